"""Make valid inputs for fuzzers from message types, and damaged inputs.

Readers refuse pure noise at the first byte. A damaged input is therefore a valid input with bytes that are flipped,
removed, repeated or replaced.
"""

from __future__ import annotations

import enum
import math
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import inspect

HARD = (
    b"", b"\xff", b"\xff\xfe", b"\xa2\xff\xfe", b"\xc3\x28", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7,
    b"\xcb\x7f\xf0" + b"\x00" * 6, b"\xcb\x7f\xf8" + b"\x00" * 6, b"\xc1", b"\xc7\x10\xff", b"\x91" * 2000,
    b"\x81\xa1a" * 1000, b"[" * 3000, b'{"a":' * 2000, b"\x00" * 8, b"\xff" * 8, b"9" * 5000, b"1e999999", b"-0.0",
    b"\\ud800", b'"""', b"\n", b"\r\n#SBATCH --wrap=x\n", "\u2028\u202e\U0001f600".encode(),
)  # fmt: skip
_TEXTS = ("", "a", "bare", "cpu:0", "é\u2028\U0001f600", "x" * 300, "-1", "../..", "a b\nc", "\0")
_INTS = (0, 1, -1, 2, 63, 64, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63))
_FLOATS = (0.0, 1.0, -1.0, 1e-9, 1e18, 1e308, math.inf, -math.inf, math.nan)


def damage_bytes(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(1 + int(chance.random() * chance.random() * 4)):
        size = len(out)
        at = int(chance.random() * (size + 1))
        kind = int(chance.random() * 10)
        if kind <= 2 and size:
            out[at % size] ^= 1 << int(chance.random() * 8)
        elif kind == 3 and size:
            out[at % size] = int(chance.random() * 256)
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            del out[at : at + 1 + int(chance.random() * 16)]
        elif kind == 6:
            out[at:at] = HARD[int(chance.random() * len(HARD))]
        elif kind == 7:
            some = HARD[int(chance.random() * len(HARD))]
            out[at : at + len(some)] = some
        elif kind == 8:
            out[at:at] = out[at : at + 1 + int(chance.random() * 64)]
        else:
            other = others[int(chance.random() * len(others))]
            start = int(chance.random() * (len(other) + 1))
            out[at:] = other[start:]
    return bytes(out)


def value_of(kind: Any, chance: random.Random) -> Any:
    return Values(chance).value(inspect.type_info(kind))


class Values:
    """Makes random values of types, smaller in deeper fields."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def value(self, kind: Any, name: str = "", depth: int = 0) -> Any:
        chance = self.chance
        match kind:
            case inspect.AnyType() | inspect.RawType():
                return chance.choice([None, 1, "a", b"b", [1], {"a": 1}])
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.IntType():
                return self.integer(kind, name)
            case inspect.FloatType():
                return self.real(kind)
            case inspect.StrType():
                return self.text(name)
            case inspect.BytesType() | inspect.MemoryViewType() | inspect.ByteArrayType():
                return chance.randbytes(chance.randrange(20))
            case inspect.EnumType(cls=cls):
                return chance.choice(list[enum.Enum](cls))
            case inspect.LiteralType(values=values):
                return chance.choice(values)
            case inspect.ListType(item_type=item):
                return self.several(item, name, depth)
            case inspect.VarTupleType(item_type=item):
                return tuple(self.several(item, name, depth))
            case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
                return set(self.several(item, name, depth))
            case inspect.TupleType(item_types=items):
                return tuple(self.value(item, name, depth + 1) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                return {each: self.value(value, name, depth + 1) for each in self.several(key, name, depth)}
            case inspect.UnionType(types=types):
                return self.value(chance.choice(types), name, depth)
            case inspect.StructType(cls=cls, fields=fields):
                return self.struct(cls, fields, depth)
            case inspect.CustomType(cls=cls):
                return cls()
            case inspect.Metadata(type=inner):
                return self.value(inner, name, depth)
        raise TypeError(f"no values are made of {kind}")

    def several(self, item: Any, name: str, depth: int) -> list[Any]:
        return [self.value(item, name, depth + 1) for _ in range(self.chance.randrange(4 if depth < 3 else 2))]

    def integer(self, kind: Any, name: str) -> int:  # noqa: ARG002
        chance = self.chance
        return int(_bounded(chance.choice(_INTS) if chance.random() < 0.5 else chance.randrange(100), kind))

    def real(self, kind: Any) -> float:
        chance = self.chance
        value = chance.choice(_FLOATS) if chance.random() < 0.5 else round(chance.random() * 100, 3)
        return float(_bounded(value, kind))

    def text(self, name: str) -> str:  # noqa: ARG002
        some = self.chance.random() < 0.4
        return self.chance.choice(_TEXTS) if some else "".join(self.chance.choices(string.ascii_lowercase, k=6))

    def struct(self, cls: type, fields: Any, depth: int) -> Any:
        wanted = [field for field in fields if field.required or self.chance.random() < (0.7 if depth < 4 else 0.2)]
        for _ in range(20):
            try:
                return cls(**{field.name: self.value(field.type, field.name, depth + 1) for field in wanted})
            except (ValueError, TypeError):  # A check of several fields failed.
                wanted = [field for field in fields if field.required]
        raise ValueError(f"no value of {cls.__name__} passes its own checks")


def _bounded(value: Any, kind: Any) -> Any:
    least = kind.ge if kind.ge is not None else kind.gt
    most = kind.le if kind.le is not None else kind.lt
    if least is not None and not value >= least:
        value = type(value)(least) + (kind.ge is None)
    if most is not None and not value <= most:
        value = type(value)(most) - (kind.le is None)
    return value


class Target(NamedTuple):
    """A reader whose `read` may raise only `declared` errors. `right`: valid inputs. If `complete`, `read` accepts all
    these inputs.

    `share`: relative number of inputs.
    """

    name: str
    read: Callable[[bytes], object]
    declared: tuple[type[BaseException], ...]
    right: list[bytes]
    share: int = 1
    complete: bool = True

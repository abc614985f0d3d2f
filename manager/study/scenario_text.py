"""A scenario as the text of a scenario file: what a run was, to be run again, or a world that was measured."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from stoker.manager.sim.world import Rate
from stoker.manager.study.scenario import Scenario
from stoker.site import Duration, Size

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def scenario_text(scenario: Scenario) -> str:
    """The file that reads back as this scenario. What is as it would be anyway is left out."""
    return "\n".join(_table(scenario, at="")) + "\n"


def _table(struct: msgspec.Struct, *, at: str) -> Iterator[str]:
    """The settings of a struct, then the tables in it."""
    kind = struct.__struct_config__.tag_field
    if kind:
        yield f"{kind} = {_value(struct.__struct_config__.tag)}"
    below: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if not field.required and value == default:
            continue
        if _is_table(value):
            below.append((field.encode_name, value))
        else:
            yield f"{field.encode_name} = {_value(value)}"
    for name, value in below:
        yield from _tables(value, at=f"{at}.{name}" if at else name)


def _is_table(value: Any) -> bool:
    """Whether it is written below a header: a struct, or structs by name or in a list."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, msgspec.Struct) and not each.__struct_config__.array_like for each in inside)


def _tables(value: Any, *, at: str) -> Iterator[str]:
    match value:
        case dict():
            for name, inner in value.items():
                yield from _tables(inner, at=f"{at}.{_key(name)}")
        case tuple():
            for inner in value:
                yield from ("", f"[[{at}]]", *_table(inner, at=at))
        case _:
            yield from ("", f"[{at}]", *_table(value, at=at))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    match value:
        case enum.Enum():
            return _value(value.value)
        case Duration():
            return f'"{_decimal(value)} s"'
        case Rate():
            return '"unlimited"' if math.isinf(value) else f'"{_rate(value)}"'
        case Size():
            return f'"{_size(value)}"'
        case str():  # what JSON escapes is escaped alike in TOML, which wants DEL escaped as well
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return f"{{ {', '.join(f'{_key(name)} = {_value(inner)}' for name, inner in value.items())} }}"
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case msgspec.Struct():  # one that is written as a list
            return _value(msgspec.structs.astuple(value))
        case _:  # a number, true or false
            return json.dumps(value)


def _decimal(number: float) -> str:
    """Without an exponent, and so that the same number is read back."""
    return f"{Decimal(repr(float(number))):f}".removesuffix(".0")


def _rate(rate: float) -> str:
    return f"{_size(int(rate))}/s" if rate.is_integer() else f"{_decimal(rate)} B/s"


def _size(size: int) -> str:
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size and not size % factor:
            return f"{size // factor} {unit}"
    return f"{size} B"

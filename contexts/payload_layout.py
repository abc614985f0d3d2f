"""The byte layout of payloads, and short texts of arguments for users. This module unpickles no values.

`short_payload` reads a pickle with placeholders for all classes and functions. Values of parameters with secret names
(`token`, `password`) are hidden.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from stoker.errors import SerializationError

Buffer = bytes | bytearray | memoryview

PLAIN = b"\x80"
_MAGIC, _VERSION, _ALIGN = b"B", 1, 64
_HEAD = struct.Struct("<cBHI")  # magic, version, unused, number of buffers
_ENTRY = struct.Struct("<QQ?7x")  # offset, length, writable


def assemble_payload_parts(body: bytes, raws: Sequence[memoryview]) -> list[Buffer]:
    """Return the parts of a payload: a head with a table, the pickle, and each buffer."""
    offset = _HEAD.size + _ENTRY.size * (1 + len(raws))
    table, parts = [], list[Buffer]()
    for raw, writable in [(memoryview(body), False), *((raw, not raw.readonly) for raw in raws)]:
        gap = -offset % _ALIGN
        offset += gap
        table.append(_ENTRY.pack(offset, raw.nbytes, writable))
        parts += [bytes(gap), raw]
        offset += raw.nbytes
    return [_HEAD.pack(_MAGIC, _VERSION, 0, len(raws)) + b"".join(table), *parts]


def split_payload(data: Buffer) -> tuple[Buffer, list[Buffer]]:
    """Return the pickle and the buffers of a payload. Raises SerializationError.

    If `data` is writable, writable buffers are views of `data`.
    """
    if data[:1] != _MAGIC:
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload")
    view = memoryview(data)
    try:
        _, version, _, count = _HEAD.unpack_from(view)
        table = [_ENTRY.unpack_from(view, _HEAD.size + _ENTRY.size * index) for index in range(count + 1)]
    except struct.error as error:
        raise SerializationError(f"a pickled value of {len(data)} bytes is truncated", what="payload") from error
    if version != _VERSION or any(offset + length > len(view) for offset, length, _ in table):
        raise SerializationError(f"a pickled value of {len(data)} bytes is damaged or truncated", what="payload")
    body, *buffers = (_part(view[offset : offset + length], writable=writable) for offset, length, writable in table)
    return body, buffers


def _part(part: memoryview, *, writable: bool) -> Buffer:
    if not writable:
        return part.toreadonly()
    return bytearray(part) if part.readonly else part


def body_of(data: bytes) -> tuple[bytes, int]:
    if data[:1] == PLAIN:
        return data, 0
    try:
        _, version, _, count = _HEAD.unpack_from(data)
        offset, length, _ = _ENTRY.unpack_from(data, _HEAD.size)
    except struct.error as error:
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload") from error
    if data[:1] != _MAGIC or version != _VERSION or offset + length > len(data):
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload")
    return data[offset : offset + length], count


LONGEST = 80
_LONGEST_VALUE = 32
_WIDTH = 2
_DEPTH = 2
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|api_?key|auth", re.IGNORECASE)


def short_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], *, names: Sequence[str] = ()) -> str:
    """Return arguments as short text: `(3, name='x')`. `names`: names of the parameters of `args`."""
    secret = [at < len(names) and _SECRET.search(names[at]) is not None for at in range(len(args))]
    parts = ["…" if hidden else short(value) for value, hidden in zip(args, secret, strict=True)]
    parts += [f"{name}={'…' if _SECRET.search(str(name)) else short(value)}" for name, value in kwargs.items()]
    text = f"({', '.join(parts)})"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]}…)"


_OF_MONITORING = "_parsl_monitoring_"
"""Prefix of the arguments that Parsl's monitoring adds to a call."""


def short_payload(payload: bytes) -> str:
    """Return pickled `(args, kwargs)` as short text, or "" if the bytes are unreadable."""
    try:
        body, buffers = body_of(payload)
        args, kwargs = _Reader(io.BytesIO(body), buffers=[b""] * buffers).load()
        shown = {name: value for name, value in dict(kwargs).items() if not str(name).startswith(_OF_MONITORING)}
        return short_arguments(tuple(args), shown)
    except Exception:  # unreadable bytes must not fail the caller
        return ""


def short(value: Any, *, depth: int = _DEPTH) -> str:
    """Return a value as short text. No code of the value's class runs."""
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if abs(value) < 10**20 else "a large int"
    if kind is str:
        return repr(value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…")
    if kind in (bytes, bytearray):
        return f"{len(value):,} bytes"
    if kind in (list, tuple, set, frozenset, dict):
        return _short_container(value, kind, depth=depth)
    return f"<{vars(kind).get('stands_for') or kind.__name__}>"


def _short_container(value: Any, kind: type, *, depth: int) -> str:
    opens, closes = "[]" if kind is list else "()" if kind is tuple else "{}"
    if depth == 0 or not value:
        return f"{opens}…{closes}" if value else f"{opens}{closes}"
    parts = list(islice(_parts(value, depth=depth - 1), _WIDTH))
    more = f", … {len(value):,} items" if len(value) > _WIDTH else "," if kind is tuple and len(value) == 1 else ""
    return f"{opens}{', '.join(parts)}{more}{closes}"


def _parts(value: Any, *, depth: int) -> Iterator[str]:
    for item in value:
        if type(value) is dict:
            hidden = isinstance(item, str) and _SECRET.search(item) is not None
            yield f"{short(item, depth=depth)}: {'…' if hidden else short(value[item], depth=depth)}"
        else:
            yield short(item, depth=depth)


_KNOWN = {
    "_make_function": "function",
    "_make_skeleton_class": "class",
    "_frombuffer": "array",
    "_reconstruct": "array",
}
"""By name of a function that a pickle calls: the kind of value that the function creates."""


class _StandIn:
    def __new__(cls, *_args: Any, **_kwargs: Any) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_kwargs: Any) -> _StandIn:
        return _StandIn()

    def __setstate__(self, _state: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def append(self, _item: Any) -> None:
        pass

    extend = add = append


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        home, shown = module.partition(".")[0], str(name).rpartition(".")[2]
        text = _KNOWN.get(shown) or (f"{home} object" if shown.startswith("_") else f"{home}.{shown}")
        return type("_StandIn", (_StandIn,), {"stands_for": text})

    def persistent_load(self, _id: Any) -> Any:
        return _StandIn()

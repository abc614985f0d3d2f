"""The byte layout of payloads, and short texts of arguments for users. This module runs no code from a pickle.

The first byte tells the format:

    0x80    a plain pickle
    B       a pickle and its out-of-band buffers (pickle protocol 5)
    M       a pickled table of modules, then the parts of B

Parts are aligned to 64 bytes. Values of parameters with secret names (`token`, `password`) are hidden in texts.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

from stoker.errors import SerializationError

Buffer = bytes | bytearray | memoryview

PLAIN, WITH_BUFFERS, WITH_MODULES = b"\x80", b"B", b"M"
_VERSION, _ALIGN = 1, 64
_HEAD = struct.Struct("<cBHI")  # magic, version, unused, number of parts after the first
_ENTRY = struct.Struct("<QQ?7x")  # offset, length, writable


def join_parts(magic: bytes, first: bytes, rest: Sequence[Buffer]) -> list[Buffer]:
    """Return a head and the aligned parts of a payload."""
    offset = _HEAD.size + _ENTRY.size * (1 + len(rest))
    table, parts = [], list[Buffer]()
    for raw in (memoryview(part) for part in (first, *rest)):
        gap = -offset % _ALIGN
        offset += gap
        table.append(_ENTRY.pack(offset, raw.nbytes, not raw.readonly))
        parts += [bytes(gap), raw]
        offset += raw.nbytes
    return [_HEAD.pack(magic, _VERSION, 0, len(rest)) + b"".join(table), *parts]


def split_payload(data: Buffer) -> list[Buffer]:
    """Return the parts of a payload. Writable parts of writable `data` are views. Raises SerializationError."""
    view = memoryview(data)
    return [_part(view[begin:end], writable=writable) for begin, end, writable in _entries(view)]


def _part(part: memoryview, *, writable: bool) -> Buffer:
    if not writable:
        return part.toreadonly()
    return bytearray(part) if part.readonly else part


def module_table(data: Any) -> bytes:
    """Return the pickled table of modules in a payload (bytes or a mapped file), or b""."""
    if data[:1] != WITH_MODULES:
        return b""
    begin, end, _ = _entries(data)[0]
    return bytes(data[begin:end])


def _entries(data: Any) -> list[tuple[int, int, bool]]:
    if data[:1] not in (WITH_BUFFERS, WITH_MODULES):
        raise SerializationError(f"these {len(data)} bytes are not a pickled value", what="payload")
    try:
        _, version, _, more = _HEAD.unpack_from(data)
        table = [_ENTRY.unpack_from(data, _HEAD.size + _ENTRY.size * index) for index in range(more + 1)]
    except struct.error:
        version, table = 0, []
    if version != _VERSION or any(offset + length > len(data) for offset, length, _ in table):
        raise SerializationError(f"a pickled value of {len(data)} bytes is damaged or truncated", what="payload")
    return [(offset, offset + length, writable) for offset, length, writable in table]


LONGEST = 80
_LONGEST_VALUE = 32
_WIDTH = 2
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|api_?key|auth", re.IGNORECASE)


def short_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], *, names: Sequence[str] = ()) -> str:
    """Return arguments as short text: `(3, name='x')`. `names`: parameter names of `args`."""
    shown = zip_longest(names[: len(args)], args, fillvalue="")
    parts = [_short_unless_secret(name, value) for name, value in shown]
    parts += [f"{name}={_short_unless_secret(name, value)}" for name, value in kwargs.items()]
    text = f"({', '.join(parts)})"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]}…)"


def short_payload(payload: bytes) -> str:
    """Return pickled `(args, kwargs)` as short text, or "" for unreadable bytes."""
    try:
        parts = [payload] if payload[:1] == PLAIN else split_payload(payload)
        body, *buffers = parts[payload[:1] == WITH_MODULES :]
        args, kwargs = _Reader(io.BytesIO(body), buffers=[b""] * len(buffers)).load()
        # Parsl's monitoring adds arguments to a call.
        shown = {name: value for name, value in kwargs.items() if not str(name).startswith("_parsl_monitoring_")}
        return short_arguments(tuple(args), shown)
    except Exception:  # unreadable bytes must not fail the caller
        return ""


def _short_unless_secret(name: Any, value: Any, *, depth: int = 2) -> str:
    return "…" if isinstance(name, str) and _SECRET.search(name) else short(value, depth=depth)


def short(value: Any, *, depth: int = 2) -> str:
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
        return f"{opens}{'…' * bool(value)}{closes}"
    parts = ", ".join(islice(_parts(value, depth=depth - 1), _WIDTH))
    more = f", … {len(value):,} items" if len(value) > _WIDTH else "," * (kind is tuple and len(value) == 1)
    return f"{opens}{parts}{more}{closes}"


def _parts(value: Any, *, depth: int) -> Iterator[str]:
    for item in value:
        shown = short(item, depth=depth)
        yield f"{shown}: {_short_unless_secret(item, value[item], depth=depth)}" if type(value) is dict else shown


_KNOWN = {
    "_make_function": "function", "_make_skeleton_class": "class", "_frombuffer": "array", "_reconstruct": "array",
}  # fmt: skip
"""Kinds of values, by the name of the function that a pickle calls to build the value."""


class _StandIn:
    def __new__(cls, *_args: Any, **_kwargs: Any) -> _StandIn:
        return object.__new__(cls)

    def __call__(self, *_args: Any, **_kwargs: Any) -> _StandIn:
        return _StandIn()

    def append(self, *_state: Any) -> None:
        pass

    extend = add = __setitem__ = __setstate__ = append


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        home, shown = module.partition(".")[0], str(name).rpartition(".")[2]
        text = _KNOWN.get(shown) or (f"{home} object" if shown.startswith("_") else f"{home}.{shown}")
        return type("_StandIn", (_StandIn,), {"stands_for": text})

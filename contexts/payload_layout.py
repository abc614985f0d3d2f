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
_VERSION, _ALIGNMENT_BYTES = 1, 64
_HEAD_FORMAT = struct.Struct("<cBHI")  # magic, version, unused, number of parts after the first
_ENTRY_FORMAT = struct.Struct("<QQ?7x")  # offset, length, writable


def join_parts(magic: bytes, first: bytes, rest: Sequence[Buffer]) -> list[Buffer]:
    """Join the parts of a payload. Return a header, then the parts with padding between them for alignment."""
    offset = _HEAD_FORMAT.size + _ENTRY_FORMAT.size * (1 + len(rest))
    table, parts = [], list[Buffer]()
    for raw in (memoryview(part) for part in (first, *rest)):
        gap = -offset % _ALIGNMENT_BYTES
        offset += gap
        table.append(_ENTRY_FORMAT.pack(offset, raw.nbytes, not raw.readonly))
        parts += [bytes(gap), raw]
        offset += raw.nbytes
    return [_HEAD_FORMAT.pack(magic, _VERSION, 0, len(rest)) + b"".join(table), *parts]


def split_payload(data: Buffer) -> list[Buffer]:
    """Return the parts of a payload. Writable parts of writable `data` are views. Raises SerializationError."""
    view = memoryview(data)
    return [_as_buffer(view[begin:end], writable=writable) for begin, end, writable in _read_part_table(view)]


def _as_buffer(part: memoryview, *, writable: bool) -> Buffer:
    if not writable:
        return part.toreadonly()
    return bytearray(part) if part.readonly else part


def extract_module_table(data: Any) -> bytes:
    """Return the pickled table of modules in a payload (bytes or a mapped file), or b""."""
    if data[:1] != WITH_MODULES:
        return b""
    begin, end, _ = _read_part_table(data)[0]
    return bytes(data[begin:end])


def _read_part_table(data: Any) -> list[tuple[int, int, bool]]:
    if data[:1] not in (WITH_BUFFERS, WITH_MODULES):
        raise SerializationError(f"these {len(data)} bytes are not a pickled value", what="payload")
    try:
        _, version, _, more = _HEAD_FORMAT.unpack_from(data)
        table = [
            _ENTRY_FORMAT.unpack_from(data, _HEAD_FORMAT.size + _ENTRY_FORMAT.size * index) for index in range(more + 1)
        ]
    except struct.error:
        version, table = 0, []
    if version != _VERSION or any(offset + length > len(data) for offset, length, _ in table):
        raise SerializationError(f"a pickled value of {len(data)} bytes is damaged or truncated", what="payload")
    return [(offset, offset + length, writable) for offset, length, writable in table]


MAX_SHOWN_CHARACTERS = 80
_MAX_TEXT_CHARACTERS = 32
_MAX_SHOWN_ITEMS = 2
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|api_?key|auth", re.IGNORECASE)


def show_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], *, names: Sequence[str] = ()) -> str:
    """Return arguments as short text: `(3, name='x')`. `names`: parameter names of `args`."""
    shown = zip_longest(names[: len(args)], args, fillvalue="")
    parts = [_show_unless_secret(name, value) for name, value in shown]
    parts += [f"{name}={_show_unless_secret(name, value)}" for name, value in kwargs.items()]
    text = f"({', '.join(parts)})"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 2]}…)"


def show_payload(payload: bytes) -> str:
    """Return pickled `(args, kwargs)` as short text, or "" for unreadable bytes."""
    try:
        parts = [payload] if payload[:1] == PLAIN else split_payload(payload)
        body, *buffers = parts[payload[:1] == WITH_MODULES :]
        args, kwargs = _PlaceholderUnpickler(io.BytesIO(body), buffers=[b""] * len(buffers)).load()
        # Hide the arguments that Parsl's monitoring adds to a call.
        shown = {name: value for name, value in kwargs.items() if not str(name).startswith("_parsl_monitoring_")}
        return show_arguments(tuple(args), shown)
    except Exception:  # the text is only for display, so unreadable bytes raise no error
        return ""


def _show_unless_secret(name: Any, value: Any, *, depth: int = 2) -> str:
    return "…" if isinstance(name, str) and _SECRET.search(name) else show_value(value, depth=depth)


def show_value(value: Any, *, depth: int = 2) -> str:
    """Return a value as short text. No code of the value's class runs."""
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if abs(value) < 10**20 else "a large int"
    if kind is str:
        return repr(value if len(value) <= _MAX_TEXT_CHARACTERS else f"{value[: _MAX_TEXT_CHARACTERS - 1]}…")
    if kind in (bytes, bytearray):
        return f"{len(value):,} bytes"
    if kind in (list, tuple, set, frozenset, dict):
        return _show_container(value, kind, depth=depth)
    return f"<{vars(kind).get('stands_for') or kind.__name__}>"


def _show_container(value: Any, kind: type, *, depth: int) -> str:
    opens, closes = "[]" if kind is list else "()" if kind is tuple else "{}"
    if depth == 0 or not value:
        return f"{opens}{'…' * bool(value)}{closes}"
    parts = ", ".join(islice(_show_items(value, depth=depth - 1), _MAX_SHOWN_ITEMS))
    more = f", … {len(value):,} items" if len(value) > _MAX_SHOWN_ITEMS else "," * (kind is tuple and len(value) == 1)
    return f"{opens}{parts}{more}{closes}"


def _show_items(value: Any, *, depth: int) -> Iterator[str]:
    for item in value:
        shown = show_value(item, depth=depth)
        yield f"{shown}: {_show_unless_secret(item, value[item], depth=depth)}" if type(value) is dict else shown


_KIND_BY_BUILDER = {
    "_make_function": "function", "_make_skeleton_class": "class", "_frombuffer": "array", "_reconstruct": "array",
}  # fmt: skip
"""Kind of a value to show to users, by the name of the function that its pickle calls to build it."""


class _PlaceholderValue:
    def __new__(cls, *_args: Any, **_kwargs: Any) -> _PlaceholderValue:
        return object.__new__(cls)

    def __call__(self, *_args: Any, **_kwargs: Any) -> _PlaceholderValue:
        return _PlaceholderValue()

    def append(self, *_state: Any) -> None:
        pass

    extend = add = __setitem__ = __setstate__ = append


class _PlaceholderUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        home, shown = module.partition(".")[0], str(name).rpartition(".")[2]
        text = _KIND_BY_BUILDER.get(shown) or (f"{home} object" if shown.startswith("_") else f"{home}.{shown}")
        return type("_PlaceholderValue", (_PlaceholderValue,), {"stands_for": text})

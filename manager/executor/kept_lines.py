"""The lines of a file that `stoker.map(..., keep=PATH)` writes: a header, and a record for each result.

    {"stoker":"kept results","format":1,"function":"verify","code":"…","context":"llm-7f3a",…}
    {"key":"…","item":0,"result":{"label":"SUPPORTS"},"digest":"…"}
    {"key":"…","item":2,"pickle":"gASV…","digest":"…"}

A result that JSON gives back exactly is written as JSON. Any other (a tuple, an array, an object) is a pickle in
base64: the second run of a program gets the same types as the first. `key` is the digest of the item's content. `item`
is the place of the item, counted from 0, in the run that computed it; with `batch_size` it is the place of the batch.
The digest covers its line: a line that is torn or damaged is skipped, and its item runs again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import json
import math
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stoker.contexts import payloads
from stoker.contexts.payload_layout import PLAIN
from stoker.errors import SerializationError

FORMAT = 1
BEGINS = b'{"stoker":"kept results"'
_BEGIN = b'{"key":"'
_KEY_CHARACTERS = 32
_HEAD_BYTES = 64
"""Covers the key and the place of an item."""
_DIGEST_BYTES = 8
_END = b',"digest":"'
_END_BYTES = len(_END) + 2 * _DIGEST_BYTES + len(b'"}\n')
_JSON_BYTES = 1_000_000
"""A result whose pickle is larger is not tried as JSON."""
CHUNK_BYTES = 3 << 18
"""Bytes that are encoded at once. A multiple of 3, as base64 wants."""


class KeptHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Which results a file keeps: of this function, with this code, these arguments, on this context."""

    function: str
    code: str = ""
    arguments: str = ""
    context: str = ""
    context_key: str = ""
    batch_size: int | None = None
    python: str = ""
    format: int = FORMAT
    stoker: str = "kept results"
    since: str = ""

    def line(self) -> bytes:
        """The line that begins the file."""
        facts = {"stoker": self.stoker, **{name: getattr(self, name) for name in self.__struct_fields__}}
        facts["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
        return json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class Record:
    """A result as a line of the file. `pieces` are its bytes, so that a large result is not copied whole."""

    def __init__(self, key: str, item: int, data: Any) -> None:
        self.key = key
        self._item = item
        self._data = data

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the line, made one after the other."""
        text = _as_json(self._data)
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        kind = "pickle" if text is None else "result"
        parts = _base64(self._data) if text is None else iter((text,))
        head = f'{{"key":"{self.key}","item":{self._item},"{kind}":'.encode()
        for part in itertools.chain((head,), parts):
            digest.update(part)
            yield part
        yield b'%s%s"}\n' % (_END, digest.hexdigest().encode())


# ---- reading


class Damaged:
    """Stands for the value of a damaged record."""


DAMAGED = Damaged()


class Scan:
    """The keys, places and offsets of the whole lines of a file, in order. Reads the beginning of each line alone, so a
    large result takes no memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.header: KeptHeader | None = None
        self.damaged = 0
        self.end = 0
        """Behind the last whole line."""

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        readline = self._file.readline
        self._file.seek(0)
        while head := readline(_HEAD_BYTES):
            at, size, last = self.end, len(head), head
            whole = [head] if head.startswith(BEGINS) else []
            while not last.endswith(b"\n"):
                last = readline(CHUNK_BYTES)
                if not last:
                    return  # torn
                size += len(last)
                if whole:
                    whole.append(last)
            self.end += size
            if whole:
                self._take_header(b"".join(whole))
            elif (found := _head_of(head)) is not None:
                yield *found, at
            else:
                self.damaged += 1

    def _take_header(self, line: bytes) -> None:
        try:
            self.header = msgspec.json.decode(line, type=KeptHeader)
        except (msgspec.DecodeError, ValueError):
            self.damaged += 1


def _head_of(head: bytes) -> tuple[str, int] | None:
    """The key and the item of a record that begins with these bytes; None for any other line."""
    key, rest = head[len(_BEGIN) : len(_BEGIN) + _KEY_CHARACTERS], head[len(_BEGIN) + _KEY_CHARACTERS :]
    number = rest.removeprefix(b'","item":').partition(b",")[0]
    if not head.startswith(_BEGIN) or not number.isdigit():
        return None
    try:
        int(key, 16)
        return key.decode(), int(number)
    except ValueError:
        return None


def value_at(file: BinaryIO, at: int, *, path: Path, key: str = "", opens: bool = True) -> Any:
    """The value that begins at a byte of the file; else as `_value_of`. Raises SerializationError."""
    file.seek(at)
    try:
        return _value_of(file.readline(), key=key, opens=opens)
    except Exception as error:  # classes of the result may raise anything
        if payloads.is_interrupt(error):
            raise
        raise SerializationError(
            f"{path}: a result cannot be unpickled here: {error!r}; the modules that define it must be importable in"
            " this program, as they were in the one that kept it",
            what="result",
        ) from error


def _value_of(line: bytes, *, key: str = "", opens: bool = True) -> Any:
    """The value in a line; DAMAGED if it is not whole, or of another key. Without `opens`: None for a whole one."""
    body, end = line[:-_END_BYTES], line[-_END_BYTES:]
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()
    if end != b'%s%s"}\n' % (_END, digest.encode()) or not body.startswith(_BEGIN + key.encode()):
        return DAMAGED
    if not opens:
        return None
    fields = json.loads(body + b"}")
    if "result" in fields:
        return fields["result"]
    try:
        return payloads.loads(bytearray(base64.b64decode(fields["pickle"])), keep_classes=True)
    except binascii.Error:
        return DAMAGED


# ---- writing


def _as_json(data: Any) -> bytes | None:
    """The JSON of a pickled result, if it gives the same value back; else None."""
    if len(data) > _JSON_BYTES or data[:1] != PLAIN:
        return None
    try:
        value = _PlainUnpickler(io.BytesIO(data)).load()
        if not _is_json(value):
            return None
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (pickle.UnpicklingError, ValueError, RecursionError):  # of another kind; half a character; within itself
        return None


class _PlainUnpickler(pickle.Unpickler):
    """Opens values of builtin types alone, so that no code of the user's runs on the thread that keeps results."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def _is_json(value: Any) -> bool:
    """Whether a value is made of what JSON gives back as it was."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is int:
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(_is_json, value))
    return kind is dict and all(type(name) is str and _is_json(part) for name, part in value.items())


def _base64(data: Any) -> Iterator[bytes]:
    view = memoryview(data)
    yield b'"'
    for start in range(0, len(view), CHUNK_BYTES):
        yield base64.b64encode(view[start : start + CHUNK_BYTES])
    yield b'"'

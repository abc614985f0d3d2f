"""The file of `stoker.map(..., keep=PATH)`: a header, and a record for each result.

    {"stoker":"kept results","format":1,"function":"verify","code":"…","context":"llm-7f3a",…}
    {"key":"…","item":0,"result":{"label":"SUPPORTS"},"digest":"…"}
    {"key":"…","item":2,"pickle":"gASV…","digest":"…"}

A result is written as JSON if JSON represents it exactly; otherwise as a pickle in base64. `item` is the item's index
in the run that computed the result. `key` is the digest of the item's content, so items may be added, removed or
reordered between runs. Each line ends with its digest; an incomplete or damaged line is skipped.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stoker import locks
from stoker.contexts import payloads
from stoker.contexts.digest import digest_of_item
from stoker.contexts.payload_layout import PLAIN
from stoker.errors import ConfigError, RecipeError, SerializationError, StokerError
from stoker.whole_files import write_all

# ---- records


FORMAT = 1
HEADER_START = b'{"stoker":"kept results"'
_LINE_START = b'{"key":"'
_KEY_CHARACTERS, _SHORT_CHARACTERS = 32, 16
_HEAD_BYTES = 64
_DIGEST_BYTES = 8
_DIGEST_START = b',"digest":"'
_LINE_END_BYTES = len(_DIGEST_START) + 2 * _DIGEST_BYTES + len(b'"}\n')
_JSON_BYTES = 1_000_000
CHUNK_BYTES = 3 << 18
"""Bytes that are encoded at once: a multiple of 3, so base64 adds no padding."""


def digest_of_kept_item(item: Any) -> str:
    try:
        return digest_of_item(item)
    except RecipeError:
        return digest_of_item(payloads.dumps(item))


class KeptHeader(msgspec.Struct, frozen=True):
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

    def encode_line(self) -> bytes:
        facts = {"stoker": self.stoker, **msgspec.structs.asdict(self), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        return json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def encode_result_line(key: str, item: int, data: Any) -> Iterator[bytes]:
    """Yield the line of a result in parts, to save memory."""
    text = _convert_pickle_to_json(data)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    yield (head := f'{{"key":"{key}","item":{item},"{"pickle" if text is None else "result"}":'.encode())
    digest.update(head)
    for part in _quoted_base64_chunks(data) if text is None else (text,):
        digest.update(part)
        yield part
    yield b'%s%s"}\n' % (_DIGEST_START, digest.hexdigest().encode())


def _quoted_base64_chunks(data: Any) -> Iterator[bytes]:
    yield b'"'
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield base64.b64encode(view[start : start + CHUNK_BYTES])
    yield b'"'


# ---- reading lines


DAMAGED = object()


class _KeptLineIndex:
    """Keys (64 bits), item indices and offsets of the complete lines of a result file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.header: KeptHeader | None = None
        self.damaged = self.end = 0
        self.keys, self.items, self.places = array("Q"), array("Q"), array("Q")
        first = file.read(len(HEADER_START))
        if not first.startswith(HEADER_START[: len(first)]):
            raise invalid_keep_error(
                path, "is not a file of kept results, because the first line differs; name a new file"
            )
        file.seek(0)
        while head := file.readline(_HEAD_BYTES):
            size, last = len(head), head
            whole = [head] if head.startswith(HEADER_START) else []
            while not last.endswith(b"\n"):
                last = file.readline(CHUNK_BYTES)
                if not last:
                    return  # the last line is incomplete
                size += len(last)
                if whole:
                    whole.append(last)
            self._add_line(head, b"".join(whole))
            self.end += size

    def _add_line(self, head: bytes, header: bytes) -> None:
        try:
            if header:
                self.header = msgspec.json.decode(header, type=KeptHeader)
                return
            key, item = _parse_kept_line_head(head)
        except (msgspec.DecodeError, ValueError):
            self.damaged += 1
            return
        self.keys.append(key)
        self.items.append(item)
        self.places.append(self.end)

    def sort_by(self, by: array[int]) -> None:
        order = sorted(range(len(by)), key=by.__getitem__)  # stable sort: records with equal keys keep their order
        self.keys, self.items, self.places = (
            array("Q", map(each.__getitem__, order)) for each in (self.keys, self.items, self.places)
        )


def _parse_kept_line_head(head: bytes) -> tuple[int, int]:
    """Return the first 64 bits of the key, and the item's index."""
    key, rest = head[len(_LINE_START) : len(_LINE_START) + _KEY_CHARACTERS], head[len(_LINE_START) + _KEY_CHARACTERS :]
    number = rest.removeprefix(b'","item":').partition(b",")[0]
    if not head.startswith(_LINE_START) or not number.isdigit():
        raise ValueError("not a record")
    return int(key, 16) >> 4 * (_KEY_CHARACTERS - _SHORT_CHARACTERS), int(number)


def read_result_at(file: BinaryIO, at: int, *, path: Path, key: str = "", unpickles: bool = True) -> Any:
    file.seek(at)
    try:
        return _decode_kept_line(file.readline(), key=key, unpickles=unpickles)
    except Exception as error:  # classes in the result may raise any error
        if payloads.is_interrupt(error):
            raise
        raise SerializationError(
            f"{path}: a result cannot be unpickled here: {error!r}; the modules that define it must be importable in"
            " this program, as they were in the program that kept it",
            what="result",
        ) from error


def _decode_kept_line(line: bytes, *, key: str, unpickles: bool) -> Any:
    """Return the value in a line (None without `unpickles`); DAMAGED if the line is incomplete or has another key."""
    body, end = line[:-_LINE_END_BYTES], line[-_LINE_END_BYTES:]
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()
    if end != b'%s%s"}\n' % (_DIGEST_START, digest.encode()) or not body.startswith(_LINE_START + key.encode()):
        return DAMAGED
    if not unpickles:
        return None
    fields = json.loads(body + b"}")
    if "result" in fields:
        return fields["result"]
    try:
        return payloads.loads(bytearray(base64.b64decode(fields["pickle"])), keep_classes=True)
    except binascii.Error:
        return DAMAGED


# ---- writing lines


def _convert_pickle_to_json(data: Any) -> bytes | None:
    if len(data) > _JSON_BYTES or data[:1] != PLAIN:
        return None
    try:
        value = _PlainUnpickler(io.BytesIO(data)).load()
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode() if json.loads(text) == value else None
    except (pickle.UnpicklingError, TypeError, ValueError, RecursionError):  # JSON cannot hold the value
        return None


class _PlainUnpickler(pickle.Unpickler):
    """Accepts only builtin types, so that no user code runs on the writing thread."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of fsync on a pipe or a device, which cannot be synced."""


class KeptFile:
    """The open and locked result file of a map. One thread may append while another searches. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.added = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise invalid_keep_error(path, f"cannot be opened: {error.strerror}") from None
        self._reader: BinaryIO = path.open("rb")  # reads have their own file offset, which writes do not move
        try:
            self._lock_and_index()
        except BaseException:
            self.close()
            raise

    def _lock_and_index(self) -> None:
        path = self.path
        if not locks.try_lock(self._file):
            holders = ", ".join(map(str, locks.find_lock_holders(path))) or "a program on another machine"
            raise invalid_keep_error(
                path, f"{holders} is writing results to this file; wait until that program ends, or name another file"
            )
        found = self._lines = _KeptLineIndex(self._reader, path)
        found.sort_by(found.keys)
        self._taken = array("Q", bytes(8 * len(found.keys)))
        """At the index of a key's first record: number of records of this key that calls already use."""
        self.header, self.damaged, self._end = found.header, found.damaged, found.end
        if self.header is None and len(self):
            raise invalid_keep_error(
                path, "the first line is damaged, so the function of the results is unknown; name a new file"
            )
        if self.header is not None and self.header.format > FORMAT:
            raise invalid_keep_error(path, "was written by a later version of Stoker; name a new file")
        if self._end < os.fstat(self._file).st_size:  # remove an incomplete last line
            os.ftruncate(self._file, self._end)

    def __len__(self) -> int:
        return len(self._lines.keys)

    def write_header(self, header: KeptHeader) -> None:
        self._append([header.encode_line()], added=0)
        self.header = header

    def append_results(self, records: Iterable[Iterator[bytes]]) -> None:
        kept = list(records)
        self._append(itertools.chain.from_iterable(kept), added=len(kept))

    def _append(self, pieces: Iterable[bytes], *, added: int) -> None:
        at, held, size = self._end, [], 0
        try:
            for piece in pieces:
                held.append(piece)
                size += len(piece)
                if size >= CHUNK_BYTES:
                    write_all(self._file, b"".join(held))
                    at, held, size = at + size, [], 0
            write_all(self._file, b"".join(held))
        except OSError as error:
            with suppress(OSError):  # an incomplete last line is removed later
                os.ftruncate(self._file, self._end)
            what = (
                f"cannot be written: {error.strerror}; the file has the {len(self) + self.added:,} results before this"
                " result: make room, and run the program again to continue"
            )
            raise StokerError.in_file(self.path, what) from error
        self._end = at + size
        self.added += added

    def take_result_offset(self, key: str) -> int | None:
        while (at := self._take_unchecked_offset(key)) is not None:
            if read_result_at(self._reader, at, path=self.path, key=key, unpickles=False) is not DAMAGED:
                return at
            self.damaged += 1
        return None

    def _take_unchecked_offset(self, key: str) -> int | None:
        keys, short = self._lines.keys, int(key[:_SHORT_CHARACTERS], 16)
        first = bisect.bisect_left(keys, short)
        if first == len(keys) or keys[first] != short:
            return None
        at = first + self._taken[first]
        if at >= len(keys) or keys[at] != short:
            return None
        self._taken[first] += 1
        return self._lines.places[at]

    def read_result_at(self, at: int) -> Any:
        value = read_result_at(self._reader, at, path=self.path)
        if value is DAMAGED:
            raise StokerError(f"{self.path}: another program changed this file while this program was reading it")
        return value

    def sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in _SYNC_UNSUPPORTED:
                what = (
                    f"the disk failed to write: {error.strerror}; the last results may be lost: make room, and run the"
                    " program again to continue"
                )
                raise StokerError.in_file(self.path, what) from error

    def close(self) -> None:
        if self._file >= 0:
            self._reader.close()
            os.close(self._file)
            self._file = -1


class KeptResults:
    """The results in a file, in the order of their items. Each result is read during iteration.

    Attributes:
        items: Indices of the items (or batches).
        function: Name of the function that computed the results.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        try:
            self._file: BinaryIO = self._path.open("rb")
        except OSError as error:
            raise ConfigError.in_file(self._path, f"cannot be read: {error.strerror}") from None
        lines = _KeptLineIndex(self._file, self._path)
        lines.sort_by(lines.items)
        self._places, self.items = lines.places, lines.items
        self.function = lines.header.function if lines.header is not None else ""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        for number, at in enumerate(self._places):
            value = read_result_at(self._file, at, path=self._path)
            if value is DAMAGED:
                if self.items[number] in self.items[number + 1 : number + 2]:  # the next record has this item
                    continue
                raise StokerError(
                    f"{self._path}: the record at byte {at:,} is damaged;"
                    " run the map with keep= again to compute this item again"
                )
            yield value

    def __repr__(self) -> str:
        return f"<{len(self):,} results of {self.function} in {self._path}>"


def kept(path: str | os.PathLike[str]) -> KeptResults:
    """Return the results that `stoker.map(..., keep=path)` has kept, in the order of their items.

    A map may write the file at the same time. Results are unpickled: read only files that you trust.

    Args:
        path: The file with the results.

    Raises:
        ConfigError: The file is not a file of kept results.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"stoker.kept: {path!r:.80} is not the path of a file")
    return KeptResults(path)


def invalid_keep_error(path: Path, why: str) -> ConfigError:
    return ConfigError(f"keep: {path}: {why}", key="keep", file=str(path))

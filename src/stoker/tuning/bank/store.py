"""A bank on disk: one folder per model. Any number of processes may use the folder.

    bank        the structure and every candidate with its unit feature, then later insertions
    readings    every candidate that was ever read, with its raw feature (`build.py`)
    lock        locked (flock) by a writer

Each insertion appends one record with its outcome, so every process derives the same bank. A writer locks the folder,
reads new insertions, and appends its own. Readers take no lock. If the file has more insertions than the bank has
members, the writer rewrites the file.

Both files are sequences of frames: the length of a record, the checksum of the record, the checksum of these two fields
(4 bytes each, little-endian), and the record. A batch of records is one `write(2)`, then `fsync`. Bytes after the last
intact frame are torn or damaged:

- *torn*: the start of a frame, zeros, or a last frame with wrong bytes, after a killed writer or a crashed host. Torn
  bytes were never acknowledged, and the next writer removes them.
- *damaged*: all other bytes. Damage is reported. `build.py` rebuilds the bank from the intact records of both files.

For the comparison with SQLite, see docs/decisions/042.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Self

import msgspec
import numpy as np

from stoker.decoding import UNREADABLE
from stoker.errors import StokerError
from stoker.tuning.bank.candidates import Candidate, Key
from stoker.tuning.bank.layers import Array, Insertion, InsertionOutcome, Layers, Scale

_HEAD = Struct("<III")


class RecordsRead(msgspec.Struct, frozen=True):
    """Records of a file from byte `start`. `end`: byte offset of the end of the last intact record. `damaged`: True if
    bytes are damaged and not only torn.
    """

    payloads: list[bytes]
    start: int
    end: int
    damaged: bool = False


def framed(payload: bytes) -> bytes:
    start = _HEAD.pack(len(payload), zlib.crc32(payload), 0)[:8]
    return start + zlib.crc32(start).to_bytes(4, "little") + payload


def read_records(path: Path, *, start: int = 0, beginning: bytes = b"", skip: bool = False) -> RecordsRead:
    """Return the intact records from byte `start`, where a frame begins. `skip`: True to skip damaged records.

    If the file was replaced (is shorter, or does not begin with `beginning`), start at byte 0. Raises OSError.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start or file.read(len(beginning)) != beginning:
            start = 0
        file.seek(start)
        data = file.read()
    payloads: list[bytes] = []
    at, skipped = 0, False
    while True:
        rest = len(data) - at
        if rest < _HEAD.size or not any(data[at : at + _HEAD.size]):
            return RecordsRead(payloads, start, start + at, damaged=skipped or (rest >= _HEAD.size and any(data[at:])))
        length, check, check_of_head = _HEAD.unpack_from(data, at)
        if zlib.crc32(data[at : at + 8]) != check_of_head:
            return RecordsRead(payloads, start, start + at, damaged=True)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload) != check:
            is_last = rest <= _HEAD.size + length
            if is_last or not skip:
                return RecordsRead(payloads, start, start + at, damaged=skipped or not is_last)
            skipped = True
        else:
            payloads.append(payload)
        at += _HEAD.size + length


def append_records(path: Path, payloads: Iterable[bytes], *, at: int) -> int:
    """Append records at byte `at`, and replace torn bytes. Return the new end of the file. The caller must hold the
    lock.

    If the write fails, add no record and raise StokerError.
    """
    data = b"".join(map(framed, payloads))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(file, at)
        os.lseek(file, at, os.SEEK_SET)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, at)
            raise StokerError(
                f"{path}: cannot be written: {error.strerror}; its earlier entries are kept", file=str(path)
            ) from error
    finally:
        os.close(file)
    return at + len(data)


def replace_records(path: Path, payloads: Iterable[bytes]) -> int:
    """Replace a file of records atomically. Return the size of the new file in bytes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        end = append_records(draft, payloads, at=0)
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        draft.unlink(missing_ok=True)
    return end


FORMAT = 1
_BANK, _LOCK = "bank", "lock"


class Head(msgspec.Struct, frozen=True, tag="head"):
    """The first record of a bank: its model and its settings. `reading`: how features were computed. `stamp`: a text
    that is unique for each file.
    """

    format: int
    stamp: str
    model: str
    reading: str
    members: int
    clusters: int
    capacity: int
    largest_group: int
    centre: bytes
    spread: bytes


class BankMember(msgspec.Struct, frozen=True, tag="member"):
    """A record with a candidate and its cluster. The first member of a cluster is the representative. `vector`:
    float32, little-endian."""

    candidate: Candidate
    cluster: int
    vector: bytes


class Inserted(msgspec.Struct, frozen=True, tag="inserted"):
    candidate: Candidate
    insertion: Insertion
    vector: bytes


_head = msgspec.msgpack.Decoder(Head)
_member = msgspec.msgpack.Decoder(BankMember)
_inserted = msgspec.msgpack.Decoder(Inserted)
_of_any = msgspec.msgpack.Decoder(BankMember | Inserted)
_encode = msgspec.msgpack.Encoder().encode


class BankStore:
    """An open bank, from `open_bank` or `create_bank`. `layers`: content of the bank when it was last read."""

    def __init__(self, folder: Path, *, model: str, reading: str) -> None:
        self.folder = folder
        self.model = model
        self.reading = reading
        self.layers: Layers
        self._end = 0
        self._beginning = b""
        self._inserted = 0

    @property
    def path(self) -> Path:
        return self.folder / _BANK

    def refresh(self) -> Self:
        """Read the insertions of other processes. Raises the errors of `open_bank`."""
        try:
            found = read_records(self.path, start=self._end, beginning=self._beginning)
        except FileNotFoundError:
            raise StokerError(
                f"{self.folder}: holds no prompt bank; build one for this model", file=str(self.path), missing=True
            ) from None
        except OSError as error:
            raise StokerError(f"{self.path}: cannot be read: {error.strerror}", file=str(self.path)) from error
        if found.damaged:
            raise self._damaged(f"it is damaged at byte {found.end:,}")
        try:
            if found.start == 0:
                self._load_all_records(found.payloads)
            else:
                self._apply_insertions(found.payloads)
        except UNREADABLE as error:
            raise self._damaged(f"it holds a record that this version cannot read ({error})") from error
        self._end = found.end
        return self

    def _load_all_records(self, payloads: list[bytes]) -> None:
        if not payloads:
            raise self._damaged("it is cut off before its first record")
        head = _head.decode(payloads[0])
        if (head.format, head.model, head.reading) != (FORMAT, self.model, self.reading):
            raise StokerError(
                f"{self.path}: is a bank of {head.model} ({head.reading}, format {head.format}), and {self.model}"
                f" ({self.reading}, format {FORMAT}) was asked for; features of two models cannot be compared:"
                " build its bank in another folder",
                file=str(self.path),
                model=head.model,
            )
        if len(payloads) <= head.members:
            raise self._damaged(f"it is cut off after {len(payloads) - 1:,} of {head.members:,} candidates")
        self.layers = _layers(head, [_member.decode(payload) for payload in payloads[1 : head.members + 1]])
        self._beginning, self._inserted = framed(payloads[0]), 0
        self._apply_insertions(payloads[head.members + 1 :])

    def _apply_insertions(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            record = _inserted.decode(payload)
            self.layers.apply(record.candidate, _decode_vector(record.vector), record.insertion)
        self._inserted += len(payloads)

    def insert(self, candidate: Candidate, feature: Array) -> Insertion:
        """Insert a prompt with its raw feature `[width]` (§4.3.3). Raises ValueError for a wrong feature, StokerError
        if the write fails.
        """
        if feature.shape != (self.layers.scale.width,) or not np.isfinite(feature).all():
            raise ValueError(f"a feature of this bank is {self.layers.scale.width} numbers, not {feature.shape}")
        with hold_bank_lock(self.folder):
            self.refresh()
            vector = self.layers.scale.unit(feature[None].astype(np.float32))[0]
            insertion = self.layers.plan(candidate, vector)
            if insertion.did is InsertionOutcome.REFUSED:
                return insertion
            record = Inserted(candidate=candidate, insertion=insertion, vector=_bytes(vector))
            self._end = append_records(self.path, [_encode(record)], at=self._end)
            self.layers.apply(candidate, vector, insertion)
            self._inserted += 1
            if self._inserted > len(self.layers):
                self._write()
        return insertion

    def _write(self) -> None:
        payloads = list(_encode_bank_records(self.layers, model=self.model, reading=self.reading))
        self._end = replace_records(self.path, payloads)
        self._beginning, self._inserted = framed(payloads[0]), 0

    def _damaged(self, what: str) -> StokerError:
        return StokerError(
            f"{self.path}: {what}; build the bank again: intact parts and computed features are reused",
            file=str(self.path),
            damaged=True,
        )


def open_bank(folder: Path, *, model: str, reading: str) -> BankStore:
    """Open a bank. Raises StokerError if the bank is missing or damaged (facts `missing`, `damaged`), or if its model
    or `reading` is different."""
    return BankStore(folder, model=model, reading=reading).refresh()


def create_bank(folder: Path, layers: Layers, *, model: str, reading: str) -> BankStore:
    """Write a bank, and replace an old bank in the folder. The caller must hold the lock."""
    replace_records(folder / _BANK, _encode_bank_records(layers, model=model, reading=reading))
    return open_bank(folder, model=model, reading=reading)


def salvage_candidates(folder: Path) -> list[Candidate]:
    try:
        payloads = read_records(folder / _BANK, skip=True).payloads[1:]
    except OSError:
        return []
    found: dict[Key, Candidate] = {}
    for payload in payloads:
        with contextlib.suppress(*UNREADABLE):
            candidate = _of_any.decode(payload).candidate
            found[candidate.key] = candidate
    return list(found.values())


@contextlib.contextmanager
def hold_bank_lock(folder: Path) -> Iterator[None]:
    """Lock the folder for a writer while the block runs. Raises StokerError if the folder is not writable."""
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StokerError(f"{folder}: cannot be written: {error.strerror}", file=str(folder)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _encode_bank_records(layers: Layers, *, model: str, reading: str) -> Iterator[bytes]:
    yield _encode(
        Head(
            format=FORMAT,
            stamp=uuid.uuid4().hex,
            model=model,
            reading=reading,
            members=len(layers),
            clusters=len(layers.clusters),
            capacity=layers.capacity,
            largest_group=layers.largest_group,
            centre=_bytes(layers.scale.centre),
            spread=_bytes(layers.scale.spread),
        )
    )
    for number, members in enumerate(layers.clusters):
        for key in members:
            yield _encode(BankMember(layers.candidates[key], number, _bytes(layers.vectors[key])))


def _layers(head: Head, members: list[BankMember]) -> Layers:
    clusters: list[list[Key]] = [[] for _ in range(head.clusters)]
    for member in members:
        clusters[member.cluster].append(member.candidate.key)
    return Layers(
        {member.candidate.key: member.candidate for member in members},
        {member.candidate.key: _decode_vector(member.vector) for member in members},
        clusters,
        scale=Scale(centre=_decode_vector(head.centre), spread=_decode_vector(head.spread)),
        capacity=head.capacity,
        largest_group=head.largest_group,
    )


def _bytes(vector: Array) -> bytes:
    return vector.astype("<f4").tobytes()


def _decode_vector(data: bytes) -> Array:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)

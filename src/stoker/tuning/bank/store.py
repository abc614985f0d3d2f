"""A bank on disk: a folder that belongs to one model, used by any number of processes.

    bank        the structure and every candidate with its unit feature, then what was inserted since (`frames.py`)
    readings    every candidate that was ever read, with its raw feature (`build.py`)
    lock        held (flock) by whoever writes

The file `bank` begins with as many members as its head says, put in place whole; each insertion is one record behind
them, with what it did, so that every process comes to the same bank by reading. Whoever inserts takes the lock, reads
what others have inserted, decides, and appends: two that insert one text at once get one candidate. Killed before its
record is whole, an insertion never was; after, it was. Readers take no lock. When there are more insertions than
members the file is written anew.

Why not SQLite: its write-ahead log does not work on network file systems, where home folders of clusters are, and
its other journals want every reader to be able to write when a writer has died. A bank changes once a job and is read
whole, so it needs neither pages nor queries.

A file that is cut off in the middle of its members, or damaged, is refused with what to do; `build.py` makes the bank
again from what is whole in either file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from stoker.decoding import UNREADABLE
from stoker.errors import StokerError
from stoker.tuning.bank import frames
from stoker.tuning.bank.candidate import Candidate, Key
from stoker.tuning.bank.features import Scale
from stoker.tuning.bank.layers import Insertion, InsertionOutcome, Layers
from stoker.tuning.bank.medoids import Array

FORMAT = 1
_BANK, _LOCK = "bank", "lock"


class Head(msgspec.Struct, frozen=True, tag="head"):
    """The first record: whose bank it is, and what follows. `reading` says how features were taken from the model;
    `stamp` is another in every file that is written."""

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
    """A candidate and its cluster; the first of a cluster represents it. Vectors are float32, little-endian."""

    candidate: Candidate
    cluster: int
    vector: bytes


class Inserted(msgspec.Struct, frozen=True, tag="inserted"):
    """An insertion, and what it did."""

    candidate: Candidate
    insertion: Insertion
    vector: bytes


_head = msgspec.msgpack.Decoder(Head)
_member = msgspec.msgpack.Decoder(BankMember)
_inserted = msgspec.msgpack.Decoder(Inserted)
_of_any = msgspec.msgpack.Decoder(BankMember | Inserted)
_encode = msgspec.msgpack.Encoder().encode


class BankStore:
    """An open bank. `layers` is what it held when it was last read. Made by `open_bank` or `create_bank`."""

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
        """The file that holds it."""
        return self.folder / _BANK

    def refresh(self) -> Self:
        """Take in what other processes have done since. Raises as `open_bank`."""
        try:
            found = frames.read(self.path, start=self._end, beginning=self._beginning)
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
                self._take_all(found.payloads)
            else:
                self._take_insertions(found.payloads)
        except UNREADABLE as error:
            raise self._damaged(f"it holds a record that this version cannot read ({error})") from error
        self._end = found.end
        return self

    def _take_all(self, payloads: list[bytes]) -> None:
        if not payloads:
            raise self._damaged("its beginning is cut off")
        head = _head.decode(payloads[0])
        if (head.format, head.model, head.reading) != (FORMAT, self.model, self.reading):
            raise StokerError(
                f"{self.path}: is a bank of {head.model} ({head.reading}, format {head.format}), and {self.model}"
                f" ({self.reading}, format {FORMAT}) was asked for; features of one model say nothing about another:"
                " build a bank for it in a folder of its own",
                file=str(self.path),
                model=head.model,
            )
        if len(payloads) <= head.members:
            raise self._damaged(f"it is cut off after {len(payloads) - 1:,} of {head.members:,} candidates")
        self.layers = _layers(head, [_member.decode(payload) for payload in payloads[1 : head.members + 1]])
        self._beginning, self._inserted = frames.frame(payloads[0]), 0
        self._take_insertions(payloads[head.members + 1 :])

    def _take_insertions(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            record = _inserted.decode(payload)
            self.layers.apply(record.candidate, _vector(record.vector), record.insertion)
        self._inserted += len(payloads)

    def insert(self, candidate: Candidate, feature: Array) -> Insertion:
        """Insert a prompt whose raw feature `[width]` was read from this bank's model (§4.3.3); what it did.

        Raises ValueError for a feature of another width or that is not a number, StokerError when the disk refuses.
        """
        if feature.shape != (self.layers.scale.width,) or not np.isfinite(feature).all():
            raise ValueError(f"a feature of this bank is {self.layers.scale.width} numbers, not {feature.shape}")
        with locked(self.folder):
            self.refresh()
            vector = self.layers.scale.unit(feature[None].astype(np.float32))[0]
            insertion = self.layers.plan(candidate, vector)
            if insertion.did is InsertionOutcome.REFUSED:
                return insertion
            record = Inserted(candidate=candidate, insertion=insertion, vector=_bytes(vector))
            self._end = frames.append(self.path, [_encode(record)], at=self._end)
            self.layers.apply(candidate, vector, insertion)
            self._inserted += 1
            if self._inserted > len(self.layers):
                self._write()
        return insertion

    def _write(self) -> None:
        """The bank as it is, as a file of members alone. The lock is held."""
        payloads = list(_payloads(self.layers, model=self.model, reading=self.reading))
        self._end = frames.replace(self.path, payloads)
        self._beginning, self._inserted = frames.frame(payloads[0]), 0

    def _damaged(self, what: str) -> StokerError:
        return StokerError(
            f"{self.path}: {what}; build the bank again: what is whole in it, and every feature that was read, is used",
            file=str(self.path),
            damaged=True,
        )


def open_bank(folder: Path, *, model: str, reading: str) -> BankStore:
    """The bank in a folder. Raises StokerError when there is none, when it is another model's or read otherwise, and
    when its file is cut off or damaged (fact `damaged`), each with what to do."""
    return BankStore(folder, model=model, reading=reading).refresh()


def create_bank(folder: Path, layers: Layers, *, model: str, reading: str) -> BankStore:
    """Put a bank in its folder, in the place of what is there. The caller holds the lock."""
    frames.replace(folder / _BANK, _payloads(layers, model=model, reading=reading))
    return open_bank(folder, model=model, reading=reading)


def salvage(folder: Path) -> list[Candidate]:
    """The candidates that are whole in a bank's file, whatever else it is; those that had gone are among them."""
    try:
        payloads = frames.read(folder / _BANK, skip=True).payloads[1:]
    except OSError:
        return []
    found: dict[Key, Candidate] = {}
    for payload in payloads:
        with contextlib.suppress(*UNREADABLE):
            candidate = _of_any.decode(payload).candidate
            found[candidate.key] = candidate
    return list(found.values())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time; others wait. Raises StokerError where the folder cannot be written."""
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StokerError(f"{folder}: cannot be written: {error.strerror}", file=str(folder)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _payloads(layers: Layers, *, model: str, reading: str) -> Iterator[bytes]:
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
        {member.candidate.key: _vector(member.vector) for member in members},
        clusters,
        scale=Scale(centre=_vector(head.centre), spread=_vector(head.spread)),
        capacity=head.capacity,
        largest_group=head.largest_group,
    )


def _bytes(vector: Array) -> bytes:
    return vector.astype("<f4").tobytes()


def _vector(data: bytes) -> Array:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)

"""A bank on disk: one folder per model. Any number of processes may use the folder.

    bank        the clusters, and each candidate with its unit feature
    readings/   each candidate that was ever read, with its raw feature: one file per batch (`build.py`)
    lock        locked (flock) by a writer

A file is a checksum (CRC-32, 4 bytes, little-endian) and a MessagePack record. A writer replaces a whole file, so a
killed writer or a crashed host leaves the old file. Readers take no lock. `build.py` rebuilds a damaged bank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import numpy as np

from stoker.decoding import UNREADABLE
from stoker.errors import StokerError
from stoker.tuning.bank.candidates import Candidate
from stoker.tuning.bank.layers import Array, FeatureScale, Insertion, InsertionOutcome, Layers
from stoker.tuning.encoding import MOST_TOKENS
from stoker.whole_files import write_whole

READING = f"mean last hidden state, first {MOST_TOKENS} tokens"
"""Description of the computation of features (`build.reader`). A bank with another description is refused."""

R = TypeVar("R", bound=msgspec.Struct)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace a file. If the write fails (StokerError), the old file is unchanged."""
    data = msgspec.msgpack.encode(record)
    try:
        write_whole(path, zlib.crc32(data).to_bytes(4, "little") + data, mode=0o644, sync=True)
    except OSError as error:
        why = f"cannot be written: {error.strerror}; its earlier content is kept"
        raise StokerError.in_file(path, why) from error


def read_record(path: Path, kind: type[R]) -> R:
    """Read a file. Raises OSError, and StokerError (fact `damaged`) for a wrong checksum or record."""
    data = path.read_bytes()
    try:
        if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            raise ValueError("its checksum is wrong")
        return msgspec.msgpack.decode(memoryview(data)[4:], type=kind)
    except UNREADABLE as error:
        why = f"is damaged ({error}); build the bank again: computed features are reused"
        raise StokerError.in_file(path, why, damaged=True) from error


def encode_vector(vector: Array) -> bytes:
    return vector.astype("<f4").tobytes()


def decode_vector(data: bytes) -> Array:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


class _Bank(msgspec.Struct, frozen=True):
    """The file `bank`. Vectors are float32, little-endian."""

    model: str
    reading: str
    capacity: int
    largest_group: int
    centre: bytes
    spread: bytes
    clusters: list[list[tuple[Candidate, bytes]]]


class BankStore:
    """An open bank (`open_bank`). `layers`: content of the bank when it was last read."""

    layers: Layers

    def __init__(self, folder: Path, *, model: str) -> None:
        self.folder = folder
        self.path = folder / "bank"
        self.model = model

    def refresh(self) -> Self:
        """Read the bank again. Raises the errors of `open_bank`."""
        try:
            found = read_record(self.path, _Bank)
        except FileNotFoundError:
            raise StokerError(
                f"{self.folder}: holds no prompt bank; build one for this model", file=str(self.path), missing=True
            ) from None
        except OSError as error:
            raise StokerError.in_file(self.path, f"cannot be read: {error.strerror}") from error
        if (found.model, found.reading) != (self.model, READING):
            raise StokerError(
                f"{self.path}: is a bank of {found.model} ({found.reading}), not of {self.model} ({READING}); features"
                f" of two models cannot be compared: build the bank of {self.model} in another folder",
                file=str(self.path),
                model=found.model,
            )
        self.layers = Layers(
            [[(candidate, decode_vector(vector)) for candidate, vector in members] for members in found.clusters],
            scale=FeatureScale(centre=decode_vector(found.centre), spread=decode_vector(found.spread)),
            capacity=found.capacity,
            largest_group=found.largest_group,
        )
        return self

    def insert(self, candidate: Candidate, feature: Array) -> Insertion:
        """Insert a prompt with its raw feature `[width]` (§4.3.3). Raises ValueError for a wrong feature, StokerError
        if the write fails."""
        width = len(self.layers.scale.centre)
        if feature.shape != (width,) or not np.isfinite(feature).all():
            raise ValueError(f"a feature of this bank has {width} numbers, and this one has shape {feature.shape}")
        with hold_bank_lock(self.folder):
            self.refresh()
            vector = self.layers.scale.scale_to_unit(feature[None].astype(np.float32))[0]
            insertion = self.layers.plan_insertion(candidate, vector)
            if insertion.did is not InsertionOutcome.REFUSED:
                self.layers.apply_insertion(candidate, vector, insertion)
                try:
                    self.write(self.layers)
                except StokerError:
                    self.refresh()
                    raise
        return insertion

    def write(self, layers: Layers) -> None:
        """Replace the bank. The caller must hold the lock."""
        clusters = [
            [(layers.candidates[key], encode_vector(layers.vectors[key])) for key in members]
            for members in layers.clusters
        ]
        centre, spread = encode_vector(layers.scale.centre), encode_vector(layers.scale.spread)
        write_record(
            self.path, _Bank(self.model, READING, layers.capacity, layers.largest_group, centre, spread, clusters)
        )
        self.layers = layers


def open_bank(folder: Path, *, model: str) -> BankStore:
    """Open a bank. Raises StokerError if the bank is missing or damaged (facts `missing`, `damaged`), or was built with
    another model or `READING`.
    """
    return BankStore(folder, model=model).refresh()


@contextlib.contextmanager
def hold_bank_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's write lock while the `with` block runs. Raises StokerError if the folder is not writable."""
    try:
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StokerError(f"{folder}: cannot be written: {error.strerror}", file=str(folder)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)

"""A bank on first use: features of thousands of prompts are read from the model once, then grouped.

Reading is what takes long (minutes on a GPU, more on a CPU), so what was read is kept by content, in the file
`readings` beside the bank: each prompt's text, provenance and raw feature. A build that was killed goes on where it
was; a bank with other settings, or one whose file was cut off, is made from it in seconds. Prompts that were inserted
are in it too, written before the bank is: each of them is in two files, and comes back whenever the bank is built.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from stoker.decoding import UNREADABLE
from stoker.errors import StokerError
from stoker.tuning.bank import frames
from stoker.tuning.bank.candidate import Candidate, Key
from stoker.tuning.bank.layers import CAPACITY, CLUSTERS, LARGEST_GROUP, Insertion, build
from stoker.tuning.bank.medoids import Array
from stoker.tuning.bank.store import BankStore, create_bank, locked, open_bank, salvage

log = logging.getLogger(__name__)

Reader = Callable[[Sequence[str]], Array]
"""Raw features `[texts, width]` of texts, from the bank's model."""
Progress = Callable[[int, int], None]
"""Told how many prompts have been read, and of how many."""

AT_ONCE = 64
"""Prompts that are read together and then kept: what a killed build loses at the most."""


class _Of(msgspec.Struct, frozen=True):
    """The first record of `readings`."""

    model: str
    reading: str


class _Reading(msgspec.Struct, frozen=True):
    """A prompt and its raw feature, float32, little-endian."""

    candidate: Candidate
    feature: bytes


class Readings:
    """What was read from one model, by content. Whoever adds to it holds the folder's lock."""

    def __init__(self, folder: Path, *, model: str, reading: str) -> None:
        self.path = folder / "readings"
        self.candidates: dict[Key, Candidate] = {}
        self._features: dict[Key, Array] = {}
        self._of = _Of(model, reading)
        self._end = 0
        with contextlib.suppress(FileNotFoundError):
            self._load()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def features(self, candidates: Sequence[Candidate]) -> Array:
        """Of candidates that have been read, `[candidates, width]`."""
        return np.stack([self._features[candidate.key] for candidate in candidates])

    def add(self, candidates: Sequence[Candidate], features: Array) -> None:
        """Keep what was read. Raises ValueError for another number of features, StokerError when the disk refuses."""
        if features.ndim != 2 or len(features) != len(candidates):
            raise ValueError(f"the reader gave features of shape {features.shape} for {len(candidates)} texts")
        records = [
            _Reading(candidate, feature.astype("<f4").tobytes())
            for candidate, feature in zip(candidates, features, strict=True)
        ]
        first = [msgspec.msgpack.encode(self._of)] if self._end == 0 else []
        self._end = frames.append(self.path, [*first, *(msgspec.msgpack.encode(one) for one in records)], at=self._end)
        self._take(records)

    def _load(self) -> None:
        found = frames.read(self.path, skip=True)
        try:
            of = msgspec.msgpack.decode(found.payloads[0], type=_Of) if found.payloads else self._of
            records = [msgspec.msgpack.decode(payload, type=_Reading) for payload in found.payloads[1:]]
        except UNREADABLE as error:
            raise StokerError(
                f"{self.path}: holds a record that this version cannot read ({error}); move it away, and prompts are"
                " read from the model again",
                file=str(self.path),
            ) from error
        if of != self._of:
            raise StokerError(
                f"{self.path}: was read from {of.model} ({of.reading}), and {self._of.model} ({self._of.reading}) was"
                " asked for: build its bank in a folder of its own",
                file=str(self.path),
                model=of.model,
            )
        if found.damaged:
            aside = keep_aside(self.path)
            log.warning(
                "%s is damaged; its %d whole records are kept, the file itself is %s", self.path, len(records), aside,
            )  # fmt: skip
            self._end = frames.replace(self.path, found.payloads)
        else:
            self._end = found.end
        self._take(records)

    def _take(self, records: Sequence[_Reading]) -> None:
        for one in records:
            self.candidates[one.candidate.key] = one.candidate
            self._features[one.candidate.key] = np.frombuffer(one.feature, dtype="<f4").astype(np.float32)


def ensure_bank(
    folder: Path,
    candidates: Sequence[Candidate],
    *,
    model: str,
    reading: str,
    read: Reader,
    k: int = CLUSTERS,
    capacity: int = CAPACITY,
    largest_group: int = LARGEST_GROUP,
    again: bool = False,
    progress: Progress | None = None,
) -> BankStore:
    """The bank in `folder`, built if there is none, if its file is cut off or damaged, or `again`.

    A new one has these candidates, those that were ever read for this folder, and those that are whole in the file
    that it replaces. Of several processes one builds, and the others wait. Raises StokerError for a folder of another
    model, ValueError as `layers.build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not again and (bank := _whole(folder, model=model, reading=reading)) is not None:
        return bank
    with locked(folder):
        bank = _whole(folder, model=model, reading=reading)
        if bank is not None and not again:  # made while this process waited
            return bank
        readings = Readings(folder, model=model, reading=reading)
        every = {one.key: one for one in (*candidates, *readings.candidates.values(), *salvage(folder))}
        wanted = list(every.values())
        _read_missing(readings, wanted, read, progress)
        layers = build(wanted, readings.features(wanted), k=k, capacity=capacity, largest_group=largest_group)
        if bank is None and (folder / "bank").exists():
            log.warning(
                "the damaged bank is %s; it was made again with %d prompts", keep_aside(folder / "bank"), len(layers)
            )
        return create_bank(folder, layers, model=model, reading=reading)


def insert(bank: BankStore, candidate: Candidate, *, read: Reader) -> Insertion:
    """Insert a prompt (a tuned one, say) into a bank: read from the model unless it was before, kept, then inserted.

    Raises as `BankStore.insert`.
    """
    return bank.insert(candidate, _keep(bank.folder, candidate, model=bank.model, reading=bank.reading, read=read))


def contribute(folder: Path, candidate: Candidate, *, model: str, reading: str, read: Reader) -> Insertion | None:
    """Insert a prompt into the bank of this folder. Where there is none yet, or a damaged one, it is kept for the one
    that will be built (None). Raises as `insert`, and StokerError for a folder of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    bank = _whole(folder, model=model, reading=reading)
    if bank is not None:
        return insert(bank, candidate, read=read)
    _keep(folder, candidate, model=model, reading=reading, read=read)
    return None


def _keep(folder: Path, candidate: Candidate, *, model: str, reading: str, read: Reader) -> Array:
    """The candidate's raw feature `[width]`; it and the candidate are among the readings of the folder now."""
    with locked(folder):
        readings = Readings(folder, model=model, reading=reading)
    feature = readings.features([candidate]) if candidate.key in readings else read([candidate.text])
    with locked(folder):
        readings = Readings(folder, model=model, reading=reading)
        if readings.candidates.get(candidate.key) != candidate:
            readings.add([candidate], feature)
    first: Array = feature[0]
    return first


def keep_aside(path: Path) -> Path:
    """Copy a damaged file that is about to be replaced, so that nothing of it is lost. Where it is."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    shutil.copyfile(path, aside)
    return aside


def _whole(folder: Path, *, model: str, reading: str) -> BankStore | None:
    try:
        return open_bank(folder, model=model, reading=reading)
    except StokerError as error:
        if error.facts.get("missing") or error.facts.get("damaged"):
            return None
        raise


def _read_missing(readings: Readings, wanted: Sequence[Candidate], read: Reader, progress: Progress | None) -> None:
    missing = [one for one in wanted if one.key not in readings]
    there = len(wanted) - len(missing)
    # Texts of like length are read together, which saves padding.
    missing.sort(key=lambda one: len(one.text))
    for start in range(0, len(missing), AT_ONCE):
        some = missing[start : start + AT_ONCE]
        readings.add(some, read([one.text for one in some]))
        if progress is not None:
            progress(there + start + len(some), len(wanted))

"""What the threads of one fetch share: the copy that grows, who has which pieces, and whether it is over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker.pilot.transfer.copy import ObjectCopy
from stoker.pilot.transfer.picker import Picker


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """Where an object can be had: at another host's `address`, or at a `path` here.

    `origin`: it is the place that the object comes from, or stands for it. `label` is what who offers it knows it by.
    """

    address: str = ""
    path: str = ""
    label: str = ""
    origin: bool = False

    def __str__(self) -> str:
        return self.label or self.path or self.address


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """How an object came: bytes read from its origin and from peers, bytes that an earlier try had left, seconds."""

    origin_bytes: int
    peer_bytes: int
    kept_bytes: int
    seconds: float


class WrongBytesError(Exception):
    """A source served what its object is not."""


class Board:
    """The state of one fetch. Every method may be called from any thread.

    `begun` gets the copy as soon as there is one, so that it can be served while it grows.
    """

    def __init__(self, name: str, root: Path, *, chance: random.Random, begun: Callable[[ObjectCopy], None]) -> None:
        self.name = name
        self._root = root
        self._chance = chance
        self._begun = begun
        self._news = threading.Condition()
        self._making = threading.Lock()
        self._picker: Picker[ObjectSource] = Picker(0, chance=chance)
        self._from_origin = self._from_peers = self._kept = 0
        self._started_at = self.moved_at = time.monotonic()
        self.told = b""
        """The manifest, where it is known beforehand."""
        self.copy: ObjectCopy | None = None
        self.over = False
        self.failure: Exception | None = None

    def establish(self, manifest: bytes) -> ObjectCopy:
        """The manifest is known: there is a copy from now on. Raises WrongBytesError if it is not this object's.

        A disk that does not take the copy ends the fetch, and raises OSError.
        """
        with self._making:
            if self.copy is not None:
                return self.copy
            try:
                copy = ObjectCopy(self._root, self.name, manifest, whole=False)
                kept = copy.recheck()
            except ValueError as error:
                raise WrongBytesError(str(error)) from error
            except OSError as error:
                self.end(error)
                raise
            with self._news:
                self._picker = Picker(len(copy.pieces), chance=self._chance)
                for index in copy.arrivals:
                    self._picker.arrived(index, time.monotonic())
                self._kept = kept
                self.copy = copy
        self._begun(copy)
        if copy.complete:
            self.end(None)
        return copy

    def join(self, source: ObjectSource, has: Iterable[int]) -> None:
        """A source can be asked, and has these pieces."""
        if self.copy is not None and source.origin:
            self.copy.first_hand = True
        with self._news:
            self._picker.gone(source)
            self._picker.add(source, origin=source.origin)
            self._picker.has(source, has)

    def hear(self, source: ObjectSource, has: Iterable[int], *, lacks: int | None = None) -> None:
        """A source has new pieces, or does not give one now."""
        with self._news:
            if lacks is not None:
                self._picker.has_not(source, lacks)
            self._picker.has(source, has)

    def take(self, source: ObjectSource) -> int | None:
        """The piece to ask this source for; None when there is none now, or the fetch is over."""
        with self._news:
            return None if self.over else self._picker.take(source, time.monotonic())

    def arrive(self, source: ObjectSource, index: int, data: memoryview) -> None:
        """A source has given a piece. Raises WrongBytesError; a disk that does not take it ends the fetch."""
        copy = self.copy
        if copy is None:
            raise ValueError("a piece came before the manifest")
        with self._news:
            self._from_origin += len(data) if source.origin else 0
            self._from_peers += 0 if source.origin else len(data)
        try:
            if not copy.has(index) and not copy.write(index, data):
                raise WrongBytesError(f"a part of {self.name} is not what its name says")
        except OSError as error:
            self.end(error)
            return
        with self._news:
            self.moved_at = time.monotonic()
            self._picker.arrived(index, self.moved_at)
            self._news.notify_all()
        if copy.complete:
            self.end(None)

    def leave(self, source: ObjectSource) -> None:
        """A source is no more."""
        with self._news:
            self._picker.gone(source)
            self._news.notify_all()

    def end(self, failure: Exception | None) -> None:
        """It is over; what is said first counts."""
        with self._news:
            if not self.over:
                self.over, self.failure = True, failure
            self._news.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until something has happened, so long at most."""
        with self._news:
            if not self.over:
                self._news.wait(seconds)

    def outcome(self) -> FetchOutcome:
        """How it has come so far."""
        return FetchOutcome(self._from_origin, self._from_peers, self._kept, time.monotonic() - self._started_at)

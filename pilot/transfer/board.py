"""The copy of an object on disk, and the choice of the next pieces to fetch.

A new copy contains all folders, links and files, with holes for missing pieces. Another process can continue an
incomplete copy.

As in BitTorrent (Cohen, "Incentives Build Robustness in BitTorrent", 2003), a fetch requests the rarest piece first and
breaks ties at random. Unlike BitTorrent, a fetch asks the pilot that reads the original object only for pieces that no
other source has or will soon have. Near the end of a fetch, a delayed piece is also requested from a second source. The
next piece is chosen from a sample of the pieces, so the choice takes no longer for large objects.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from stoker.contexts.manifest import (
    PART_BYTES,
    Entry,
    EntryKind,
    Manifest,
    ManifestPart,
    group_into_pieces,
    is_piece_intact,
    piece_size_bytes,
    read_manifest,
)

# ---- copy


class ObjectCopy:
    """A copy of an object at one path. Thread-safe. `arrivals`: indices of the present pieces, in order of arrival."""

    def __init__(self, root: Path, name: str, data: bytes, *, whole: bool) -> None:
        """Raises ValueError for an invalid manifest `data`, OSError for an unusable path."""
        self.name = name
        self.manifest_bytes = data
        self.manifest = read_manifest(name, data)
        self.pieces = group_into_pieces(self.manifest)
        self.reads_origin = False  # True if the fetch reads the object's origin
        self.changed = threading.Condition()
        self.arrivals: Sequence[int] = range(len(self.pieces))
        self._arrivals: list[int] = []
        self._present_pieces = bytearray(len(self.pieces))
        self._folder = self.manifest.kind is EntryKind.FOLDER
        if not whole:
            self.arrivals = self._arrivals
            _create_tree(root, self.manifest)
        how = os.O_DIRECTORY if self._folder else (os.O_RDONLY if whole else os.O_RDWR)
        self._root = os.open(root, how | os.O_CLOEXEC)
        # Close the descriptor with the last reference: otherwise, a late thread could write to a file that reuses it.
        weakref.finalize(self, os.close, self._root)

    @property
    def is_complete(self) -> bool:
        return len(self.arrivals) == len(self.pieces)

    def keep_correct_pieces(self) -> None:
        """Record correct pieces that an earlier attempt left. Raises OSError."""
        buffer = memoryview(bytearray(PART_BYTES))
        for index, piece in enumerate(self.pieces):
            if any(self._is_hole(part) for part in piece):
                continue
            size = piece_size_bytes(piece)
            if self.read_piece(index, buffer[:size]) and is_piece_intact(piece, buffer[:size]):
                self._record_arrival(index)

    def write_piece(self, index: int, data: memoryview) -> bool:
        """Write a piece. Return False if its bytes are wrong. Raises OSError."""
        piece = self.pieces[index]
        if not is_piece_intact(piece, data):
            return False
        offset = 0
        for part in piece:
            with self.open_file_of(part, os.O_WRONLY) as file:
                _write_all_at(file, data[offset : offset + part.size_bytes], part.offset)
            offset += part.size_bytes
        self._record_arrival(index)
        return True

    def read_piece(self, index: int, into: memoryview) -> bool:
        offset = 0
        for part in self.pieces[index]:
            with self.open_file_of(part) as file:
                if not _read_all_at(file, into[offset : offset + part.size_bytes], part.offset):
                    return False
            offset += part.size_bytes
        return True

    def free_disk_space(self) -> None:
        """Free the disk space of the copy, even if other processes have the copy open."""
        if not self._folder and os.fstat(self._root).st_nlink <= 1:
            os.ftruncate(self._root, 0)

    def has_piece(self, index: int) -> bool:
        return self.arrivals is not self._arrivals or bool(self._present_pieces[index])

    def _record_arrival(self, index: int) -> None:
        with self.changed:
            if not self._present_pieces[index]:
                self._present_pieces[index] = 1
                self._arrivals.append(index)
                self.changed.notify_all()

    @contextmanager
    def open_file_of(self, part: ManifestPart, how: int = os.O_RDONLY) -> Iterator[int]:
        """Yield a descriptor of the file that contains `part`. Raises OSError."""
        if not self._folder:
            yield self._root
            return
        file = os.open(self.manifest.entries[part.entry].name, how | os.O_CLOEXEC, dir_fd=self._root)
        try:
            yield file
        finally:
            os.close(file)

    def _is_hole(self, part: ManifestPart) -> bool:
        with self.open_file_of(part) as file:
            try:
                return os.lseek(file, part.offset, os.SEEK_DATA) >= part.offset + part.size_bytes
            except OSError as error:
                return error.errno == errno.ENXIO


def _create_tree(root: Path, manifest: Manifest) -> None:
    place = os.fsencode(root)
    if manifest.kind is EntryKind.FILE:
        _create_sparse_file(place, manifest.entries[0])
        return
    os.makedirs(place, mode=0o700, exist_ok=True)
    for entry in manifest.entries:
        path = os.path.join(place, entry.name)
        if entry.kind is EntryKind.FILE:
            _create_sparse_file(path, entry)
        elif entry.kind is EntryKind.FOLDER:
            os.makedirs(path, mode=0o700, exist_ok=True)
        elif not os.path.islink(path):
            os.symlink(entry.target, path)


def _create_sparse_file(path: bytes, entry: Entry) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, f"{os.fsdecode(path)} is not a file")
        os.ftruncate(file, entry.size_bytes)
        os.fchmod(file, 0o700 if entry.executable else 0o600)
    finally:
        os.close(file)


def _write_all_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _read_all_at(file: int, into: memoryview, offset: int) -> bool:
    while into:
        count = os.preadv(file, [into], offset)
        if not count:
            return False
        into, offset = into[count:], offset + count
    return True


# ---- the choice of pieces

S = TypeVar("S")

SAMPLE_PIECES = 48
MIN_OVERDUE_S, OVERDUE_FACTOR = 1.0, 3.0
"""Near the end of a fetch, a piece is also requested from a second source after the longer of 1 s and 3 times the
recent seconds per piece.
"""
ORIGIN_FALLBACK_S = 5.0  # seconds without a new piece, after which the origin also sends pieces that peers have


@dataclass(slots=True)
class _PieceRequest:
    sources: int
    since: float


@dataclass(slots=True)
class _SourcePieces:
    origin: bool
    pieces: list[int] = field(default_factory=list)
    known: bytearray = field(default_factory=bytearray)
    requested: set[int] = field(default_factory=set)


class PiecePicker(Generic[S]):
    """Chooses the next piece of an object to request from a source. Not thread-safe."""

    def __init__(self, count: int, *, chance: random.Random) -> None:
        self._has_arrived = bytearray(count)
        self._left = count
        self._peers_with_piece = [0] * count
        self._requests: dict[int, _PieceRequest] = {}
        self._offers: dict[S, _SourcePieces] = {}
        self._chance = chance
        self._last_arrival_at = 0.0
        self._took_s = 0.0

    @property
    def missing(self) -> int:
        return self._left

    def add_source(self, source: S, *, origin: bool = False) -> None:
        self._offers[source] = _SourcePieces(origin=origin, known=bytearray(len(self._has_arrived)))

    def add_pieces_of_source(self, source: S, indices: Iterable[int]) -> None:
        offer = self._offers[source]
        for index in indices:
            if not offer.known[index]:
                offer.known[index] = 1
                if not offer.origin:
                    self._peers_with_piece[index] += 1
                if not self._has_arrived[index]:
                    offer.pieces.append(index)

    def mark_piece_unavailable(self, source: S, index: int) -> None:
        offer = self._offers[source]
        self._withdraw_request(offer, index)
        if offer.known[index]:
            offer.known[index] = 0
            if not offer.origin:
                self._peers_with_piece[index] -= 1
            if index in offer.pieces:
                offer.pieces.remove(index)

    def remove_source(self, source: S) -> None:
        """Remove a source. Its pieces can then be requested from other sources."""
        offer = self._offers.pop(source, None)
        if offer is None:
            return
        for index in list(offer.requested):
            self._withdraw_request(offer, index)
        if not offer.origin:
            for index, known in enumerate(offer.known):
                self._peers_with_piece[index] -= known

    def record_arrival(self, index: int, now: float) -> bool:
        """Record the arrival of a piece. Return False if the piece was already present."""
        for offer in self._offers.values():
            offer.requested.discard(index)
        asked = self._requests.pop(index, None)
        if self._has_arrived[index]:
            return False
        if asked is not None:
            self._took_s += (now - asked.since - self._took_s) / 4
        self._has_arrived[index] = 1
        self._left -= 1
        self._last_arrival_at = now
        return True

    def choose_next_piece(self, source: S, now: float) -> int | None:
        """Return the piece to request from a source, if any, and mark the piece as requested."""
        offer = self._offers.get(source)
        if offer is None:
            return None
        found = self._choose_unrequested_piece(offer, now)
        found = self._choose_overdue_piece(offer, now) if found is None else found
        if found is not None:
            asked = self._requests.get(found)
            self._requests[found] = _PieceRequest(1 + (asked.sources if asked else 0), now)
            offer.requested.add(found)
        return found

    def _choose_unrequested_piece(self, offer: _SourcePieces, now: float) -> int | None:
        """Return the rarest unrequested piece of a sample, or of all pieces if the sample has none."""
        spared = offer.origin and now - self._last_arrival_at < ORIGIN_FALLBACK_S
        here, asked, holders, pieces = self._has_arrived, self._requests, self._peers_with_piece, offer.pieces
        for size in (SAMPLE_PIECES,) if spared else (SAMPLE_PIECES, len(pieces)):
            best, fewest = None, len(self._offers) + 1
            place = self._chance.randrange(len(pieces)) if pieces else 0
            for _ in range(min(size, len(pieces))):
                place = place % len(pieces)
                index = pieces[place]
                if here[index]:
                    pieces[place] = pieces[-1]
                    pieces.pop()
                    if not pieces:
                        return best
                    continue
                if index not in asked and holders[index] < fewest and not (spared and holders[index]):
                    best, fewest = index, holders[index]
                place += 1
            if best is not None:
                return best
        return None

    def _choose_overdue_piece(self, offer: _SourcePieces, now: float) -> int | None:
        """If all missing pieces have been requested, return a piece whose only request is overdue."""
        if len(self._requests) < self._left:
            return None
        patience_s = max(MIN_OVERDUE_S, OVERDUE_FACTOR * self._took_s) + (ORIGIN_FALLBACK_S if offer.origin else 0.0)
        late = [
            index
            for index, asked in self._requests.items()
            if asked.sources == 1
            and now - asked.since > patience_s
            and offer.known[index]
            and index not in offer.requested
        ]
        return self._chance.choice(late) if late else None

    def _withdraw_request(self, offer: _SourcePieces, index: int) -> None:
        if index in offer.requested:
            offer.requested.discard(index)
            asked = self._requests.get(index)
            if asked is not None:
                asked.sources -= 1
                if asked.sources <= 0:
                    del self._requests[index]


# ---- sources and outcomes of fetches


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """A source of an object: a peer's `address` or a `path`. `origin`: True if the source is, or reads, the original
    object.
    """

    address: str = ""
    path: str = ""
    label: str = ""
    origin: bool = False

    def __str__(self) -> str:
        return self.label or self.path or self.address


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """The result of a fetch: bytes from the origin, bytes from peers, and the duration in seconds."""

    origin_bytes: int
    peer_bytes: int
    seconds: float


class WrongBytesError(Exception):
    """A source served wrong bytes."""

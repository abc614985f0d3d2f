"""An object on this disk, complete or in parts.

A new copy is laid out in full first: folders, links, and files with holes where pieces are missing. Another process may
continue it: `recheck` reads what is there and keeps the pieces that are right.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.contexts.manifest import (
    PART_BYTES,
    Entry,
    EntryKind,
    Manifest,
    Slice,
    is_right,
    piece_bytes,
    pieces,
    read_manifest,
)


class ObjectCopy:
    """One object at one place, for several threads. `arrivals` are the pieces that are here, in order of arrival."""

    def __init__(self, root: Path, name: str, data: bytes, *, whole: bool) -> None:
        """`data` is the manifest. Raises ValueError if it is not, OSError if the place cannot be opened or laid out."""
        self.name = name
        self.data = data
        self.manifest = read_manifest(name, data)
        self.pieces = pieces(self.manifest)
        self.first_hand = False  # whether it is being read from where the object comes from
        self.changed = threading.Condition()
        self.arrivals: Sequence[int] = range(len(self.pieces))
        self._made: list[int] = []
        self._here = bytearray(len(self.pieces))
        self._folder = self.manifest.kind is EntryKind.FOLDER
        if not whole:
            self.arrivals = self._made
            _lay_out(root, self.manifest)
        how = os.O_DIRECTORY if self._folder else (os.O_RDONLY if whole else os.O_RDWR)
        self._root = os.open(root, how | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._root)  # not earlier: a late thread must not write to another file

    @property
    def complete(self) -> bool:
        """Whether every piece is here."""
        return len(self.arrivals) == len(self.pieces)

    def recheck(self) -> int:
        """Keep the pieces that an earlier try has left here; returns their bytes. Raises OSError."""
        kept = 0
        buffer = memoryview(bytearray(PART_BYTES))
        for index, piece in enumerate(self.pieces):
            if any(self._is_hole(part) for part in piece):
                continue
            size = piece_bytes(piece)
            if self.read(index, buffer[:size]) and is_right(piece, buffer[:size]):
                self._arrive(index)
                kept += size
        return kept

    def write(self, index: int, data: memoryview) -> bool:
        """Put a piece where it belongs; False, and nothing is written, if these bytes are not it. Raises OSError."""
        piece = self.pieces[index]
        if not is_right(piece, data):
            return False
        offset = 0
        for part in piece:
            with self._open(part.entry, os.O_WRONLY) as file:
                _write(file, data[offset : offset + part.size_bytes], part.offset)
            offset += part.size_bytes
        self._arrive(index)
        return True

    def read(self, index: int, into: memoryview) -> bool:
        """Read a piece's bytes as they are now; False if a file is shorter than it should be. Raises OSError."""
        offset = 0
        for part in self.pieces[index]:
            with self._open(part.entry, os.O_RDONLY) as file:
                if not _read(file, into[offset : offset + part.size_bytes], part.offset):
                    return False
            offset += part.size_bytes
        return True

    @contextmanager
    def file_of(self, part: Slice) -> Iterator[int]:
        """A descriptor of the file that a part is in, for `sendfile`. Raises OSError."""
        with self._open(part.entry, os.O_RDONLY) as file:
            yield file

    def give_up(self) -> None:
        """Free its room, even while it is open elsewhere; a file that others hold under a second name stays."""
        if not self._folder and os.fstat(self._root).st_nlink <= 1:
            os.ftruncate(self._root, 0)

    def has(self, index: int) -> bool:
        """Whether a piece is here."""
        return self.arrivals is not self._made or bool(self._here[index])

    # ---- inside

    def _arrive(self, index: int) -> None:
        with self.changed:
            if not self._here[index]:
                self._here[index] = 1
                self._made.append(index)
                self.changed.notify_all()

    @contextmanager
    def _open(self, entry: int, how: int) -> Iterator[int]:
        if not self._folder:
            yield self._root
            return
        name = self.manifest.entries[entry].name
        file = os.open(name, how | os.O_CLOEXEC, dir_fd=self._root)
        try:
            yield file
        finally:
            os.close(file)

    def _is_hole(self, part: Slice) -> bool:
        """Whether nothing was ever written at the beginning of a part. A file system that cannot tell says no."""
        with self._open(part.entry, os.O_RDONLY) as file:
            try:
                return os.lseek(file, part.offset, os.SEEK_DATA) >= part.offset + part.size_bytes
            except OSError as error:
                return error.errno == errno.ENXIO


def _lay_out(root: Path, manifest: Manifest) -> None:
    place = os.fsencode(root)
    if manifest.kind is EntryKind.FILE:
        _make_file(place, manifest.entries[0])
        return
    os.makedirs(place, mode=0o700, exist_ok=True)
    for entry in manifest.entries:
        path = os.path.join(place, entry.name)
        if entry.kind is EntryKind.FILE:
            _make_file(path, entry)
        elif entry.kind is EntryKind.FOLDER:
            os.makedirs(path, mode=0o700, exist_ok=True)
        elif not os.path.islink(path):
            os.symlink(entry.target, path)


def _make_file(path: bytes, entry: Entry) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, f"{os.fsdecode(path)} is no file")
        os.ftruncate(file, entry.size_bytes)
        os.fchmod(file, 0o700 if entry.executable else 0o600)
    finally:
        os.close(file)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _read(file: int, into: memoryview, offset: int) -> bool:
    while into:
        count = os.preadv(file, [into], offset)
        if not count:
            return False
        into, offset = into[count:], offset + count
    return True

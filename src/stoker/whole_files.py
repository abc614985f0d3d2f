"""Files that are written whole or not at all, and bytes that are appended whole or not at all.

A file is written beside its place, under a name of its own, and then renamed: a reader sees the old file or the new
one. If the disk is full, or the writer is interrupted, the draft goes and the old file stays. A writer that is killed
leaves its draft; its name begins with a dot and ends as the file's own does.

Standard library alone: a starting pilot uses this before it has its environment.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME_CHARACTERS = 200
"""A draft's name keeps this much of the file's: most file systems take names of 255 bytes."""


@contextmanager
def draft_of(path: Path, *, draft: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Give the block a path to write; it becomes `path` when the block ends well, and is removed otherwise.

    `draft`: this path instead of one of its own, for a file that has one writer at a time; what a killed writer left
    there is then known by its name. `sync`: bytes and name survive a crash of the host, at the price of two syncs.
    Raises OSError.
    """
    place = draft or path.with_name(f".{secrets.token_hex(4)}.{path.name[-_NAME_CHARACTERS:]}")
    try:
        yield place
        if sync:
            sync_file(place)
        place.replace(path)
    finally:
        with suppress(OSError):
            place.unlink()
    if sync:
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Put a file of these bytes in the place of `path`; `sync` as in `draft_of`. Raises OSError; the old file is then
    as it was."""
    with draft_of(path, sync=sync) as draft:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(file, data)
        finally:
            os.close(file)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all these bytes to an open file: `os.write` may take a part of them. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def append_whole(file: int, data: bytes, *, at: int) -> None:
    """Write behind the byte `at`, the end of an open file that has one writer. Raises OSError; the file then ends at
    `at` again, if its disk lets it."""
    try:
        write_all(file, data)
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, at)
        raise


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the host, where its file system can."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

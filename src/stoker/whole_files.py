"""Write or append data completely or not at all. Standard library only, as the pilot's starter requires.

A writer creates a draft in the same folder and renames it to the final name. A killed writer leaves its draft, whose
name starts with a dot.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME_CHARACTERS = 200
"""Number of characters of the file name that a draft's name keeps. Most file systems allow names of 255 bytes."""


@contextmanager
def draft_file(path: Path, *, draft: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a draft file. If the `with` block succeeds, rename the draft to `path`. `draft`: a fixed draft
    path, for a file with one writer at a time. `sync`: True if the file must survive a crash of the host.
    """
    place = draft or path.with_name(f".{secrets.token_hex(4)}.{path.name[-_NAME_CHARACTERS:]}")
    try:
        yield place
        if sync:
            with place.open("rb") as file:
                os.fsync(file.fileno())
        place.replace(path)
    finally:
        with suppress(OSError):
            place.unlink()
    if sync:
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace the content of a file atomically. After an OSError, the old file is unchanged."""
    with draft_file(path, sync=sync) as draft:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(file, data)
        finally:
            os.close(file)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of `data`; `os.write` may write only a part. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def append_or_truncate(file: int, data: bytes, *, at: int) -> None:
    """Append `data` at byte `at`, the end of a file that has only one writer. After an OSError, truncate the file to
    `at`.
    """
    try:
        write_all(file, data)
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, at)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the folder's file names to disk, if possible."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

"""What the cache does with files: have them without copying, know them at a glance, remove them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from stoker.contexts.recipe import ObjectRef

_FICLONE = 0x40049409


def link(source: Path, draft: Path, ref: ObjectRef) -> bool:
    """Have a file by a second name for it. It may change with its source, which `look` notices; it is not read now."""
    try:
        facts = source.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != ref.size_bytes:
            return False
        delete(draft)
        os.link(source.resolve(), draft)
    except OSError:
        return False
    return True


def share(source: Path, draft: Path) -> bool:
    """Have a file without copying it, where the file system can: a clone, to be checked like a copy."""
    if not source.is_file() or draft.exists():
        return False
    try:
        with source.open("rb") as here, draft.open("xb") as there:
            fcntl.ioctl(there, _FICLONE, here.fileno())
    except OSError:
        delete(draft)
        return False
    return True


def look(place: Path) -> str:
    """What a glance tells of an object: a change of content under its name changes this."""
    try:
        facts = place.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            return f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"
        parts = []
        for folder, folders, files in os.walk(place):
            folders.sort()
            for name in sorted([*folders, *files]):
                path = os.path.join(folder, name)
                one = os.lstat(path)
                parts.append((os.path.relpath(path, place), one.st_mode, one.st_size, one.st_mtime_ns))
        return f"{len(parts)} {_hash_of(parts)}"
    except OSError:
        return ""


def size(place: Path) -> int:
    """The length of a file, or of all files below a folder."""
    if place.is_file():
        return place.stat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(place) for name in files)


def taken(place: Path) -> int:
    """Bytes that a file, or all files below a folder, take of the disk; holes take none. 0 if nothing is there."""
    try:
        if not place.is_dir():
            return place.stat().st_blocks * 512
        return sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, files in os.walk(place)
            for name in files
        )
    except OSError:
        return 0


def delete(place: Path) -> None:
    """Remove a file or a folder; one that is not there is fine."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink()


def _hash_of(parts: list[tuple[str, int, int, int]]) -> str:
    """A digest of a listing."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

"""The cache's files: bring them in without copying, recognise them at a glance, remove them, and mark what is durable.

A crash of the machine soon after an object came could leave zeros in its place, of the right length and age. So an
object without a mark is brought again after a boot. Syncing takes longer than loading a small context, and slows it
down: one thread does it, half a second after an object came.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker.contexts.recipe import ObjectRef

# ---- files


_FICLONE = 0x40049409


def link(source: Path, draft: Path, ref: ObjectRef) -> str:
    """Link a file under a second name; return how it looks, or empty if that fails.

    Its content is not read: it must be as it was when it was named (`ref.changed_ns`). It may change with its source
    later, which `stat_signature` notices.
    """
    try:
        facts = source.stat()
        if not stat.S_ISREG(facts.st_mode) or not _is_as_named(facts, ref):
            return ""
        delete(draft)
        os.link(source.resolve(), draft)
        facts = draft.lstat()
    except OSError:
        return ""
    if not _is_as_named(facts, ref):
        delete(draft)
        return ""
    return _signature_of(facts)


def _is_as_named(facts: os.stat_result, ref: ObjectRef) -> bool:
    named = (ref.size_bytes, ref.changed_ns, ref.inode)
    return bool(ref.changed_ns) and (facts.st_size, facts.st_mtime_ns, facts.st_ino) == named


def was_changed(ref: ObjectRef) -> bool:
    """Whether a file was written to since its content was named, as far as a glance at its source tells."""
    try:
        return bool(ref.changed_ns) and not _is_as_named(os.stat(ref.source), ref)
    except OSError:
        return False


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


def stat_signature(place: Path) -> str:
    """Facts of an object from `stat`: they change if its content changes under its name."""
    try:
        facts = place.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            return _signature_of(facts)
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


def _signature_of(facts: os.stat_result) -> str:
    return f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def flush(place: Path) -> None:
    """Wait until a file, or all files below a folder, are on the disk. Raises OSError."""
    files = [place] if not place.is_dir() else [each for each in place.rglob("*") if each.is_file()]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


@functools.cache
def boot() -> str:
    """Names the time since this machine was started; empty where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def frees_bytes(place: Path) -> int:
    """How much room its removal gives back: files that have a second name elsewhere give none."""
    files = [place] if not place.is_dir() else [each for each in place.rglob("*") if not each.is_dir()]
    total = 0
    for file in files:
        with suppress(OSError):
            facts = file.lstat()
            total += facts.st_blocks * 512 if facts.st_nlink == 1 else 0
    return total


def size(place: Path) -> int:
    """The length of a file, or of all files below a folder."""
    if place.is_file():
        return place.stat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(place) for name in files)


def taken(place: Path) -> int:
    """Bytes on disk of a file, or of all files below a folder, without holes. 0 if nothing is there."""
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
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


# ---- durable objects


log = logging.getLogger("stoker.pilot")

PAUSE_S = 0.5
"""Objects that came within so short a time are written out together, after it."""


class SafeMarks:
    """The marks of one cache, in their folder. `while_same(place, look, action)` of the cache calls `action` if the
    object at `place` still looks like that, and keeps it unchanged meanwhile."""

    def __init__(self, folder: Path, while_same: Callable[[Path, str, Callable[[], None]], None]) -> None:
        self.folder = folder
        self._while_same = while_same
        self._lock = threading.Lock()
        self._fresh: list[Path] = []
        self._is_at_work = False

    def has(self, place: Path) -> bool:
        """True if the object at this place was on the disk before a crash could come."""
        return (self.folder / place.name).exists()

    def make_soon(self, place: Path) -> None:
        """Write an object out and mark it, in the background."""
        with self._lock:
            self._fresh.append(place)
            if self._is_at_work:
                return
            self._is_at_work = True
        try:
            threading.Thread(target=self._make, name="cache-safe", daemon=True).start()
        except RuntimeError as error:  # this user may have no more threads here
            with self._lock:
                self._fresh.clear()
                self._is_at_work = False
            log.debug("%s may not outlive a crash of this machine: %s", place, error)

    def remove(self, place: Path) -> None:
        """The object at this place goes, and its mark with it."""
        delete(self.folder / place.name)

    def _make(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            with self._lock:
                fresh, self._fresh = self._fresh, []
                if not fresh:
                    self._is_at_work = False
                    return
            for place in fresh:
                try:
                    look = stat_signature(place)
                    flush(place)
                    self._while_same(place, look, (self.folder / place.name).touch)
                except OSError as error:
                    log.debug("%s may not outlive a crash of this machine: %s", place, error)

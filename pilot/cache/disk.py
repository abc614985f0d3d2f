"""Functions for the files of the object cache: links, signatures, sizes, entries and claims."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker import locks
from stoker.contexts.recipe import ObjectRef
from stoker.whole_files import draft_file

# ---- objects


def link_if_unchanged(source: Path, draft: Path, ref: ObjectRef) -> str:
    """Hard-link `source` to `draft` if the file is unchanged since the recipe was made. Return the file's signature;
    empty on failure.
    """
    try:
        facts = source.stat()
        if not stat.S_ISREG(facts.st_mode) or not _matches_recorded_stat(facts, ref):
            return ""
        delete_tree(draft)
        os.link(source.resolve(), draft)
        facts = draft.lstat()
    except OSError:
        return ""
    if not _matches_recorded_stat(facts, ref):
        delete_tree(draft)
        return ""
    return _signature_of(facts)


def _matches_recorded_stat(facts: os.stat_result, ref: ObjectRef) -> bool:
    named = (ref.size_bytes, ref.changed_ns, ref.inode)
    return bool(ref.changed_ns) and (facts.st_size, facts.st_mtime_ns, facts.st_ino) == named


def has_source_changed(ref: ObjectRef) -> bool:
    try:
        return bool(ref.changed_ns) and not _matches_recorded_stat(os.stat(ref.source), ref)
    except OSError:
        return False


def stat_signature(place: Path) -> str:
    """Return a signature from `stat` that changes when the content changes."""
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
        return f"{len(parts)} {hashlib.sha256(repr(parts).encode('utf-8', 'surrogateescape')).hexdigest()}"
    except OSError:
        return ""


def _signature_of(facts: os.stat_result) -> str:
    return f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def sync_to_disk(place: Path) -> None:
    """Sync a file, or all files below a folder, to disk. Raises OSError."""
    for file in [place] if not place.is_dir() else [each for each in place.rglob("*") if each.is_file()]:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())


@functools.cache
def boot_id() -> str:
    """Return the id of this machine's current boot; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def bytes_freed_by_deletion(place: Path) -> int:
    """Return the bytes that deleting a file or folder frees. A file with another hard link counts as 0."""
    return sum(facts.st_blocks * 512 for facts in _stat_files(place) if facts.st_nlink == 1)


def sum_file_bytes(place: Path) -> int:
    """Return the bytes in a file or in all files of a folder."""
    return sum(facts.st_size for facts in _stat_files(place))


def bytes_on_disk(place: Path) -> int:
    return sum(facts.st_blocks * 512 for facts in _stat_files(place))


def _stat_files(place: Path) -> Iterator[os.stat_result]:
    if not place.is_dir():
        files = [str(place)]
    else:
        files = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names]
    for file in files:
        with suppress(OSError):
            yield os.lstat(file)


def delete_tree(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink()


# ---- entries and claims


class EntryFacts(msgspec.Struct, frozen=True):
    """An object's name, length, and signature on arrival. `boot`: boot id at that time; empty for a linked file."""

    name: str
    size_bytes: int
    look: str = ""
    boot: str = ""


def write_file_atomically(file: Path, data: bytes) -> None:
    """Write a file completely or not at all. A killed pilot leaves at most one draft file. Raises OSError."""
    with draft_file(file, draft=file.with_name(f".{file.name}"[:200])) as draft:
        draft.write_bytes(data)


NO_PROGRESS_LIMIT_S = 30.0  # seconds without progress of a fetch after which other pilots fetch the object themselves
_CLAIM_POLL_S = 0.05


def wait_for_claim(claim: int, draft: Path) -> bool:
    """Wait for the lock on a claim's open file. Return False if the pilot that has the lock makes no progress."""
    grown_at, taken, check_at = time.monotonic(), -1, 0.0
    while True:
        if locks.try_lock(claim):
            return True
        now = time.monotonic()
        if now >= check_at:
            check_at = now + NO_PROGRESS_LIMIT_S / 10
            before, taken = taken, bytes_on_disk(draft)
            grown_at = now if taken != before else grown_at
            if now - grown_at > NO_PROGRESS_LIMIT_S:
                return False
        time.sleep(_CLAIM_POLL_S)

"""The files of the cache: objects, entries, claims, and marks of objects that were synced to disk.

*Marks.* A mark states that an object was synced to disk. After a crash of the machine, an unsynced object may contain
zeros. After a boot, the cache therefore fetches unmarked objects again. One thread syncs and marks new objects half a
second after they arrive.

*Claims.* A claim is the right to fetch an object: a lock on `drafts/NAME.lock`. When the process ends, its claim ends
too. The draft (the partial object) remains.
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
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from stoker import locks
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.pilot.core.objects import CachedObject, encode_as_file_name
from stoker.whole_files import draft_of

# ---- files

_FICLONE = 0x40049409


def link(source: Path, draft: Path, ref: ObjectRef) -> str:
    """Create a hard link to a file in the cache. Return the signature of the file, or an empty text on failure.

    The content is not read, so the file must be unchanged since the recipe was made (`ref.changed_ns`).
    """
    try:
        facts = source.stat()
        if not stat.S_ISREG(facts.st_mode) or not _has_recorded_stat(facts, ref):
            return ""
        delete_tree(draft)
        os.link(source.resolve(), draft)
        facts = draft.lstat()
    except OSError:
        return ""
    if not _has_recorded_stat(facts, ref):
        delete_tree(draft)
        return ""
    return _signature_of(facts)


def _has_recorded_stat(facts: os.stat_result, ref: ObjectRef) -> bool:
    named = (ref.size_bytes, ref.changed_ns, ref.inode)
    return bool(ref.changed_ns) and (facts.st_size, facts.st_mtime_ns, facts.st_ino) == named


def has_source_changed(ref: ObjectRef) -> bool:
    try:
        return bool(ref.changed_ns) and not _has_recorded_stat(os.stat(ref.source), ref)
    except OSError:
        return False


def share(source: Path, draft: Path) -> bool:
    """Clone a file if the file system supports clones. Callers verify the content of the clone."""
    if not source.is_file() or draft.exists():
        return False
    try:
        with source.open("rb") as here, draft.open("xb") as there:
            fcntl.ioctl(there, _FICLONE, here.fileno())
    except OSError:
        delete_tree(draft)
        return False
    return True


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


def flush(place: Path) -> None:
    """Sync a file, or all files below a folder, to disk. Raises OSError."""
    for file in [place] if not place.is_dir() else [each for each in place.rglob("*") if each.is_file()]:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())


@functools.cache
def boot() -> str:
    """Return the id of this machine's current boot; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def frees_bytes(place: Path) -> int:
    """Return the bytes that deleting a file or folder frees. A file with another hard link counts as 0."""
    return sum(facts.st_blocks * 512 for facts in _stat_files(place) if facts.st_nlink == 1)


def size(place: Path) -> int:
    """Return the length in bytes of a file or of a folder's files."""
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


# ---- durable objects

log = logging.getLogger("stoker.pilot")

PAUSE_S = 0.5  # seconds to wait for more new objects, which are then synced together


class SafeMarks:
    """The marks of synced objects in one cache.

    `while_same(place, look, action)` calls `action` if the object's signature is still `look`."""

    def __init__(self, folder: Path, while_same: Callable[[Path, str, Callable[[], None]], None]) -> None:
        self.folder = folder
        self._while_same = while_same
        self._lock = threading.Lock()
        self._fresh: list[Path] = []
        self._is_at_work = False

    def has(self, place: Path) -> bool:
        """Return True if the object at `place` was synced to disk."""
        return (self.folder / place.name).exists()

    def sync_and_mark_in_background(self, place: Path) -> None:
        with self._lock:
            self._fresh.append(place)
            if self._is_at_work:
                return
            self._is_at_work = True
        try:
            threading.Thread(target=self._make, name="cache-safe", daemon=True).start()
        except RuntimeError as error:  # the user has reached the limit of threads
            with self._lock:
                self._fresh.clear()
                self._is_at_work = False
            log.debug("%s is not synced to disk and may be lost in a crash: %s", place, error)

    def remove(self, place: Path) -> None:
        delete_tree(self.folder / place.name)

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
                    log.debug("%s is not synced to disk and may be lost in a crash: %s", place, error)


# ---- entries


class EntryFacts(msgspec.Struct, frozen=True):
    """An object's name, length, and signature on arrival. `boot`: boot id on arrival; empty for a linked file."""

    name: str
    size_bytes: int
    look: str
    boot: str = ""


class CacheEntry(msgspec.Struct, frozen=True):
    file: Path
    facts: EntryFacts
    used_at: float


class Entries:
    """The entry files in a folder of the cache, one per object. The caller locks the cache if needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listed: dict[str, tuple[tuple[int, int], EntryFacts]] = {}
        """Facts of each entry at the last listing, with the inode and length of the entry's file."""

    def read_all(self) -> list[CacheEntry]:
        found, listed = [], {}
        try:
            entries = list(os.scandir(self.folder))
        except OSError:  # the batch system may clear the scratch folder
            entries = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                found_at = entry.stat()
            except OSError:
                continue
            path = Path(entry.path)
            seen = found_at.st_ino, found_at.st_size
            before, facts = self._listed.get(entry.name, (None, None))
            if facts is None or before != seen:
                facts = read_facts(path)
            if facts is not None:
                listed[entry.name] = seen, facts
                found.append(CacheEntry(path, facts, found_at.st_mtime))
        self._listed = listed
        return found

    def write(self, file: Path, facts: EntryFacts) -> None:
        write_file_atomically(file, msgspec.json.encode(facts))
        self.forget(file)

    def forget(self, file: Path) -> None:
        """Read this entry again at the next listing."""
        self._listed.pop(file.name, None)


def read_facts(file: Path) -> EntryFacts | None:
    """Return the facts in the file of an entry or a claim; None if unreadable."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=EntryFacts)
    except (OSError, *UNREADABLE):
        return None


def write_file_atomically(file: Path, data: bytes) -> None:
    """Write a file completely or not at all. Raises OSError."""
    with draft_of(
        file, draft=file.with_name(f".{file.name}"[:200])
    ) as draft:  # a killed pilot leaves at most one draft file
        draft.write_bytes(data)


# ---- claims

STUCK_S = 30.0  # seconds without progress after which other pilots no longer wait for a claim
_POLL_S = 0.05


class Claims:
    """The claims in a folder of drafts. `make_folders` creates missing folders of the cache."""

    def __init__(self, folder: Path, *, make_folders: Callable[[], None]) -> None:
        self.folder = folder
        self._make_folders = make_folders

    @contextmanager
    def claim(self, ref: ObjectRef) -> Iterator[Path]:
        """Claim an object and yield the path of its draft. May wait for another pilot that holds the claim."""
        name = encode_as_file_name(ref.name)
        while True:
            claim = self.folder / f"{name}.lock"
            self._make_folders()
            with open(claim, "a+b") as file:
                if not _wait_for(file.fileno(), claim.with_suffix("")):
                    name = f"{encode_as_file_name(ref.name)}~{uuid.uuid4().hex[:8]}"  # the claim makes no progress
                    continue
                try:
                    if not os.path.samestat(os.fstat(file.fileno()), claim.stat()):
                        continue
                except OSError:  # another pilot removed the lock file
                    continue
                file.truncate(0)
                file.write(msgspec.json.encode(EntryFacts(name=ref.name, size_bytes=ref.size_bytes, look="")))
                file.flush()
                draft = claim.with_suffix("")
                try:
                    yield draft
                finally:
                    if not draft.exists():
                        claim.unlink(missing_ok=True)
                return

    def coming(self, ref: ObjectRef) -> list[CachedObject]:
        """Return the objects other than `ref` that pilots are fetching into the cache."""
        found = []
        for claim in self.folder.glob("*.lock"):
            facts = read_facts(claim)
            if facts is not None and facts.name != ref.name and locks.is_locked(claim):
                found.append(CachedObject(facts.name, facts.size_bytes, 0.0, pinned=True))
        return found

    def sweep(self, *, kept_s: float) -> None:
        """Remove drafts without progress for `kept_s` seconds."""
        for claim in self.folder.glob("*.lock"):
            with suppress(OSError), claim.open("rb") as file:
                if not locks.take(file.fileno()):
                    continue
                if time.time() - claim.stat().st_mtime >= kept_s:
                    delete_tree(claim.with_suffix(""))
                    claim.unlink()


def _wait_for(claim: int, draft: Path) -> bool:
    grown_at, taken, check_at = time.monotonic(), -1, 0.0
    while True:
        if locks.take(claim):
            return True
        now = time.monotonic()
        if now >= check_at:
            check_at = now + STUCK_S / 10
            before, taken = taken, bytes_on_disk(draft)
            grown_at = now if taken != before else grown_at
            if now - grown_at > STUCK_S:
                return False
        time.sleep(_POLL_S)

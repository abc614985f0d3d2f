"""The object cache: a folder on local disk. All pilots of one user on a host share the cache, across sessions.

    <cache>/lock             locked (flock) while entries change
    <cache>/identity         the id of the cache, which its pilots share
    <cache>/objects/NAME     a complete file or folder
    <cache>/entries/NAME     facts of the object; the modification time is the time of last use
    <cache>/manifests/NAME   the manifest for serving the object to other pilots
    <cache>/safe/NAME        mark of an object that was synced to disk
    <cache>/drafts/NAME      a partial object; the fetching pilot locks NAME.lock, and so claims the object

A pin is a shared lock on the file of an entry. A complete object enters the cache by a rename. If an object was changed
on disk, the cache fetches the object again. After a crash of the machine, an unsynced object may contain zeros. After a
boot, the cache therefore fetches objects without a mark in `safe/` again. A starting pilot removes objects that were
unused for `MAX_UNUSED_S`.

Libraries write snapshots to `<scratch>/snapshots/FORM`, next to the cache. `FORM.object` contains the name of the
cached object that shares files with the snapshot. If the cache evicts this object, the snapshot is removed too.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker import locks
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import read_json
from stoker.errors import ContextError
from stoker.pilot.cache import disk
from stoker.pilot.cache.disk import EntryFacts, write_file_atomically
from stoker.pilot.core.objects import CachedObject, Shortage, choose_evictions, encode_as_file_name
from stoker.units import show_bytes

# ---- the cache

log = logging.getLogger("stoker.pilot")

MAX_UNUSED_S = 14 * 86400.0  # default seconds after which an unused object is removed
_MAX_DRAFT_IDLE_S = 3600.0
_SYNC_PAUSE_S = 0.5  # seconds between the arrival of objects and their sync to disk


class CacheError(ContextError):
    """An object could not be put into the cache. Attributes: `object`, `cache`."""


class DiskError(CacheError):
    """The disk of this pilot cannot store an object. Another pilot may succeed."""


class InUseError(DiskError):
    """An object does not fit into the cache because running libraries use other cached objects."""


class ChangedError(OSError):
    """An object changed while it entered the cache."""


class Pin:
    """Keeps the object at `path` in the cache until `release` is called."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def duplicate(self) -> Pin:
        return Pin(self.path, os.dup(self._descriptor))

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CacheEntry(NamedTuple):
    file: Path
    facts: EntryFacts
    used_at: float

    @property
    def may_be_in_use(self) -> bool:
        return locks.is_locked(self.file) is not False


class ObjectCache:
    """The object cache of this host. Methods block during disk access."""

    def __init__(self, folder: Path, *, capacity_bytes: int, max_unused_s: float = MAX_UNUSED_S) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._folders = [folder / name for name in ("objects", "entries", "manifests", "drafts", "safe")]
        self._objects, self._entries, self._manifests, self._drafts, self._synced_marks = self._folders
        self._lock = threading.Lock()
        self._unsynced: list[Path] = []
        self._is_sync_running = False
        self._make_folders()
        if folder.stat().st_uid != os.getuid():
            raise CacheError(f"the cache folder {folder} belongs to another user; set --scratch to another folder")
        folder.chmod(0o700)
        with self._lock_cache():
            now = time.time()
            for entry in self._read_entries():
                if now - entry.used_at >= max_unused_s and not entry.may_be_in_use:
                    self._remove_object(*self._object_and_entry_paths(entry.facts.name))
            self._remove_leftovers(max_idle_s=_MAX_DRAFT_IDLE_S)
            self.identity = self._read_identity()

    def find_and_pin(self, name: str) -> Pin | None:
        place, entry = self._object_and_entry_paths(name)
        with self._lock_cache():
            return self._pin_if_intact(place, entry)

    @contextmanager
    def claim_draft(self, ref: ObjectRef) -> Iterator[Path]:
        """Claim an object and yield the path of its draft. May wait for another pilot that has the claim."""
        name = encode_as_file_name(ref.name)
        while True:
            draft, claim = self._drafts / name, self._drafts / f"{name}.lock"
            self._make_folders()
            with open(claim, "a+b") as file:
                if not disk.wait_for_claim(file.fileno(), draft):
                    name = f"{encode_as_file_name(ref.name)}~{uuid.uuid4().hex[:8]}"
                    continue
                try:
                    is_same = os.path.samestat(os.fstat(file.fileno()), claim.stat())
                except OSError:
                    is_same = False
                if not is_same:  # another pilot removed the lock file
                    continue
                file.truncate(0)
                file.write(msgspec.json.encode(EntryFacts(ref.name, ref.size_bytes)))
                file.flush()
                try:
                    yield draft
                finally:
                    if not draft.exists():
                        claim.unlink(missing_ok=True)
                return

    def publish_draft(self, ref: ObjectRef, draft: Path, *, manifest: bytes = b"", signature: str = "") -> Pin:
        """Move a complete draft into the cache. `signature`: for a linked file. Raises OSError, ChangedError."""
        place, entry = self._object_and_entry_paths(ref.name)
        with self._lock_cache():
            here = self._pin_if_intact(place, entry)
            if here is not None:
                disk.delete_tree(draft)
                return here
            disk.delete_tree(place)
            os.rename(draft, place)
            if manifest:
                write_file_atomically(self._manifests / place.name, manifest)
            boot = "" if signature else disk.boot_id()
            facts = EntryFacts(ref.name, disk.sum_file_bytes(place), signature or disk.stat_signature(place), boot)
            write_file_atomically(entry, msgspec.json.encode(facts))
            found = self._pin_if_intact(place, entry)
        if found is None:
            raise ChangedError(f"{place} was changed right after it was written")
        if boot:
            with self._lock:
                self._unsynced.append(place)
                if not self._is_sync_running:
                    self._is_sync_running = True
                    threading.Thread(target=self._sync_new_objects, name="cache-safe", daemon=True).start()
        return found

    def read_stored_manifest(self, name: str) -> bytes:
        try:
            return (self._manifests / encode_as_file_name(name)).read_bytes()
        except OSError:
            return b""

    def store_manifest(self, name: str, data: bytes) -> None:
        with suppress(OSError):
            write_file_atomically(self._manifests / encode_as_file_name(name), data)

    def free_cache_space(self, ref: ObjectRef) -> None:
        """Evict objects until a claimed object fits into the cache. Raises DiskError."""
        with self._lock_cache():
            listed = self._read_entries()
            here = [
                CachedObject(x.facts.name, x.facts.size_bytes, x.used_at, is_pinned=x.may_be_in_use) for x in listed
            ]
            plan = choose_evictions(
                [*here, *self._objects_being_fetched(ref)],
                size_bytes=ref.size_bytes,
                capacity_bytes=self.capacity_bytes,
            )
            if not isinstance(plan, Shortage):
                self._remove_leftovers(max_idle_s=0.0 if plan else _MAX_DRAFT_IDLE_S)
                for name in plan:
                    self._remove_object(*self._object_and_entry_paths(name))
                return
        bound, used = show_bytes(self.capacity_bytes), show_bytes(sum(entry.size_bytes for entry in here))
        why = (
            f"does not fit: running libraries use the cached objects ({used} of {bound}), including libraries of this"
            " user's other sessions on this host"
        )
        if is_too_large := plan is Shortage.TOO_LARGE:
            why = f"is larger than the whole cache ({bound})"
        kind = DiskError if is_too_large else InUseError
        raise self._make_error(kind, ref, f"{why}; raise [pilot] cache_size (--cache-size)")

    def free_disk_space(self, ref: ObjectRef, draft: Path) -> None:
        """Evict objects until the disk has space for the draft. Raises InUseError."""
        with self._lock_cache():
            lacking = ref.size_bytes - disk.bytes_on_disk(draft) - self._free_bytes()
            if lacking <= 0:
                return
            unused, used = self._freeable_bytes_by_use()
            if sum(unused.values()) >= lacking:
                for name, size in unused.items():
                    if lacking > 0 and size:
                        self._remove_object(*self._object_and_entry_paths(name))
                        lacking -= size
                return
        if sum(unused.values()) + sum(used.values()) >= lacking:
            what = (
                f"does not fit on the disk of {self.folder}: running libraries use"
                f" {show_bytes(sum(used.values()))} of it, including libraries of this user's other sessions on this"
                " host; free disk space there, or set [pilot] scratch to another disk"
            )
            raise self._make_error(InUseError, ref, what)

    def bytes_to_release(self, refs: Sequence[ObjectRef]) -> int:
        """Return how many bytes of cached objects must go out of use before the objects `refs` fit into the cache."""
        with self._lock_cache():
            listed = self._read_entries()
            here = {entry.facts.name for entry in listed}
            needed = {entry.facts.name: entry.facts.size_bytes for entry in listed if entry.may_be_in_use}
            on_disk = self._free_bytes() + sum(self._freeable_bytes_by_use()[0].values())
        needed |= {ref.name: ref.size_bytes for ref in refs}
        coming = sum({ref.name: ref.size_bytes for ref in refs if ref.name not in here}.values())
        return max(0, sum(needed.values()) - self.capacity_bytes, coming - on_disk)

    def object_sizes(self) -> dict[str, int]:
        return {entry.facts.name: entry.facts.size_bytes for entry in self._read_entries()}

    def _make_error(self, kind: type[DiskError], ref: ObjectRef, what: str) -> DiskError:
        text = f"the object {ref.name} ({show_bytes(ref.size_bytes)}) {what}"
        return kind(text, object=ref.name, cache=str(self.folder))

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _freeable_bytes_by_use(self) -> tuple[dict[str, int], dict[str, int]]:
        unused: dict[str, int] = {}
        used: dict[str, int] = {}
        for entry in sorted(self._read_entries(), key=lambda each: each.used_at):
            of = used if entry.may_be_in_use else unused
            of[entry.facts.name] = disk.bytes_freed_by_deletion(self._object_and_entry_paths(entry.facts.name)[0])
        return unused, used

    def _make_folders(self) -> None:
        for part in (self.folder, *self._folders):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _read_identity(self) -> str:
        file, name = self.folder / "identity", uuid.uuid4().hex
        try:
            return file.read_text() or name
        except FileNotFoundError:
            with suppress(OSError):  # if the disk is full, this pilot uses an id of its own
                write_file_atomically(file, name.encode())
            return name

    def _object_and_entry_paths(self, name: str) -> tuple[Path, Path]:
        file = encode_as_file_name(name)
        return self._objects / file, self._entries / file

    @contextmanager
    def _lock_cache(self) -> Iterator[None]:
        self._make_folders()
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            locks.wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _read_entries(self) -> list[CacheEntry]:
        found = []
        for file in self._entries.glob("[!.]*"):
            with suppress(OSError):  # another pilot removed the entry
                if (facts := read_json(file, EntryFacts)) is not None:
                    found.append(CacheEntry(file, facts, file.stat().st_mtime))
        return found

    def _objects_being_fetched(self, ref: ObjectRef) -> list[CachedObject]:
        """Return the objects other than `ref` that pilots are fetching into the cache."""
        return [
            CachedObject(facts.name, facts.size_bytes, 0.0, is_pinned=True)
            for claim in self._drafts.glob("*.lock")
            if (facts := read_json(claim, EntryFacts)) is not None and facts.name != ref.name and locks.is_locked(claim)
        ]

    def _pin_if_intact(self, place: Path, entry: Path) -> Pin | None:
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        facts = read_json(entry, EntryFacts)
        is_intact = facts is not None and disk.stat_signature(place) == facts.look
        if is_intact and facts and (facts.boot in ("", disk.boot_id()) or (self._synced_marks / place.name).exists()):
            locks.wait_for_lock(descriptor, shared=True)
            now = time.time()
            os.utime(entry, (now, now))  # `time.time` is more precise than the clock of the file system
            return Pin(str(place), descriptor)
        os.close(descriptor)
        self._remove_object(place, entry)
        return None

    def _remove_object(self, place: Path, entry: Path) -> None:
        with suppress(OSError):
            entry.unlink()  # remove the entry first, because a lookup starts at the entry
        for folder in (self._objects, self._manifests, self._synced_marks):
            disk.delete_tree(folder / place.name)

    def _remove_leftovers(self, *, max_idle_s: float) -> None:
        """Remove drafts without progress for `max_idle_s` seconds, and files without an entry."""
        for claim in self._drafts.glob("*.lock"):
            with suppress(OSError), claim.open("rb") as file:
                if locks.try_lock(file.fileno()) and time.time() - claim.stat().st_mtime >= max_idle_s:
                    disk.delete_tree(claim.with_suffix(""))
                    claim.unlink()
        entries = set(os.listdir(self._entries))
        for folder in (self._objects, self._manifests, self._synced_marks):
            for name in set(os.listdir(folder)) - entries:
                disk.delete_tree(folder / name)

    def _sync_new_objects(self) -> None:
        while True:
            time.sleep(_SYNC_PAUSE_S)
            with self._lock:
                places, self._unsynced = self._unsynced, []
                self._is_sync_running = bool(places)
            if not places:
                return
            for place in places:
                try:
                    look = disk.stat_signature(place)
                    disk.sync_to_disk(place)
                    with self._lock_cache():
                        facts = read_json(self._entries / place.name, EntryFacts)
                        if facts is not None and facts.look == look:
                            (self._synced_marks / place.name).touch()
                except OSError as error:
                    log.debug("%s is not synced to disk and may be lost in a crash: %s", place, error)


# ---- snapshots

_MARKER_SUFFIX = ".object"


def snapshot_folder_beside(cache: ObjectCache) -> Path:
    return cache.folder.parent / "snapshots"


def write_snapshot_marker(cache: ObjectCache, snapshot: Path, *, name: str) -> None:
    if snapshot.parent == snapshot_folder_beside(cache):
        with suppress(OSError):
            snapshot.with_name(snapshot.name + _MARKER_SUFFIX).write_text(name)


def remove_evicted_snapshots(cache: ObjectCache) -> None:
    here = cache.object_sizes()
    for mark in snapshot_folder_beside(cache).glob(f"*{_MARKER_SUFFIX}"):
        with suppress(OSError):
            if mark.read_text() not in here:
                disk.delete_tree(mark.with_name(mark.name.removesuffix(_MARKER_SUFFIX)))
                mark.unlink()


def remove_stale_snapshots(cache: ObjectCache, *, max_unused_s: float) -> None:
    """Remove unfinished snapshots, and old snapshots that share no files with a cached object."""
    folder, now = snapshot_folder_beside(cache), time.time()
    for place in (*folder.glob("*"), *folder.glob(".*")):
        draft = place.name.startswith(".")
        form = place.name[1:].rpartition(".")[0] if draft else place.name.partition(".")[0]
        with suppress(OSError):
            is_object = not draft and (folder / f"{place.name}{_MARKER_SUFFIX}").exists()
            if not place.is_dir() or is_object or locks.is_locked(folder / f"{form}.lock"):
                continue
            if now - place.stat().st_mtime >= max_unused_s:
                disk.delete_tree(place)

"""The object cache: a folder on local disk that pilots of one user share, in this session and in others.

    <cache>/lock             held (flock) while entries come or go
    <cache>/objects/NAME     a file or a folder, complete or not there
    <cache>/entries/NAME     one line of facts; its modification time is when the object was last used
    <cache>/drafts/          what is being copied, locked by whoever copies; leftovers of the dead are swept

A pin is a shared lock on the entry's file: the kernel drops it when the process that holds it dies, so no crash leaves
an object pinned, and an evictor that gets the exclusive lock knows that nobody uses it. An object comes in whole, by a
rename, after it was hard-linked, cloned or copied and (for a copy) its content was found to be what its name says.
What was changed under its name since is noticed when it is next wanted, and fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from stoker.contexts.objects import copy_object, matches
from stoker.contexts.recipe import ObjectRef
from stoker.errors import ContextError, RecipeError
from stoker.pilot.core.cache import Entry, Shortage, file_name, make_room
from stoker.units import show_bytes


class CacheError(ContextError):
    """An object could not be brought into the cache. Facts: `object`, `cache`."""


class _Facts(msgspec.Struct, frozen=True):
    """What an entry's file says: the object's cache name and length, and how its content looked when it came."""

    name: str
    size_bytes: int
    look: str


class Pin:
    """Keeps an object in the cache until it is released. `path` is where the object lies."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """The object may go now; releasing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ObjectCache:
    """See the module's text. Its methods block on disks, so an agent calls them in a thread of their own."""

    def __init__(self, folder: Path, *, bound_bytes: int) -> None:
        self._folder = folder
        self._bound = bound_bytes
        self._objects = folder / "objects"
        self._entries = folder / "entries"
        self._drafts = folder / "drafts"
        for part in (folder, self._objects, self._entries, self._drafts):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise CacheError(f"the cache folder {folder} belongs to somebody else; give --scratch another folder")
        folder.chmod(0o700)
        with self._locked():
            self._sweep()

    def pin(self, ref: ObjectRef) -> Pin:
        """The object, from the cache or first brought into it from `ref.source`. Raises CacheError."""
        place, entry = self._place(ref.name)
        for _ in range(3):
            with self._locked():
                found = self._lookup(place, entry)
            if found is not None:
                return found
            self._bring(ref)
        raise CacheError(
            f"the object {ref.name} goes away from the cache {self._folder} as fast as it comes: several pilots fight"
            " for its room; give it more with --cache-size",
            object=ref.name,
            cache=str(self._folder),
        )

    def used_bytes(self) -> int:
        """Bytes of all objects in it."""
        return sum(facts.size_bytes for _, facts, _ in self._list())

    def names(self) -> list[str]:
        """Cache names of all objects in it."""
        return sorted(facts.name for _, facts, _ in self._list())

    # ---- inside

    def _place(self, name: str) -> tuple[Path, Path]:
        file = file_name(name)
        return self._objects / file, self._entries / file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _lookup(self, place: Path, entry: Path) -> Pin | None:
        """A pin if the object is here and looks as it did when it came; a damaged one goes."""
        try:
            descriptor = os.open(entry, os.O_RDONLY)
        except FileNotFoundError:
            return None
        facts = self._read(entry)
        if facts is not None and _look(place) == facts.look:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            now = time.time()
            os.utime(entry, (now, now))
            return Pin(str(place), descriptor)
        os.close(descriptor)
        self._remove(place, entry)
        return None

    def _bring(self, ref: ObjectRef) -> None:
        """Copy an object in. The copy is made without the lock, and comes in under it, whole."""
        source = Path(ref.source)
        if not ref.source or not source.exists():
            where = f"at {ref.source}" if ref.source else "anywhere that this pilot knows"
            raise CacheError(
                f"the object {ref.name} is not {where}; put it on a file system that compute nodes see",
                object=ref.name,
                cache=str(self._folder),
            )
        self._make_room(ref)
        draft = self._drafts / uuid.uuid4().hex
        with open(f"{draft}.lock", "wb") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX)
            try:
                linked = _link(source, draft, ref)
                if not linked and not _share(source, draft):
                    copy_object(source, draft)
                if not linked and not matches(draft, ref):
                    raise CacheError(
                        f"{source} no longer has the content that the recipe was made from ({ref.name}): it was"
                        " changed or is damaged; make the recipe again",
                        object=ref.name,
                        cache=str(self._folder),
                    )
                self._enter(ref, draft)
            except (OSError, RecipeError) as error:
                raise CacheError(
                    f"the object {ref.name} ({show_bytes(ref.size_bytes)}) could not be copied from {source} to"
                    f" {self._folder}: {error}; make room there, or give --scratch another folder",
                    object=ref.name,
                    cache=str(self._folder),
                ) from error
            finally:
                _delete(draft)
                with suppress(OSError):
                    os.unlink(claim.name)

    def _enter(self, ref: ObjectRef, draft: Path) -> None:
        place, entry = self._place(ref.name)
        with self._locked():
            if entry.exists():  # another pilot was faster
                return
            _delete(place)
            os.rename(draft, place)
            facts = _Facts(name=ref.name, size_bytes=_size(place), look=_look(place))
            fresh = entry.with_name(f".{entry.name}"[:200])
            fresh.write_bytes(msgspec.json.encode(facts))
            os.rename(fresh, entry)

    def _make_room(self, ref: ObjectRef) -> None:
        with self._locked():
            self._sweep()
            here = self._list()
            plan = make_room(
                [
                    Entry(facts.name, facts.size_bytes, used_at, pinned=_is_pinned(entry))
                    for entry, facts, used_at in here
                ],
                size_bytes=ref.size_bytes,
                bound_bytes=self._bound,
            )
            match plan:
                case Shortage.TOO_LARGE:
                    reason = f"is larger than the whole cache ({show_bytes(self._bound)})"
                case Shortage.PINNED:
                    used = show_bytes(sum(facts.size_bytes for _, facts, _ in here))
                    reason = f"does not fit: running libraries use what is here ({used} of {show_bytes(self._bound)})"
                case _:
                    for name in plan:
                        self._remove(*self._place(name))
                    return
            raise CacheError(
                f"the object {ref.name} ({show_bytes(ref.size_bytes)}) {reason}; give the pilot more with --cache-size",
                object=ref.name,
                cache=str(self._folder),
            )

    def _list(self) -> list[tuple[Path, _Facts, float]]:
        found = []
        for entry in self._entries.glob("[!.]*"):
            try:
                used_at = entry.stat().st_mtime
            except OSError:
                continue
            facts = self._read(entry)
            if facts is not None:
                found.append((entry, facts, used_at))
        return found

    def _read(self, entry: Path) -> _Facts | None:
        try:
            return msgspec.json.decode(entry.read_bytes(), type=_Facts)
        except (OSError, msgspec.DecodeError):
            return None

    def _remove(self, place: Path, entry: Path) -> None:
        with suppress(OSError):
            entry.unlink()  # first: an object without an entry is not there
        _delete(place)

    def _sweep(self) -> None:
        """Remove what crashed pilots left: drafts that nobody copies to, objects without an entry."""
        for claim in self._drafts.glob("*.lock"):
            with suppress(OSError), claim.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(claim.with_suffix(""))
                claim.unlink()
        for place in self._objects.iterdir():
            if not (self._entries / place.name).exists():
                _delete(place)


def _is_pinned(entry: Path) -> bool:
    try:
        with entry.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _link(source: Path, draft: Path, ref: ObjectRef) -> bool:
    """Have a file by a second name for it. It may change with its source, which `_look` notices; it is not read now."""
    try:
        facts = source.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != ref.size_bytes:
            return False
        os.link(source.resolve(), draft)
    except OSError:
        return False
    return True


def _share(source: Path, draft: Path) -> bool:
    """Have a file without copying it, where the file system can: a clone, checked like a copy."""
    if not source.is_file():
        return False
    try:
        with source.open("rb") as here, draft.open("xb") as there:
            fcntl.ioctl(there, _FICLONE, here.fileno())
            os.fchmod(there.fileno(), 0o700 if os.fstat(here.fileno()).st_mode & stat.S_IXUSR else 0o600)
    except OSError:
        _delete(draft)
        return False
    return True


_FICLONE = 0x40049409


def _look(place: Path) -> str:
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


def _hash_of(parts: list[tuple[str, int, int, int]]) -> str:
    """A digest of a listing."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _size(place: Path) -> int:
    if place.is_file():
        return place.stat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(place) for name in files)


def _delete(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink()

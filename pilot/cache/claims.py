"""The entries of an object cache, and the claims on objects that are coming.

An entry is a small file with the facts of an object; without it the object is not there. It is written once, as a new
file, and its modification time is the time of last use. So facts are cached, and read again only for another file.

A claim is a lock (flock) on `drafts/NAME.lock`, so it ends with its process. Its draft, `drafts/NAME`, stays: the next
pilot that claims the object continues with it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from stoker import locks
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.pilot.cache import disk
from stoker.pilot.core.objects import CachedObject, file_name
from stoker.whole_files import draft_of

# ---- entries


class EntryFacts(msgspec.Struct, frozen=True):
    """The facts in an entry's file: the object's cache name and length, and how its content looked when it came.

    `boot`: the boot of this machine in which the object was copied, while a crash could lose its content; empty: it has
    another name elsewhere.
    """

    name: str
    size_bytes: int
    look: str
    boot: str = ""


class CacheEntry(msgspec.Struct, frozen=True):
    """An object that is listed: its entry's file, its facts, and when it was last used (seconds since the epoch)."""

    file: Path
    facts: EntryFacts
    used_at: float


class Entries:
    """The entries in a folder. The caller holds the cache's lock where that matters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listed: dict[str, tuple[tuple[int, int], EntryFacts]] = {}
        """The facts of entries that were listed before, with the inode and the length of the files that had them."""

    def read_all(self) -> list[CacheEntry]:
        """Every object's entry; entries that cannot be read are left out."""
        found, listed = [], {}
        try:
            entries = list(os.scandir(self.folder))
        except OSError:  # a batch system clears the scratch folder
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
        """Write an object's entry. Raises OSError."""
        write_small(file, msgspec.json.encode(facts))
        self.forget(file)

    def forget(self, file: Path) -> None:
        """Read this entry again when it is listed next."""
        self._listed.pop(file.name, None)


def read_facts(file: Path) -> EntryFacts | None:
    """The facts in a file of an entry, or of a claim; None if it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=EntryFacts)
    except (OSError, *UNREADABLE):
        return None


def write_small(file: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with draft_of(file, draft=file.with_name(f".{file.name}"[:200])) as draft:  # a killed pilot leaves one at most
        draft.write_bytes(data)


# ---- claims


STUCK_S = 30.0
"""Seconds without progress after which a claim no longer makes others wait (its session may be cut off)."""
_POLL_S = 0.05


class Claims:
    """The claims in a folder of drafts. `make_folders` makes the cache's folders if they were removed."""

    def __init__(self, folder: Path, *, make_folders: Callable[[], None]) -> None:
        self.folder = folder
        self._make_folders = make_folders

    @contextmanager
    def claim(self, ref: ObjectRef) -> Iterator[Path]:
        """Return the one right on this host to bring this object in, and where to make its draft. May wait for another
        pilot: look again whether the object is here. A draft stays for the next claim."""
        name = file_name(ref.name)
        while True:
            claim = self.folder / f"{name}.lock"
            self._make_folders()
            with open(claim, "a+b") as file:
                if not _wait_for(file.fileno(), claim.with_suffix("")):
                    name = f"{file_name(ref.name)}~{uuid.uuid4().hex[:8]}"  # beside one who does not get on with it
                    continue
                if not _is_at(file.fileno(), claim):  # whoever had it has removed it
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
        """Other objects that are being brought in, by this pilot or another: their room is taken."""
        found = []
        for claim in self.folder.glob("*.lock"):
            facts = read_facts(claim)
            if facts is not None and facts.name != ref.name and locks.is_locked(claim):
                found.append(CachedObject(facts.name, facts.size_bytes, 0.0, pinned=True))
        return found

    def sweep(self, *, kept_s: float) -> None:
        """Remove drafts without progress for this long."""
        for claim in self.folder.glob("*.lock"):
            with suppress(OSError), claim.open("rb") as file:
                if not locks.take(file.fileno()):
                    continue
                if time.time() - claim.stat().st_mtime >= kept_s:
                    disk.delete(claim.with_suffix(""))
                    claim.unlink()


def _wait_for(claim: int, draft: Path) -> bool:
    """Wait for a claim; False if the holder's draft has not grown for `STUCK_S`."""
    grown_at, taken, check_at = time.monotonic(), -1, 0.0
    while True:
        if locks.take(claim):
            return True
        now = time.monotonic()
        if now >= check_at:
            check_at = now + STUCK_S / 10
            before, taken = taken, disk.taken(draft)
            grown_at = now if taken != before else grown_at
            if now - grown_at > STUCK_S:
                return False
        time.sleep(_POLL_S)


def _is_at(descriptor: int, place: Path) -> bool:
    try:
        there = place.stat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

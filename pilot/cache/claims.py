"""Claims of an object cache: which pilot of a host brings an object in, and the drafts of objects that are coming.

A claim is a lock (flock) on `drafts/NAME.lock`, so it ends with the process that holds it. Its draft, `drafts/NAME`,
stays: the next pilot that claims the object goes on with what is there.
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
from stoker.pilot.cache import disk
from stoker.pilot.cache.entries import EntryFacts, read_facts
from stoker.pilot.core.objects import CachedObject, file_name

STUCK_S = 30.0
"""Who brings an object and has got nothing of it for so long (its session may be cut off) is not waited for."""
_POLL_S = 0.05


class Claims:
    """The claims in a folder of drafts. `make_folders` makes the cache's folders, which somebody may have removed."""

    def __init__(self, folder: Path, *, make_folders: Callable[[], None]) -> None:
        self.folder = folder
        self._make_folders = make_folders

    @contextmanager
    def claim(self, ref: ObjectRef) -> Iterator[Path]:
        """The one right on this host to bring this object in, and where to make its draft. May wait for another pilot:
        look again whether the object is here. What is left at that place stays for who claims it next."""
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
        """Remove drafts that no pilot has brought on for so long."""
        for claim in self.folder.glob("*.lock"):
            with suppress(OSError), claim.open("rb") as file:
                if not locks.take(file.fileno()):
                    continue
                if time.time() - claim.stat().st_mtime >= kept_s:
                    disk.delete(claim.with_suffix(""))
                    claim.unlink()


def _wait_for(claim: int, draft: Path) -> bool:
    """Wait for a claim; False when the draft of whoever has it has not grown for `STUCK_S`."""
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
    """Whether an open file still is the one at a place."""
    try:
        there = place.stat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

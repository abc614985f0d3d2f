"""Snapshots that libraries of this host have made, beside the cache: one set of bytes, two names.

    <scratch>/snapshots/FORM            where a library writes a context in a form that loads fast, and finds it again
    <scratch>/snapshots/FORM.object     the cache name of the object that was made of it, by second names for its files

The cache is bounded, and what lies under the other name takes no room of its own, for as long as the cache has the
object too. When the cache has let it go, the other name goes as well, or the room would not come free. A snapshot of
which no object was made (the cache refused it, its pilot ended too soon) takes room of its own and goes by its age.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from stoker import locks
from stoker.pilot.cache import disk
from stoker.pilot.cache.store import ObjectCache

_MARK = ".object"


def folder_beside(cache: ObjectCache) -> Path:
    """Where snapshots lie that are on the cache's disk."""
    return cache.folder.parent / "snapshots"


def note(cache: ObjectCache, snapshot: Path, *, name: str) -> None:
    """The cache has this snapshot as an object of this name. One that lies elsewhere is not ours to remove."""
    if snapshot.parent == folder_beside(cache):
        with suppress(OSError):
            snapshot.with_name(snapshot.name + _MARK).write_text(name)


def tidy(cache: ObjectCache) -> None:
    """Remove snapshots whose objects the cache has let go. A library that has loaded one keeps what it has mapped."""
    here = cache.sizes()
    for mark in folder_beside(cache).glob(f"*{_MARK}"):
        with suppress(OSError):
            if mark.read_text() not in here:
                disk.delete(mark.with_name(mark.name.removesuffix(_MARK)))
                mark.unlink()


def sweep(cache: ObjectCache, *, kept_s: float) -> None:
    """Remove snapshots that never became objects, and the parts of snapshots that dead processes left, once they are
    `kept_s` old. A snapshot that a process writes at the moment stays."""
    folder, now = folder_beside(cache), time.time()
    for place in (*folder.glob("*"), *folder.glob(".*")):
        draft = place.name.startswith(".")
        form = place.name[1:].rpartition(".")[0] if draft else place.name.partition(".")[0]
        with suppress(OSError):
            is_object = not draft and (folder / f"{place.name}{_MARK}").exists()
            if not place.is_dir() or is_object or locks.is_locked(folder / f"{form}.lock"):
                continue
            if now - place.stat().st_mtime >= kept_s:
                disk.delete(place)

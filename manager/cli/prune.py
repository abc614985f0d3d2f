"""Removing the folder of a session that is over: what must be so before, and what exactly is removed.

A folder that lies where Stoker puts them (`sessions.d` of the state folder, `runinfo` of a program) is removed as it
is. One that a person has named (`stoker up --folder`) may hold other things: it stays if anything else is there.
"""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import SessionError, StokerError
from stoker.locks import is_locked
from stoker.manager.cli import left
from stoker.manager.executor import detached
from stoker.manager.factory.batch import JOBS_LEFT
from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder
from stoker.site import ProviderKind

_LOCKED = ("journal", "factory.lock", "commands.lock")
"""What the manager, the factory and its commands hold a lock on."""
_OF_A_SESSION = (
    "session.json", "keys", "journal", "journal.*", "*.log", "manager.*", "factory.lock", "commands.lock", "seed.*",
    "sites", "sources", "submit", "objects", "pilots", "carried", "taskvine*", JOBS_LEFT,
)  # fmt: skip
"""What lies at the top of a session's folder."""


class Pruned(msgspec.Struct, frozen=True):
    """What became of an old session's folder. `kept` says why it stays; empty: its `bytes` were removed."""

    session: str
    folder: str
    bytes: int = 0
    kept: str = ""


def prune(folder: SessionFolder, session: str) -> Pruned:
    """Remove the folder of a session that is over, unless something speaks against it."""
    place = str(folder.path)
    if why := next(_objections(folder), ""):
        return Pruned(session, place, kept=why)
    size = size_bytes(folder.path)
    try:
        shutil.rmtree(folder.path)
    except OSError as error:
        return Pruned(session, place, kept=f"it cannot be removed: {error}")
    _forget(folder.path)
    return Pruned(session, place, bytes=size)


def size_bytes(folder: Path) -> int:
    """What the files below a folder take; one of two names takes it once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def _objections(folder: SessionFolder) -> Iterator[str]:
    """Why a folder is not to be removed, the cheap reasons first."""
    for name in _LOCKED:
        if is_locked(folder.path / name):
            yield f"{name} is locked: a process of it is alive"
    try:
        holder = lease.read(lease.lease_file(folder))
    except (OSError, SessionError) as error:
        yield str(error)
        return
    if holder is not None and not holder.over and lease.is_alive(holder) is not False:
        yield f"its manager was {holder}, and may be alive: ask there"
    if not _is_our_place(folder.path):
        others = [entry.name for entry in folder.path.iterdir() if not _is_of_a_session(entry.name)]
        if others:
            yield f"it holds files that are not of a session: {', '.join(sorted(others)[:5])}"
    for each in left.processes(folder):
        yield f"something of it is left: {each.what}"
    yield from _jobs(folder)


def _jobs(folder: SessionFolder) -> Iterator[str]:
    """What batch systems may still have of it. A factory that has ended in good order has left an empty list."""
    if not folder.file.exists() or not left.may_have_jobs(folder):  # a manager that never listened has asked for none
        return
    try:
        sites = detached.sites_of(folder)
    except StokerError as error:
        yield f"its jobs are not known: {error}"
        return
    for site in sites.values():
        if site.provider.kind is ProviderKind.LOCAL:  # its jobs are processes of this machine
            continue
        try:
            batch = left.batch_of(site, folder)
            jobs = list(batch.find())
            statuses = batch.query(jobs) if jobs else {}
        except StokerError as error:
            yield f"site {site.name} cannot be asked for its jobs: {error}"
            continue
        if there := [job for job in jobs if job not in statuses or not statuses[job].phase.over]:
            yield f"site {site.name} still has its jobs {', '.join(there)}"


def _is_our_place(folder: Path) -> bool:
    return folder.parent == (state_folder() / "sessions.d").resolve() or folder.parent.parent.name == "runinfo"


def _is_of_a_session(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _OF_A_SESSION)


def _forget(folder: Path) -> None:
    """Links to a folder that is gone, and the folder of its program's run if nothing else is in that."""
    for link in (state_folder() / "sessions").glob("*"):
        if link.is_symlink() and not link.exists() and link.resolve() == folder:
            link.unlink(missing_ok=True)
    if folder.parent.parent.name == "runinfo":
        with contextlib.suppress(OSError):
            folder.parent.rmdir()

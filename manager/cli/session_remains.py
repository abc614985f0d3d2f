"""Find the processes, jobs and the folder that remain of an ended session. `prune` removes the whole folder if it is in
a usual place (`sessions.d`, `runinfo`). A folder that a user has named (`stoker up --folder`) stays if it contains
other files."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.config import read_sites
from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError, StokerError
from stoker.locks import is_locked
from stoker.manager.executor import detached
from stoker.manager.factory.batch import JOBS_LEFT, BatchJobStatus
from stoker.manager.factory.pilot_command import PILOT, TASKVINE_PILOT
from stoker.manager.live import lease
from stoker.pilot.taskvine import POOL
from stoker.protocol.session import SessionFolder
from stoker.protocol.show_status import job_ids
from stoker.protocol.to_client import Status
from stoker.site import Engine, ProviderKind, Site

# ---- processes and jobs


OURS = {
    "stoker.manager.main": "manager",
    "stoker.manager.factory.main": "factory",
    PILOT: "pilot",
    TASKVINE_PILOT: "pilot",
}
_OF_POOLS = ("vine_factory", "vine_worker", "library_code.py")
_SHOWN_AS = {"factory": "job submitter"}
_SUBMITTER = "its job submitter"
_REMOVES = {
    ProviderKind.SLURM: "scancel", ProviderKind.CONDOR: "condor_rm", ProviderKind.PBS: "qdel",
    ProviderKind.LSF: "bkill", ProviderKind.GRID_ENGINE: "qdel", ProviderKind.KUBERNETES: "kubectl delete pod",
}  # fmt: skip


class LeftBehind(msgspec.Struct, frozen=True):
    """A process or job that remains of a session. `remove`: a command that ends the process or job, or empty."""

    what: str
    remove: str = ""


def processes(folder: SessionFolder) -> Iterator[LeftBehind]:
    """Yield the session's processes on this machine, and its manager and its job submitter if these run elsewhere."""
    own = [(process.pid, kind) for process, kind, path in iter_own_session_processes() if path == folder.path]
    yield from (LeftBehind(f"its {_SHOWN_AS.get(kind, kind)} (pid {pid})", f"kill {pid}") for pid, kind in own)
    with contextlib.suppress(SessionError):
        holder = lease.read(folder.lease)
        if holder is not None and lease.is_alive(holder) is None and not holder.over:
            yield LeftBehind(f"its manager, {holder}", f"ssh {holder.host} kill {holder.pid}")
    lock = folder.path / "factory.lock"
    if "factory" not in [kind for _, kind in own] and lock.exists() and is_locked(lock, exclusively=True):
        yield LeftBehind(f"{_SUBMITTER} on another machine, which cancels its jobs")


def iter_own_session_processes() -> Iterator[tuple[psutil.Process, str, Path]]:
    """Yield this user's session processes on this machine, with kind and session folder."""
    for process in psutil.process_iter(["pid", "cmdline", "uids", "status"]):
        command, uids = process.info["cmdline"] or [], process.info["uids"]
        if process.info["status"] == psutil.STATUS_ZOMBIE or uids is None or uids.real != os.getuid():
            continue
        module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
        kind = next((name for part in command[:2] if (name := Path(part).name) in _OF_POOLS), "")
        if module in OURS and "--session" in command[:-1]:
            yield process, OURS[module], Path(command[command.index("--session") + 1]).absolute()
        elif kind:
            with contextlib.suppress(psutil.Error, OSError):
                if pool := process.environ().get(POOL, ""):
                    yield process, kind, Path(pool)


def may_have_jobs(folder: SessionFolder) -> bool:
    """True if batch systems may still have jobs of an ended session. The factory's list of jobs does not contain
    TaskVine's workers."""
    file = folder.path / JOBS_LEFT
    if detached.engine_of(folder) is Engine.STOKER and file.exists():
        return bool(file.read_text(errors="replace").strip())
    return any(folder.sites.glob("*.toml"))


def _open_jobs(site: Site, folder: SessionFolder, *, seen: Collection[str] = ()) -> dict[str, BatchJobStatus | None]:
    """Return the open jobs of a session at a site, with their status. Raises StokerError."""
    if site.provider.kind is ProviderKind.LOCAL:
        return {}
    from stoker.manager.factory.batches import make_batch  # this import is slow, because it imports Parsl

    own = msgspec.structs.replace(site, engine=Engine.STOKER)
    batch = make_batch(own, session=folder.read().session, folder=folder)
    listed = [job for job in batch.find() if job not in seen]
    statuses = batch.query(listed) if listed else {}
    return {job: status for job in listed if (status := statuses.get(job)) is None or not status.phase.over}


def list_jobs_before_processes(
    here: Sequence[LeftBehind], folder: SessionFolder, before: Status | None
) -> list[LeftBehind]:
    """Return the jobs that the factory is still cancelling, then the processes: a factory with jobs must not be
    killed."""
    submitter = [each for each in here if each.what.startswith(_SUBMITTER)]
    there = list(jobs(folder, before)) if submitter else []
    if not there:
        return list(here)
    busy = [LeftBehind(f"{each.what}, which keeps trying to cancel them") for each in submitter]
    return [*there, *busy, *(each for each in here if each not in submitter)]


def jobs(folder: SessionFolder, before: Status | None) -> Iterator[LeftBehind]:
    """Yield the session's jobs. If a batch system does not answer, yield the jobs in the earlier status `before`."""
    seen: set[str] = set()
    jobs_before = [job for job in before.jobs if job.job] if before is not None else []
    try:
        sites = read_sites(folder.sites)
    except ConfigError as error:
        if jobs_before:
            names = job_ids([job.job for job in jobs_before])
            yield LeftBehind(f"perhaps jobs {names}, whose states are not known: {error}")
        return
    for site in sites.values():
        remove = _REMOVES.get(site.provider.kind, "")
        try:
            found = _open_jobs(site, folder, seen=seen)
        except StokerError as error:
            if known := [job.job for job in jobs_before if job.source == site.name]:
                text = f"perhaps jobs {job_ids(known)} of site {site.name}: {error}"
                yield LeftBehind(text, f"{remove} {' '.join(known)}")
            continue
        seen.update(found)
        stuck = [job for job, status in found.items() if status is not None and status.leaving]
        if there := [job for job in found if job not in stuck]:
            yield LeftBehind(f"jobs {job_ids(there)} of site {site.name}", f"{remove} {' '.join(there)}")
        if stuck:  # only HTCondor reports jobs that are being removed
            text = f"jobs {job_ids(stuck)} of site {site.name}, cancelled; their machines have not answered yet"
            yield LeftBehind(text, f"condor_rm -forcex {' '.join(stuck)}")


# ---- the folder


_LOCKED = ("journal", "factory.lock", "commands.lock")
_OF_A_SESSION = (
    "session.json", "keys", "journal", "journal.*", "*.log", "manager.*", "factory.lock", "commands.lock", "seed.*",
    "sites", "sources", "submit", "objects", "pilots", "carried", "taskvine*", JOBS_LEFT,
)  # fmt: skip


class Pruned(msgspec.Struct, frozen=True):
    """The result of `prune`. `kept`: why the folder is kept. `bytes`: number of removed bytes."""

    session: str
    folder: str
    bytes: int = 0
    kept: str = ""


def prune(folder: SessionFolder, session: str) -> Pruned:
    place = str(folder.path)
    if why := next(_reasons_against_pruning(folder), ""):
        return Pruned(session, place, kept=why)
    size = size_bytes(folder.path)
    try:
        shutil.rmtree(folder.path)
    except OSError as error:
        return Pruned(session, place, kept=f"the folder cannot be removed: {error}")
    detached.remove_session_links(folder)
    if folder.path.parent.parent.name == "runinfo":
        with contextlib.suppress(OSError):
            folder.path.parent.rmdir()
    return Pruned(session, place, bytes=size)


def size_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder; hard links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def _reasons_against_pruning(folder: SessionFolder) -> Iterator[str]:
    yield from (f"{name} is locked: a process of the session runs" for name in _LOCKED if is_locked(folder.path / name))
    try:
        holder = lease.read(folder.lease)
    except (OSError, SessionError) as error:
        yield str(error)
        return
    if holder is not None and not holder.over and lease.is_alive(holder) is not False:
        yield f"its manager was {holder}, and may still run: check that machine"
    if folder.path.parent != (state_folder() / "sessions.d").resolve() and folder.path.parent.parent.name != "runinfo":
        names = [entry.name for entry in folder.path.iterdir()]
        others = [name for name in names if not any(fnmatch.fnmatchcase(name, each) for each in _OF_A_SESSION)]
        if others:
            yield f"the folder contains files that do not belong to a session: {', '.join(sorted(others)[:5])}"
    yield from (f"left behind: {each.what}" for each in processes(folder))
    if not folder.file.exists() or not may_have_jobs(folder):  # a session whose manager never started has no jobs
        return
    site = None
    try:
        for site in read_sites(folder.sites).values():
            if there := _open_jobs(site, folder):
                yield f"site {site.name} still has its jobs {', '.join(there)}"
    except StokerError as error:
        yield f"the session's jobs{f' at site {site.name}' if site is not None else ''} are unknown: {error}"

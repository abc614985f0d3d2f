"""Find the processes, jobs and the folder that remain of an ended session. `prune_session` removes the whole folder if
it is in a usual place (`sessions.d`, `runinfo`). A folder that a user has named (`stoker up --folder`) stays if it
contains other files."""

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
from stoker.protocol.show_status import format_job_ids
from stoker.protocol.to_client import Status
from stoker.site import Engine, ProviderKind, Site

# ---- processes and jobs


PROCESS_KINDS = {
    "stoker.manager.main": "manager",
    "stoker.manager.factory.main": "factory",
    PILOT: "pilot",
    TASKVINE_PILOT: "pilot",
}
_POOL_PROGRAMS = ("vine_factory", "vine_worker", "library_code.py")
_DISPLAY_NAMES = {"factory": "job submitter"}
_SUBMITTER = "its job submitter"
_CANCEL_COMMANDS = {
    ProviderKind.SLURM: "scancel", ProviderKind.CONDOR: "condor_rm", ProviderKind.PBS: "qdel",
    ProviderKind.LSF: "bkill", ProviderKind.GRID_ENGINE: "qdel", ProviderKind.KUBERNETES: "kubectl delete pod",
}  # fmt: skip


class LeftBehind(msgspec.Struct, frozen=True):
    """A process or job that remains of a session. `remove`: a command that ends the process or job, or empty."""

    what: str
    remove: str = ""


def find_processes(folder: SessionFolder) -> Iterator[LeftBehind]:
    """Yield the session's processes on this machine, and its manager and its job submitter if these run elsewhere."""
    own = [(process.pid, kind) for process, kind, path in iter_own_session_processes() if path == folder.path]
    yield from (LeftBehind(f"its {_DISPLAY_NAMES.get(kind, kind)} (pid {pid})", f"kill {pid}") for pid, kind in own)
    with contextlib.suppress(SessionError):
        holder = lease.read_lease(folder.lease)
        if holder is not None and lease.is_holder_alive(holder) is None and not holder.over:
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
        kind = next((name for part in command[:2] if (name := Path(part).name) in _POOL_PROGRAMS), "")
        if module in PROCESS_KINDS and "--session" in command[:-1]:
            yield process, PROCESS_KINDS[module], Path(command[command.index("--session") + 1]).absolute()
        elif kind:
            with contextlib.suppress(psutil.Error, OSError):
                if pool := process.environ().get(POOL, ""):
                    yield process, kind, Path(pool)


def may_have_jobs(folder: SessionFolder) -> bool:
    """True if batch systems may still have jobs of an ended session. `JOBS_LEFT` does not list jobs of TaskVine."""
    file = folder.path / JOBS_LEFT
    if detached.engine_of(folder) is Engine.STOKER and file.exists():
        return bool(file.read_text(errors="replace").strip())
    return any(folder.sites.glob("*.toml"))


def _open_jobs(site: Site, folder: SessionFolder, *, seen: Collection[str] = ()) -> dict[str, BatchJobStatus | None]:
    """Return the open jobs of a session at a site, with their status. Raises StokerError."""
    if site.provider.kind is ProviderKind.LOCAL:
        return {}
    from stoker.manager.factory.batches import open_batch_system  # imported late, because it imports Parsl

    own = msgspec.structs.replace(site, engine=Engine.STOKER)
    batch = open_batch_system(own, session=folder.read().session, folder=folder)
    listed = [job for job in batch.find() if job not in seen]
    statuses = batch.query(listed) if listed else {}
    return {job: status for job in listed if (status := statuses.get(job)) is None or not status.phase.is_over}


def list_jobs_before_processes(
    here: Sequence[LeftBehind], folder: SessionFolder, before: Status | None
) -> list[LeftBehind]:
    """Return the jobs that the job submitter still cancels, then the processes. A user must not kill it before."""
    submitter = [each for each in here if each.what.startswith(_SUBMITTER)]
    there = list(find_jobs(folder, before)) if submitter else []
    if not there:
        return list(here)
    busy = [LeftBehind(f"{each.what}, which keeps trying to cancel them") for each in submitter]
    return [*there, *busy, *(each for each in here if each not in submitter)]


def find_jobs(folder: SessionFolder, before: Status | None) -> Iterator[LeftBehind]:
    """Yield the session's jobs. If a batch system does not answer, yield the jobs in the earlier status `before`."""
    seen: set[str] = set()
    jobs_before = [job for job in before.jobs if job.job] if before is not None else []
    try:
        sites = read_sites(folder.sites)
    except ConfigError as error:
        if jobs_before:
            names = format_job_ids([job.job for job in jobs_before])
            yield LeftBehind(f"perhaps jobs {names}, whose states are not known: {error}")
        return
    for site in sites.values():
        remove = _CANCEL_COMMANDS.get(site.provider.kind, "")
        try:
            found = _open_jobs(site, folder, seen=seen)
        except StokerError as error:
            if known := [job.job for job in jobs_before if job.source == site.name]:
                text = f"perhaps jobs {format_job_ids(known)} of site {site.name}: {error}"
                yield LeftBehind(text, f"{remove} {' '.join(known)}")
            continue
        seen.update(found)
        stuck = [job for job, status in found.items() if status is not None and status.is_being_cancelled]
        if there := [job for job in found if job not in stuck]:
            yield LeftBehind(f"jobs {format_job_ids(there)} of site {site.name}", f"{remove} {' '.join(there)}")
        if stuck:  # these are HTCondor's, because other batch systems do not report jobs that are being removed
            text = f"jobs {format_job_ids(stuck)} of site {site.name}, cancelled; their machines have not answered yet"
            yield LeftBehind(text, f"condor_rm -forcex {' '.join(stuck)}")


# ---- the folder


_LOCK_FILES = ("journal", "factory.lock", "commands.lock")
_SESSION_FILES = (
    "session.json", "keys", "journal", "journal.*", "*.log", "manager.*", "factory.lock", "commands.lock", "seed.*",
    "sites", "sources", "submit", "objects", "pilots", "carried", "taskvine*", JOBS_LEFT,
)  # fmt: skip


class PruneResult(msgspec.Struct, frozen=True):
    """The result of `prune_session`. `kept`: why the folder was not removed. `bytes`: number of removed bytes."""

    session: str
    folder: str
    bytes: int = 0
    kept: str = ""


def prune_session(folder: SessionFolder, session: str) -> PruneResult:
    place = str(folder.path)
    if why := next(_reasons_against_pruning(folder), ""):
        return PruneResult(session, place, kept=why)
    size = size_bytes(folder.path)
    try:
        shutil.rmtree(folder.path)
    except OSError as error:
        return PruneResult(session, place, kept=f"the folder cannot be removed: {error}")
    detached.remove_session_links(folder)
    if folder.path.parent.parent.name == "runinfo":
        with contextlib.suppress(OSError):
            folder.path.parent.rmdir()
    return PruneResult(session, place, bytes=size)


def size_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder; hard links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def _reasons_against_pruning(folder: SessionFolder) -> Iterator[str]:
    yield from (
        f"{name} is locked: a process of the session runs" for name in _LOCK_FILES if is_locked(folder.path / name)
    )
    try:
        holder = lease.read_lease(folder.lease)
    except (OSError, SessionError) as error:
        yield str(error)
        return
    if holder is not None and not holder.over and lease.is_holder_alive(holder) is not False:
        yield f"its manager was {holder}, and may still run: check that machine"
    if folder.path.parent != (state_folder() / "sessions.d").resolve() and folder.path.parent.parent.name != "runinfo":
        names = [entry.name for entry in folder.path.iterdir()]
        others = [name for name in names if not any(fnmatch.fnmatchcase(name, each) for each in _SESSION_FILES)]
        if others:
            yield f"the folder contains files that do not belong to a session: {', '.join(sorted(others)[:5])}"
    yield from (f"left behind: {each.what}" for each in find_processes(folder))
    if not folder.file.exists() or not may_have_jobs(folder):  # a session whose manager never started has no jobs
        return
    site = None
    try:
        for site in read_sites(folder.sites).values():
            if there := _open_jobs(site, folder):
                yield f"site {site.name} still has its jobs {', '.join(there)}"
    except StokerError as error:
        yield f"the session's jobs{f' at site {site.name}' if site is not None else ''} are unknown: {error}"

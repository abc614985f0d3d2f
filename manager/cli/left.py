"""What is left of a session that was ended: processes on this machine, the factory, jobs in batch systems."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.errors import ConfigError, SessionError, StokerError
from stoker.locks import is_locked
from stoker.manager.executor import detached, engines
from stoker.manager.factory.batch import JOBS_LEFT, Batch
from stoker.manager.factory.pilot_command import PILOT, TASKVINE_PILOT
from stoker.manager.live import lease
from stoker.pilot.taskvine.engine import POOL
from stoker.protocol.session import SessionFolder
from stoker.protocol.show_blocks import job_ids
from stoker.protocol.to_client import Status
from stoker.site import Engine, ProviderKind, Site

OURS = {
    "stoker.manager.main": "manager",
    "stoker.manager.factory.main": "factory",
    PILOT: "pilot",
    TASKVINE_PILOT: "pilot",
}
"""The modules that our processes run, and what people call them."""
_OF_POOLS = ("vine_factory", "vine_worker", "library_code.py")
"""What TaskVine runs for a session. The last is a library's program."""
_SHOWN_AS = {"factory": "job submitter"}
"""What people call a process of a kind whose name they need not know."""
_SUBMITTER = "its job submitter"
_REMOVES = {
    ProviderKind.SLURM: "scancel",
    ProviderKind.CONDOR: "condor_rm",
    ProviderKind.PBS: "qdel",
    ProviderKind.LSF: "bkill",
    ProviderKind.GRID_ENGINE: "qdel",
    ProviderKind.KUBERNETES: "kubectl delete pod",
}
"""What a person types to end jobs."""


class LeftBehind(msgspec.Struct, frozen=True):
    """Something of a session that is still there. `remove` is the command that ends it, where one can be told."""

    what: str
    remove: str = ""


def processes(folder: SessionFolder) -> Iterator[LeftBehind]:
    """The session's processes on this machine. Of the manager elsewhere its lease tells."""
    for process, kind, path in own_processes():
        if path == folder.path:
            yield LeftBehind(f"its {_SHOWN_AS.get(kind, kind)} (pid {process.pid})", f"kill {process.pid}")
    holder = None
    with contextlib.suppress(SessionError):  # it is damaged
        holder = lease.read(lease.lease_file(folder))
    if holder is not None and lease.is_alive(holder) is None and not holder.over:
        yield LeftBehind(f"its manager, {holder}", f"ssh {holder.host} kill {holder.pid}")


def own_processes() -> Iterator[tuple[psutil.Process, str, Path]]:
    """This user's processes of any session on this machine: what each is, and its session's folder."""
    for process in psutil.process_iter(["pid", "cmdline", "uids", "status"]):
        command, uids = process.info["cmdline"] or [], process.info["uids"]
        if process.info["status"] == psutil.STATUS_ZOMBIE or uids is None or uids.real != os.getuid():
            continue
        if (found := _of_stoker(command) or _of_taskvine(process, command)) is not None:
            yield process, *found


def _of_stoker(command: Sequence[str]) -> tuple[str, Path] | None:
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if module not in OURS or "--session" not in command[:-1]:
        return None
    return OURS[module], Path(command[command.index("--session") + 1]).absolute()


def _of_taskvine(process: psutil.Process, command: Sequence[str]) -> tuple[str, Path] | None:
    kind = next((name for part in command[:2] if (name := Path(part).name) in _OF_POOLS), "")
    try:
        pool = process.environ().get(POOL, "") if kind else ""
    except (psutil.Error, OSError):  # it has ended meanwhile
        return None
    return (kind, Path(pool)) if pool else None


def factory(folder: SessionFolder) -> Iterator[LeftBehind]:
    """Whether a factory still looks after the session's jobs on another machine."""
    lock = folder.path / "factory.lock"
    if not lock.exists() or any(kind == "factory" and path == folder.path for _, kind, path in own_processes()):
        return
    if is_locked(lock, exclusively=True):
        yield LeftBehind(f"{_SUBMITTER} on another machine, which cancels its jobs")


def may_have_jobs(folder: SessionFolder) -> bool:
    """Whether it is worth a question to the batch systems of a session that is over. A factory that has ended in good
    order has left an empty list; of workers that TaskVine has started it knows nothing."""
    file = folder.path / JOBS_LEFT
    if engines.engine_of(folder) is Engine.STOKER and file.exists():
        return bool(file.read_text(errors="replace").strip())
    return any(folder.sites.glob("*.toml"))


def batch_of(site: Site, folder: SessionFolder) -> Batch:
    """The batch system that has the jobs of a session at a site. Raises SubmissionRefused, ConfigError.

    Workers of TaskVine carry the marks of the session like other jobs, though their pool is no job.
    """
    from stoker.manager.factory.batches import make_batch  # imports Parsl, which takes a while

    own = msgspec.structs.replace(site, engine=Engine.STOKER)
    return make_batch(own, session=folder.read().session, folder=folder)


def with_jobs_first(here: Sequence[LeftBehind], folder: SessionFolder, before: Status | None) -> list[LeftBehind]:
    """Processes that are left, after the jobs that the job submitter is still cancelling.

    A submitter with jobs has no command that ends it: killed, it would leave its jobs in the queue.
    """
    submitter = [each for each in here if each.what.startswith(_SUBMITTER)]
    there = list(jobs(folder, before)) if submitter else []
    if not there:
        return list(here)
    busy = [LeftBehind(f"{each.what}, which keeps trying to cancel them") for each in submitter]
    return [*there, *busy, *(each for each in here if each not in submitter)]


def jobs(folder: SessionFolder, before: Status | None) -> Iterator[LeftBehind]:
    """Jobs of the session that its batch systems still have. Of those that do not answer, what was there `before`."""
    seen: set[str] = set()
    try:
        sites = detached.sites_of(folder)
    except ConfigError as error:
        if before is not None and before.jobs:
            names = job_ids([job.job for job in before.jobs if job.job])
            yield LeftBehind(f"perhaps jobs {names}, which cannot be asked about: {error}")
        return
    for site in sites.values():
        if site.provider.kind is ProviderKind.LOCAL:  # its jobs are processes of this machine
            continue
        remove = _REMOVES.get(site.provider.kind, "")
        try:
            batch = batch_of(site, folder)
            listed = [job for job in batch.find() if job not in seen]
            statuses = batch.query(listed) if listed else {}
            there = [job for job in listed if job not in statuses or not statuses[job].phase.over]
        except StokerError as error:
            jobs_before = before.jobs if before is not None else ()
            known = [job.job for job in jobs_before if job.source == site.name and job.job]
            if known:
                text = f"perhaps jobs {job_ids(known)} of site {site.name}: {error}"
                yield LeftBehind(text, f"{remove} {' '.join(known)}")
            continue
        seen.update(there)
        stuck = [job for job in there if job in statuses and statuses[job].leaving]
        there = [job for job in there if job not in stuck]
        if there:
            yield LeftBehind(f"jobs {job_ids(there)} of site {site.name}", f"{remove} {' '.join(there)}")
        if stuck:  # of all batch systems only HTCondor's jobs say so
            text = f"jobs {job_ids(stuck)} of site {site.name}, cancelled; their machines have not answered yet"
            yield LeftBehind(text, f"condor_rm -forcex {' '.join(stuck)}")

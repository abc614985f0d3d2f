"""Drain an executor's blocks, detect failed blocks, cancel jobs, and report the states of blocks."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import shlex
import signal
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.jobs.states import TERMINAL_STATES, JobState, JobStatus
from parsl.monitoring.message_type import MessageType
from parsl.providers import LocalProvider
from parsl.providers.base import ExecutionProvider
from parsl.providers.errors import SubmitException
from parsl.utils import execute_wait

from stoker.errors import SessionError
from stoker.locks import is_locked
from stoker.manager.executor.client import ClientLink
from stoker.manager.factory import pilot_command
from stoker.manager.factory.batch import JOBS_LEFT
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import PilotStatus
from stoker.protocol.to_manager import ParslBlockStates, ReleaseBlock
from stoker.site import Engine, Site
from stoker.units import show_seconds

if TYPE_CHECKING:
    from parsl.executors.status_handling import BlockProviderExecutor  # the base of StokerExecutor

logger = logging.getLogger(__name__)


PILOT_EXIT_LIMIT_S = 5.0
FACTORY_START_S = 10.0
FACTORY_LIMIT_S = 40.0
FACTORY_DEAD_AFTER_S = 2.0
"""If the factory's lock is free for this many seconds, the factory counts as dead."""
_LAST_LINES = 20


def fail_calls_if_all_blocks_failed(executor: BlockProviderExecutor, status: dict[str, JobStatus]) -> None:
    if executor.seen_blocks or not status:
        return
    enough = max(1, getattr(executor.provider, "init_blocks", 1))
    failed = [job for job in status.values() if job.state in (JobState.FAILED, JobState.MISSING)]
    if len(status) >= enough and len(failed) == len(status):
        answer = executor.ask_status()
        # The manager does not answer while it restarts. Then it is unknown whether a pilot has joined, so a later call
        # of this function decides.
        if answer is not None and not (answer.pilots or answer.gone_pilots):
            log = str(getattr(executor.provider, "script_dir", "") or "")
            executor.set_bad_state_and_fail_all(no_pilot_error(status, site=executor.site.name, log=log))


def no_pilot_error(status: dict[str, JobStatus], *, site: str, log: str) -> SessionError:
    said: dict[str, list[str]] = {}
    for block, job in status.items():
        text = (job.stderr_summary or "").strip() or job.message or ""
        how = [f"exit code {job.exit_code}"] if job.exit_code is not None else []
        said.setdefault("\n    ".join([*how, *text.splitlines()[-_LAST_LINES:]]), []).append(block)
    lines = [f"no pilot could be started on site {site}"]
    lines += [f"  block {', '.join(names)}: {text or 'it printed nothing'}" for text, names in said.items()]
    lines.append("  fix the site file, or install the missing files on the node of the job, and load again")
    if log:
        lines.append(f"  the scripts and their output: {log}")
    return SessionError("\n".join(lines), log=log)


def choose_blocks_to_drain(executor: BlockProviderExecutor, wanted: int, *, idle_only: bool) -> list[str]:
    """Return up to `wanted` blocks to drain: fewest running calls first, then youngest first."""
    active = [block for block, job in executor.status_facade.items() if job.state not in TERMINAL_STATES]
    answer, running = executor.ask_status(), Counter[str]()
    if answer is not None:
        block_of = {pilot.pilot: pilot.block for pilot in answer.pilots}
        for library in answer.libraries:
            running[block_of.get(library.pilot, "")] += library.running
    elif idle_only:
        return []
    order = sorted(active, key=lambda block: (running[block], -int(block)))
    return [block for block in order if not idle_only or not running[block]][:wanted]


def max_pilot_count(provider: ExecutionProvider) -> int:
    """Return the maximum number of pilots that a provider allows; 0: no limit."""
    most, nodes = getattr(provider, "max_blocks", 0), getattr(provider, "nodes_per_block", 1)
    return int(most * nodes) if isinstance(most, int) and isinstance(nodes, int) else 0


def end_all_jobs(executor: BlockProviderExecutor, *, exiting_blocks: set[str]) -> None:
    provider = executor.provider
    jobs = dict(executor.blocks_to_job_id)
    if provider is None or not jobs:
        return
    until = time.monotonic() + PILOT_EXIT_LIMIT_S
    try:
        ending = [job for block, job in jobs.items() if isinstance(provider, LocalProvider) and block in exiting_blocks]
        if others := _unfinished_jobs(provider, [job for job in jobs.values() if job not in ending]):
            provider.cancel(others)
        while (ending := _unfinished_jobs(provider, ending)) and time.monotonic() < until:
            time.sleep(0.02)
        if ending:
            provider.cancel(ending)
    except Exception:  # log every error of the provider, because the caller must still end the manager
        logger.exception("jobs %s could not be cancelled; look for them in the batch system", sorted(jobs.values()))


def _unfinished_jobs(provider: ExecutionProvider, jobs: list[str]) -> list[str]:
    try:
        return [job for job, status in zip(jobs, provider.status(jobs), strict=True) if not status.terminal]
    except OSError:  # the status is unknown, so return all jobs; cancelling an ended job is harmless
        return list(jobs)


def wait_until_factory_jobs_end(folder: SessionFolder) -> None:
    until = time.monotonic() + FACTORY_LIMIT_S
    give_up_at = time.monotonic() + FACTORY_START_S
    left = folder.path / JOBS_LEFT
    while not left.exists():
        now = time.monotonic()
        if is_locked(folder.path / "factory.lock", exclusively=True) is not False:
            give_up_at = now + FACTORY_DEAD_AFTER_S
        if now > min(until, give_up_at):
            logger.warning("jobs of the session may still be in the queue: %s", folder.path / "factory.log")
            return
        time.sleep(0.05)
    if jobs := left.read_text().strip():
        logger.warning("jobs of the session could not be cancelled; cancel them by hand: %s", jobs)


# ---- periodic work, run when Parsl requests the status of blocks


class BlockMonitor:
    """Reports blocks to the manager, and cancels the jobs of drained blocks and of blocks without pilots."""

    def __init__(self, owner: BlockProviderExecutor, *, lease_s: float) -> None:
        self._owner = owner
        self._lease_s = lease_s
        self._cancel_at: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}
        """By block with a running job: time at which the block was first seen without pilots."""
        self._reported_states: dict[str, str] = {}
        self._revoked_blocks: set[str] = set()

    def drain(self, blocks: Iterable[str], link: ClientLink, *, within_s: float) -> None:
        for block in blocks:
            self._cancel_at[block] = time.monotonic() + within_s
            link.send_message(ReleaseBlock(block))

    def cancel_due_jobs(self, status: Mapping[str, JobStatus], *, emptied: Container[str] | None) -> None:
        """Cancel drained blocks after their time limit, and blocks without pilots (`emptied`; None if unknown)."""
        for block, at in list(self._cancel_at.items()):
            if time.monotonic() >= at:
                del self._cancel_at[block]
                self._cancel_job(block)
        if emptied is None:
            return
        running = [block for block, job in status.items() if job.state is JobState.RUNNING]
        now, known = time.monotonic(), self._silent_since
        self._silent_since = {block: known.get(block, now) for block in running if block in emptied}
        gone = show_seconds(self._lease_s)
        for block, since in self._silent_since.items():
            if now - since >= self._lease_s and self._cancel_job(block):
                logger.warning("block %s: its pilots left %s ago, but the job still runs and is cancelled", block, gone)

    def report_states(self, status: Mapping[str, JobStatus], link: ClientLink) -> None:
        said = {
            block: job.state.name.lower() + (f": {job.message}" if job.message else "") for block, job in status.items()
        }
        if said == self._reported_states:
            return
        self._reported_states = said
        ended = tuple(block for block, job in status.items() if job.state in TERMINAL_STATES)
        for block in set(ended) - self._revoked_blocks:
            pilot_command.revoke_block_key(link.folder, block)
            self._revoked_blocks.add(block)
        link.send_message(ParslBlockStates(said, ended, max_pilot_count(self._owner.provider)))

    def _cancel_job(self, block: str) -> bool:
        job = self._owner.blocks_to_job_id.get(block)
        if job is None or self._owner.provider is None:
            return False
        self._owner.provider.cancel([job])
        return True


def report_nodes_to_monitoring(
    radio: Any, pilots: Iterable[PilotStatus], before: Mapping[str, PilotStatus], *, run_id: str
) -> dict[str, PilotStatus]:
    """Tell Parsl's monitoring which pilots have joined or left since `before`. Return the current pilots by name."""
    now = {pilot.pilot: pilot for pilot in pilots}
    for there, other, is_active in ((now, before, True), (before, now, False)):
        for pilot in (there[name] for name in there.keys() - other.keys()):
            at = datetime.datetime.now()
            facts = {
                "run_id": run_id,
                "hostname": pilot.host,
                "uid": pilot.pilot,
                "block_id": pilot.block,
                "cpu_count": sum(device.cores for device in pilot.devices),
                "total_memory": sum(device.memory_bytes for device in pilot.devices),
                "active": is_active,
                "worker_count": len(pilot.devices),
                "python_v": platform.python_version(),
                "timestamp": at,
                "last_heartbeat": at,
            }
            radio.send((MessageType.NODE_INFO, facts))
    return now


_PID = "PID:"


class PathQuotingLocalProvider(LocalProvider):  # type: ignore[misc]  # Parsl has no types
    def submit(self, command: str, tasks_per_node: int, job_name: str = "parsl.localprovider") -> str:
        name = f"{job_name}.{time.time()}"
        script = str(Path(self.script_dir, f"{name}.sh").absolute())
        launched = self.launcher(command, tasks_per_node, self.nodes_per_block, self.script_dir)
        self._write_submit_script(f"{self.worker_init}\nexport JOBNAME={shlex.quote(name)}\n{launched}", script)
        run = "bash {0} 1>{0}.out 2>{0}.err; echo $? >{0}.ec".format(shlex.quote(script))
        start = f'echo - >{shlex.quote(script)}.ec && {{ {{ {run}; }} >/dev/null 2>&1 & echo "{_PID}$!"; }}'
        code, out, err = execute_wait(f"/bin/bash -c {shlex.quote(start)}", self.cmd_timeout)
        pids: list[str] = [line.removeprefix(_PID).strip() for line in out.splitlines() if line.startswith(_PID)]
        if code or not pids:
            raise SubmitException(name, f"the block's shell ended with exit code {code}", out, err)
        facts: dict[str, Any] = {"job_id": pids[0], "status": JobStatus(JobState.RUNNING)}
        self.resources[pids[0]] = {**facts, "remote_pid": int(pids[0]), "script_path": script}
        return pids[0]

    def cancel(self, job_ids: list[str]) -> list[bool]:
        groups = []
        for job in job_ids:
            with suppress(OSError):
                groups.append(os.getpgid(self.resources[job]["remote_pid"]))
        done: list[bool] = super().cancel(job_ids)
        for group in groups:  # a process that SIGSTOP has stopped exits only after SIGCONT
            with suppress(OSError):
                os.killpg(group, signal.SIGCONT)
        return done

    def _read_job_file(self, script_path: str, suffix: str) -> str:
        """Return `-` if the exit code's file is missing, so that Parsl takes the job's state from the process."""
        try:
            return str(super()._read_job_file(script_path, suffix))
        except OSError:
            if suffix != ".ec":
                raise
            return "-"


def create_local_provider(site: Site) -> LocalProvider:
    if site.engine is Engine.TASKVINE:
        return PathQuotingLocalProvider(init_blocks=1, min_blocks=1, max_blocks=1)
    first, least, most = site.pilot.init_blocks, site.pilot.min_blocks, site.pilot.max_blocks
    least, worker_init = max(least, min(1, first)), site.provider.worker_init
    return PathQuotingLocalProvider(init_blocks=first, min_blocks=least, max_blocks=most, worker_init=worker_init)

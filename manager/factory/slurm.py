"""The factory's interface to Slurm.

One `squeue` command, whose output may be cached, lists all jobs of this user. For a job that it does not list, or a
cancelled job that it still lists, this module runs `scontrol`, and then `sacct`. If neither lists the job, only its
output may show how it ended ("CANCELLED AT ... DUE TO PREEMPTION").
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.manager.factory import slurm_output
from stoker.manager.factory.batch import BatchJobStatus, block_of_job_name, job_name
from stoker.manager.factory.commands import last_output_lines, split_into_chunks
from stoker.manager.factory.pacing import RequestPacer, SharedListing
from stoker.manager.factory.slurm_output import AccountedJob
from stoker.manager.factory.submitting import JobSubmitter
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, LossReason
from stoker.protocol.ids import BlockId
from stoker.site import Site

_STANDARD_TIME = {"SLURM_TIME_FORMAT": "standard"}
_UNKNOWN_JOB_ERROR = "Invalid job id"
_MAX_REASON_QUERIES = 3
_DEFAULT_REQUEUE_REASON = ("queued again by Slurm", LossReason.VACATED)
_MAX_SCONTROL_COMMANDS = 3
"""For up to this number of jobs, the factory runs one `scontrol` command per job; for more, one for all jobs."""


@dataclass(slots=True)
class _LastRun:
    """The last run of a job. `requeue_reason`: why it ended. `reason_queries`: number of attempts to find this out."""

    nodes: str
    reason_queries: int = 0
    requeue_reason: tuple[str, LossReason] | None = None


class SlurmBatch:
    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        pacer: RequestPacer | None = None,
    ) -> None:
        self._submitter = JobSubmitter(site, session=session, folder=folder, command=command, pacer=pacer)
        self._run, self._check = self._submitter.commands.run, self._submitter.commands.run_or_raise
        self._listing: SharedListing[dict[str, AccountedJob]] = self._submitter.commands.pacer.listing
        self._has_accounting = True
        self._cancelled: set[str] = set()
        self._last_runs: dict[str, _LastRun] = {}

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        try:
            return self._submitter.submit(block, allowed)
        finally:
            self._listing.forget()

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs, and cancel jobs that Slurm will hold forever."""
        rows = self._listing.read(self._run_squeue)
        now = time.time()
        rows = rows | self._run_scontrol([job for job in jobs if self._needs_scontrol_check(job, rows.get(job))])
        held = [job for job in jobs if job in rows and rows[job].is_held_for_good]
        if held:
            self.cancel(held)
        for job in self._query_preempted_jobs([job for job in jobs if job in rows and rows[job].state == "COMPLETED"]):
            rows[job] = msgspec.structs.replace(rows[job], state="PREEMPTED")
        statuses = {}
        for job in jobs:
            row = rows.get(job)
            if row is None:
                status = slurm_output.build_status_of_unknown_job(self._submitter.last_output_lines_of_job(job))
            else:
                output = self._submitter.last_output_lines_of_job(job, row.name) if row.is_over else []
                status = slurm_output.build_job_status(row, now=now, output=output)
            statuses[job] = self._add_requeue_reason(job, status, row)
        return statuses

    def _needs_scontrol_check(self, job: str, row: AccountedJob | None) -> bool:
        if row is None or row.state == "FAILED":
            return True
        return not row.is_over and (job in self._cancelled or (job in self._last_runs and row.is_waiting))

    def _add_requeue_reason(self, job: str, status: BatchJobStatus, row: AccountedJob | None) -> BatchJobStatus:
        """Add to the status of a pending job why Slurm requeued it after a run. Only `sacct` lists earlier runs."""
        if row is not None and row.is_held_for_good and job in self._last_runs:
            words, loss = (
                self._last_runs[job].requeue_reason or self._find_requeue_reason(job, row) or _DEFAULT_REQUEUE_REASON
            )
            del self._last_runs[job]
            return msgspec.structs.replace(status, reason=f"{words}, and {status.reason}", loss=loss)
        if status.phase is not BlockPhase.PENDING or row is None:
            self._last_runs.pop(job, None)
            if status.phase is BlockPhase.RUNNING and row is not None:
                self._last_runs[job] = _LastRun(row.nodes)
            return status
        run = self._last_runs.get(job)
        if run is None:
            return status
        if run.requeue_reason is None:
            run.reason_queries += 1
            run.requeue_reason = self._find_requeue_reason(job, row)
            # `sacct` may list the run later, so ask again
            if run.requeue_reason is None and run.reason_queries < _MAX_REASON_QUERIES:
                return msgspec.structs.replace(status, requeue_reason=_DEFAULT_REQUEUE_REASON[0])
        words, loss = run.requeue_reason = run.requeue_reason or _DEFAULT_REQUEUE_REASON
        return msgspec.structs.replace(status, loss=loss, requeue_reason=words)

    def _query_preempted_jobs(self, jobs: list[str]) -> set[str]:
        """Return jobs that Slurm preempted but lists as completed, because their pilots exited in time."""
        jobs = [job for job in jobs if job not in self._cancelled]
        if not jobs:
            return set()
        form = f"--Format={slurm_output.PREEMPTED_FORMAT}"
        words = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", form]
        return slurm_output.parse_preempted_jobs(self._run(words).out) & set(jobs)

    def _find_requeue_reason(self, job: str, row: AccountedJob) -> tuple[str, LossReason] | None:
        said = ""
        if self._has_accounting:
            ran = self._run(["sacct", "-X", "-D", "-n", "-P", "-o", slurm_output.SACCT_FORMAT, "-j", job])
            said = ran.out if ran.code == 0 else ""
        found = slurm_output.find_requeue_reason(
            said, last_output_lines(self._submitter.folder, row.name) if row.name else []
        )
        if found is None and self._last_runs[job].nodes:
            nodes = self._run(["sinfo", "-h", "-N", "-n", self._last_runs[job].nodes, "-o", "%N|%T"])
            down = slurm_output.parse_lost_nodes(nodes.out) if nodes.code == 0 else []
            found = (f"its node failed ({', '.join(down)})", LossReason.NODE_LOST) if down else None
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        self._cancelled.update(jobs)
        self._listing.forget()
        for some in split_into_chunks(jobs):
            self._check(["scancel", *some], allowed_error=_UNKNOWN_JOB_ERROR)

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        self._listing.forget()
        for block in blocks:
            self._check(["scancel", f"--user={os.getuid()}", f"--name={job_name(self._submitter.session, block)}"])

    def find(self) -> Mapping[str, BlockId]:
        """Return the jobs of the session. Another session may have the same id, so compare submission folders."""
        found = {}
        folder = self._submitter.folder
        ours, session = (os.path.realpath(path).splitlines()[0] for path in (folder, folder.parent))
        for row in self._listing.read(self._run_squeue).values():
            block = block_of_job_name(row.name, session=self._submitter.session)
            if block is not None and (row.folder == ours or row.folder.startswith(f"{session}/")):
                found[row.job] = block
                self._submitter.names_of_jobs[row.job] = row.name
        return found

    def _run_squeue(self) -> dict[str, AccountedJob]:
        words = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--user={os.getuid()}",
            f"--format={slurm_output.SQUEUE_FORMAT}",
        ]
        return slurm_output.parse_squeue(self._check(words, environment=_STANDARD_TIME).out)

    def _run_scontrol(self, jobs: list[str]) -> dict[str, AccountedJob]:
        wanted = [[job] for job in jobs] if len(jobs) <= _MAX_SCONTROL_COMMANDS else [[]]
        shown: dict[str, AccountedJob] = {}
        for words in wanted:
            said = self._check(["scontrol", "show", "job", "-o", *words], allowed_error=_UNKNOWN_JOB_ERROR)
            shown |= slurm_output.parse_scontrol(said.out)
        found = {job: shown[job] for job in jobs if job in shown}
        forgotten = [job for job in jobs if job not in found]
        if forgotten and self._has_accounting:
            said = self._run(["sacct", "-X", "-n", "-P", "-o", slurm_output.SACCT_FORMAT, "-j", ",".join(forgotten)])
            self._has_accounting = said.code == 0 or "disabled" not in said.err
            rows = slurm_output.parse_sacct(said.out) if said.code == 0 else {}
            found |= {job: row for job, row in rows.items() if row.is_over or job not in self._cancelled}
        return found

"""The factory's interface to Slurm.

One `squeue`, whose output may be cached, lists all jobs of this user. For a missing job, or a cancelled job that is
still listed, this module runs `scontrol`, then `sacct`. If neither lists the job, the job is absent. The job's output
may show how the job ended ("CANCELLED AT ... DUE TO PREEMPTION").
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.manager.factory import slurm_output
from stoker.manager.factory.batch import BatchJobStatus, block_of, job_name
from stoker.manager.factory.commands import in_chunks, last_lines
from stoker.manager.factory.pacing import Listing, Pacer
from stoker.manager.factory.slurm_output import AccountedJob
from stoker.manager.factory.submitting import Submitter
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, LossReason
from stoker.protocol.ids import BlockId
from stoker.site import Site

_STANDARD_TIME = {"SLURM_TIME_FORMAT": "standard"}
_UNKNOWN = "Invalid job id"
_TRIES = 3
_VACATED = ("queued again by Slurm", LossReason.VACATED)
_ONE_BY_ONE = 3
"""Up to this number of jobs, the factory runs one `scontrol` per job."""


@dataclass(slots=True)
class _Run:
    """The last run of a job: its nodes, and why it ended. `tries`: number of attempts to find this reason."""

    nodes: str
    tries: int = 0
    again: tuple[str, LossReason] | None = None


class SlurmBatch:
    def __init__(
        self, site: Site, *, session: str, folder: Path, command: Callable[[BlockId], str], pacer: Pacer | None = None
    ) -> None:
        self._jobs = Submitter(site, session=session, folder=folder, command=command, pacer=pacer)
        self._run, self._check = self._jobs.commands.run, self._jobs.commands.check
        self._listing: Listing[dict[str, AccountedJob]] = self._jobs.commands.pacer.listing
        self._accounting = True
        self._cancelled: set[str] = set()
        self._ran: dict[str, _Run] = {}

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        try:
            return self._jobs.submit(block, allowed)
        finally:
            self._listing.forget()

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return job states. Cancel jobs that Slurm holds permanently."""
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
                status = slurm_output.gone(self._jobs.output(job))
            else:
                output = self._jobs.output(job, row.name) if row.over else []
                status = slurm_output.job_status(row, now=now, output=output)
            statuses[job] = self._with_requeue_reason(job, status, row)
        return statuses

    def _needs_scontrol_check(self, job: str, row: AccountedJob | None) -> bool:
        if row is None or row.state == "FAILED":
            return True
        return not row.over and (job in self._cancelled or (job in self._ran and row.is_waiting))

    def _with_requeue_reason(self, job: str, status: BatchJobStatus, row: AccountedJob | None) -> BatchJobStatus:
        """Add why a pending job was requeued after a run. Only `sacct` lists earlier runs."""
        if row is not None and row.is_held_for_good and job in self._ran:
            words, loss = self._ran[job].again or self._requeue_reason(job, row) or _VACATED
            del self._ran[job]
            return msgspec.structs.replace(status, reason=f"{words}, and {status.reason}", loss=loss)
        if status.phase is not BlockPhase.PENDING or row is None:
            self._ran.pop(job, None)
            if status.phase is BlockPhase.RUNNING and row is not None:
                self._ran[job] = _Run(row.nodes)
            return status
        run = self._ran.get(job)
        if run is None:
            return status
        if run.again is None:
            run.tries += 1
            run.again = self._requeue_reason(job, row)
            if run.again is None and run.tries < _TRIES:  # `sacct` may list the run later
                return msgspec.structs.replace(status, again=_VACATED[0])
        words, loss = run.again = run.again or _VACATED
        return msgspec.structs.replace(status, loss=loss, again=words)

    def _query_preempted_jobs(self, jobs: list[str]) -> set[str]:
        """Return the jobs that Slurm preempted, and whose pilots exited within the grace time."""
        jobs = [job for job in jobs if job not in self._cancelled]
        if not jobs:
            return set()
        form = f"--Format={slurm_output.PREEMPTED}"
        words = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", form]
        return slurm_output.read_preempted(self._run(words).out) & set(jobs)

    def _requeue_reason(self, job: str, row: AccountedJob) -> tuple[str, LossReason] | None:
        said = ""
        if self._accounting:
            ran = self._run(["sacct", "-X", "-D", "-n", "-P", "-o", slurm_output.SACCT, "-j", job])
            said = ran.out if ran.code == 0 else ""
        found = slurm_output.requeued(said, last_lines(self._jobs.folder, row.name) if row.name else [])
        if found is None and self._ran[job].nodes:
            nodes = self._run(["sinfo", "-h", "-N", "-n", self._ran[job].nodes, "-o", "%N|%T"])
            down = slurm_output.lost_nodes(nodes.out) if nodes.code == 0 else []
            found = (f"its node failed ({', '.join(down)})", LossReason.NODE_LOST) if down else None
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        self._cancelled.update(jobs)
        self._listing.forget()
        for some in in_chunks(jobs):
            self._check(["scancel", *some], allow=_UNKNOWN)

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        self._listing.forget()
        for block in blocks:
            self._check(["scancel", f"--user={os.getuid()}", f"--name={job_name(self._jobs.session, block)}"])

    def find(self) -> Mapping[str, BlockId]:
        """Return the jobs of the session. The submission folder distinguishes sessions with equal ids."""
        found = {}
        folder = self._jobs.folder
        ours, session = (os.path.realpath(path).splitlines()[0] for path in (folder, folder.parent))
        for row in self._listing.read(self._run_squeue).values():
            block = block_of(row.name, session=self._jobs.session)
            if block is not None and (row.folder == ours or row.folder.startswith(f"{session}/")):
                found[row.job] = block
                self._jobs.names[row.job] = row.name
        return found

    def _run_squeue(self) -> dict[str, AccountedJob]:
        words = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={slurm_output.SQUEUE}"]
        return slurm_output.read_squeue(self._check(words, more=_STANDARD_TIME).out)

    def _run_scontrol(self, jobs: list[str]) -> dict[str, AccountedJob]:
        wanted = [[job] for job in jobs] if len(jobs) <= _ONE_BY_ONE else [[]]
        shown: dict[str, AccountedJob] = {}
        for words in wanted:
            said = self._check(["scontrol", "show", "job", "-o", *words], allow=_UNKNOWN)
            shown |= slurm_output.read_scontrol(said.out)
        found = {job: shown[job] for job in jobs if job in shown}
        forgotten = [job for job in jobs if job not in found]
        if forgotten and self._accounting:
            said = self._run(["sacct", "-X", "-n", "-P", "-o", slurm_output.SACCT, "-j", ",".join(forgotten)])
            self._accounting = said.code == 0 or "disabled" not in said.err
            rows = slurm_output.read_sacct(said.out) if said.code == 0 else {}
            found |= {job: row for job, row in rows.items() if row.over or job not in self._cancelled}
        return found

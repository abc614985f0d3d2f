"""The factory's interface to PBS, LSF and Grid Engine. One command lists all jobs.

If a job is not listed any more, the accounting (`qacct`, `bhist`) shows how it ended. Without accounting, only the
output of the job may show this.
"""

from __future__ import annotations

import getpass
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from stoker.manager.factory.batch import (
    BatchJobStatus,
    BatchSystemError,
    block_of_job_name,
    job_name,
    loss_reason_from_text,
)
from stoker.manager.factory.pacing import RequestPacer
from stoker.manager.factory.submitting import JobSubmitter, is_temporary_submission_error
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import ProviderKind, Site

log = logging.getLogger("stoker.factory")

LSF_FIELDS = "jobid stat exit_code exec_host job_name pend_reason delimiter='|'"
_LSF_CANCELLED = "cancelled by someone (bkill)"
_LSF_ENDS = {"130": _LSF_CANCELLED, "143": _LSF_CANCELLED, "137": "killed by signal 9", "140": "out of walltime"}
_BHIST_ENDS = (
    (r"TERM_OWNER|TERM_ADMIN|TERM_FORCE_OWNER|TERM_FORCE_ADMIN", _LSF_CANCELLED),
    (r"TERM_RUNLIMIT", "out of walltime"),
    (r"TERM_MEMLIMIT", "out of memory"),
    (r"TERM_PREEMPT", "preempted by LSF"),
    (r"Done successfully", "done"),
    (r"Exited with exit code (\d+)", "exit code {}"),
    (r"Exited by signal (\d+)", "killed by signal {}"),
    (r"[:;] Exited", _LSF_CANCELLED),
)

# ---- reading listings (pure)


class ListedJob(msgspec.Struct, frozen=True):
    """A job in a listing. `expected_at`: wall-clock time of its expected start (0: unknown). `has_failed`: True if the
    job failed and its output may show the cause.
    """

    name: str
    phase: BlockPhase
    reason: str = ""
    expected_at: float = 0.0
    has_failed: bool = False


ListingReader = Callable[[str], dict[str, ListedJob]]


def parse_qstat_json(text: str) -> dict[str, ListedJob]:
    """Parse the output of `qstat -x -f -F json`; text before the JSON is ignored. Raises ValueError without JSON."""
    start = re.search(r"^\s*\{", text, re.MULTILINE)
    answer: dict[str, Any] = {}
    if text.strip():
        answer, _ = json.JSONDecoder().raw_decode(text, start.end() - 1 if start else 0)
    jobs: dict[str, Any] = answer.get("Jobs", {})
    return {id: _parse_pbs_job(job) for id, job in jobs.items()}


def _parse_pbs_job(job: dict[str, Any]) -> ListedJob:
    name, state, comment = str(job.get("Job_Name", "")), job.get("job_state", ""), str(job.get("comment", ""))
    if state in ("F", "X"):
        code = job.get("Exit_status", 0)
        if "walltime" in comment:
            return ListedJob(name, BlockPhase.ENDED, "out of walltime")
        if code in (0, None):
            return ListedJob(name, BlockPhase.ENDED, "done")
        if isinstance(code, int) and code > 256:
            return ListedJob(name, BlockPhase.ENDED, f"killed by signal {code - 256}")
        return ListedJob(name, BlockPhase.ENDED, f"exit code {code}", has_failed=True)
    if state in ("R", "B", "E", "S", "U"):
        reason = {"S": "suspended", "U": "suspended: its workstation is in use"}.get(state, "")
        return ListedJob(name, BlockPhase.RUNNING, reason or (f"on {job['exec_host']}" if job.get("exec_host") else ""))
    start = job.get("estimated", {}).get("start_time", 0)
    held = {"H": "held", "W": "waits for its start time"}.get(state, "")
    return ListedJob(name, BlockPhase.PENDING, comment or held, float(start) if isinstance(start, int | float) else 0.0)


def parse_bjobs(text: str) -> dict[str, ListedJob]:
    rows = ([field.strip() for field in line.split("|", 5)] for line in text.splitlines())
    return {row[0]: _parse_lsf_job(*row[1:]) for row in rows if len(row) == 6 and row[0].isdecimal()}


def _parse_lsf_job(state: str, code: str, host: str, name: str, why: str) -> ListedJob:
    known = "" if why == "-" else why
    match state:
        case "PEND" | "WAIT" | "PROV":
            return ListedJob(name, BlockPhase.PENDING, known)
        case "PSUSP":
            return ListedJob(name, BlockPhase.PENDING, known or "suspended while it waits")
        case "USUSP" | "SSUSP":
            return ListedJob(name, BlockPhase.RUNNING, "suspended")
        case "DONE":
            return ListedJob(name, BlockPhase.ENDED, "done")
        case "EXIT":
            how = _LSF_ENDS.get(code) or (f"exit code {code}" if code != "-" else _LSF_CANCELLED)
            return ListedJob(name, BlockPhase.ENDED, how, has_failed=code not in _LSF_ENDS and code != "-")
        case _:
            return ListedJob(name, BlockPhase.RUNNING, f"on {host}" if host != "-" else "")


def parse_qstat_xml(text: str) -> dict[str, ListedJob]:
    """Parse the output of `qstat -xml`; text around the XML is ignored. Raises ValueError without XML."""
    found = re.search(r"<job_info\b.*</job_info>", text, re.DOTALL)  # an inner element is also named `job_info`
    try:
        tree = ElementTree.fromstring(found[0] if found else text) if text.strip() else ElementTree.Element("none")
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    return {
        id: _parse_grid_engine_job(
            job.findtext("JB_name", ""), job.findtext("state", ""), job.findtext("queue_name") or ""
        )
        for job in tree.iter("job_list")
        if (id := job.findtext("JB_job_number", ""))
    }


def _parse_grid_engine_job(name: str, state: str, queue: str) -> ListedJob:
    if "q" in state:
        held = "held" if "h" in state else ""
        return ListedJob(name, BlockPhase.PENDING, f"in error state {state}: see `qstat -j`" if "E" in state else held)
    if any(letter in state for letter in "sST"):
        return ListedJob(name, BlockPhase.RUNNING, f"suspended ({state})")
    return ListedJob(name, BlockPhase.RUNNING, f"on {queue}" if queue else "")


def parse_qacct(text: str) -> ListedJob | None:
    found = dict(line.split(None, 1) for line in text.splitlines() if len(line.split(None, 1)) == 2)
    if "jobnumber" not in found or "exit_status" not in found:
        return None
    name, failed, code = found.get("jobname", "").strip(), found.get("failed", "0"), found["exit_status"].split()[0]
    if found.get("deleted_by", "NONE").strip() not in ("NONE", "undefined"):
        return ListedJob(name, BlockPhase.ENDED, f"cancelled by {found['deleted_by'].strip()} (qdel)")
    if "h_rt" in failed or "s_rt" in failed:
        return ListedJob(name, BlockPhase.ENDED, "out of walltime")
    if code == "0" and failed.split()[0] == "0":
        return ListedJob(name, BlockPhase.ENDED, "done")
    said = failed.partition(":")[2].strip()
    return ListedJob(name, BlockPhase.ENDED, f"exit code {code}" + (f" ({said})" if said else ""), has_failed=True)


def parse_bhist(text: str) -> ListedJob | None:
    text = re.sub(r"\n {10,}", "", text)  # bhist may break a line at any character
    if not re.search(r"^Job <\d+", text, re.MULTILINE):
        return None
    found = re.search(r"Job Name <([^>]*)>", text)
    name = found[1] if found else ""
    for pattern, words in _BHIST_ENDS:
        if end := re.search(pattern, text):
            how = words.format(*end.groups())
            return ListedJob(name, BlockPhase.ENDED, how, has_failed=how.startswith("exit code"))
    runs = "Starting" in text or "Started" in text
    return ListedJob(name, BlockPhase.RUNNING if runs else BlockPhase.PENDING)


# ---- the batch system

_CANCEL_COMMANDS = {ProviderKind.PBS: "qdel", ProviderKind.LSF: "bkill", ProviderKind.GRID_ENGINE: "qdel"}
_ACCOUNTING: dict[ProviderKind, tuple[list[str], Callable[[str], ListedJob | None]]] = {
    ProviderKind.LSF: (["bhist", "-l"], parse_bhist),
    ProviderKind.GRID_ENGINE: (["qacct", "-j"], parse_qacct),
}
"""By provider: command that shows how a job ended, and function that reads its output. PBS needs no entry, because its
listing includes ended jobs.
"""
_MAX_ACCOUNTING_COMMANDS = 3
_PBS_ID = re.compile(r"\d+(\[\d*\])?(\.\S+)?")


class ListingBatchSystem:
    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        pacer: RequestPacer | None = None,
    ) -> None:
        self._kind = site.provider.kind
        self._has_accounting = True
        self._submitter = JobSubmitter(site, session=session, folder=folder, command=command, pacer=pacer)

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        return self._submitter.submit(block, allowed)

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        listed = self._list_jobs(jobs)
        listed |= self._read_accounting([job for job in jobs if job not in listed])
        return {job: self._build_status(job, listed.get(job)) for job in jobs}

    def cancel(self, jobs: Sequence[str]) -> None:
        self._run_cancel_command([_CANCEL_COMMANDS[self._kind], *jobs])

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            name = job_name(self._submitter.session, block)
            if self._kind is ProviderKind.LSF:
                self._run_cancel_command(["bkill", "-J", name, "0"])
            elif self._kind is ProviderKind.GRID_ENGINE:
                self._run_cancel_command(["qdel", name])
            elif jobs := self._run_qselect(["-N", name]):
                self.cancel(jobs)

    def _run_cancel_command(self, words: list[str]) -> None:
        said = self._submitter.commands.run(words)
        if said.code and is_temporary_submission_error(said.failure_reason):
            raise BatchSystemError(f"{words[0]}: {said.failure_reason}")

    def find(self) -> Mapping[str, BlockId]:
        found = {}
        for job, entry in self._list_jobs(None).items():
            block = block_of_job_name(entry.name, session=self._submitter.session)
            if block is not None:
                found[job] = block
                self._submitter.names_of_jobs[job] = entry.name
        return found

    def _build_status(self, job: str, entry: ListedJob | None) -> BatchJobStatus:
        if entry is None:
            how = "; ".join(self._submitter.last_output_lines_of_job(job))
            reason = f"no longer in the queue: {how}" if how else "no longer in the queue"
            return BatchJobStatus(BlockPhase.ENDED, reason, is_unlisted=True)
        expected_in_s = max(0.0, entry.expected_at - time.time()) if entry.expected_at else 0.0
        if entry.phase is not BlockPhase.ENDED:
            return BatchJobStatus(entry.phase, entry.reason, expected_in_s)
        how = "; ".join(self._submitter.last_output_lines_of_job(job, entry.name)) if entry.has_failed else ""
        reason = f"{entry.reason}: {how}" if how else entry.reason
        return BatchJobStatus(entry.phase, reason, expected_in_s, loss_reason_from_text(entry.reason))

    def _list_jobs(self, jobs: Sequence[str] | None) -> dict[str, ListedJob]:
        if self._kind is ProviderKind.LSF:
            return self._run_and_parse(["bjobs", "-a", "-noheader", "-o", LSF_FIELDS], parse_bjobs)
        if self._kind is ProviderKind.GRID_ENGINE:
            return self._run_and_parse(["qstat", "-xml", "-u", getpass.getuser()], parse_qstat_xml)
        jobs = self._run_qselect([]) if jobs is None else jobs
        # PBS reports an error for an unknown job, but lists the other jobs.
        return self._run_and_parse(["qstat", "-x", "-f", "-F", "json", *jobs], parse_qstat_json) if jobs else {}

    def _run_qselect(self, options: list[str]) -> list[str]:
        words = self._run_command(["qselect", "-u", getpass.getuser(), *options]).split()
        return [word for word in words if _PBS_ID.fullmatch(word)]

    def _read_accounting(self, jobs: Sequence[str]) -> dict[str, ListedJob]:
        if not self._has_accounting or self._kind not in _ACCOUNTING:
            return {}
        command, read = _ACCOUNTING[self._kind]
        found = {}
        for job in jobs[:_MAX_ACCOUNTING_COMMANDS]:
            try:
                row = read(self._submitter.commands.run([*command, job]).out)
            except BatchSystemError as error:
                self._has_accounting = False
                log.warning("the ends of jobs are unknown from now on: %s", error)
                break
            # Check the name, because Grid Engine reuses the numbers of old jobs.
            if row is not None and row.name in ("", self._submitter.names_of_jobs.get(job, row.name)):
                found[job] = row
        return found

    def _run_and_parse(self, words: list[str], read: ListingReader) -> dict[str, ListedJob]:
        text = self._run_command(words)
        try:
            return read(text)
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise BatchSystemError(
                f"{words[0]} printed something that cannot be read ({error}): {text[:80]!r}"
            ) from error

    def _run_command(self, words: list[str]) -> str:
        said = self._submitter.commands.run(words)
        nothing = "no unfinished job found" in said.err.lower() or "no job found" in said.err.lower()
        if said.code and not said.out.strip() and not nothing and "Unknown Job Id" not in said.err:
            raise BatchSystemError(f"{words[0]}: {said.failure_reason}")
        return said.out

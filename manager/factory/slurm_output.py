"""Parse the output of Slurm's commands, in pure functions.

Formats are those of Slurm 22.05 and later; other lines are ignored. `--json` is not used: the JSON of `squeue` changes
types between releases, ignores filters in some releases, and needs an optional plugin.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import msgspec

from stoker.manager.factory.batch import BatchJobStatus, loss_reason_from_text
from stoker.protocol.blocks import BlockPhase, LossReason

_PERMANENT_REASONS = (
    (r"PartitionTimeLimit|\w*MaxWall\w*", "walltime is longer than allowed; shorten [provider] walltime"),
    (r"PartitionNodeLimit|\w*MaxNode\w*PerJob\w*", "nodes is more than allowed; lower [provider] nodes"),
    (r"\w*MaxGRES\w*PerJob\w*", "gpus is more than allowed; lower [provider] gpus"),
    (r"\w*MaxCpu\w*PerJob\w*", "cores is more than allowed; lower [provider] cores"),
    (r"\w*MaxMem\w*PerJob\w*", "memory is more than allowed; lower [provider] memory"),
    (r"BadConstraints", "no node matches [provider] constraint, cores, memory and gpus; change them"),
    (r"InvalidAccount|AccountNotAllowed", "the account may not be used there; change [provider] account"),
    (r"InvalidQOS|QOSNotAllowed", "the QOS may not be used there; change [provider] qos"),
    (r"PartitionInactive|PartitionDown", ""),
)
"""Reasons for which a job waits until somebody changes a setting, and what to change."""
_NO_NODE_REASON = re.compile(r"ReqNodeNotAvail|BadConstraints|Nodes.required.for.job.are.DOWN", re.IGNORECASE)
"""Reasons of a job that waits because no available node can run it."""
_CLOSED_PARTITION_ADVICE = "the partition takes no jobs now; the job waits until an administrator opens it"


def _add_advice_to_reason(reason: str) -> str:
    word = reason.partition(",")[0].strip()
    what = next((what for pattern, what in _PERMANENT_REASONS if re.fullmatch(pattern, word)), None)
    if what is None:
        return reason
    return (
        f"{reason}: the job never starts with these settings: {what}"
        if what
        else f"{reason}: {_CLOSED_PARTITION_ADVICE}"
    )


SQUEUE_FORMAT = "%F|%T|%r|%S|%N|%j|%Z"
"""Format of `squeue`. `%F` is the job id that sbatch has printed; all tasks of a job array have the same."""
PREEMPTED_FORMAT = "ArrayJobID:24,PreemptTime:24"
SACCT_FORMAT = "JobIDRaw,State,ExitCode,NodeList"

_WAITING_STATES = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING_STATES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
CANCELLED = "cancelled by someone (scancel)"
_END_REASONS = {
    "COMPLETED": "done",
    "CANCELLED": CANCELLED,
    "PREEMPTED": "preempted by Slurm",
    "TIMEOUT": "out of walltime",
    "DEADLINE": "out of walltime (DEADLINE)",
    "NODE_FAIL": "node failed",
    "BOOT_FAIL": "node failed to boot",
    "OUT_OF_MEMORY": "out of memory",
    "REVOKED": "revoked by another cluster",
}
_CANCELLATION_CAUSES = {
    "PREEMPTION": "preempted by Slurm",
    "TIME LIMIT": "out of walltime",
    "NODE FAILURE": "node failed",
}
_CANCELLATION_LINE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO (.+?)\s*\*\*\*")
_FIELD = re.compile(r"\b(JobId|JobState|Reason|ExitCode|NodeList|JobName|ArrayJobId|StartTime)=(\S*)")
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma between two node names. A comma inside brackets does not match: `n[1,3]`."""
_EMPTY_VALUES = {"", "None", "N/A", "(null)", "Unknown"}
_HELD_STATES = {"REQUEUE_HOLD", "SPECIAL_EXIT"}
_PERMANENT_HOLD_REASON = re.compile(
    r"launch.failed.requeued.held|job.requeued.in.held.state|JobHoldMaxRequeue", re.IGNORECASE
)
_HELD_BY_A_PERSON = {"JobHeldUser", "JobHeldAdmin"}
_TOO_FAR_S = 30 * 86400.0
_REQUEUE_REASONS = {
    "PREEMPTED": ("preempted by Slurm", LossReason.PREEMPTED),
    "NODE_FAIL": ("its node failed", LossReason.NODE_LOST),
    "REQUEUED": ("requeued by a person", LossReason.VACATED),
}


class AccountedJob(msgspec.Struct, frozen=True):
    """A job, as Slurm lists it. `state`: job state in Slurm's long form. `exit_code`: code and signal, as in `1:0`.
    `start`: wall-clock time. `folder`: submission folder, up to the first line break.
    """

    job: str
    state: str
    reason: str = ""
    start: float = 0.0
    nodes: str = ""
    name: str = ""
    folder: str = ""
    exit_code: str = ""

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING_STATES

    @property
    def is_over(self) -> bool:
        return self.state not in _WAITING_STATES and self.state not in _RUNNING_STATES

    @property
    def is_held_for_good(self) -> bool:
        return self.state in _HELD_STATES or (
            self.state in _WAITING_STATES and bool(_PERMANENT_HOLD_REASON.search(self.reason))
        )


def parse_squeue(text: str) -> dict[str, AccountedJob]:
    """Read squeue's output. A job array is one job, with the state of its most active task."""
    rows: dict[str, AccountedJob] = {}
    for line in text.splitlines():
        fields = line.split("|", 6)
        if len(fields) == 7 and fields[0].isdecimal():
            job, state, reason, start, nodes, name, folder = fields
            reason, nodes = _blank_if_none(reason), _blank_if_none(nodes)
            row = AccountedJob(job, state, reason, _parse_timestamp(start), nodes, name, folder)
            rows[job] = _merge_tasks(rows[job], row) if job in rows else row
    return rows


def _merge_tasks(one: AccountedJob, other: AccountedJob) -> AccountedJob:
    # Order of states: running, waiting, ended. Among ended tasks, failed tasks are first.
    first, second = sorted((one, other), key=lambda row: (row.is_over, row.is_waiting, row.state == "COMPLETED"))
    if first.state in _RUNNING_STATES and second.state in _RUNNING_STATES:
        nodes = dict.fromkeys(node for row in (first, second) for node in _COMMA.split(row.nodes) if node)
        return msgspec.structs.replace(first, nodes=",".join(nodes))
    return first


def parse_sacct(text: str) -> dict[str, AccountedJob]:
    """Read `sacct -X -n -P -o SACCT_FORMAT`. `CANCELLED by 1000` becomes CANCELLED."""
    rows = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0].isdecimal():
            job, state, exit_code, nodes = fields
            rows[job] = AccountedJob(job, state.partition(" ")[0], nodes=_blank_if_none(nodes), exit_code=exit_code)
    return rows


def parse_scontrol(text: str) -> dict[str, AccountedJob]:
    """Read `scontrol show job -o`, one line per job. A job array is one job."""
    rows: dict[str, AccountedJob] = {}
    for line in text.splitlines():
        found: dict[str, str] = dict(reversed(_FIELD.findall(line)))  # the first of two equal keys counts
        if "JobId" not in found or "JobState" not in found:
            continue
        job = found.get("ArrayJobId") or found["JobId"]
        row = AccountedJob(
            job,
            found["JobState"],
            _blank_if_none(found.get("Reason", "")),
            start=_parse_timestamp(found.get("StartTime", "")),
            nodes=_blank_if_none(found.get("NodeList", "")),
            name=found.get("JobName", ""),
            exit_code=found.get("ExitCode", ""),
        )
        rows[job] = _merge_tasks(rows[job], row) if job in rows else row
    return rows


def build_job_status(row: AccountedJob, *, now: float, output: Iterable[str] = ()) -> BatchJobStatus:
    if row.state in _WAITING_STATES:
        reason = row.reason if row.state == "PENDING" else row.reason or row.state.lower()
        if row.is_held_for_good:
            words = reason.replace("_", " ")  # squeue prints blanks, scontrol underscores
            return BatchJobStatus(BlockPhase.ENDED, f"held by Slurm: {words}")
        if reason in _HELD_BY_A_PERSON:
            reason += f", until `scontrol release {row.job}`"
        expected_in_s = max(0.0, row.start - now) if row.start else 0.0
        if expected_in_s > _TOO_FAR_S:  # Slurm estimates a job without a time limit as one year long
            expected_in_s = 0.0
        no_node = _NO_NODE_REASON.match(reason) is not None
        return BatchJobStatus(BlockPhase.PENDING, _add_advice_to_reason(reason), expected_in_s, no_node=no_node)
    if row.state in _RUNNING_STATES:
        how = "" if row.state == "RUNNING" else f"{row.state.lower()} "
        return BatchJobStatus(BlockPhase.RUNNING, f"{how}on {row.nodes}" if row.nodes else how.strip())
    how = _describe_end(row, list(output))
    return BatchJobStatus(BlockPhase.ENDED, how, loss=loss_reason_from_text(how))


def build_status_of_unknown_job(output: Iterable[str]) -> BatchJobStatus:
    """Return the status of a job that Slurm does not know."""
    said = find_end_reason_in_output(list(output))
    return BatchJobStatus(
        BlockPhase.ENDED,
        said or "Slurm no longer knows this job",
        loss=loss_reason_from_text(said),
        is_unlisted=not said,
    )


def find_requeue_reason(sacct: str, output: Iterable[str]) -> tuple[str, LossReason] | None:
    """Return why Slurm requeued a job, or None. `sacct`: accounting lines of its runs, oldest first."""
    for line in reversed(sacct.splitlines()):
        fields = line.split("|")
        state = fields[1].partition(" ")[0] if len(fields) == 4 else ""
        if state in _REQUEUE_REASONS:
            words, loss = _REQUEUE_REASONS[state]
            nodes = _blank_if_none(fields[3])
            return (f"{words} ({nodes})" if state == "NODE_FAIL" and nodes else words), loss
    said = find_end_reason_in_output(list(output))
    known = loss_reason_from_text(said)
    return (said, known) if known is not None else None


def find_end_reason_in_output(output: list[str]) -> str:
    """Return why a job ended, if Slurm has written the reason into the job's output; otherwise empty."""
    found = next(filter(None, map(_CANCELLATION_LINE.search, reversed(output))), None)
    return _CANCELLATION_CAUSES.get(found[1], f"cancelled: {found[1].lower()}") if found else ""


def parse_preempted_jobs(text: str) -> set[str]:
    """Return the preempted jobs in the output of `squeue -h -O PREEMPTED_FORMAT`."""
    rows = (line.split() for line in text.splitlines())
    return {row[0] for row in rows if len(row) == 2 and row[1] not in _EMPTY_VALUES}


def parse_lost_nodes(sinfo: str) -> list[str]:
    """Return the nodes that are down or do not answer (a `*` after the state)."""
    rows = (line.strip().split("|") for line in sinfo.splitlines())
    lost = [row[0] for row in rows if len(row) == 2 and (row[1].startswith(("down", "fail")) or row[1].endswith("*"))]
    return list(dict.fromkeys(lost))


def _describe_end(row: AccountedJob, output: list[str]) -> str:
    if row.state == "NODE_FAIL" and row.nodes:
        return f"node failed: {row.nodes}"
    if row.state == "CANCELLED":
        return find_end_reason_in_output(output) or CANCELLED
    if row.state in _END_REASONS:
        return _END_REASONS[row.state]
    code, _, signal = row.exit_code.partition(":")
    how = f"killed by signal {signal}" if signal not in ("", "0") else f"exit code {code}" if code else "failed"
    said = "; ".join(output)
    return f"{how}: {said}" if said else how


def _blank_if_none(text: str) -> str:
    return "" if text in _EMPTY_VALUES else text


def _parse_timestamp(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0

"""Read HTCondor's job ads: pure functions over the output of `condor_q -json` and `condor_history -json`.

If HTCondor evicts a job (its state changes from RUNNING to IDLE), the factory removes the job and its block ends,
because a new job starts sooner. A held job counts as PENDING, and is removed after `MAX_HELD_S` seconds. `NumHolds`
also counts holds that begin and end between two queries. A removed job stays in the queue until its machine answers. If
a job's shadow process is killed, `NumJobStarts` is not updated.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from stoker.manager.factory.batch import BatchJobStatus, BatchSystemError
from stoker.manager.factory.condor_description import BLOCK, BY_OWNER, SOURCE, SPOOLING, WALLTIME
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.units import show_bytes, show_line, show_seconds

JobAd = Mapping[str, Any]

ATTRIBUTES = (
    "ClusterId", "ProcId", "JobStatus", "LastJobStatus", "EnteredCurrentStatus", "ServerTime", "RemoteHost",
    "LastRemoteHost", "NumJobStarts", "NumHolds", "LastRejMatchReason", "LastRejMatchTime", "HoldReason",
    "HoldReasonCode", "HoldReasonSubCode", "LastHoldReason", "LastHoldReasonCode", "LastHoldReasonSubCode",
    "VacateReason", "VacateReasonCode", "VacateReasonSubCode", "RequestMemory", "ResidentSetSize_RAW",
    "RemoveReason", "ExitCode", "ExitBySignal", "ExitSignal", BLOCK, SOURCE, WALLTIME,
)  # fmt: skip

MAX_HELD_S = 120.0
_SLOT_COUNT_PHRASES = (
    r"are rejected by your job's requirements",
    r"reject your job because of their own",
    r"would match if drained",
)
_DIVISIBLE_RESOURCE = re.compile(r"\b(Cpus|Memory|Disk|GPUs|AvailableGPUs)\b", re.IGNORECASE)
_STUCK_S = 120.0
_PREEMPTED_CODES = frozenset({1011, 1015, 1018, 1019, 1030})
"""`VacateReasonCode` of jobs that were preempted: by the machine, by condor_now, or by a job with higher priority."""
_NODE_LOST_CODES = frozenset({1002, 1007, 1008, 1012, 1024, 1031, 1036})
_NOT_STARTED_CODES = frozenset({1003, 1006, *range(1026, 1037)})
"""`VacateReasonCode` of jobs that a slot did not start. A job whose shadow process was killed also has such a code."""
_OUT_OF_MEMORY = (34, 102)
_OUT_OF_DISK = (34, 104)
"""Code and subcode of a job that was held or evicted because it used more disk than its slot has."""
_POLICY_HOLDS = frozenset({3, 21, 26, 34})
"""Codes of holds by a policy of the pool. The text of the reason may then name memory or disk."""
_MEMORY = "memory"
_CONDITION_NUMBER = re.compile(r"(?<![\w)\]}])\[\d+\]")
"""Number of a condition, as in `[3]`. An index does not match, as in `split(TARGET.CondorVersion)[1]`."""


class JobStatus(enum.IntEnum):
    """States of an HTCondor job. REMOVED: the job is being removed or, in the history, was removed. SENDING: the job
    transfers its output.
    """

    IDLE = 1
    RUNNING = 2
    REMOVED = 3
    COMPLETED = 4
    HELD = 5
    SENDING = 6
    SUSPENDED = 7


class JobVerdict(NamedTuple):
    """Status of a job. `remove`: True to remove the job. `force`: True to remove it without waiting for its machine."""

    status: BatchJobStatus
    remove: bool = False
    force: bool = False


def parse_job_ads(text: str, *, command: str) -> list[JobAd]:
    """Raises BatchSystemError."""
    if not text.strip():
        return []
    try:
        ads = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchSystemError(
            f"{command} printed something that is not JSON ({error}): {text.strip()[:200]}"
        ) from None
    if not isinstance(ads, list) or not all(isinstance(ad, dict) and "ClusterId" in ad for ad in ads):
        raise BatchSystemError(f"{command} printed something that is not a list of job ads: {text.strip()[:200]}")
    return ads


def job_id_of_ad(ad: JobAd) -> str:
    return f"{ad['ClusterId']}.{ad.get('ProcId', 0)}"


def judge_job(ad: JobAd, *, has_run: bool = False, held_s: float = MAX_HELD_S, memory_bytes: int = 0) -> JobVerdict:
    """Return a job's status and whether to remove it. `has_run`: True if an earlier query saw the job run.

    `memory_bytes`: memory in the site file, because HTCondor rounds its own value.
    """
    verdict = _judge_without_hold_details(ad, has_run=has_run, held_s=held_s)
    prefix = "" if ad.get("JobStatus") == JobStatus.HELD else "Last"
    return verdict._replace(status=_add_hold_to_status(verdict.status, ad, prefix=prefix, memory_bytes=memory_bytes))


def _add_hold_to_status(status: BatchJobStatus, ad: JobAd, *, prefix: str, memory_bytes: int) -> BatchJobStatus:
    cause = _cause_of_hold(ad, prefix=prefix)
    if not cause:
        return status
    advice = _describe_hold_remedy(ad, cause, memory_bytes=memory_bytes)
    return msgspec.structs.replace(status, cause=cause, advice=advice, holds=int(ad.get("NumHolds") or 1))


def _judge_without_hold_details(ad: JobAd, *, has_run: bool, held_s: float) -> JobVerdict:
    since_s = seconds_in_current_status(ad)
    match ad.get("JobStatus"):
        case JobStatus.IDLE if was_evicted(ad, has_run=has_run):
            status = BatchJobStatus(BlockPhase.ENDED, _describe_eviction(ad), loss=loss_reason_of_eviction(ad))
            return JobVerdict(status, remove=True)
        case JobStatus.IDLE:
            return JobVerdict(
                BatchJobStatus(BlockPhase.PENDING, ": ".join(filter(None, ["idle", _rejection_reason(ad)])))
            )
        case JobStatus.HELD:
            return _judge_held_job(ad, since_s=since_s, held_s=held_s)
        case JobStatus.REMOVED:
            stuck = since_s > _STUCK_S
            where = f"; {ad['RemoteHost']} does not answer" if stuck and ad.get("RemoteHost") else ""
            phase = BlockPhase.ENDED if stuck else BlockPhase.RUNNING
            return JobVerdict(
                BatchJobStatus(phase, f"is being removed{where}", is_being_cancelled=True), remove=stuck, force=stuck
            )
        case JobStatus.COMPLETED:
            return JobVerdict(build_end_status(ad))
        case JobStatus.SENDING:
            return JobVerdict(BatchJobStatus(BlockPhase.RUNNING, "sends its output back"))
        case JobStatus.SUSPENDED:
            return JobVerdict(BatchJobStatus(BlockPhase.RUNNING, "suspended"))
        case _:
            return JobVerdict(
                BatchJobStatus(BlockPhase.RUNNING, f"on {ad['RemoteHost']}" if ad.get("RemoteHost") else "")
            )


def build_end_status(ad: JobAd, *, memory_bytes: int = 0) -> BatchJobStatus:
    """Return an ended job's status. If a held job was removed, the hold is the reason for its end."""
    how, loss = _describe_end(ad), None
    if ad.get("JobStatus") == JobStatus.REMOVED:
        if how.startswith("out of walltime"):
            loss = LossReason.WALLTIME
        elif how.startswith("held"):  # the attributes that are set depend on HTCondor's version
            prefix = "Last" if "HoldReasonCode" not in ad else ""
            status = BatchJobStatus(BlockPhase.ENDED, how, loss=loss_reason_of_hold(ad, prefix=prefix))
            return _add_hold_to_status(status, ad, prefix=prefix, memory_bytes=memory_bytes)
        else:
            loss = LossReason.CANCELLED
    return BatchJobStatus(BlockPhase.ENDED, how, loss=loss)


def seconds_in_current_status(ad: JobAd) -> float:
    now_s = float(ad.get("ServerTime") or 0)
    return now_s - float(ad.get("EnteredCurrentStatus") or now_s) if now_s else 0.0


def was_evicted(ad: JobAd, *, has_run: bool) -> bool:
    """True if an idle job has run and was not held afterwards. `VacateReasonCode` alone does not prove this: a job that
    a slot rejected also has this code.
    """
    if ad.get("LastJobStatus") != JobStatus.RUNNING:
        return False
    code = ad.get("VacateReasonCode")
    return bool(ad.get("NumJobStarts")) or (code is not None and (has_run or code not in _NOT_STARTED_CODES))


def loss_reason_of_eviction(ad: JobAd) -> LossReason:
    """Return why HTCondor evicted a job. HTCondor before 24 gives no code, so the reason is then VACATED."""
    code = ad.get("VacateReasonCode")
    if code in _PREEMPTED_CODES:
        return LossReason.PREEMPTED
    if code in _NODE_LOST_CODES:
        return LossReason.NODE_LOST
    out_of_memory = (code, ad.get("VacateReasonSubCode")) == _OUT_OF_MEMORY
    return LossReason.OUT_OF_MEMORY if out_of_memory else LossReason.VACATED


def loss_reason_of_hold(ad: JobAd, *, prefix: str = "") -> LossReason:
    return LossReason.OUT_OF_MEMORY if _cause_of_hold(ad, prefix=prefix) == _MEMORY else LossReason.HELD


def _cause_of_hold(ad: JobAd, *, prefix: str) -> str:
    """Return why HTCondor holds a job; empty if a person holds the job, or the job waits for a file transfer."""
    code, sub = ad.get(f"{prefix}HoldReasonCode"), ad.get(f"{prefix}HoldReasonSubCode")
    if code in (BY_OWNER, SPOOLING, None):
        return ""
    words = str(ad.get(f"{prefix}HoldReason", "")).lower()
    if (code, sub) == _OUT_OF_MEMORY or (code in _POLICY_HOLDS and "memory" in words):
        return _MEMORY
    if (code, sub) == _OUT_OF_DISK or (code in _POLICY_HOLDS and "disk" in words):
        return "disk"
    return f"hold code {code}"


def _describe_hold_remedy(ad: JobAd, cause: str, *, memory_bytes: int) -> str:
    if cause == _MEMORY:
        asked = memory_bytes or int(ad.get("RequestMemory") or 0) * 2**20
        used = int(ad.get("ResidentSetSize_RAW") or 0) * 1024
        has = f'memory = "{show_bytes(asked)}" is too small' if asked else "memory is too small"
        took = f": the pilot used {show_bytes(used)}" if used else " for the pilot"
        return f"{has}{took}; raise [provider] memory in the site file"
    if cause == "disk":
        return "the pilot used more disk than the job had requested; raise [pilot] cache_size, which sets the request"
    if "permission denied" in str(ad.get("HoldReason") or ad.get("LastHoldReason")).lower():
        return (
            "the pool runs jobs as users of its own, who cannot access the session's folder; set [provider]"
            ' shared_files = false and [environment] kind = "packed" in the site file'
        )
    return "fix the cause that HTCondor names, in the site file or on its machines"


def has_failed(ad: JobAd) -> bool:
    return ad.get("JobStatus") == JobStatus.COMPLETED and bool(ad.get("ExitBySignal") or ad.get("ExitCode"))


def has_no_matching_slot(ad: JobAd) -> bool:
    return ad.get("JobStatus") == JobStatus.IDLE and "no match" in _rejection_reason(ad)


def is_unseen_by_negotiator(ad: JobAd, *, for_s: float) -> bool:
    """True if HTCondor has not tried to match the job, or an equal job, for `for_s` seconds."""
    return (
        ad.get("JobStatus") == JobStatus.IDLE and seconds_in_current_status(ad) >= for_s and not _rejection_reason(ad)
    )


def summarize_match_analysis(text: str) -> str:
    """Return how many slots a job's requirements exclude, and which conditions no slot meets; empty if slots match.

    HTCondor before 24.4 considers only the free part of a partitionable slot.
    """
    total = re.search(r"Of (\d+) (?:slots|machines)", text)
    out, own, later = (_find_slot_count(what, text) for what in _SLOT_COUNT_PHRASES)
    if total is None or out is None:
        return ""
    said = [f"{out} are ruled out by the job's requirements"] if out else []
    drained = r"0\s+" if re.search(r"^Step\s+Matched\s+Drained\s", text, re.MULTILINE) else ""
    rows = dict(re.findall(rf"^\s*(\[\d+\])\s+0\s+{drained}(\S.*?)\s*$", text, re.MULTILINE))
    nowhere = [_expand_condition(row, text) for row in _unmet_conditions(rows)]
    if nowhere and out == int(total[1]):
        is_divided = "slots on" not in text[total.start() :] and any(map(_DIVISIBLE_RESOURCE.search, nowhere))
        now = " with the resources free now" if is_divided else ""
        said = [f"{said[0]}: none meets {', '.join(nowhere)}{now}"]
    said += [f"{own} refuse the job by their own requirements"] if own else []
    said += [f"{later} would suit, but are taken"] if later else []
    return f"of {total[1]} slots {', '.join(said)}" if said else ""


def is_every_slot_excluded(analysis: str) -> bool:
    return re.match(r"of (\d+) slots \1 are ruled out", analysis) is not None


def _unmet_conditions(rows: Mapping[str, str]) -> list[str]:
    """Return the conditions that no slot meets. Omit the parts of an `||` condition, and each other condition that
    contains a condition in `rows`.
    """
    parts = {number: set(_CONDITION_NUMBER.findall(row)) for number, row in rows.items()}
    choices = {part for number, row in rows.items() if "||" in row for part in parts[number]}
    return [
        row for number, row in rows.items() if number not in choices and ("||" in row or not parts[number] & set(rows))
    ]


def _expand_condition(condition: str, text: str) -> str:
    parts: dict[str, str] = dict(re.findall(r"^\s+(\[\d+\])\s+: (\S.*?)\s*$", text, re.MULTILINE))
    parts |= dict(re.findall(r"^\s*(\[\d+\])\s+\d+\s+(?:\d+\s+)?(\S.*?)\s*$", text, re.MULTILINE))

    def replace_number(number: re.Match[str]) -> str:
        found = parts.pop(number[0], "")  # replace a condition only once: no condition contains itself
        return f"({found})" if re.search(r"&&|\|\||\?", found) else found or number[0]

    while parts:
        before, condition = condition, _CONDITION_NUMBER.sub(replace_number, condition)
        if condition == before:
            break
    return condition


def _describe_end(ad: JobAd) -> str:
    if ad.get("JobStatus") == JobStatus.REMOVED:
        why = str(ad.get("RemoveReason", "")).strip()
        if "PeriodicRemove" in why and ad.get("LastJobStatus") == JobStatus.RUNNING:
            return f"out of walltime ({show_seconds(float(ad.get(WALLTIME, 0)))})"
        held = ad.get("HoldReason") or ad.get("LastHoldReason")  # the set attribute depends on HTCondor's version
        if ad.get("LastJobStatus") == JobStatus.HELD and held:
            return f"held by HTCondor: {show_line(str(held))}"
        return f"removed {why}".strip()
    if ad.get("ExitBySignal"):
        return f"killed by {_show_signal(ad.get('ExitSignal', 0))}"
    return f"exit code {ad['ExitCode']}" if "ExitCode" in ad else "ended"


def _describe_eviction(ad: JobAd) -> str:
    slot, loss = str(ad.get("LastRemoteHost") or ""), loss_reason_of_eviction(ad)
    if loss is LossReason.NODE_LOST:
        what = ": ".join(["node failed", *filter(None, [slot.partition("@")[2]])])
    else:
        what = "preempted" if loss is LossReason.PREEMPTED else "evicted"
        what += f" from {slot}" if slot else ""
    return ": ".join([what, *filter(None, [show_line(str(ad.get("VacateReason", "")))])])


def _rejection_reason(ad: JobAd) -> str:
    """Return why HTCondor has found no slot since the job became idle; empty if it has not tried."""
    waits_since = float(ad.get("EnteredCurrentStatus") or 0)
    if float(ad.get("LastRejMatchTime") or waits_since) < waits_since:
        return ""
    reason = show_line(str(ad.get("LastRejMatchReason", "")))
    return reason.partition(" |")[0]  # numbered diagnoses follow the vertical bar


def _judge_held_job(ad: JobAd, *, since_s: float, held_s: float) -> JobVerdict:
    reason = f"held: {show_line(str(ad.get('HoldReason', 'HTCondor does not say why')))}"
    has_run = ad.get("NumJobStarts") or ad.get("LastJobStatus") == JobStatus.RUNNING
    stays = ad.get("HoldReasonCode") in (BY_OWNER, SPOOLING) or since_s < held_s
    phase = BlockPhase.PENDING if stays else BlockPhase.ENDED
    return JobVerdict(
        BatchJobStatus(phase, reason, loss=loss_reason_of_hold(ad) if has_run else None), remove=not stays
    )


def _find_slot_count(what: str, text: str) -> int | None:
    found = re.search(rf"^\s*(\d+)(?: slots)? {what}", text, re.MULTILINE)
    return int(found[1]) if found else None


def _show_signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"

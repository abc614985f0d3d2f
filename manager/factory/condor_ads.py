"""Readers of HTCondor's ads of our jobs: pure functions over `condor_q -json` and `condor_history -json`.

An evicted job goes from RUNNING back to IDLE. It is removed and its block is over: an idle pool may leave it waiting
for five minutes, and a new job wakes the negotiator at once. A held job is PENDING; after `HELD_S` it counts as ended.
A pool may release held jobs within a second: `NumHolds` counts the holds that no query saw. A removed job stays in the
queue until its machine answers. `NumJobStarts` does not tell whether a job has run: a killed shadow never writes it.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.manager.factory.batch import BatchJobStatus, BatchTrouble
from stoker.manager.factory.condor_description import BLOCK, BY_OWNER, SOURCE, SPOOLING, WALLTIME
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.units import show_bytes, show_seconds

Ad = Mapping[str, Any]

ATTRIBUTES = (
    "ClusterId", "ProcId", "JobStatus", "LastJobStatus", "EnteredCurrentStatus", "ServerTime", "RemoteHost",
    "LastRemoteHost", "NumJobStarts", "NumHolds", "LastRejMatchReason", "LastRejMatchTime", "HoldReason",
    "HoldReasonCode", "HoldReasonSubCode", "LastHoldReason", "LastHoldReasonCode", "LastHoldReasonSubCode",
    "VacateReason", "VacateReasonCode", "VacateReasonSubCode", "RequestMemory", "ResidentSetSize_RAW",
    "RemoveReason", "ExitCode", "ExitBySignal", "ExitSignal", BLOCK, SOURCE, WALLTIME,
)  # fmt: skip

HELD_S = 120.0
"""Sites that release held jobs do it within this time, or rarely."""
_SLOTS = (
    r"are rejected by your job's requirements",
    r"reject your job because of their own",
    r"would match if drained",
)
_DIVIDED = re.compile(r"\b(Cpus|Memory|Disk|GPUs|AvailableGPUs)\b", re.IGNORECASE)
"""Resources by which a machine is divided into slots."""
_STUCK_S = 120.0
_PREEMPTED = frozenset({1011, 1015, 1018, 1019, 1030})
"""VacateReasonCode: the machine's PREEMPT, condor_now, a better rank or user priority."""
_NODE_LOST = frozenset({1002, 1007, 1008, 1012, 1024, 1031, 1036})
"""VacateReasonCode: shadow and starter lost each other, the startd or its scratch folder failed, the slot is broken."""
_NOT_STARTED = frozenset({1003, 1006, *range(1026, 1037)})
"""VacateReasonCode: a slot did not start the job. A killed shadow leaves one, too."""
_OUT_OF_MEMORY = (34, 102)
_OUT_OF_DISK = (34, 104)
"""HoldReasonCode (or VacateReasonCode) and subcode of a job that took more than its slot has."""
_BY_POLICY = frozenset({3, 21, 26, 34})
"""HoldReasonCode: by a policy, or for what the job took; the words say which."""
_MEMORY = "memory"
_NUMBER = re.compile(r"(?<![\w)\]}])\[\d+\]")
"""`[3]` of a condition, not of a list: `split(TARGET.CondorVersion)[1]`."""


class JobStatus(enum.IntEnum):
    """REMOVED: to be removed, or (in the history) removed. SENDING: its output home."""

    IDLE = 1
    RUNNING = 2
    REMOVED = 3
    COMPLETED = 4
    HELD = 5
    SENDING = 6
    SUSPENDED = 7


class Verdict(msgspec.Struct, frozen=True):
    """`remove`: from the queue; `force`: without waiting for its machine."""

    status: BatchJobStatus
    remove: bool = False
    force: bool = False


def read_ads(text: str, *, command: str) -> list[Ad]:
    """Read what a command printed with `-json`. Raises BatchTrouble."""
    if not text.strip():
        return []
    try:
        ads = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchTrouble(f"{command} printed something that is not JSON ({error}): {text.strip()[:200]}") from None
    if not isinstance(ads, list) or not all(isinstance(ad, dict) and "ClusterId" in ad for ad in ads):
        raise BatchTrouble(f"{command} printed something that is no list of job ads: {text.strip()[:200]}")
    return ads


def job_of(ad: Ad) -> str:
    return f"{ad['ClusterId']}.{ad.get('ProcId', 0)}"


def judge(ad: Ad, *, ran: bool = False, held_s: float = HELD_S, memory_bytes: int = 0) -> Verdict:
    """`ran`: the job was seen running before. `memory_bytes`: the site file's setting, which HTCondor rounds."""
    verdict = _judge(ad, ran=ran, held_s=held_s)
    prefix = "" if ad.get("JobStatus") == JobStatus.HELD else "Last"
    status = _with_hold(verdict.status, ad, prefix=prefix, memory_bytes=memory_bytes)
    return msgspec.structs.replace(verdict, status=status)


def _with_hold(status: BatchJobStatus, ad: Ad, *, prefix: str, memory_bytes: int) -> BatchJobStatus:
    """Add the cause of a job's present hold, or of its last one (`prefix`: `Last`)."""
    cause = _cause(ad, prefix=prefix)
    if not cause:
        return status
    advice = _advice(ad, cause, memory_bytes=memory_bytes)
    return msgspec.structs.replace(status, cause=cause, advice=advice, holds=int(ad.get("NumHolds") or 1))


def _judge(ad: Ad, *, ran: bool, held_s: float) -> Verdict:
    since_s = waits_s(ad)
    match ad.get("JobStatus"):
        case JobStatus.IDLE if was_evicted(ad, ran=ran):
            status = BatchJobStatus(BlockPhase.ENDED, _why_evicted(ad), loss=loss_of_vacate(ad))
            return Verdict(status, remove=True)
        case JobStatus.IDLE:
            return Verdict(BatchJobStatus(BlockPhase.PENDING, ": ".join(filter(None, ["idle", _rejected(ad)]))))
        case JobStatus.HELD:
            return _held(ad, since_s=since_s, held_s=held_s)
        case JobStatus.REMOVED:
            stuck = since_s > _STUCK_S
            where = f"; {ad['RemoteHost']} does not answer" if stuck and ad.get("RemoteHost") else ""
            phase = BlockPhase.ENDED if stuck else BlockPhase.RUNNING
            return Verdict(BatchJobStatus(phase, f"is being removed{where}", leaving=True), remove=stuck, force=stuck)
        case JobStatus.COMPLETED:
            return Verdict(ended(ad))
        case JobStatus.SENDING:
            return Verdict(BatchJobStatus(BlockPhase.RUNNING, "sends its output home"))
        case JobStatus.SUSPENDED:
            return Verdict(BatchJobStatus(BlockPhase.RUNNING, "suspended"))
        case _:
            return Verdict(BatchJobStatus(BlockPhase.RUNNING, f"on {ad['RemoteHost']}" if ad.get("RemoteHost") else ""))


def ended(ad: Ad, *, memory_bytes: int = 0) -> BatchJobStatus:
    """The status of a job that has left the queue. A pool may remove held jobs by itself."""
    how, loss = _how(ad), None
    if ad.get("JobStatus") == JobStatus.REMOVED:
        if how.startswith("out of walltime"):
            loss = LossReason.WALLTIME
        elif how.startswith("held"):  # in which attributes is up to the version
            prefix = "Last" if "HoldReasonCode" not in ad else ""
            status = BatchJobStatus(BlockPhase.ENDED, how, loss=loss_of_hold(ad, prefix=prefix))
            return _with_hold(status, ad, prefix=prefix, memory_bytes=memory_bytes)
        else:
            loss = LossReason.CANCELLED
    return BatchJobStatus(BlockPhase.ENDED, how, loss=loss)


def waits_s(ad: Ad) -> float:
    now_s = float(ad.get("ServerTime") or 0)
    return now_s - float(ad.get("EnteredCurrentStatus") or now_s) if now_s else 0.0


def was_evicted(ad: Ad, *, ran: bool = False) -> bool:
    """True if an idle job has run, and was not held since. A refusal by a machine leaves a code, too."""
    if ad.get("LastJobStatus") != JobStatus.RUNNING:
        return False
    code = ad.get("VacateReasonCode")
    return bool(ad.get("NumJobStarts")) or (code is not None and (ran or code not in _NOT_STARTED))


def loss_of_vacate(ad: Ad) -> LossReason:
    """VACATED before version 24, which gives no code."""
    code, sub = ad.get("VacateReasonCode"), ad.get("VacateReasonSubCode")
    if code in _PREEMPTED:
        return LossReason.PREEMPTED
    if code in _NODE_LOST:
        return LossReason.NODE_LOST
    if (code, sub) == _OUT_OF_MEMORY:
        return LossReason.OUT_OF_MEMORY
    return LossReason.VACATED


def loss_of_hold(ad: Ad, *, prefix: str = "") -> LossReason:
    """Return the loss of the pilot that ran. `prefix`: `Last` for a hold that is over."""
    return LossReason.OUT_OF_MEMORY if _cause(ad, prefix=prefix) == _MEMORY else LossReason.HELD


def _cause(ad: Ad, *, prefix: str = "") -> str:
    """Empty for a hold by a person, or for files in transfer."""
    code, sub = ad.get(f"{prefix}HoldReasonCode"), ad.get(f"{prefix}HoldReasonSubCode")
    if code in (BY_OWNER, SPOOLING, None):
        return ""
    words = str(ad.get(f"{prefix}HoldReason", "")).lower()
    if (code, sub) == _OUT_OF_MEMORY or (code in _BY_POLICY and "memory" in words):
        return _MEMORY
    if (code, sub) == _OUT_OF_DISK or (code in _BY_POLICY and "disk" in words):
        return "disk"
    return f"hold code {code}"


def _advice(ad: Ad, cause: str, *, memory_bytes: int) -> str:
    if cause == _MEMORY:
        asked = memory_bytes or int(ad.get("RequestMemory") or 0) * 2**20
        used = int(ad.get("ResidentSetSize_RAW") or 0) * 1024
        has = f'memory = "{show_bytes(asked)}" is too small' if asked else "memory is too small"
        took = f": the pilot used {show_bytes(used)}" if used else " for the pilot"
        return f"{has}{took}; raise [provider] memory in the site file"
    if cause == "disk":
        return "the pilot used more disk than it was granted; raise [pilot] cache_size, for which disk is requested"
    if "permission denied" in str(ad.get("HoldReason") or ad.get("LastHoldReason")).lower():
        return (
            "jobs run as users of the pool's own there, who may not use the session's folder; set [provider]"
            ' shared_files = false and [environment] kind = "packed" in the site file'
        )
    return "mend what HTCondor says, in the site file or on its machines"


def has_failed(ad: Ad) -> bool:
    return ad.get("JobStatus") == JobStatus.COMPLETED and bool(ad.get("ExitBySignal") or ad.get("ExitCode"))


def is_unmatched(ad: Ad) -> bool:
    """The job waits although a negotiator has looked for a slot."""
    return ad.get("JobStatus") == JobStatus.IDLE and "no match" in _rejected(ad)


def is_unseen(ad: Ad, *, for_s: float) -> bool:
    """No negotiator has looked at the job for so long. It looks at only one of several equal jobs."""
    return ad.get("JobStatus") == JobStatus.IDLE and waits_s(ad) >= for_s and not _rejected(ad)


def read_analysis(text: str) -> str:
    """Read `condor_q -better-analyze`: how many slots a job's requirements rule out, and by which of their conditions.
    Empty if slots suit. A divided machine counts with its free part; HTCondor 24.4 and later also look at the whole
    machine."""
    total = re.search(r"Of (\d+) (?:slots|machines)", text)
    out, own, later = (_slots(what, text) for what in _SLOTS)
    if total is None or out is None:
        return ""
    said = [f"{out} are ruled out by the job's requirements"] if out else []
    drained = r"0\s+" if re.search(r"^Step\s+Matched\s+Drained\s", text, re.MULTILINE) else ""
    rows = dict(re.findall(rf"^\s*(\[\d+\])\s+0\s+{drained}(\S.*?)\s*$", text, re.MULTILINE))
    nowhere = [_written_out(row, text) for row in _unmet(rows)]
    if nowhere and out == int(total[1]):
        of_machines = "slots on" in text[total.start() :]
        now = (
            "" if of_machines or not any(_DIVIDED.search(part) for part in nowhere) else " with the resources free now"
        )
        said = [f"{said[0]}: none meets {', '.join(nowhere)}{now}"]
    said += [f"{own} refuse it by their own"] if own else []
    said += [f"{later} would suit, and are taken"] if later else []
    return f"of {total[1]} slots {', '.join(said)}" if said else ""


def _unmet(rows: Mapping[str, str]) -> list[str]:
    """Return the smallest conditions that no slot meets, without the parts of a choice."""
    parts = {number: set(_NUMBER.findall(row)) for number, row in rows.items()}
    choices = {part for number, row in rows.items() if "||" in row for part in parts[number]}
    return [
        row for number, row in rows.items() if number not in choices and ("||" in row or not parts[number] & set(rows))
    ]


def _written_out(condition: str, text: str) -> str:
    """The analysis writes `[0] && [1]`."""
    parts: dict[str, str] = dict(re.findall(r"^\s+(\[\d+\])\s+: (\S.*?)\s*$", text, re.MULTILINE))
    parts |= dict(re.findall(r"^\s*(\[\d+\])\s+\d+\s+(?:\d+\s+)?(\S.*?)\s*$", text, re.MULTILINE))

    def part(number: re.Match[str]) -> str:
        found = parts.pop(number[0], "")  # no condition holds itself
        return f"({found})" if re.search(r"&&|\|\||\?", found) else found or number[0]

    while parts:
        before, condition = condition, _NUMBER.sub(part, condition)
        if condition == before:
            break
    return condition


def _how(ad: Ad) -> str:
    if ad.get("JobStatus") == JobStatus.REMOVED:
        why = str(ad.get("RemoveReason", "")).strip()
        if "PeriodicRemove" in why and ad.get("LastJobStatus") == JobStatus.RUNNING:
            return f"out of walltime ({show_seconds(float(ad.get(WALLTIME, 0)))})"
        held = ad.get("HoldReason") or ad.get("LastHoldReason")  # which of them is up to the version
        if ad.get("LastJobStatus") == JobStatus.HELD and held:
            return f"held by HTCondor: {_line(held)}"
        return f"removed {why}".strip()
    if ad.get("ExitBySignal"):
        return f"killed by {_signal(ad.get('ExitSignal', 0))}"
    return f"exit code {ad['ExitCode']}" if "ExitCode" in ad else "ended"


def _why_evicted(ad: Ad) -> str:
    """`preempted from slot1@n1: PREEMPT expression evaluated to True`, or `node failed: n1: ...`."""
    slot, loss = str(ad.get("LastRemoteHost") or ""), loss_of_vacate(ad)
    if loss is LossReason.NODE_LOST:
        what = ": ".join(["node failed", *filter(None, [slot.partition("@")[2]])])
    else:
        what = "preempted" if loss is LossReason.PREEMPTED else "evicted"
        what += f" from {slot}" if slot else ""
    return ": ".join([what, *filter(None, [_line(ad.get("VacateReason", ""))])])


def _rejected(ad: Ad) -> str:
    """Why the negotiator has found no slot. The ad keeps an old reason after a match and an eviction."""
    waits_since = float(ad.get("EnteredCurrentStatus") or 0)
    if float(ad.get("LastRejMatchTime") or waits_since) < waits_since:
        return ""
    return _line(ad.get("LastRejMatchReason", "")).partition(" |")[0]  # where a negotiator numbers its diagnoses


def _held(ad: Ad, *, since_s: float, held_s: float) -> Verdict:
    reason = f"held: {_line(ad.get('HoldReason', 'HTCondor does not say why'))}"
    has_run = ad.get("NumJobStarts") or ad.get("LastJobStatus") == JobStatus.RUNNING
    stays = ad.get("HoldReasonCode") in (BY_OWNER, SPOOLING) or since_s < held_s
    phase = BlockPhase.PENDING if stays else BlockPhase.ENDED
    return Verdict(BatchJobStatus(phase, reason, loss=loss_of_hold(ad) if has_run else None), remove=not stays)


def _slots(what: str, text: str) -> int | None:
    found = re.search(rf"^\s*(\d+)(?: slots)? {what}", text, re.MULTILINE)
    return int(found[1]) if found else None


def _line(text: Any) -> str:
    return " ".join(str(text).split())


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"

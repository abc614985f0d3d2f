"""What HTCondor's ads of our jobs mean: pure functions over `condor_q -json` and `condor_history -json`.

An evicted job goes from RUNNING back to IDLE, and runs again: its block is PENDING. A held one is PENDING with
HTCondor's reason, until it has been held for `HELD_S`: then it counts as ended, because it would never run by itself
(`Verdict.remove`). One that its owner holds, or that waits for its files, just waits. A removed job stays in the queue
for as long as its machine does not answer.

How long a job has been in its state is told by one clock, the schedd's: an ad that is asked for it has `ServerTime`.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.manager.factory.batch import BatchTrouble, JobLook
from stoker.manager.factory.condor_description import BLOCK, BY_OWNER, SPOOLING, WALLTIME
from stoker.manager.protocol.blocks import BlockPhase
from stoker.units import show_seconds

Ad = Mapping[str, Any]

ATTRIBUTES = (
    "ClusterId", "ProcId", "JobStatus", "LastJobStatus", "EnteredCurrentStatus", "ServerTime", "RemoteHost",
    "LastRemoteHost", "NumShadowStarts", "LastRejMatchReason", "LastRejMatchTime", "HoldReason", "HoldReasonCode",
    "LastHoldReason", "RemoveReason", "ExitCode", "ExitBySignal", "ExitSignal", BLOCK, WALLTIME,
)  # fmt: skip

HELD_S = 120.0
"""Sites that release jobs by themselves do it within this time, or rarely."""
_SLOTS = (
    r"are rejected by your job's requirements",
    r"reject your job because of their own",
    r"would match if drained",
)
"""What `condor_q -better-analyze` says of some of the slots."""
_DIVIDED = re.compile(r"\b(Cpus|Memory|Disk|GPUs|AvailableGPUs)\b", re.IGNORECASE)
"""What slots are divided by."""
_STUCK_S = 120.0
"""A job that was removed is still there after this: its machine does not answer."""


class JobStatus(enum.IntEnum):
    """HTCondor's states of a job."""

    IDLE = 1
    RUNNING = 2
    REMOVED = 3
    """To be removed, or (in the history) removed."""
    COMPLETED = 4
    HELD = 5
    SENDING = 6
    """Its output is sent home."""
    SUSPENDED = 7


class Verdict(msgspec.Struct, frozen=True):
    """How a job is. `remove`: it is to be removed from the queue; `force`: without waiting for its machine."""

    look: JobLook
    remove: bool = False
    force: bool = False


def read_ads(text: str, *, command: str) -> list[Ad]:
    """The ads that a command printed with `-json`; nothing at all is none. Raises BatchTrouble."""
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
    """The id of a job: `12.0`."""
    return f"{ad['ClusterId']}.{ad.get('ProcId', 0)}"


def judge(ad: Ad, *, held_s: float = HELD_S) -> Verdict:
    """How a job in the queue is."""
    now_s = float(ad.get("ServerTime") or 0)
    since_s = now_s - float(ad.get("EnteredCurrentStatus") or now_s) if now_s else 0.0
    match ad.get("JobStatus"):
        case JobStatus.IDLE:
            return Verdict(JobLook(BlockPhase.PENDING, _why_idle(ad)))
        case JobStatus.HELD:
            return _held(ad, since_s=since_s, held_s=held_s)
        case JobStatus.REMOVED:
            stuck = since_s > _STUCK_S
            where = f"; {ad['RemoteHost']} does not answer" if stuck and ad.get("RemoteHost") else ""
            phase = BlockPhase.ENDED if stuck else BlockPhase.RUNNING
            return Verdict(JobLook(phase, f"is being removed{where}"), remove=stuck, force=stuck)
        case JobStatus.COMPLETED:
            return Verdict(ended(ad))
        case JobStatus.SENDING:
            return Verdict(JobLook(BlockPhase.RUNNING, "sends its output home"))
        case JobStatus.SUSPENDED:
            return Verdict(JobLook(BlockPhase.RUNNING, "suspended"))
        case _:
            return Verdict(JobLook(BlockPhase.RUNNING, f"on {ad['RemoteHost']}" if ad.get("RemoteHost") else ""))


def ended(ad: Ad) -> JobLook:
    """How a job that has left the queue came to its end."""
    return JobLook(BlockPhase.ENDED, _how(ad))


def has_failed(ad: Ad) -> bool:
    """Whether a job ended by itself, and not well."""
    return ad.get("JobStatus") == JobStatus.COMPLETED and bool(ad.get("ExitBySignal") or ad.get("ExitCode"))


def is_unmatched(ad: Ad) -> bool:
    """Whether a job waits although the pool was asked for a slot for it."""
    return ad.get("JobStatus") == JobStatus.IDLE and "no match" in _rejected(ad)


def read_analysis(text: str) -> str:
    """What `condor_q -better-analyze` found out of a job: how many slots its requirements rule out, and by which of
    their conditions. Empty when it says nothing of that, or that slots suit: the next negotiation finds them.

    A machine that is divided into slots counts with what is free of it now, also where all would be enough. Where
    HTCondor 25 sees that, it adds a column to its table, and tells how many would match if nothing ran on them.
    """
    total = re.search(r"Of (\d+) (?:slots|machines)", text)
    out, own, later = (_slots(what, text) for what in _SLOTS)
    if total is None or out is None:
        return ""
    said = [f"{out} are ruled out by the job's requirements"] if out else []
    drained = r"0\s+" if re.search(r"^Step\s+Matched\s+Drained\s", text, re.MULTILINE) else ""
    nowhere = re.findall(rf"^\s*\[\d+\]\s+0\s+{drained}(\S.*?)\s*$", text, re.MULTILINE)
    if nowhere and out == int(total[1]):
        now = " with what is free now" if any(_DIVIDED.search(condition) for condition in nowhere) else ""
        said = [f"{said[0]}: none meets {', '.join(nowhere)}{now}"]
    said += [f"{own} refuse it by their own"] if own else []
    said += [f"{later} would suit, and are taken"] if later else []
    return f"of {total[1]} slots {', '.join(said)}" if said else ""


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


def _why_idle(ad: Ad) -> str:
    words = ["idle"]
    if ad.get("NumShadowStarts") and ad.get("LastRemoteHost"):
        words = [f"evicted from {ad['LastRemoteHost']}, idle"]
    return ": ".join([*words, *filter(None, [_rejected(ad)])])


def _rejected(ad: Ad) -> str:
    """Why the negotiator has found no slot for the job since it waits. The ad keeps the reason when the job is matched
    after all, and evicted again: then it is an old story."""
    waits_since = float(ad.get("EnteredCurrentStatus") or 0)
    if float(ad.get("LastRejMatchTime") or waits_since) < waits_since:
        return ""
    return _line(ad.get("LastRejMatchReason", "")).partition(" |")[0]  # where a negotiator numbers its diagnoses


def _held(ad: Ad, *, since_s: float, held_s: float) -> Verdict:
    reason = f"held: {_line(ad.get('HoldReason', 'HTCondor does not say why'))}"
    if ad.get("HoldReasonCode") in (BY_OWNER, SPOOLING) or since_s < held_s:
        return Verdict(JobLook(BlockPhase.PENDING, reason))
    return Verdict(JobLook(BlockPhase.ENDED, reason), remove=True)


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

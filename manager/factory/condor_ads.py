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
    "LastRemoteHost", "NumShadowStarts", "LastRejMatchReason", "HoldReason", "HoldReasonCode", "RemoveReason",
    "ExitCode", "ExitBySignal", "ExitSignal", BLOCK, WALLTIME,
)  # fmt: skip

HELD_S = 120.0
"""Sites that release jobs by themselves do it within this time, or rarely."""
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
    except ValueError as error:
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
    return ad.get("JobStatus") == JobStatus.IDLE and "no match" in str(ad.get("LastRejMatchReason", ""))


def read_analysis(text: str) -> str:
    """What `condor_q -better-analyze` found out of a job: how many slots its requirements rule out, and by which of
    their conditions. Empty when it says nothing of that."""
    total = re.search(r"Of (\d+) (?:slots|machines)", text)
    out = re.search(r"^\s*(\d+)(?: slots)? are rejected by your job's requirements", text, re.MULTILINE)
    own = re.search(r"^\s*(\d+)(?: slots)? reject your job because of their own", text, re.MULTILINE)
    if total is None or out is None:
        return ""
    said = f"of {total[1]} slots {out[1]} are ruled out by the job's requirements"
    nowhere = re.findall(r"^\s*\[\d+\]\s+0\s+(.+?)\s*$", text, re.MULTILINE)
    if nowhere and out[1] == total[1]:
        said += f": none meets {', '.join(nowhere)}"
    return f"{said}, {own[1]} refuse it by their own" if own and own[1] != "0" else said


def _how(ad: Ad) -> str:
    if ad.get("JobStatus") == JobStatus.REMOVED:
        why = str(ad.get("RemoveReason", "")).strip()
        if "PeriodicRemove" in why and ad.get("LastJobStatus") == JobStatus.RUNNING:
            return f"out of walltime ({show_seconds(float(ad.get(WALLTIME, 0)))})"
        if ad.get("LastJobStatus") == JobStatus.HELD and ad.get("HoldReason"):
            return f"held by HTCondor: {_line(ad['HoldReason'])}"
        return f"removed {why}".strip()
    if ad.get("ExitBySignal"):
        return f"killed by {_signal(ad.get('ExitSignal', 0))}"
    return f"exit code {ad['ExitCode']}" if "ExitCode" in ad else "ended"


def _why_idle(ad: Ad) -> str:
    words = ["idle"]
    if ad.get("NumShadowStarts") and ad.get("LastRemoteHost"):
        words = [f"evicted from {ad['LastRemoteHost']}, idle"]
    if ad.get("LastRejMatchReason"):
        words.append(_line(ad["LastRejMatchReason"]).partition(" |")[0])  # where a negotiator numbers its diagnoses
    return ": ".join(words)


def _held(ad: Ad, *, since_s: float, held_s: float) -> Verdict:
    reason = f"held: {_line(ad.get('HoldReason', 'HTCondor does not say why'))}"
    if ad.get("HoldReasonCode") in (BY_OWNER, SPOOLING) or since_s < held_s:
        return Verdict(JobLook(BlockPhase.PENDING, reason))
    return Verdict(JobLook(BlockPhase.ENDED, reason), remove=True)


def _line(text: Any) -> str:
    return " ".join(str(text).split())


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"

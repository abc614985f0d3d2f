"""Blocks in words: how many wait and for what, and how the others ended. Pure: statuses in, texts out."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from stoker.protocol.blocks import BlockPhase, BlockStatus
from stoker.units import show_about, show_seconds

_SHOWN_JOBS = 6
"""More ranges of job ids than these are not listed."""
SILENT_S = 600.0
"""A job that has run for so long without a pilot will hardly bring one."""
READ_JOB = "read what its job printed, in the session folder's submit/"


def coming(jobs: Sequence[BlockStatus]) -> list[str]:
    """Blocks that have no pilot, a text a phase: `3 queued (Priority; the first in about 11 min)`."""
    leaving = [job for job in jobs if job.leaving and not job.pilots]
    jobs = [job for job in jobs if not job.leaving]
    asked = [job for job in jobs if job.phase == BlockPhase.ASKED.value]
    pending = pending_of(jobs)
    running = [job for job in jobs if job.phase == BlockPhase.RUNNING.value and not job.pilots]
    suspended = [job for job in running if is_suspended(job.reason)]
    starting = [job for job in running if job not in suspended and not job.emptied_s]
    emptied = [job for job in running if job not in suspended and job.emptied_s]
    texts = []
    if asked:
        texts.append(f"{len(asked)} to be submitted")
    if pending:
        texts.append(f"{len(pending)} queued{_in_brackets(reasons(pending), soonest(pending))}")
    if suspended:
        texts.append(f"{len(suspended)} suspended by the batch system")
    if starting:
        longest_s = max(job.since_s for job in starting)
        advice = f": {READ_JOB}" if longest_s > SILENT_S else ""
        texts.append(f"{len(starting)} starting (its job runs for {show_seconds(longest_s)}, no pilot yet{advice})")
    if emptied:
        longest = show_seconds(max(job.emptied_s for job in emptied))
        texts.append(f"{len(emptied)} without a pilot (it went {longest} ago; the batch system says that the job runs)")
    if leaving:
        texts.append(f"{len(leaving)} being cancelled")
    return texts


def is_suspended(reason: str) -> bool:
    """Whether the batch system has stopped a job that it counts as running, by the reason that it gives."""
    return reason.startswith("suspended")


def pending_of(jobs: Iterable[BlockStatus]) -> list[BlockStatus]:
    """Those that the batch system keeps waiting."""
    return [job for job in jobs if job.phase == BlockPhase.PENDING.value]


def reasons(jobs: Sequence[BlockStatus]) -> str:
    """Why they wait, in the batch system's words: `Priority`, or `5 Priority, 3 QOSMaxGRESPerUser`."""
    counted = Counter(job.reason for job in jobs if job.reason)
    if len(counted) == 1 and counted.total() == len(jobs):
        return next(iter(counted))
    return ", ".join(f"{count} {reason}" for reason, count in counted.most_common())


def soonest(jobs: Iterable[BlockStatus]) -> float:
    """Seconds until the batch system expects to start the first of them; 0 = it does not say."""
    return min((job.expected_in_s for job in jobs if job.expected_in_s > 0), default=0.0)


def expected(seconds: float, now: datetime.datetime) -> str:
    """`10:42 (in 11 min)`, with the date where it is not today's."""
    at = now + datetime.timedelta(seconds=seconds)
    clock = f"{at:%H:%M}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M}"
    return f"{clock} (in {show_seconds(seconds)})"


def ended(counts: Mapping[str, int]) -> list[str]:
    """`9 preempted by Slurm`, the most frequent first."""
    return [f"{count} {how}" for how, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]


def job_ids(jobs: Iterable[str]) -> str:
    """`88123-88130, 88140`: ids of jobs, those that follow each other as a range."""
    ids = list(dict.fromkeys(jobs))
    if not all(id.isdecimal() for id in ids):
        return ", ".join(ids)
    ranges: list[list[int]] = []
    for number in sorted(map(int, ids)):
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = f", and {len(texts) - _SHOWN_JOBS} more" if len(texts) > _SHOWN_JOBS else ""
    return ", ".join(texts[:_SHOWN_JOBS]) + more


def _in_brackets(why: str, expected_in_s: float) -> str:
    first = f"the first in about {show_about(expected_in_s)}" if expected_in_s else ""
    inside = "; ".join(filter(None, (why, first)))
    return f" ({inside})" if inside else ""

"""How many devices each job of a fixed cluster gets: ElasticFlow's plan (Gu et al., ASPLOS 2023), as arithmetic.

The idea. Work on more devices is done sooner but costs more device time, for speedup is never quite linear. So a job
should get as few devices as its deadline allows (its *minimum satisfactory share*), and what is left over should go
where it costs the least device time. Three questions, each answered from times alone:

- `minimum_shares` (progressive filling): jobs are looked at by deadline, the nearest first. Each gets the smallest size
  with which it is in time, on the devices that those before it leave free; where they leave fewer, it runs on fewer
  for that while. What it gets is its own until it is done.
- `admits`: a new job is admitted if it is in time so, and nobody that was in time before is late because of it.
- `elastic`: devices that are free just now, when all have their shares, are given out one step at a time: first to
  jobs that have none, then always to the job whose device time grows least for each device more.

Sizes are powers of two, times the devices of a replica: with buddy allocation such jobs always fit if their sum does.

Sources: the paper's abstract, its published simulator and traces (github.com/gudiandian/ElasticFlow-artifact: the rules
were read, nothing was taken over), and public summaries of the paper. Where we differ, and why:

- Time is cut where something changes, not into slots of equal length: nothing is rounded, and there are as many pieces
  as jobs. When plans are made anew is the caller's business.
- A start costs: a job that begins, or that goes on with another size, does nothing for `start_s`. The simulator adds
  this to the jobs after it has planned; planned with, fewer promises are broken.
- A step may be of more than one size: a running job that could do with less goes back to what it has first of all, for
  that saves a start.
- The paper's greedy step counts the device time of one slot at the new size. Here a job is taken to keep what it gets
  until it is done: with jobs of minutes and starts of many seconds no change would ever pay within a slot. Nobody is
  given more if that makes it later. (The published simulator sorts these steps the other way round, the most device
  time first; the paper's aim, the least device time in all, is what is done here.)
- Filling goes from now on with one size. The simulator fills from the deadline backwards with two sizes, which leaves
  less idle in between; that matters for plans that span days.
- A new job is refused there too while any admitted job is late, for whatever reason. Here only if it does harm.

Times are in seconds, on the manager's clock; sizes are in devices.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A job as a plan finds it. `run_s`: sizes, ascending, and how long what is left of it takes with each, descending.

    `deadline_at`: 0 = none. `size`: what it has now (0 = it waits), and `lag_s` how long until it goes on with that.
    `start_s`: how long it does nothing when it begins or changes its size. A `fixed` one keeps its size until it is
    done."""

    id: int
    deadline_at: float
    run_s: tuple[tuple[int, float], ...]
    size: int = 0
    start_s: float = 0.0
    lag_s: float = 0.0
    fixed: bool = False

    def lasts_s(self, size: int) -> float:
        return (self.lag_s if size == self.size else self.start_s) + dict(self.run_s)[size]


def by_two(run_s: Iterable[tuple[int, float]], *, smallest: int = 1, unit: int = 1) -> tuple[tuple[int, float], ...]:
    """A job's `run_s` from its replicas' (`smallest` of them or more): powers of two that make it faster, in devices
    of which each replica takes `unit`. The smallest itself if there is none."""
    kept: list[tuple[int, float]] = []
    for count, seconds in sorted(run_s):
        if count < smallest or (count & (count - 1) and count != smallest):
            continue
        if not kept or seconds < kept[-1][1]:
            kept.append((count, seconds))
    powers = [step for step in kept if not step[0] & (step[0] - 1)]
    return tuple((count * unit, seconds) for count, seconds in powers or kept)


class Share(msgspec.Struct, frozen=True):
    """What a job is to get: from when to when how many devices."""

    pieces: tuple[tuple[float, float, int], ...]

    @property
    def ends_at(self) -> float:
        return self.pieces[-1][1]

    def size_at(self, now: float) -> int:
        return next((size for start, end, size in self.pieces if start <= now < end), 0)


class Free:
    """Devices that nobody was given yet, from now on for ever."""

    __slots__ = ("_at", "_count")

    def __init__(self, devices: int, *, now: float) -> None:
        self._at, self._count = [now], [devices]

    def pieces(self) -> Iterator[tuple[float, float, int]]:
        for n, start in enumerate(self._at):
            yield start, self._at[n + 1] if n + 1 < len(self._at) else math.inf, self._count[n]

    def take(self, share: Share) -> None:
        for start, end, size in share.pieces:
            first, last = self._cut(start), self._cut(end)
            for n in range(first, last):
                self._count[n] -= size

    def _cut(self, at: float) -> int:
        n = bisect_right(self._at, at)
        if self._at[n - 1] == at:
            return n - 1
        self._at.insert(n, at)
        self._count.insert(n, self._count[n - 1])
        return n


def fill(job: Job, size: int, free: Free) -> Share | None:
    """The job with this size, or the most below it where fewer are free, until it is done; None if it never is."""
    left, has, lost = 1.0, job.size, job.lag_s
    pieces: list[tuple[float, float, int]] = []
    for start, end, spare in free.pieces():
        step = _below(job, min(size, spare))
        if step is None:
            has = 0
            continue
        if step[0] != has:
            has, lost = step[0], job.start_s
        done_at = start + lost + left * step[1]
        if done_at <= end:
            pieces.append((start, done_at, has))
            return Share(tuple(pieces))
        pieces.append((start, end, has))
        if end > start + lost:
            left -= (end - start - lost) / step[1]
        lost = max(0.0, start + lost - end)
    return None


def minimum_share(job: Job, free: Free) -> Share | None:
    """The smallest size with which the job is in time; None if there is none (or nothing that it could be late for)."""
    for size, seconds in job.run_s:
        share = fill(job, size, free) if seconds < math.inf else None
        if share is not None and share.ends_at <= job.deadline_at:
            return share
    return None


def minimum_shares(jobs: Iterable[Job], devices: int, *, now: float) -> dict[int, Share]:
    """Shares of all jobs that are in time with one, by id. Those that are not get none."""
    free = Free(devices, now=now)
    line = sorted(jobs, key=lambda job: (not job.fixed, job.deadline_at, job.id))
    shares: dict[int, Share] = {}
    for job in line:
        share = Share(((now, now + job.lasts_s(job.size), job.size),)) if job.fixed else minimum_share(job, free)
        if share is not None:
            free.take(share)
            if not job.fixed or share.ends_at <= job.deadline_at:
                shares[job.id] = share
    return shares


def admits(job: Job, others: Sequence[Job], devices: int, *, now: float) -> bool:
    before = minimum_shares(others, devices, now=now)
    after = minimum_shares([*others, job], devices, now=now)
    return job.id in after and before.keys() <= after.keys()


def elastic(jobs: Sequence[Job], shares: dict[int, Share], devices: int, *, now: float) -> dict[int, int]:
    """What each job has from now on, by id: its share, and its part of what is left over. Jobs without a share (they
    have no deadline, or are late) get of that too."""
    sizes = {job.id: job.size if job.fixed else shares[job.id].size_at(now) if job.id in shares else 0 for job in jobs}
    spare = devices - sum(sizes.values())
    by_id = {job.id: job for job in jobs if not job.fixed}
    heap = [step for job in by_id.values() for step in _steps(job, sizes[job.id])]
    heapq.heapify(heap)
    while heap and spare > 0:
        _, _, id, had, size = heapq.heappop(heap)
        if had != sizes[id] or size - had > spare:
            continue
        sizes[id] = size
        spare -= size - had
        for step in _steps(by_id[id], size):
            heapq.heappush(heap, step)
    return sizes


_Step = tuple[float, float, int, int, int]
"""Device seconds more for each device more, the deadline, the job, its size before and after."""


def _steps(job: Job, has: int) -> Iterator[_Step]:
    due = job.deadline_at or math.inf
    if not has:
        yield -math.inf, due, job.id, 0, job.run_s[0][0]
        return
    lasts_s = job.lasts_s(has)
    for size, _ in job.run_s:
        if size > has and job.lasts_s(size) < lasts_s:
            yield (size * job.lasts_s(size) - has * lasts_s) / (size - has), due, job.id, has, size


def _below(job: Job, most: int) -> tuple[int, float] | None:
    found = None
    for step in job.run_s:
        if step[0] > most:
            break
        found = step
    return found

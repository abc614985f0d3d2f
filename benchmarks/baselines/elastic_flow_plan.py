"""ElasticFlow's plan (Gu et al., ASPLOS 2023): the number of devices for each job of a fixed cluster.

More devices end a job sooner but cost more device time. `minimum_shares` (progressive filling) takes jobs in order of
deadlines. Each job gets the fewest devices that meet its deadline (*minimum satisfactory share*). `admits`: a new job
is admitted if it meets its deadline and makes no other job late. `elastic_sizes` gives free devices first to jobs
without devices, then to the job whose device time grows least per added device. Sizes are powers of two times the
devices of a replica. Jobs therefore fit if their sum fits (buddy allocation).

Sources: the paper's abstract, its published simulator (github.com/gudiandian/ElasticFlow-artifact), and public
summaries. Differences from the simulator: time is divided at changes instead of equal slots, and the plan includes
`start_s`. A step may skip sizes, and counts the device time until the job ends instead of one slot. Filling goes
forward with one size; the simulator goes backward from the deadline with two sizes. Only a job that makes other jobs
late is refused.

Times are in seconds on the manager's clock; sizes are in devices.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A job in a plan. `run_s`: pairs of size and seconds of the remaining items, in ascending order.

    `deadline_at`: 0 = none. `size`: current size (0 = waiting). `lag_s`: seconds until the job runs at that size.
    `start_s`: seconds of a start or a change of size.
    """

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
    """Return device numbers (powers of two) that make a job faster, with the seconds. `run_s`: pairs of replicas and
    seconds.
    """
    kept: list[tuple[int, float]] = []
    for count, seconds in sorted(run_s):
        if count < smallest or (count & (count - 1) and count != smallest):
            continue
        if not kept or seconds < kept[-1][1]:
            kept.append((count, seconds))
    powers = [step for step in kept if not step[0] & (step[0] - 1)]
    return tuple((count * unit, seconds) for count, seconds in powers or kept)


class Share(msgspec.Struct, frozen=True):
    pieces: tuple[tuple[float, float, int], ...]

    @property
    def ends_at(self) -> float:
        return self.pieces[-1][1]

    def size_at(self, now: float) -> int:
        return next((size for start, end, size in self.pieces if start <= now < end), 0)


class Free:
    def __init__(self, devices: int, *, now: float) -> None:
        self._at, self._count = [now], [devices]

    def pieces(self) -> Iterator[tuple[float, float, int]]:
        yield from zip(self._at, [*self._at[1:], math.inf], self._count, strict=True)

    def take(self, share: Share) -> None:
        for start, end, size in share.pieces:
            for n in range(self._cut(start), self._cut(end)):
                self._count[n] -= size

    def _cut(self, at: float) -> int:
        n = bisect_right(self._at, at)
        if self._at[n - 1] == at:
            return n - 1
        self._at.insert(n, at)
        self._count.insert(n, self._count[n - 1])
        return n


def fill(job: Job, size: int, free: Free) -> Share | None:
    """Return the share of a job: up to `size` devices, as far as devices are free; None if the job never ends."""
    left, has, lost = 1.0, job.size, job.lag_s
    pieces: list[tuple[float, float, int]] = []
    for start, end, spare in free.pieces():
        step = max((step for step in job.run_s if step[0] <= min(size, spare)), default=None)
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
    for size, seconds in job.run_s:
        share = fill(job, size, free) if seconds < math.inf else None
        if share is not None and share.ends_at <= job.deadline_at:
            return share
    return None


def minimum_shares(jobs: Iterable[Job], devices: int, *, now: float) -> dict[int, Share]:
    """Return shares by id of jobs that can meet their deadlines."""
    free = Free(devices, now=now)
    shares: dict[int, Share] = {}
    for job in sorted(jobs, key=lambda job: (not job.fixed, job.deadline_at, job.id)):
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


def elastic_sizes(jobs: Sequence[Job], shares: dict[int, Share], devices: int, *, now: float) -> dict[int, int]:
    """Return the size of each job from now on: its share plus some free devices."""
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


def _steps(job: Job, has: int) -> Iterator[tuple[float, float, int, int, int]]:
    """Yield steps: added device seconds per added device, deadline, job id, old and new size."""
    due = job.deadline_at or math.inf
    if not has:
        yield -math.inf, due, job.id, 0, job.run_s[0][0]
        return
    lasts_s = job.lasts_s(has)
    for size, _ in job.run_s:
        if size > has and job.lasts_s(size) < lasts_s:
            yield (size * job.lasts_s(size) - has * lasts_s) / (size - has), due, job.id, has, size

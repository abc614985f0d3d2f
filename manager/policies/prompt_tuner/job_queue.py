"""Jobs that wait for one warm pool, in the order in which they are looked at, kept up to date a change at a time.

With thousands of jobs a round must cost what changed, not what waits. A job's *need* is the least number of replicas
with which it would be in time if it began now. It grows as time goes by and never shrinks, so jobs lie in rows by need,
each row in order of deadlines, and move to the next row when their latest start has passed (a heap says whose is next).
Whoever has some idle replicas looks at the heads of the rows that these would do for, and at nobody else.

Jobs that are late whatever they get, and those without a deadline, have rows of their own, behind all others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

import msgspec

Key = tuple[int, float, int]
"""A job's place in line: `HOPEFUL`, `LATE` or `REST`; its deadline (of the rest: less its priority); its id."""

HOPEFUL, LATE, REST = 0, 1, 2
FRONT: Key = (-1, 0.0, 0)
"""Before all jobs."""

_EARLY_S = 1e-6
"""A job's need is looked at again so much before its latest start, which is known up to rounding."""
_FEW = 8
"""So many jobs are put into a row one by one; of more the row is sorted."""


class PoolJob(msgspec.Struct, frozen=True, gc=False):
    """A job that waits. `run_s[a - 1]`: an upper bound of its time on `a` replicas, meeting included, not longer for
    more of them. `deadline_at`: 0 = none, then it runs when nobody else wants to, in order of `priority`. `least`: the
    fewest replicas that it can run on. One that `measures` runs on these, for nobody knows how long it takes."""

    id: int
    deadline_at: float
    run_s: tuple[float, ...]
    least: int = 1
    measures: bool = False
    priority: int = 0

    def fewest(self, *, begins_at: float, most: int) -> int:
        """The least number of replicas, up to `most`, with which the job ends in time; 0 if none is enough."""
        for count, seconds in enumerate(self.run_s[:most], start=1):
            if begins_at + seconds <= self.deadline_at:
                return count
        return 0

    def is_lost(self, now: float) -> bool:
        """Whether it is late however many replicas it gets, were they warm."""
        return now + self.run_s[-1] > self.deadline_at


def by_deadline(jobs: Iterable[PoolJob]) -> list[PoolJob]:
    """Those with a deadline first, the nearest before all; then the others, oldest first."""
    return sorted(jobs, key=lambda job: (not job.deadline_at, job.deadline_at or -job.priority, job.id))


class JobQueue:
    """See the module's text. `now` never goes back."""

    __slots__ = ("_due", "_keys", "_needs", "_turns", "jobs", "late", "rest", "rows")

    def __init__(self) -> None:
        self.jobs: dict[int, PoolJob] = {}
        self.rows: dict[int, list[Key]] = {}
        """Jobs that can be in time, by their need."""
        self.late: list[Key] = []
        """Those that cannot."""
        self.rest: list[Key] = []
        """Those that need not."""
        self._keys: dict[int, Key] = {}
        self._needs: dict[int, int] = {}
        self._due: dict[int, float] = {}
        """When the need of each that can be in time may have grown."""
        self._turns: list[tuple[float, int]] = []
        """The same as a heap. An entry that does not agree is old; when many come they are swept."""

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def hopeful(self) -> bool:
        """Whether any can be in time."""
        return any(self.rows.values())

    def put(self, jobs: Iterable[PoolJob], *, now: float) -> None:
        """Add these, or put them in the place of those with the same ids."""
        fresh: dict[int, list[Key]] = {}
        turns: list[tuple[float, int]] = []
        for job in jobs:
            id, deadline_at = job.id, job.deadline_at
            if id in self.jobs:
                self.remove(id)
            self.jobs[id] = job
            if not deadline_at:
                need, key = -1, (REST, -float(job.priority), id)
            else:
                run_s = job.run_s
                need = 1 if now + run_s[0] <= deadline_at else job.fewest(begins_at=now, most=len(run_s))
                key = (HOPEFUL if need else LATE, deadline_at, id)
                if need:
                    self._due[id] = at = deadline_at - run_s[need - 1] - _EARLY_S
                    turns.append((at, id))
            self._keys[id], self._needs[id] = key, need
            if need in fresh:
                fresh[need].append(key)
            else:
                fresh[need] = [key]
        if len(turns) <= _FEW:
            for turn in turns:
                heapq.heappush(self._turns, turn)
        else:
            self._turns = [(at, id) for at, id in self._turns if self._due.get(id) == at] + turns
            heapq.heapify(self._turns)
        for need, keys in fresh.items():
            row = self._row(need)
            if len(keys) <= _FEW:
                for key in keys:
                    insort(row, key)
            else:
                row += keys
                row.sort()

    def remove(self, id: int) -> None:
        """A job waits no more. One that is not here is none."""
        if self.jobs.pop(id, None) is None:
            return
        row, key = self._row(self._needs.pop(id)), self._keys.pop(id)
        del row[bisect_left(row, key)]
        self._due.pop(id, None)

    def advance(self, now: float) -> bool:
        """Jobs whose latest start with what they needed has passed need more now, or are late. Whether any does."""
        moved = False
        turns = self._turns
        while turns and turns[0][0] <= now:
            at, id = heapq.heappop(turns)
            if self._due.get(id) != at:
                continue
            job, need, key = self.jobs[id], self._needs[id], self._keys[id]
            grown = job.fewest(begins_at=now, most=len(job.run_s))
            if grown:
                self._set_alarm(id, max(now + _EARLY_S, job.deadline_at - job.run_s[grown - 1] - _EARLY_S))
            else:
                del self._due[id]
            if grown == need:
                continue
            moved = True
            row = self._row(need)
            del row[bisect_left(row, key)]
            key = (HOPEFUL if grown else LATE, job.deadline_at, id)
            self._keys[id], self._needs[id] = key, grown
            insort(self._row(grown), key)
        return moved

    def is_hopeful(self, id: int) -> bool:
        """Whether a job is here that can be in time."""
        return self._needs.get(id, 0) > 0

    def need(self, id: int) -> int:
        """With how many replicas a job would be in time if it began now; 0 = it is late, or has no deadline."""
        return max(0, self._needs.get(id, 0))

    def key(self, id: int) -> Key:
        """A job's place."""
        return self._keys[id]

    def first(self, *, after: Key, most: int, but: Iterable[int] = ()) -> Key | None:
        """Of the jobs that so many replicas would do for, the first behind this place that is none of those."""
        found: Key | None = None
        for need, row in self.rows.items():
            if need > most:
                continue
            place = bisect_right(row, after)
            while place < len(row) and row[place][2] in but:
                place += 1
            if place < len(row) and (found is None or row[place] < found):
                found = row[place]
        return found

    def behind(self, after: Key) -> Iterator[Key]:
        """All jobs behind this place, in order. They stay as they are meanwhile."""
        rows = [row for row in (*self.rows.values(), self.late, self.rest) if row and row[-1] > after]
        ways = [_from(row, bisect_right(row, after)) for row in rows]
        return heapq.merge(*ways) if len(ways) > 1 else iter(ways[0] if ways else ())

    def _set_alarm(self, id: int, at: float) -> None:
        self._due[id] = at
        heapq.heappush(self._turns, (at, id))

    def _row(self, need: int) -> list[Key]:
        if need > 0:
            row = self.rows.get(need)
            if row is None:
                row = self.rows[need] = []
            return row
        return self.rest if need else self.late


def _from(row: list[Key], place: int) -> Iterator[Key]:
    for at in range(place, len(row)):
        yield row[at]

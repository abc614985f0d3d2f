"""Jobs that a listing lacks. One listing without a job proves nothing: it may come from a cache, or be incomplete.

A job that the batch system does not account for is lost when `LISTINGS` listings in a row lack it, over the site's
`listing_lag` at least. The same holds for the job of a submission that got no answer: before that it may still appear,
and its block is not submitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

LISTINGS = 3


class Absences:
    """Counts the listings in a row that lack a job. `lag_s`: how long a listing may lack a job that exists; 0 where one
    listing is proof."""

    def __init__(self, *, lag_s: float, clock: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._clock = clock
        self._missed: dict[Hashable, tuple[int, float]] = {}
        """How many listings in a row lacked a job, and when the first of them was read."""

    def listed(self, job: Hashable) -> None:
        """Note that a listing has this job, or that its end is known."""
        self._missed.pop(job, None)

    def missed(self, job: Hashable) -> bool:
        """Note that a listing lacks this job; True once that proves that there is no such job."""
        now = self._clock()
        count, since = self._missed.get(job, (0, now))
        self._missed[job] = count + 1, since
        if self._lag_s and (count + 1 < LISTINGS or now - since < self._lag_s):
            return False
        del self._missed[job]
        return True

"""A model's traffic: what its jobs keep busy, and how long an idle instance of it should stay (see `infless`)."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

_ENOUGH = 8
"""Times between arrivals that make a histogram."""
_RECENT = 20
"""A job's predicted time is a mean over about this many jobs."""


class Traffic:
    """When jobs of a model came in the last `long_s`, and what they took."""

    __slots__ = ("_arrivals", "_instance_s", "_jobs", "long_s", "short_s")

    def __init__(self, *, long_s: float, short_s: float) -> None:
        self.long_s, self.short_s = long_s, short_s
        self._arrivals: deque[float] = deque()
        self._instance_s = 0.0
        self._jobs = 0

    def came(self, at: float) -> None:
        self._arrivals.append(at)
        while self._arrivals[0] < at - self.long_s:
            self._arrivals.popleft()

    def takes(self, instance_s: float) -> None:
        self._jobs += 1
        self._instance_s += (instance_s - self._instance_s) / min(self._jobs, _RECENT)

    def wants(self, now: float, *, window_s: float) -> int:
        count = sum(at > now - window_s for at in self._arrivals) if window_s > 0 else 0
        return math.ceil(count / window_s * self._instance_s) if count > 1 else 0

    def keep_s(self, now: float, *, gamma: float, tail: float) -> float | None:
        """Return the quantile of the times between arrivals, mixed by `gamma`; None while there are too few."""
        long_s = self._gap_s(now, over_s=self.long_s, tail=tail)
        if long_s is None:
            return None
        short_s = self._gap_s(now, over_s=self.short_s, tail=tail)
        return gamma * long_s + (1 - gamma) * (long_s if short_s is None else short_s)

    def _gap_s(self, now: float, *, over_s: float, tail: float) -> float | None:
        times = [at for at in self._arrivals if at > now - over_s]
        gaps = sorted(later - at for at, later in pairwise(times))
        return gaps[min(len(gaps) - 1, int(tail * len(gaps)))] if len(gaps) >= _ENOUGH else None

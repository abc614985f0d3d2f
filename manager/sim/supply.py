"""How much work devices could do until a time, at the most: capacity as the scenario gives it, less what each block
needs before it is of use.

A block is of use at time t only if it has run since t - s at least, where s is the least that passes from its start to
its first call. So it ran at every moment of the s seconds before t, and of such blocks there were never more than the
capacity of any of those moments: the useful ones are at most the least capacity within [t - s, t]. That holds whichever
blocks were preempted, and whenever others were asked for.

Where blocks have a walltime w there is a second limit. A block that lasts l is of use for at most l - s of that, which
is at most the share (w - s) / w of l, since l is at most w; and all blocks together last at most as long as the
integral of the capacity says.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

Steps = list[tuple[float, float]]
"""What a quantity is from each time on, until the next; zero before the first."""


def limited(capacity: Iterable[tuple[float, int]], *, most: int, from_s: float) -> Steps:
    """Blocks that may run: as the capacity says, at most so many, none before a time."""
    before = 0.0
    steps: Steps = []
    for at, blocks in capacity:
        count = float(min(blocks, most))
        if at <= from_s:
            before = count
        else:
            steps.append((at, count))
    return [(from_s, before), *steps]


def useful(steps: Steps, *, setup_s: float) -> Steps:
    """Of blocks that may run, the most that have run for so long: the least of each window."""
    times = [at for at, _ in steps]
    values = [0.0, *(value for _, value in steps)]  # one more at the front: before the first step there are none
    moments = sorted({*times, *(at + setup_s for at in times)})
    found: Steps = []
    for at, until in pairwise([*moments, math.inf]):
        middle = at + setup_s + 1.0 if until == math.inf else (at + until) / 2
        first, last = bisect_right(times, middle - setup_s), bisect_right(times, middle)
        found.append((at, min(values[first : last + 1])))
    return found


def clipped(steps: Steps, *, from_s: float) -> Steps:
    """The same, but zero before a time."""
    at_first = next((value for at, value in reversed(steps) if at <= from_s), 0.0)
    return [(from_s, at_first), *((at, value) for at, value in steps if at > from_s)]


class Supply:
    """Work that can be done over time: the sum of rates, each times a price."""

    def __init__(self, parts: Sequence[tuple[Steps, float]]) -> None:
        events = sorted((at, number, value) for number, (steps, _) in enumerate(parts) for at, value in steps)
        now = [0.0] * len(parts)
        self._times: list[float] = []
        self._rates: list[float] = []
        for at, number, value in events:
            now[number] = value * parts[number][1]
            if self._times and self._times[-1] == at:
                self._rates[-1] = math.fsum(now)
            else:
                self._times.append(at)
                self._rates.append(math.fsum(now))
        spans = (rate * (b - a) for rate, (a, b) in zip(self._rates, pairwise(self._times), strict=False))
        self._amounts = [0.0, *accumulate(spans)] if self._times else []

    def until(self, at: float) -> float:
        """How much can have been done by a time."""
        place = bisect_right(self._times, at) - 1
        if place < 0:
            return 0.0
        return self._amounts[place] + self._rates[place] * (at - self._times[place])

    def when(self, amount: float) -> float:
        """The earliest time by which so much can have been done; infinite if that is never so."""
        if amount <= 0:
            return 0.0
        place = bisect_left(self._amounts, amount) - 1
        if place < 0:
            return math.inf
        rate = self._rates[place]
        return self._times[place] + (amount - self._amounts[place]) / rate if rate else math.inf

"""The recent rate of something that is counted: calls that ended a second, over the last half minute. Pure.

The manager counts for the session, each context and each pilot. Forecasts of a map and progress bars use `pace`.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
"""A rate is over the last of so many seconds."""

Counts = deque[list[int]]
"""What was counted in each of the last seconds: [second, count], oldest first."""


def add(counts: Counts, count: int, *, now: float) -> None:
    """Count, and forget what is older than the window. Done for every frame of ends, so it is short."""
    second = int(now)
    if counts:
        last = counts[-1]
        if last[0] == second:
            last[1] += count
            return
    counts.append([second, count])
    while counts[0][0] < second - WINDOW_S:
        counts.popleft()


def total(counts: Counts, *, now: float) -> int:
    """What was counted within the window."""
    return sum(count for second, count in counts if second > now - WINDOW_S)


def since_s(counts: Counts, *, now: float) -> float:
    """Seconds since the first count within the window; 0.0 if nothing was counted."""
    first = next((second for second, _ in counts if second > now - WINDOW_S), None)
    return 0.0 if first is None else max(0.0, now - first)


def per_second(counts: Counts, *, now: float) -> float:
    """The rate over the window, or since the first count within it; 0.0 if nothing was counted.

    Results come in bursts, so it is measured from the first burst to the last: counts over the time until now would
    double with each burst, and halve until the next one. Without a burst when one is due, the rate falls.
    """
    window = [(second, count) for second, count in counts if second > now - WINDOW_S]
    if not window:
        return 0.0
    (first, first_count), (last, _), counted = window[0], window[-1], sum(count for _, count in window)
    until_now = counted / max(1.0, now - first)
    return min(until_now, (counted - first_count) / (last - first)) if last > first else until_now

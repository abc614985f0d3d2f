"""Estimate the rate of work, and the time for the remaining work.

`WorkPace` is the estimator of every progress bar and forecast. Times are monotonic seconds.

Results arrive in bursts. A count over a fixed window would double or halve with each burst. Therefore:

- The rate is measured between bursts: the results after the first burst, divided by the time from the first to the last
  burst of the window. The window is the longer of 30 s and five times the longest gap.
- The rate follows a new measurement with a time constant of 10 s. The rate changes by at most a factor of 1.4 in
  10 s (1.7 if rate and measurement differ by more than a factor of 3).
- The time before the first burst may include the load of a model. The window drops this time when the bursts cover an
  equal time and no gap is longer than half of this time.
- If no result arrives for 1.5 times the longest gap, the rate decreases by at most a factor of 1.4 in 10 s.
- The time left changes by at most a factor of 1.9 in 10 s, in addition to elapsed time.
"""

from __future__ import annotations

import math
from collections import deque

from stoker.units import show_about

WINDOW_S = 30.0
_MIN_WINDOW_GAPS = 5.0
"""Minimum window of the rate, as a multiple of the longest gap between bursts."""
_BURST_S, _BURST_GAP_SHARE = 1.0, 0.25
"""A burst lasts 1 s from its first result, or 0.25 of the longest gap between bursts if this is longer."""
_RATE_TIME_CONSTANT_S = 10.0
_MAX_LOG_STEP_PER_S, _MAX_LOG_STEP_PER_BURST = math.log(1.4) / 10.0, math.log(1.35)
"""Limits on the change of the rate's logarithm: per second, and per burst."""
_LARGE_LOG_DIFFERENCE, _MAX_LARGE_LOG_STEP_PER_S = math.log(3.0), math.log(1.7) / 10.0
_SETTLE_S = 5.0
"""Seconds after the first result during which the rate counts as unknown."""
_MAX_LOG_STEP_OF_TIME_LEFT = math.log(1.9) / 10.0
_MAX_SILENCE_GAPS = 1.5


class _Burst:
    __slots__ = ("count", "first", "last")

    def __init__(self, at: float, count: float) -> None:
        self.first = self.last = at
        self.count = count


class WorkPace:
    def __init__(self, now: float) -> None:
        self._bursts: deque[_Burst] = deque([_Burst(now, 0.0)])
        """Bursts, oldest first. The count of the first burst is ignored."""
        self._rate = 0.0
        """Results per second at the last complete burst (0.0: not measured yet)."""
        self._first_at: float | None = None
        self._rated_at = now
        self._longest_s = 0.0
        self._last_time_left: tuple[float, float, float] | None = None
        """The last result of `left_s`: when it was returned, the remaining work, and the remaining seconds."""

    def record_wait(self, now: float) -> None:
        """Record that the work has not started yet. No effect after the first result."""
        if len(self._bursts) == 1:
            self._bursts[0] = _Burst(now, 0.0)

    def add(self, count: float, now: float) -> None:
        if count <= 0:
            return
        if self._first_at is None:
            self._first_at = now
        last = self._bursts[-1]
        if len(self._bursts) > 1 and not self._is_burst_complete(now):
            last.last = now
            last.count += count
            return
        self._rate = self.per_second(now)
        if self._rate:
            self._update_rate()
        self._bursts.append(_Burst(now, count))
        self._slide_window()

    def per_second(self, now: float) -> float:
        """Return results per second, or 0.0 if unknown."""
        rate = self._current_rate(now)
        silent_s, patience_s = now - self._bursts[-1].last, _MAX_SILENCE_GAPS * max(self._longest_s, _BURST_S)
        if silent_s <= patience_s:
            return rate
        return rate * max(patience_s / silent_s, math.exp(-_MAX_LOG_STEP_PER_S * (silent_s - patience_s)))

    def left_s(self, rest: float, now: float) -> float | None:
        """Return the seconds until `rest` more results have arrived, or None if unknown."""
        if rest <= 0:
            return 0.0
        rate = self._current_rate(now)
        if not rate:
            return None
        bursts = self._bursts
        burst_s = self._count_in_window() / (len(bursts) - 1) / rate
        begun_s = min(max(0.0, now - bursts[-1].last), burst_s)
        return self._smooth_seconds_left(rest, max(0.0, rest / self.per_second(now) - begun_s), now)

    def _smooth_seconds_left(self, rest: float, left_s: float, now: float) -> float:
        """Limit the change of `left_s` since the last answer, unless the remaining work has grown."""
        if self._last_time_left is not None and rest <= self._last_time_left[1]:
            at, _, before_s = self._last_time_left
            passed_s = max(0.0, now - at)
            factor = math.exp(min(_MAX_LOG_STEP_OF_TIME_LEFT * passed_s, 10.0))
            left_s = max(min(before_s / factor, before_s - passed_s), min(left_s, before_s * factor))
        self._last_time_left = (now, rest, left_s)
        return left_s

    def _is_burst_complete(self, now: float) -> bool:
        return now - self._bursts[-1].first >= max(_BURST_S, _BURST_GAP_SHARE * self._longest_s)

    def _current_rate(self, now: float) -> float:
        if self._rate or self._first_at is None or now < self._first_at + _SETTLE_S:
            return self._rate
        if len(self._bursts) == 2 and not self._is_burst_complete(now):
            return 0.0
        return self._measure_rate()

    def _count_in_window(self) -> float:
        return sum(burst.count for burst in self._bursts) - self._bursts[0].count

    def _measure_rate(self) -> float:
        span_s = self._bursts[-1].last - self._bursts[0].last
        return self._count_in_window() / max(span_s, _BURST_S)

    def _slide_window(self) -> None:
        bursts = self._bursts
        gaps = [bursts[at].first - bursts[at - 1].last for at in range(1, len(bursts))]
        since_first_s = bursts[-1].first - bursts[1].first
        if not bursts[0].count and gaps[0] <= since_first_s and gaps[0] > 2 * max(gaps[1:], default=math.inf):
            bursts.popleft()
        self._longest_s = max(bursts[at].first - bursts[at - 1].last for at in range(1, len(bursts)))
        begins = bursts[-1].last - max(WINDOW_S, _MIN_WINDOW_GAPS * self._longest_s)
        while len(bursts) > 2 and bursts[1].last <= begins:
            bursts.popleft()

    def _update_rate(self) -> None:
        if len(self._bursts) < 2 or self._bursts[-1].last - self._bursts[0].last < _BURST_S:
            return
        now = self._bursts[-1].last
        since_s, self._rated_at = max(0.0, now - self._rated_at), now
        far = math.log(self._measure_rate() / self._rate)
        step = (1.0 - math.exp(-since_s / _RATE_TIME_CONSTANT_S)) * far
        most = min(
            (_MAX_LARGE_LOG_STEP_PER_S if abs(far) > _LARGE_LOG_DIFFERENCE else _MAX_LOG_STEP_PER_S) * since_s,
            _MAX_LOG_STEP_PER_BURST,
        )
        self._rate *= math.exp(max(-most, min(most, step)))


def format_rate(per_second: float, noun: str) -> str:
    """Return `7.6 calls/s`, `1,200 calls/s` or `3.1 calls/min`."""
    if per_second < 0.095:
        return f"{60 * per_second:.1f} {noun}/min"
    return f"{per_second:.1f} {noun}/s" if per_second < 100 else f"{per_second:,.0f} {noun}/s"


def format_time_left(seconds: float | None) -> str:
    """Return `left 0:25`, `left 12:40`, `left 3 h 10 min`; "" if unknown."""
    if seconds is None:
        return ""
    whole = round(seconds)
    return f"left {whole // 60}:{whole % 60:02d}" if whole < 3600 else f"left {show_about(seconds)}"


# ---- calls in the last 30 s


RECENT_S = 30.0

Counts = deque[list[int]]
"""The count of each second as a [second, count] pair, oldest first."""


def add_recent_count(counts: Counts, count: int, *, now: float) -> None:
    """Add `count` to the pair of the current second."""
    second = int(now)
    if counts:
        last = counts[-1]
        if last[0] == second:
            last[1] += count
            return
    counts.append([second, count])
    while counts[0][0] < second - RECENT_S:
        counts.popleft()


def recent_total(counts: Counts, *, now: float) -> int:
    return sum(count for second, count in counts if second > now - RECENT_S)


def seconds_since_first_count(counts: Counts, *, now: float) -> float:
    first = next((second for second, _ in counts if second > now - RECENT_S), None)
    return 0.0 if first is None else max(0.0, now - first)


def recent_rate_per_second(counts: Counts, *, now: float) -> float:
    """Return the counts per second between the first and the last burst. The rate decreases while the next burst is
    overdue.
    """
    window = [(second, count) for second, count in counts if second > now - RECENT_S]
    if not window:
        return 0.0
    (first, first_count), (last, _), counted = window[0], window[-1], sum(count for _, count in window)
    until_now = counted / max(1.0, now - first)
    return min(until_now, (counted - first_count) / (last - first)) if last > first else until_now

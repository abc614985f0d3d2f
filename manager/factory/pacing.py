"""Limit the rate of requests to a batch system, over all sources of a session, to the rate that strict sites allow.

The budget is a token bucket. With `poll = "10 s"` it allows a burst of 36 requests, then 3.8 per minute; a shorter poll
allows more. Only cancellations may use the last tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

BURST, A_MINUTE = 36.0, 3.8
"""Requests in a burst and per minute, for a poll period of `_POLL_S`. Strict sites allow 40 and 4."""
_POLL_S = 10.0
FOR_SUBMISSIONS, FOR_QUERIES = 4.0, 6.0
_STRETCH, _SLOW = 2.5, 4.0
"""The next query waits `_STRETCH` poll periods if less than half of the tokens are left. The wait is also at least
`_SLOW` times the duration of the last query.
"""
_ROUNDING = 1e-6
_LEAST_WAIT_S = 0.01

T = TypeVar("T")


class Pacer:
    """Token bucket that limits the requests of several threads. `listing`: the shared output of the command that lists
    all jobs.
    """

    def __init__(
        self,
        *,
        poll_s: float = _POLL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        scale = _POLL_S / poll_s
        self.burst, self.per_s = BURST * scale, A_MINUTE * scale / 60.0
        self.listing: Listing[Any] = Listing(fresh_s=poll_s / 2, clock=clock)
        self._clock, self._sleep = clock, sleep
        self._level, self._at = self.burst, clock()
        self._lock = threading.Lock()

    def take(self) -> None:
        while True:
            with self._lock:
                wait_s = self._seconds_until(1.0)
                if not wait_s:
                    self._level -= 1.0
                    return
            self._sleep(wait_s)

    def wait_s(self, *, leaving: float) -> float:
        """Return the seconds until a request can be sent so that `leaving` tokens remain."""
        with self._lock:
            return self._seconds_until(leaving + 1.0)

    def poll_period_s(self, poll_s: float, *, took_s: float) -> float:
        """Return the seconds between two queries: more if few tokens are left or the last query was long."""
        with self._lock:
            stretch = _STRETCH if self._seconds_until(self.burst / 2) else 1.0
        return max(stretch * poll_s, _SLOW * took_s)

    def _seconds_until(self, level: float) -> float:
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._at) * self.per_s)
        self._at = now
        lacking = level - self._level
        return max(_LEAST_WAIT_S, lacking / self.per_s) if lacking > _ROUNDING else 0.0


def unlimited() -> Pacer:
    return Pacer(poll_s=1e-6)


def in_words(poll_s: float) -> str:
    """Return the maximum request rate as text: `3 requests a minute while its jobs run, …`."""
    pacer = Pacer(poll_s=poll_s, clock=lambda: 0.0)
    at_rest = min(60.0 / (_STRETCH * poll_s) + 1.0, 60.0 * pacer.per_s)
    return (
        f"{at_rest:.1f} requests a minute while its jobs run, {60 * pacer.per_s:.1f} at most, "
        f"after the first {pacer.burst:.0f}"
    )


class Listing(Generic[T]):
    """Shares the output of a command that lists all jobs: one thread runs the command, and other threads wait
    for it.
    """

    def __init__(self, *, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._said: T | None = None
        self._at = 0.0
        self._lock = threading.Lock()

    def read(self, ask: Callable[[], T]) -> T:
        with self._lock:
            if self._said is None or self._clock() - self._at > self._fresh_s:
                self._said, self._at = None, self._clock()
                self._said = ask()
            return self._said

    def forget(self) -> None:
        with self._lock:
            self._said = None

"""Limit how often all sites of a session together send requests to a batch system, as strict sites demand.

A request takes a token from a bucket. With `poll = "10 s"` the bucket contains up to 36 tokens and gets 3.8 per minute;
a shorter poll gives more. Submissions and queries leave the last tokens to cancellations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

MAX_BURST, MAX_PER_MINUTE = 36.0, 3.8
"""Maximum requests at once and per minute, for a poll period of `_REFERENCE_POLL_S`. Strict sites allow 40 and 4."""
_REFERENCE_POLL_S = 10.0
TOKENS_LEFT_BY_SUBMISSIONS, TOKENS_LEFT_BY_QUERIES = 4.0, 6.0
_POLL_STRETCH, _SLOW_QUERY_FACTOR = 2.5, 4.0
"""If less than half of the request tokens are left, the next query waits `_POLL_STRETCH` poll periods. Each query waits
at least `_SLOW_QUERY_FACTOR` times as long as the last query took.
"""
_TOKEN_ROUNDING = 1e-6
_MIN_WAIT_S = 0.01

T = TypeVar("T")


class RequestPacer:
    """Token bucket that limits the requests of several threads. `listing`: output of the command that lists all jobs,
    which the threads share.
    """

    def __init__(
        self,
        *,
        poll_s: float = _REFERENCE_POLL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        scale = _REFERENCE_POLL_S / poll_s
        self.burst, self.per_s = MAX_BURST * scale, MAX_PER_MINUTE * scale / 60.0
        self.listing: SharedListing[Any] = SharedListing(fresh_s=poll_s / 2, clock=clock)
        self._clock, self._sleep = clock, sleep
        self._tokens, self._at = self.burst, clock()
        self._lock = threading.Lock()

    def take_token(self) -> None:
        while True:
            with self._lock:
                wait_s = self._seconds_until_tokens(1.0)
                if not wait_s:
                    self._tokens -= 1.0
                    return
            self._sleep(wait_s)

    def seconds_until_request(self, *, remaining_tokens: float) -> float:
        """Return the seconds until `remaining_tokens` tokens would remain after a request."""
        with self._lock:
            return self._seconds_until_tokens(remaining_tokens + 1.0)

    def poll_period_s(self, poll_s: float, *, took_s: float) -> float:
        """Return the seconds until the next query: more if few tokens are left, or if the last query took long."""
        with self._lock:
            stretch = _POLL_STRETCH if self._seconds_until_tokens(self.burst / 2) else 1.0
        return max(stretch * poll_s, _SLOW_QUERY_FACTOR * took_s)

    def _seconds_until_tokens(self, needed_tokens: float) -> float:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        lacking = needed_tokens - self._tokens
        return max(_MIN_WAIT_S, lacking / self.per_s) if lacking > _TOKEN_ROUNDING else 0.0


def unlimited_pacer() -> RequestPacer:
    return RequestPacer(poll_s=1e-6)


def describe_request_rate(poll_s: float) -> str:
    """Describe how many requests are sent: `3 requests a minute while its jobs run, …`."""
    pacer = RequestPacer(poll_s=poll_s, clock=lambda: 0.0)
    at_rest = min(60.0 / (_POLL_STRETCH * poll_s) + 1.0, 60.0 * pacer.per_s)
    return (
        f"{at_rest:.1f} requests a minute while its jobs run, {60 * pacer.per_s:.1f} at most, "
        f"after the first {pacer.burst:.0f}"
    )


class SharedListing(Generic[T]):
    """Output of a command that several threads need: one thread runs the command, and the others wait for it."""

    def __init__(self, *, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._said: T | None = None
        self._at = 0.0
        self._lock = threading.Lock()

    def read(self, run_command: Callable[[], T]) -> T:
        with self._lock:
            if self._said is None or self._clock() - self._at > self._fresh_s:
                self._said, self._at = None, self._clock()
                self._said = run_command()
            return self._said

    def forget(self) -> None:
        with self._lock:
            self._said = None

"""How often a batch system is asked: no more often than a strict site allows, counted over all sources of a session.

Some sites give a user so many requests at once and a few more each minute, and refuse the rest. The budget here is a
token bucket of that form, a little smaller: with `poll = "10 s"` 36 requests at once and 3.8 a minute. A shorter poll
asks for more, in proportion. Cancellations may take the last token; submissions and queries leave some for them, and a
query that is long overdue comes before a submission.

`Listing` keeps what one command said of all jobs, for the other sources of the same batch system, and for the second
question within one step. What changes the queue forgets it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

BURST, A_MINUTE = 36.0, 3.8
"""Requests at once and each minute, where the poll is `_POLL_S`: within 40 and 4."""
_POLL_S = 10.0

FOR_SUBMISSIONS, FOR_QUERIES = 4.0, 6.0
"""Tokens that submissions and queries leave in the bucket."""

_ROUNDING = 1e-6
_LEAST_WAIT_S = 0.01

T = TypeVar("T")


class Pacer:
    """A token bucket. Safe with several threads."""

    def __init__(
        self,
        *,
        poll_s: float = _POLL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        scale = _POLL_S / poll_s
        self.burst, self.per_s = BURST * scale, A_MINUTE * scale / 60.0
        self.listing_s = poll_s / 2
        """How old a listing may be that another source has asked for."""
        self._clock, self._sleep = clock, sleep
        self._level, self._at = self.burst, clock()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Count a request; waits until there is a token for it."""
        while (wait_s := self._take()) > 0:
            self._sleep(wait_s)

    def wait_s(self, *, leaving: float) -> float:
        """How long until a request could be made that leaves so many tokens; 0 = now."""
        with self._lock:
            self._fill()
            return self._until(leaving + 1.0)

    @property
    def is_low(self) -> bool:
        """True when half of the tokens are gone: what can wait should."""
        with self._lock:
            self._fill()
            return self._level < self.burst / 2

    def _take(self) -> float:
        with self._lock:
            self._fill()
            wait_s = self._until(1.0)
            if not wait_s:
                self._level -= 1.0
            return wait_s

    def _until(self, level: float) -> float:
        """How long until the bucket holds so much. Never so little that a clock cannot tell it from nothing."""
        lacking = level - self._level
        return max(_LEAST_WAIT_S, lacking / self.per_s) if lacking > _ROUNDING else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._at) * self.per_s)
        self._at = now


def in_words(poll_s: float) -> str:
    """What a session asks of its batch system at most: `3 requests a minute at rest, …`."""
    pacer = Pacer(poll_s=poll_s, clock=lambda: 0.0)
    at_rest = min(60.0 / (_STRETCH * poll_s) + 1.0, 60.0 * pacer.per_s)
    return (
        f"{at_rest:.1f} requests a minute while its jobs run, {60 * pacer.per_s:.1f} at most, "
        f"after the first {pacer.burst:.0f}"
    )


_STRETCH = 2.5


def poll_period_s(poll_s: float, pacer: Pacer | None, *, took_s: float) -> float:
    """How long until the next query: longer when the tokens go, and when the last one took long."""
    stretch = _STRETCH if pacer is not None and pacer.is_low else 1.0
    return max(stretch * poll_s, _SLOW * took_s)


_SLOW = 4.0


class Listing(Generic[T]):
    """What one command said of all jobs. Safe with several threads: while one asks, the others wait for its answer."""

    def __init__(self, *, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._said: T | None = None
        self._at = 0.0
        self._lock = threading.Lock()

    def read(self, ask: Callable[[], T]) -> T:
        """The last answer, if it is fresh; else that of `ask`."""
        with self._lock:
            if self._said is None or self._clock() - self._at > self._fresh_s:
                self._said, self._at = None, self._clock()
                self._said = ask()
            return self._said

    def forget(self) -> None:
        """The queue was changed: the next answer must be a new one."""
        with self._lock:
            self._said = None

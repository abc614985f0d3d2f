"""Limit the calls in flight of a `stoker.map`, collect its results, and report its progress to the manager.

The window limits calls in flight (`most_calls`), bytes of their arguments, and bytes of waiting results (`most_bytes`
each). It assumes that each call in flight returns a result of the recent mean size. If result bytes limit the calls in
flight, the limit rises each time that the program waits for a result.

Before the first result, the number of permitted calls is a quarter of `most_bytes` divided by the maximum inline size.
This number doubles every GROW_S seconds. An empty window permits at least one call.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from stoker.protocol.calls import INLINE_LIMIT_BYTES, CallEnd, CallForecast, CallProgress, Payload
from stoker.protocol.ids import CallId, RecipeKey
from stoker.protocol.to_manager import MapReport
from stoker.units import MOST_NUMBER

WINDOW_BYTES = 256_000_000
CHUNK = 500
GROW_S = 2.0
_MEAN_RESULTS = 64
"""Approximate number of recent results from which the mean result size is computed."""


class CallWindow:
    """Limits the calls in flight of a stream, and the bytes of its unread results. The stream updates `in_flight` and
    `held_bytes`.
    """

    def __init__(
        self, most_calls: int, *, most_bytes: int = WINDOW_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_calls = most_calls
        self.most_bytes = most_bytes
        self.in_flight: dict[CallId, tuple[int, int]] = {}
        """Item index and argument bytes of each call in flight."""
        self.held_bytes = 0
        self._argument_bytes = 0
        self._ended = 0
        self._mean_bytes = 0.0
        self._extra_calls = 0
        """Number of calls allowed in flight beyond the limit that result bytes set."""
        self._clock = clock
        self._began_at = 0.0

    def count_argument_bytes(self, argument_bytes: int) -> None:
        self._argument_bytes += argument_bytes

    def count_ended_calls(self, calls: int, *, argument_bytes: int, result_bytes: int) -> None:
        self._argument_bytes -= argument_bytes
        self._ended += calls
        self.held_bytes += result_bytes
        if calls:
            self._mean_bytes += (result_bytes / calls - self._mean_bytes) * min(
                1.0, calls / min(self._ended, _MEAN_RESULTS)
            )

    def raise_limit_after_starvation(self) -> None:
        flying, most = len(self.in_flight), self._current_call_limit()
        if self._ended and most < self.most_calls and flying >= most - most // 4:
            self._extra_calls = min(self._extra_calls + 1 + flying // 8, self.most_calls)

    def free_call_count(self, *, ready: int, only_if_many: bool = False) -> int:
        """Return how many calls can be sent now. `only_if_many`: return 0 instead of a small number."""
        most, flying = self._current_call_limit(), len(self.in_flight)
        if not flying and not ready:
            return most or 1
        if self._argument_bytes >= self.most_bytes:
            return 0
        room = max(0, min(most, 2 * self.most_calls - ready) - flying)
        return 0 if only_if_many and flying and room < CHUNK and room < most // 4 else room

    def seconds_until_growth(self) -> float | None:
        """Return the seconds until the limit on calls in flight rises; None if only a result raises it."""
        if self._ended or not self.in_flight or self._initial_call_limit() >= self.most_calls:
            return None
        return GROW_S - (self._clock() - self._began_at) % GROW_S

    def clear(self) -> None:
        self.in_flight.clear()
        self._argument_bytes = self.held_bytes = 0

    def _current_call_limit(self) -> int:
        if not self._ended:
            return min(self.most_calls, self._initial_call_limit())
        free_bytes = self.most_bytes - self.held_bytes
        if self._mean_bytes * self.most_calls <= free_bytes:
            return self.most_calls
        if self._extra_calls and self.held_bytes > self.most_bytes // 2:
            self._extra_calls //= 2
        return min(self.most_calls, max(0, int(free_bytes / max(1.0, self._mean_bytes))) + self._extra_calls)

    def _initial_call_limit(self) -> int:
        now = self._clock()
        if not self.in_flight:
            self._began_at = now
        doublings = int((now - self._began_at) / GROW_S)
        return max(1, self.most_bytes // (4 * INLINE_LIMIT_BYTES)) << min(doublings, 20)


def payload_size(payload: Payload) -> int:
    return len(payload) if isinstance(payload, bytes) else payload.size_bytes


_REPORT_S = 1.0
_numbers = itertools.count()


class MapReporter:
    """Sends reports on one map to the manager, at most one a second."""

    def __init__(
        self, tell: Callable[[MapReport], None], *, name: str, context: str, items: int | None, batch_size: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._tell = tell
        self._number = next(_numbers)
        self._name = name
        self._context = RecipeKey(context)
        self._items = None if items is None else min(items, MOST_NUMBER)
        self._size = batch_size or 1
        self._sent = self._ended = self._kept = self._told_kept = 0
        """Numbers of calls. `_kept` counts calls whose results an earlier run has stored."""
        self._clock = clock
        self._told_at: float | None = None
        self._is_over = False

    def count_sent(self, calls: int) -> None:
        self._sent += calls
        if self._told_kept != self._kept:  # report newly found results of earlier runs at once
            self._told_at = None
        self._send_report_if_due()

    def count_ended(self, calls: int) -> None:
        self._ended += calls
        self._send_report_if_due()

    def count_kept(self) -> None:
        self._kept += 1
        self._send_report_if_due()

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._told_at is not None:
                self._tell(self._create_report())

    def _send_report_if_due(self) -> None:
        now = self._clock()
        if self._is_over or (self._told_at is not None and now - self._told_at < _REPORT_S):
            return
        self._told_at, self._told_kept = now, self._kept
        self._tell(self._create_report())

    def _create_report(self) -> MapReport:
        total, done, kept = self._items, self._size * (self._kept + self._ended), self._size * self._kept
        unsent = -1
        if total is not None:
            done, kept = min(done, total), min(kept, total)
            unsent = max(0, -(-total // self._size) - self._sent - self._kept)
        return MapReport(
            self._number, self._name, self._context, total=-1 if total is None else total, done=done, kept=kept,
            unsent=unsent, over=self._is_over,
        )  # fmt: skip


class MapResultInbox:
    """Collects the results of a `stoker.map` for the consumer's thread."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.wake_queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.on_calls_ended: Callable[[int], None] = lambda _calls: None
        """Function that receives the number of calls that a received frame has ended."""
        self._ended = 0

    def settle(self, end: CallEnd) -> bool:
        self._ended += 1
        self.arrived.append(end)
        return True

    def fail(self, call: CallId, error: Exception) -> None:
        self.arrived.append((call, error))

    def flush(self) -> None:
        if ended := self._ended:
            self._ended = 0
            self.on_calls_ended(ended)
        self.wake_queue.put(None)

    def report(self, said: CallProgress | CallForecast) -> None:
        """Ignore the report."""

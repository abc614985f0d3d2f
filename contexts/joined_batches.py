"""Compute rows of similar length from many callers in shared batches.

At any time, one caller (the *leader*) computes batches until its own rows are done. Each batch has the leader's longest
remaining row and rows of similar length (a ratio of about 2 at most). Afterwards, the caller with the longest wait
leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stoker.contexts import ambient
from stoker.contexts.ambient import StopRequest

Row = TypeVar("Row")
Result = TypeVar("Result")

_ALWAYS_JOINED_TOKENS = 16
"""Two rows can share a batch if the longer has at most twice the tokens of the shorter plus this number."""


@dataclass(eq=False)
class _Request(Generic[Row, Result]):
    kind: Hashable
    rows: Sequence[Row]
    batch_size: int
    results: dict[int, Result] = field(default_factory=dict)
    error: BaseException | None = None
    is_leader: bool = False
    wake_event: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self.results) == len(self.rows)


class JoinedBatches(Generic[Row, Result]):
    """Joins rows of concurrent calls into batches for `compute(kind, rows)`. `length` counts a row's tokens."""

    def __init__(
        self, compute: Callable[[Hashable, list[Row]], Sequence[Result]], *, length: Callable[[Row], int]
    ) -> None:
        self._compute = compute
        self._length = length
        self._lock = threading.Lock()
        self._open_requests: list[_Request[Row, Result]] = []
        self._waiting: dict[Hashable, list[tuple[int, int, int, _Request[Row, Result]]]] = {}
        """Waiting rows by kind, shortest first: (length, unique number, index in the request, request)."""
        self._row_count = 0
        self._has_leader = False

    def run(self, kind: Hashable, rows: Sequence[Row], *, batch_size: int) -> list[Result]:
        """Return the results of `rows`. Raises the exception of a failed batch, or Evicted."""
        if not rows:
            return []
        stop = ambient.current_stop_request()
        stop.raise_if_requested()
        request: _Request[Row, Result] = _Request(kind, rows, batch_size)
        with self._lock:
            self._queue_rows(request)
            request.is_leader = not self._has_leader
            self._has_leader = True
        if not request.is_leader:
            self._wait_for_results(request, stop)
        if request.is_leader:
            self._run_batches_as_leader(request, stop)
        stop.raise_if_requested()
        if request.error is not None:
            raise request.error
        return [request.results[place] for place in range(len(rows))]

    def _queue_rows(self, request: _Request[Row, Result]) -> None:
        waiting = self._waiting.setdefault(request.kind, [])
        for place, row in enumerate(request.rows):
            self._row_count += 1
            waiting.append((self._length(row), self._row_count, place, request))
        waiting.sort()
        self._open_requests.append(request)

    def _wait_for_results(self, request: _Request[Row, Result], stop: StopRequest) -> None:
        stop.add_wake_function(request.wake_event.set)
        try:
            request.wake_event.wait()
        finally:
            stop.remove_wake_function(request.wake_event.set)
        with self._lock:
            if stop.is_requested and not request.is_leader:
                self._remove_request(request)

    def _remove_request(self, request: _Request[Row, Result]) -> None:
        if request in self._open_requests:
            self._open_requests.remove(request)
            waiting = self._waiting[request.kind]
            waiting[:] = [entry for entry in waiting if entry[3] is not request]

    def _run_batches_as_leader(self, request: _Request[Row, Result], stop: StopRequest) -> None:
        try:
            while not (request.is_done or stop.is_requested):
                self._compute_batch(request)
        finally:
            with self._lock:
                self._remove_request(request)
                if self._open_requests:
                    self._open_requests[0].is_leader = True
                    self._open_requests[0].wake_event.set()
                else:
                    self._has_leader = False

    def _compute_batch(self, request: _Request[Row, Result]) -> None:
        with self._lock:
            batch = self._take_batch(request)
        found: Sequence[Result] = ()
        error: BaseException | None = None
        try:
            found = self._compute(request.kind, [each.rows[place] for _, _, place, each in batch])
        except BaseException as raised:  # all callers of this batch receive the exception
            error = raised
        with self._lock:
            for (_, _, place, each), result in zip(batch, found, strict=False):
                each.results[place] = result
            for each in {id(each): each for _, _, _, each in batch}.values():
                each.error = each.error or error
                if each.is_done:
                    self._remove_request(each)
                    each.wake_event.set()

    def _take_batch(self, request: _Request[Row, Result]) -> list[tuple[int, int, int, _Request[Row, Result]]]:
        waiting = self._waiting[request.kind]
        first = next(at for at in range(len(waiting) - 1, -1, -1) if waiting[at][3] is request)
        start, end, most, anchor = first, first + 1, request.batch_size, waiting[first][0]
        while end - start < most:
            shortest, longest = waiting[start][0], waiting[end - 1][0]
            near = {at: waiting[at][0] for at in (start - 1, end) if 0 <= at < len(waiting)}
            near = {
                at: row
                for at, row in near.items()
                if max(longest, row) <= 2 * min(shortest, row) + _ALWAYS_JOINED_TOKENS
            }
            if not near:
                break
            joins = min(near, key=lambda at: (abs(near[at] - anchor), at))
            if waiting[joins][3].batch_size <= end - start:
                break
            most = min(most, waiting[joins][3].batch_size)
            start, end = min(start, joins), max(end, joins + 1)
        batch = waiting[start:end]
        del waiting[start:end]
        return batch

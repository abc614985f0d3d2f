"""`stoker.map`: many calls of one function, and the iterator over their results.

A `ResultStream` submits calls in bulk to the link, without Parsl's task record, future and callback. The link's thread
appends results to a `MapResultInbox`; the thread that reads a result unpickles it. The link does not refer to the
stream, so a dropped stream is garbage-collected, which cancels its calls.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import msgspec
from parsl.executors.errors import BadStateException

from stoker.errors import ConfigError
from stoker.manager.executor import map_inputs
from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.failures import result_or_raise
from stoker.manager.executor.keeping import KeptItem, ResultStoringInbox, check_keep_path, open_result_file
from stoker.manager.executor.kept_file import digest_of_kept_item
from stoker.manager.executor.map_calls import MapCalls, find_kernel_and_executor, unwrap_parsl_app
from stoker.manager.executor.map_inputs import SLOW_S, FailedInput, ItemNotArrived, SlowInputDetector, ThreadedInputs
from stoker.manager.executor.map_window import (
    CHUNK,
    WINDOW_BYTES,
    CallWindow,
    MapReporter,
    MapResultInbox,
    payload_size,
)
from stoker.manager.executor.options import check_boolean_option, check_integer_option, check_option
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.prepared import function_name
from stoker.manager.executor.progress import Follow, MapProgress
from stoker.manager.executor.session_files import remove_result_file
from stoker.protocol.calls import CallEnd, Payload
from stoker.protocol.ids import CallId
from stoker.units import MOST_NUMBER

WINDOW = 2_000
PICKLE_S = 0.02


def map(
    function: Callable[..., Any], items: Iterable[Any], *, batch_size: int | None = None, ordered: bool = True,
    progress: bool | Follow = False, window: int | None = None, return_exceptions: bool = False,
    keep: str | os.PathLike[str] | None = None, reuse: bool = False,
) -> ResultStream:  # fmt: skip
    """Return an iterator over the results of `function` on every item, as they arrive.

    If the program leaves the loop, the remaining calls are cancelled. Calls are not retried.

    Args:
        function: An app or a plain function. An app with `cache=True` or Parsl's `walltime` is refused.
        items: An iterable, which may be endless or contain futures. A data frame (pandas, polars), an Arrow table or
            a data file (a Path: CSV, JSONL, Parquet, Arrow, a saved data set) yields its rows as dicts.
        batch_size: Maximum items per call. The function receives a list of items and returns one result per list. The
            default is the batch size of `@stoker.app`, or single items.
        ordered: Return results in the order of the items. With False, return each result as soon as it arrives.
        progress: True shows a bar. A function receives `(done, total)`, counted in items; `total` may be None.
        window: Maximum calls in flight (default 2,000); fewer while 256 MB of results wait. An input that
            waits for results of this map needs `window=1`.
        return_exceptions: Return the exception of a failed call as its result, and continue.
        keep: A file that stores each result, so that the next run skips these items (docs/long-runs.md).
        reuse: Accept stored results even if the function or its context has changed.

    Raises:
        SessionError: No site is loaded.
        ConfigError: An option or its value is not allowed.
        Exception: The error of a call, instead of its result.
    """
    size = batch_size if batch_size is not None else getattr(unwrap_parsl_app(function), "batch_size", None)
    for name, number in (("batch_size", size), ("window", window)):
        if number is not None:
            check_integer_option(f"stoker.map: {name}", number, least=1)
    for name, value in (("ordered", ordered), ("return_exceptions", return_exceptions), ("reuse", reuse)):
        check_boolean_option(f"stoker.map: {name}", value)
    if reuse and keep is None:
        raise ConfigError(
            "stoker.map: reuse=True has no effect without keep=; name a file with keep=, or leave reuse out"
        )
    path = None if keep is None else check_keep_path(keep)
    follows = isinstance(progress, bool) or callable(progress)
    check_option("stoker.map: progress", progress, follows, "True, False or a function of (done, total)")
    if not callable(function):
        raise ConfigError(f"stoker.map: {function!r} is not a function; write stoker.map(function, items)")
    items = map_inputs.read_table_rows(items)
    total = len(items) if isinstance(items, Sized) else None
    try:
        items = items if isinstance(items, Iterable) else iter(items)  # torch's data sets define only __getitem__
    except TypeError:
        raise ConfigError(f"stoker.map: {items!r:.80} is not iterable; write stoker.map(function, items)") from None
    kernel, executor = find_kernel_and_executor(function, "stoker.map", inside="use Python's own map")
    inputs: Iterator[Any] = map_inputs.resolve_futures(items)
    if size is not None:
        size = min(size, MOST_NUMBER)
        inputs = map_inputs.split_into_batches(inputs, size)
    calls = MapCalls(executor, function, batch_size=size)
    keeping = None if path is None else open_result_file(path, calls, reuse=reuse)
    follow: Follow | None = progress if callable(progress) else None
    if progress is True:
        kept = 0 if keeping is None else len(keeping.file) * (size or 1)
        follow = MapProgress(function_name(function), total, executor.ask_status, kept=kept)
    return ResultStream(
        executor, calls, inputs, ordered=ordered, window=window or WINDOW, total=total, follow=follow,
        return_exceptions=return_exceptions, retries=kernel.config.retries, keeping=keeping,
    )  # fmt: skip


class _UnsentItem(msgspec.Struct, eq=False):
    error: Exception
    items: int
    place: int = -1


class _Batch(msgspec.Struct, eq=False):
    """Pickled calls that are sent together. `submissions`: one per call if contexts depend on inputs. `last`: number of
    items in the last call. `unsent`: the error or stored result that follows these calls.
    """

    packed: list[Payload] = []
    submissions: list[Submission] = []
    keys: list[str] = []
    last: int = 0
    unsent: tuple[None, Exception] | _UnsentItem | KeptItem | None = None


class ResultStream(Iterator[Any]):
    """The results of a `stoker.map`.

    Attributes:
        taken: Number of results that the program has received.
        items: Number of items in these results.
        failed_item: Index of the item (or batch) of the last error, from 0; -1 if a result cannot be unpickled here.
    """

    def __init__(
        self, executor: StokerExecutor, calls: MapCalls, inputs: Iterator[Any], *, ordered: bool, window: int,
        total: int | None, follow: Follow | None, return_exceptions: bool, retries: int,
        keeping: ResultStoringInbox | None,
    ) -> None:  # fmt: skip
        self._link = executor.link
        self._calls = calls
        self._keeping = keeping
        self._batch_size = size = calls.batch_size
        self._counted = "results" if size is None else "items' results"
        self._inputs = inputs
        self._slow_items = SlowInputDetector()
        self._ordered = ordered
        self._window = CallWindow(window)
        self._total = total
        self._follow = follow
        self._inbox = keeping or MapResultInbox()
        self._reports = MapReporter(
            self._link.queue_message, name=calls.name, context=calls.context_key, items=total, batch_size=size
        )
        self._inbox.on_calls_ended = self._reports.count_ended
        self._wake_queue, self._arrived = self._inbox.wake_queue, self._inbox.arrived
        self._read_lock = threading.RLock()
        """Held by the thread that reads a result, because threads may share a stream."""
        self._indices = itertools.count()
        self._next = 0
        self._ready: dict[int, Any] = {}
        self._failed: dict[CallId, int] = {}  # index of each failed item, for the error message
        self._short_batches: dict[CallId, int] = {}  # number of items in a batch that is not full
        self._return_exceptions = return_exceptions
        self._retries = retries
        self._exhausted = self._closed = self._is_stopped = False
        self._pid = os.getpid()
        self.taken = self.items = 0
        self.failed_item = -1
        _open_streams.add(self)

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Any:
        with self._read_lock:
            try:
                result = self._next_result()
            except StopIteration:
                self._release_resources()
                if self._keeping is not None and self._keeping.error is not None:
                    raise self._keeping.error from None
                raise
            except KeyboardInterrupt:
                sys.stderr.write(f"\n{self.close_and_describe()}\n")
                raise
            except BadStateException as bad:
                self.close()
                raise bad.__cause__ or bad from None
            except BaseException:
                self.close()
                raise
        if self._is_stopped:  # another thread called `close`; this thread closes the stream
            self.close()
        return result

    def close(self) -> None:
        """Cancel the remaining calls and drop their results. Any thread may call this method."""
        if self._closed or os.getpid() != self._pid:
            return
        self.stop()
        if not self._read_lock.acquire(blocking=False):  # the thread that reads a result closes the stream
            self._link.cancel(list(self._window.in_flight))
            return
        try:
            self._link.cancel(list(self._window.in_flight))
            self._release_resources()
            self._collect_arrived_results()
            for end in self._ready.values():
                if isinstance(end, CallEnd):
                    remove_result_file(end)
            self._window.clear()
            self._ready.clear()
        finally:
            self._read_lock.release()

    def stop(self) -> None:
        """Make the thread that reads a result close the stream."""
        self._is_stopped = True
        self._wake_queue.put(None)

    def close_and_describe(self) -> str:
        """Close the stream; return a message for the user."""
        left = "" if self._total is None else f" of {self._total:,}"
        done = len(self._ready) + len(self._arrived)
        also = f", {done:,} more had arrived" if done else ""
        self.close()
        batches = "" if self._batch_size is None else f" ({self.taken:,} batch{'es' * (self.taken != 1)})"
        if self._keeping is not None:
            file = self._keeping.file
            go_on = f"{len(file) + file.added:,} results are in {file.path}; run the program again to continue"
        elif self._ordered:
            go_on = "to continue, map the items after these"
        else:
            go_on = "to continue a map with ordered=False, return the item's name with each result"
        return f"stoker.map stopped: {self.items:,}{left} {self._counted}{batches} were taken{also}; {go_on}"

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_closed", True) and not _ending() and os.getpid() == self._pid:
            _dropped_streams.append((time.monotonic(), self.close_and_describe()))

    def __repr__(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        flying = len(self._window.in_flight)
        return f"<map of {self._calls.name}: {self.items:,}{total} {self._counted} taken, {flying:,} calls in flight>"

    # ---- taking results

    def _next_result(self) -> Any:
        if self._closed:
            raise StopIteration
        window = self._window
        while True:
            if self._arrived:
                self._collect_arrived_results()
            if self._keeping is not None and self._keeping.error is not None:
                raise self._keeping.error  # stop the map, because later results would not be stored
            # If only one call may be in flight, the program receives a result before the next item is read.
            if not self._is_stopped and (window.most_calls > 1 or self._next not in self._ready):
                self._send_calls()
            if self._is_stopped:
                self.close()
                raise StopIteration
            if self._next in self._ready:
                end = self._ready.pop(self._next)
                self._next += 1
                if type(end) is tuple:
                    raise end[1]
                if type(end) is CallEnd:
                    window.held_bytes -= payload_size(end.payload)
                return self._result_value(end)
            if not window.in_flight and self._exhausted and not self._arrived:
                raise StopIteration
            self._wait_for_result()

    def _result_value(self, end: CallEnd | _UnsentItem | KeptItem) -> Any:
        if isinstance(end, KeptItem):
            value, size = end.file.read_result_at(end.at), end.items
            if isinstance(self._follow, MapProgress):
                self._follow.kept_taken += size
        elif isinstance(end, _UnsentItem):
            self.failed_item = end.place
            if not self._return_exceptions:
                raise end.error
            value, size = end.error, end.items
        else:
            try:
                value = result_or_raise(end, session=self._link.session.session)
            except Exception as error:
                self.failed_item = self._failed.pop(end.call, -1)
                if self.failed_item >= 0:
                    what = "item" if self._batch_size is None else "batch"
                    again = f"; maps do not retry: retries={self._retries} is for calls of apps" * bool(self._retries)
                    error.add_note(f"stoker.map: {what} {self.failed_item:,}, counted from 0{again}")
                if not self._return_exceptions:
                    raise
                value = error
            size = self._short_batches.pop(end.call, self._batch_size or 1)
        if isinstance(value, Exception) and self._return_exceptions:
            value.__traceback__ = None  # the frames of the traceback would keep the stream alive
        self.taken += 1
        self.items += size
        if self._follow is not None:
            self._follow(self.items, self._total)
        return value

    def _wait_for_result(self) -> None:
        while not self._wake_queue.empty():
            self._wake_queue.get_nowait()
        if self._arrived or self._is_stopped:
            return
        if (
            isinstance(self._inputs, ThreadedInputs)
            and self._inputs.is_ready
            and self._free_call_count()
            and not self._exhausted
        ):
            return
        if not self._ready:
            self._window.raise_limit_after_starvation()
        timeout_s = None if self._exhausted else self._window.seconds_until_growth()
        if self._follow is not None:
            timeout_s = min(1.0, timeout_s or 1.0)
        try:
            self._wake_queue.get(timeout=timeout_s)
        except queue.Empty:
            if self._follow is not None:
                self._follow(self.items, self._total)

    def _collect_arrived_results(self) -> None:
        arrived, in_flight = self._arrived, self._window.in_flight
        calls = argument_bytes = result_bytes = 0
        while arrived:
            end = arrived.popleft()
            call = end[0] if type(end) is tuple else end.call
            sent = in_flight.pop(call, None)
            if sent is not None:
                calls += 1
                argument_bytes += sent[1]
                self._ready[sent[0] if self._ordered else self._next + len(self._ready)] = end
                if type(end) is CallEnd:
                    result_bytes += payload_size(end.payload)
                    if not end.ok:
                        self._failed[call] = sent[0]
        self._window.count_ended_calls(calls, argument_bytes=argument_bytes, result_bytes=result_bytes)

    # ---- sending items

    def _send_calls(self) -> None:
        """Send calls while the window has capacity, several at a time."""
        if self._exhausted or len(self._window.in_flight) >= self._window.most_calls:
            return
        room = self._window.free_call_count(
            ready=len(self._ready), only_if_many=not isinstance(self._inputs, ThreadedInputs)
        )
        while room and not self._exhausted:
            if isinstance(self._inputs, ThreadedInputs):
                self._inputs.set_read_ahead(room)
                if not self._inputs.is_ready:
                    return
            batch = self._pickle_batch(room)
            self._send_batch(batch)
            if batch.unsent is not None:
                place = next(self._indices)
                if isinstance(batch.unsent, _UnsentItem):
                    batch.unsent.place = place
                elif isinstance(batch.unsent, KeptItem):
                    self._reports.count_kept()
                self._ready[place if self._ordered else self._next + len(self._ready)] = batch.unsent
            if self._arrived or self._next in self._ready:
                return
            room = self._free_call_count()

    def _free_call_count(self) -> int:
        return self._window.free_call_count(ready=len(self._ready))

    def _pickle_batch(self, room: int) -> _Batch:
        """Pickle up to `room` items. Stop after `PICKLE_S` seconds, or at an item that needs no call."""
        batch, size = _Batch(), 0
        started = before = time.monotonic()
        while len(batch.packed) < min(room, CHUNK) and size < WINDOW_BYTES // 16 and before - started <= PICKLE_S:
            try:
                item = next(self._inputs)
            except ItemNotArrived:
                break
            except StopIteration:
                self._exhausted = True
                break
            except Exception as error:  # an error ends the input; the program receives it in place of a result
                self._exhausted = True
                batch.unsent = (None, error)
                break
            now = time.monotonic()
            is_slow = now - before > SLOW_S and self._window.in_flight and self._slow_items.count_slow_item(before, now)
            if is_slow and self._window.most_calls > 1 and not isinstance(self._inputs, ThreadedInputs):
                self._inputs = ThreadedInputs(self._inputs, wake_queue=self._wake_queue)
            batch.unsent = self._pickle_item(item, batch)
            if batch.unsent is not None:
                break
            size += payload_size(batch.packed[-1])
            before = time.monotonic()
        return batch

    def _pickle_item(self, item: Any, batch: _Batch) -> _UnsentItem | KeptItem | None:
        is_batch = self._batch_size is not None
        size = len(item) if is_batch else 1
        try:
            for each in item if is_batch else (item,):
                if type(each) is FailedInput:
                    raise each.error
            if self._keeping is not None:
                key = digest_of_kept_item(item)
                if (kept := self._keeping.find_result(key, items=size)) is not None:
                    return kept
                batch.keys.append(key)
            payload = self._calls.pack_call((item,), {})
            if self._calls.is_family:
                batch.submissions.append(self._calls.create_submission_for_arguments((item,), {}))
        except Exception as error:  # the program receives this error in place of a result
            self._exhausted = not self._return_exceptions
            return _UnsentItem(error, size)
        batch.packed.append(payload)
        batch.last = size
        return None

    def _send_batch(self, batch: _Batch) -> None:
        if not batch.packed:
            return
        places = list(itertools.islice(self._indices, len(batch.packed)))
        self._reports.count_sent(len(batch.packed))
        submission = batch.submissions or self._calls.current_submission()
        if self._keeping is None:
            calls = self._link.submit_many(submission, batch.packed, self._inbox)
        else:
            with self._keeping.sending:
                calls = self._link.submit_many(submission, batch.packed, self._keeping)
                self._keeping.record_sent_calls(calls, list(zip(batch.keys, places, strict=False)))
        sizes = [payload_size(payload) for payload in batch.packed]
        self._window.in_flight.update(zip(calls, zip(places, sizes, strict=True), strict=True))
        self._window.count_argument_bytes(sum(sizes))
        if batch.last != (self._batch_size or 1):  # only the last batch may have fewer items
            self._short_batches[calls[-1]] = batch.last

    def _release_resources(self) -> None:
        self._closed = True
        _open_streams.discard(self)
        if isinstance(self._inputs, ThreadedInputs):
            self._inputs.close()
        self._inputs = iter(())
        if self._keeping is not None:
            self._keeping.close()
        self._reports.close()
        if isinstance(self._follow, MapProgress):
            self._follow.close()


_open_streams: weakref.WeakSet[ResultStream] = weakref.WeakSet()
_dropped_streams: deque[tuple[float, str]] = deque(maxlen=4)
"""Time and message of each stream that the program dropped without `close`."""
_RECENT_S = 1.0


def close_open_streams() -> list[str]:
    now = time.monotonic()
    just = [said for at, said in _dropped_streams if now - at < _RECENT_S]
    _dropped_streams.clear()
    return just + [stream.close_and_describe() for stream in list(_open_streams)]

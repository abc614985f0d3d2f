"""The results of a `stoker.map`: an iterator that sends items as calls and takes their results.

It submits to the link directly, not through Parsl's kernel: no task record, future or callback a call. It takes items
while the `Window` has room, and packs and sends them in bulk. Results come back in bulk on a queue; the thread that
takes one unpickles it. If the input is slow, a thread of its own takes items from it (`pulling`), so that results that
have come do not wait.

A program that leaves its loop drops the last reference to the stream, which cancels the calls. So the link refers to
the stream's `MapInbox` alone. Ctrl-C in the body of a loop also drops the stream, before its message is printed;
`_left` keeps the message for the session, which handles the Ctrl-C next.
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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from parsl.executors.errors import BadStateException

from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.failures import outcome
from stoker.manager.executor.keeping import Keeping, KeptItem
from stoker.manager.executor.large_payloads import discard_result
from stoker.manager.executor.map_calls import MapCalls
from stoker.manager.executor.map_inputs import SLOW_S, NotYet, PulledInputs, SlowItems, refuse_lost
from stoker.manager.executor.map_window import CHUNK, WINDOW_BYTES, MapInbox, MapReports, Window
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.progress import Follow, MapProgress
from stoker.protocol.calls import CallEnd, Payload
from stoker.protocol.ids import CallId

PATIENCE_S = 0.02
"""Packed items of a slow input are sent after this long."""


class _NotSent:
    """An item, or a batch of `items`, that the input could not give or that could not be packed."""

    def __init__(self, error: Exception, *, items: int) -> None:
        self.error = error
        self.items = items
        self.place = -1


class _Batch:
    """Packed calls that are sent together."""

    def __init__(self) -> None:
        self.packed: list[Payload] = []
        self.submissions: list[Submission] = []
        """Those of a family, whose contexts depend on the items' lengths: one a call."""
        self.keys: list[str] = []
        """The keys under which their results are kept."""
        self.last = 0
        """Items of the call that was packed last."""
        self.unsent: tuple[None, Exception] | _NotSent | KeptItem | None = None
        """What comes behind these calls in place of another one."""


class ResultStream(Iterator[Any]):
    """The results of a `map`. `taken` counts the results handed over, `items` the items that they belong to;
    `failed_item` is the place, from 0, of the item (or batch) that the error handed over last is of, and -1 if that is
    a result that cannot be opened here. `close()` cancels the calls that are left."""

    def __init__(
        self,
        executor: StokerExecutor,
        calls: MapCalls,
        inputs: Iterator[Any],
        *,
        ordered: bool,
        window: int,
        total: int | None,
        follow: Follow | None,
        batch_size: int | None,
        return_exceptions: bool,
        retries: int,
        keeping: Keeping | None = None,
    ) -> None:
        self._link = executor.link
        self._calls = calls
        self._keeping = keeping
        self._batch_size = batch_size
        self._inputs = inputs
        self._slow_items = SlowItems()
        self._ordered = ordered
        self._window = Window(window)
        self._total = total
        self._follow = follow
        self._inbox = MapInbox() if keeping is None else keeping.inbox
        self._reports = MapReports(
            self._link.tell_later, name=calls.name, context=calls.context_key, items=total, batch_size=batch_size
        )
        self._inbox.on_ended = self._reports.ended
        self._bell, self._arrived = self._inbox.bell, self._inbox.arrived
        self._taking = threading.RLock()
        """Held while a thread takes a result: several threads may share a stream."""
        self._places = itertools.count()
        self._next = 0
        self._ready: dict[int, Any] = {}
        self._failed: dict[CallId, int] = {}  # the place of each failed item, for its error
        self._short: dict[CallId, int] = {}  # the number of items of a batch that is not full
        self._return_exceptions = return_exceptions
        self._retries = retries
        """How often Parsl's kernel would try a call again."""
        self._exhausted = False
        self._closed = False
        self._is_stopped = False
        self._pid = os.getpid()
        self.taken = 0
        self.items = 0
        self.failed_item = -1
        _open_streams.add(self)

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Any:
        with self._taking:
            result = self._take_or_end()
        if self._is_stopped:  # by a thread that found this one at work, and left the rest to it
            self.close()
        return result

    def _take_or_end(self) -> Any:
        try:
            return self._take()
        except StopIteration:
            self._finish()
            if self._keeping is not None and self._keeping.inbox.error is not None:
                raise self._keeping.inbox.error from None
            raise
        except KeyboardInterrupt:
            sys.stderr.write(f"\n{self.interrupted()}\n")
            raise
        except BadStateException as bad:
            self.close()
            raise bad.__cause__ or bad from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the calls that are left, and drop their results. Any thread may call this. Where another one takes a
        result just now, that one finishes the closing: it may be about to send calls. A forked child of the program
        closes nothing of it."""
        if self._closed or os.getpid() != self._pid:
            return
        self.stop()
        if not self._taking.acquire(blocking=False):
            self._link.cancel(list(self._window.in_flight))
            return
        try:
            self._close()
        finally:
            self._taking.release()

    def _close(self) -> None:
        self._link.cancel(list(self._window.in_flight))
        self._finish()
        self._collect()
        for end in self._ready.values():
            if isinstance(end, CallEnd):
                discard_result(end)
        self._window.clear()
        self._ready.clear()

    def stop(self) -> None:
        """Have the thread that takes a result, if there is one, close the stream. Any thread may call this."""
        self._is_stopped = True
        self._bell.put(None)

    def interrupted(self) -> str:
        """Close the stream; returns a message with what was taken and how to go on."""
        left = "" if self._total is None else f" of {self._total:,}"
        done = len(self._ready) + len(self._arrived)
        also = f", {done:,} more had come" if done else ""
        self.close()
        what = (
            "results"
            if self._batch_size is None
            else f"items' results ({self.taken:,} batch{'es' * (self.taken != 1)})"
        )
        go_on = (
            "to go on, map the items after these"
            if self._ordered
            else "they came in any order, so to go on let each result say which item it is of"
        )
        if self._keeping is not None:
            go_on = self._keeping.how_to_continue()
        return f"stoker.map stopped: {self.items:,}{left} {what} were taken{also}; {go_on}"

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_closed", True) and not _ending() and os.getpid() == self._pid:
            _left.append((time.monotonic(), self.interrupted()))

    def __repr__(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        what = "results" if self._batch_size is None else "items' results"
        return (
            f"<map of {self._calls.name}: {self.items:,}{total} {what} taken, "
            f"{len(self._window.in_flight):,} calls in flight>"
        )

    def _take(self) -> Any:
        if self._closed:
            raise StopIteration
        while True:
            if self._arrived:
                self._collect()
            if self._keeping is not None and self._keeping.inbox.error is not None:
                raise self._keeping.inbox.error  # what came since is not in the file
            # One at a time: a result before the next item.
            if not self._is_stopped and (self._window.most_calls > 1 or self._next not in self._ready):
                self._fill()
            if self._is_stopped:
                self.close()
                raise StopIteration
            if self._next in self._ready:
                end = self._ready.pop(self._next)
                self._next += 1
                if type(end) is tuple:
                    raise end[1]
                if type(end) is CallEnd:
                    self._window.held_bytes -= _size(end.payload)
                return self._hand_over(end)
            if not self._window.in_flight and self._exhausted and not self._arrived:
                raise StopIteration
            self._wait()

    def _hand_over(self, end: CallEnd | _NotSent | KeptItem) -> Any:
        """Return the result of a call. Raises its exception, or returns it with `return_exceptions`."""
        if isinstance(end, KeptItem):
            return self._taken(end.value(), end.items, kept=True)
        try:
            if isinstance(end, _NotSent):
                raise end.error
            value = outcome(end, session=self._link.session.session)
        except Exception as error:
            if isinstance(end, _NotSent):
                self.failed_item = end.place
            elif end.call in self._failed:
                self.failed_item = self._failed.pop(end.call)
                what = "item" if self._batch_size is None else "batch"
                again = f"; it was not tried again: retries={self._retries} is for calls of apps" * bool(self._retries)
                error.add_note(f"stoker.map: {what} {self.failed_item:,}, counted from 0{again}")
            else:
                self.failed_item = -1
            if not self._return_exceptions:
                raise
            value = error
            error.__traceback__ = None  # its frames are this module's; they would keep the stream alive
        size = end.items if isinstance(end, _NotSent) else self._short.pop(end.call, self._batch_size or 1)
        return self._taken(value, size)

    def _taken(self, value: Any, items: int, *, kept: bool = False) -> Any:
        """Count a result that is handed over; an earlier run has `kept` it."""
        self.taken += 1
        self.items += items
        if kept and isinstance(self._follow, MapProgress):
            self._follow.take_kept(items)
        if self._follow is not None:
            self._follow(self.items, self._total)
        return value

    def _wait(self) -> None:
        """Wait until something arrives. Rings for results that were collected already are dropped first; the ring of
        `stop` may be among them."""
        while not self._bell.empty():
            self._bell.get_nowait()
        if self._arrived or self._is_stopped:
            return
        if isinstance(self._inputs, PulledInputs) and self._inputs.is_ready and self._room() and not self._exhausted:
            return
        if not self._ready:
            self._window.starved()
        timeout_s = None if self._exhausted else self._window.grows_in()
        if self._follow is not None:
            timeout_s = min(1.0, timeout_s or 1.0)
        try:
            self._bell.get(timeout=timeout_s)
        except queue.Empty:
            if self._follow is not None:
                self._follow(self.items, self._total)

    def _collect(self) -> None:
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
                    result_bytes += _size(end.payload)
                    if not end.ok:
                        self._failed[call] = sent[0]
        self._window.ended(calls, argument_bytes=argument_bytes, result_bytes=result_bytes)

    def _fill(self) -> None:
        """Send calls while there is room, but not one by one while results can be handed over."""
        room = (
            self._room()
            if isinstance(self._inputs, PulledInputs)
            else self._window.room_to_fill(ready=len(self._ready))
        )
        while room and not self._exhausted and self._may_take_items(room):
            batch = self._pack(room)
            self._send(batch)
            if batch.unsent is not None:
                self._place(batch.unsent)
            if self._arrived or self._next in self._ready:
                return
            room = self._room()

    def _may_take_items(self, room: int) -> bool:
        """False if a thread reads the input and has no item yet."""
        if not isinstance(self._inputs, PulledInputs):
            return True
        self._inputs.allow(room)
        return self._inputs.is_ready

    def _pack(self, room: int) -> _Batch:
        """Take items and pack them: at most `room`, for a short time, up to one that cannot be sent."""
        batch, size = _Batch(), 0
        started = before = time.monotonic()
        while len(batch.packed) < min(room, CHUNK) and size < WINDOW_BYTES // 16 and before - started <= PATIENCE_S:
            try:
                item = next(self._inputs)
            except NotYet:
                break
            except StopIteration:
                self._exhausted = True
                break
            except Exception as error:  # the input ends here; raised where its next result would have come
                self._exhausted = True
                batch.unsent = (None, error)
                break
            now = time.monotonic()
            if now - before > SLOW_S and self._window.in_flight and self._slow_items.took(before, now):
                self._read_on_a_thread()
            batch.unsent = self._pack_item(item, batch)
            if batch.unsent is not None:
                break
            size += _size(batch.packed[-1])
            before = time.monotonic()
        return batch

    def _pack_item(self, item: Any, batch: _Batch) -> _NotSent | KeptItem | None:
        """Add an item to the batch, or return what takes the place of its call."""
        size = len(item) if self._batch_size is not None else 1
        try:
            refuse_lost(item if self._batch_size is not None else (item,))
            if self._keeping is not None:
                key = self._keeping.key_of(item)
                if (kept := self._keeping.find(key, items=size)) is not None:
                    return kept
                batch.keys.append(key)
            payload = self._calls.pack(item)
            if self._calls.is_family:
                batch.submissions.append(self._calls.submission_of((item,), {}))
        except Exception as error:  # raised, or given, where its result would have come
            self._exhausted = not self._return_exceptions
            return _NotSent(error, items=size)
        batch.packed.append(payload)
        batch.last = size
        return None

    def _place(self, unsent: tuple[None, Exception] | _NotSent | KeptItem) -> None:
        """Put what takes the place of a call among the results."""
        place = next(self._places)
        if isinstance(unsent, _NotSent):
            unsent.place = place
        elif isinstance(unsent, KeptItem):
            self._reports.kept()
        self._ready[place if self._ordered else self._next + len(self._ready)] = unsent

    def _room(self) -> int:
        return self._window.room(ready=len(self._ready))

    def _read_on_a_thread(self) -> None:
        """Have a thread read the input, which is slow: results are not to wait for its items."""
        if self._window.most_calls > 1 and not isinstance(self._inputs, PulledInputs):
            self._inputs = PulledInputs(self._inputs, bell=self._bell)

    def _send(self, batch: _Batch) -> None:
        if not batch.packed:
            return
        total = 0
        places = list(itertools.islice(self._places, len(batch.packed)))
        self._reports.sent(len(batch.packed))
        submission = batch.submissions or self._calls.submission()
        if self._keeping is None:
            calls = self._link.submit_many(submission, batch.packed, self._inbox)
        else:
            inbox = self._keeping.inbox
            with inbox.sending:
                calls = self._link.submit_many(submission, batch.packed, inbox)
                inbox.sent(calls, list(zip(batch.keys, places, strict=False)))
        for call, payload, place in zip(calls, batch.packed, places, strict=True):
            size = _size(payload)
            self._window.in_flight[call] = (place, size)
            total += size
        self._window.sent(total)
        if batch.last != (self._batch_size or 1):  # no batch but the very last is short
            self._short[call] = batch.last

    def _finish(self) -> None:
        self._closed = True
        _open_streams.discard(self)
        if isinstance(self._inputs, PulledInputs):
            self._inputs.close()
        self._inputs = iter(())
        if self._keeping is not None:
            self._keeping.close()
        self._reports.close()
        if isinstance(self._follow, MapProgress):
            self._follow.close()


_open_streams: weakref.WeakSet[ResultStream] = weakref.WeakSet()
_left: deque[tuple[float, str]] = deque(maxlen=4)
"""Streams dropped without `close`: when, and the message for the user."""
_JUST_S = 1.0


def interrupt_open() -> list[str]:
    """Close every open stream after Ctrl-C; returns the messages for the user."""
    now = time.monotonic()
    just = [said for at, said in _left if now - at < _JUST_S]
    _left.clear()
    return just + [stream.interrupted() for stream in list(_open_streams)]


def _size(payload: Payload) -> int:
    return len(payload) if isinstance(payload, bytes) else payload.size_bytes

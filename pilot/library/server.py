"""The main loop of a library, which receives calls, runs them and sends their outcomes.

With one slot, the main thread reads frames, runs calls and sends outcomes. It sends outcomes before it waits for work,
after 1 ms, and before a call of a slow function. While a call runs longer than 20 ms, the *attendant* thread sends the
waiting outcomes and reads frames. With several slots, calls run in threads and the main thread only reads frames.
"""

from __future__ import annotations

import contextvars
import errno
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from stoker.contexts import ambient
from stoker.contexts.loading import find_resize_method
from stoker.pilot.core import infrastructure
from stoker.pilot.core.turns import CallQueue
from stoker.pilot.library import connection
from stoker.pilot.library.connection import LibraryOutbox
from stoker.pilot.library.functions import CallCompatibility, FunctionCache, RunnableCall
from stoker.pilot.library.pieces import GangMeetings, PieceSender
from stoker.pilot.library.process import DAMAGE_CHECK_S, LibraryFault, ProcessGuard
from stoker.pilot.library.runner import NO_CALL, Runner
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import GivenBack, Resized, SleepFailed
from stoker.protocol.to_library import (
    Evict,
    GiveBack,
    Load,
    MeetRankZero,
    PiecesReceived,
    Resize,
    Run,
    Sleep,
    Stop,
    ToLibrary,
    Wake,
)

_MAX_REPORT_DELAY_S = 0.001  # seconds after which a thread that runs short calls sends outcomes and reads frames
_SLOW_CALL_S = 0.0005  # run time in seconds of a slow function; waiting outcomes are sent before such a call
_ATTENDANT_INTERVAL_S = 0.02
_MOST_FAILURES_IN_A_ROW = 3  # a library exits after 3 calls in a row with infrastructure failures
NOT_RESIZED = -1  # answer to a `Resize` order that the context refused
_now = time.perf_counter


class LibraryServer:
    """Serves calls on one socket until the agent stops the library, or for `calls_allowed` calls (0 = any number)."""

    _exit = staticmethod(os._exit)

    def __init__(
        self, sock: socket.socket, *, library: int, context: Any, calls_allowed: int, guard: ProcessGuard,
        reader: connection.FrameReader | None = None, host: str = "127.0.0.1", gang_key: bytes = b"",
        sleep_or_wake: Callable[[Sleep | Wake], Any] | None = None,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._sleep_or_wake = sleep_or_wake
        self._guard = guard
        self._calls_allowed = calls_allowed
        self._reader = reader or connection.FrameReader(sock)
        self._decode = wire.to_library_decoder()
        self._functions = FunctionCache()
        self.outbox = LibraryOutbox(sock, on_send_error=self._exit_after_socket_error)
        self.meetings = GangMeetings(host=host, send_message=self.send_message, key=gang_key)
        self.piece_sender = PieceSender(library, send=self.outbox.send_pieces)
        self._reads_for_call = False  # True while a call that waits for its client reads the frames
        self.compatibility = CallCompatibility()
        self._queue: CallQueue[RunnableCall] = CallQueue()
        self._runners: list[Runner] = []
        self._reading = threading.Lock()
        self._handling = threading.RLock()  # held while a call leaves the queue, and while messages are handled
        self._slots = 1
        self._stopping = False
        self._served = 0
        self._attendant_needed = threading.Event()
        self._is_attendant_idle = True
        self._resizer = find_resize_method(context)
        self._resizes: deque[int] = deque()
        self._fault: LibraryFault | None = None  # why the library exits once no call runs
        self._failures_in_a_row = 0  # number of calls in a row that failed because of the infrastructure

    def serve(self, runner: Runner, *, on_idle: Callable[[], None]) -> None:
        self._runners = [runner]
        self.piece_sender.read_messages = self._wait_and_receive_for_call
        self._handle_frames()
        threading.Thread(target=self._attend_long_calls, name="stoker-attendant", daemon=True).start()
        take, run, ends = self._queue.take_first, runner.run, self.outbox.unsent_ends
        guard, handling = self._guard, self._handling
        read_at = 0.0
        while not self._has_finished():
            with handling:
                if self._resizes:
                    self._apply_resizes()
                entry = take()
                if entry is not None:
                    runner.take_call(entry[0])
            if entry is None:
                on_idle()
                self.outbox.send_unsent()
                if runner.ended_at - guard.checked_at > DAMAGE_CHECK_S:
                    self._exit_if_process_unfit(runner)
                self._receive(block=True)
                read_at = _now()
                continue
            work = entry[1]
            mean_s = work.function.mean_s
            if not 0.0 < mean_s < DAMAGE_CHECK_S or max(runner.ended_at, read_at) - guard.checked_at > DAMAGE_CHECK_S:
                self._exit_if_process_unfit(runner)
            runner.begun_calls += 1  # count before the check: the attendant thread sets its flag, then reads the count
            if self._is_attendant_idle:
                self._is_attendant_idle = False
                self._attendant_needed.set()
            if ends and not 0.0 < mean_s < _SLOW_CALL_S:
                self.outbox.send_unsent()
            self._record_outcome(run(work), runner)
            guard.restore_environment()
            if not runner.is_clean:
                self._remove_left_files(runner)
            now = runner.ended_at
            if ends and now - self.outbox.oldest_end_at > _MAX_REPORT_DELAY_S:
                self.outbox.send_unsent()
            if now - read_at > _MAX_REPORT_DELAY_S:
                self._receive_without_blocking()
                read_at = now
        on_idle()
        self.outbox.send_unsent()

    def serve_threads(
        self, make_runner: Callable[[int], Runner], slots: int, *, on_idle: Callable[[int], None]
    ) -> None:
        """Run calls in `slots` threads. This thread reads frames once each slot has its runner."""
        self._slots = slots
        self._handle_frames()
        work_came = threading.Condition(self._handling)
        all_made = threading.Barrier(slots + 1)
        side_by_side = self.compatibility
        threads: list[threading.Thread] = []

        def worker(slot: int) -> None:
            runner = make_runner(slot)
            self._runners.append(runner)
            all_made.wait()
            while True:
                with work_came:
                    if side_by_side.record_call_end(slot):
                        work_came.notify_all()
                    while self._fault is not None or (work := side_by_side.take_next_call(self._queue, slot)) is None:
                        if self._fault is not None and self._is_only_busy_slot(runner):
                            self.exit_process(self._fault)
                        if self._has_finished():
                            return
                        on_idle(slot)
                        work_came.wait()
                    runner.take_call(work.spec.call)
                if not 0.0 < work.function.mean_s < DAMAGE_CHECK_S or _now() - self._guard.checked_at > DAMAGE_CHECK_S:
                    self._exit_if_process_unfit(runner)
                self._record_outcome(runner.run(work), runner)
                del work
                if not runner.is_clean:
                    self._remove_left_files(runner)
                if not len(self._queue):
                    on_idle(slot)
                self.outbox.send_unsent()
                if _now() - self._guard.checked_at > DAMAGE_CHECK_S:
                    self._exit_if_process_unfit(runner)
                if self._has_finished():
                    with work_came:
                        work_came.notify_all()
                    self._sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads frames

        def work_or_end(slot: int) -> None:
            try:
                worker(slot)
            except BaseException:  # exit like a library with one slot; the agent reports the exit
                traceback.print_exc()
                self.outbox.send_unsent()
                self._exit(1)

        for slot in range(slots):
            run = contextvars.copy_context().run  # includes context variables that the loader has set
            name = f"stoker-slot-{slot}"
            threads.append(threading.Thread(target=run, args=(work_or_end, slot), name=name, daemon=True))
            threads[-1].start()
        all_made.wait()
        while not self._has_finished():
            self._receive(block=True, has_threads=True)
            with work_came:
                work_came.notify(len(self._queue))
        with work_came:
            work_came.notify_all()
        for thread in threads:
            thread.join()
        self.outbox.send_unsent()

    def _has_finished(self) -> bool:
        return (self._stopping and not len(self._queue)) or 0 < self._calls_allowed <= self._served

    def _record_outcome(self, outcome: CallEnd | CallProgress, runner: Runner) -> None:
        self._served += 1
        self.outbox.add_outcome(outcome, ended_at=runner.ended_at)
        if isinstance(outcome, CallEnd) and (self._failures_in_a_row or outcome.failure is not None):
            self._exit_if_infrastructure_failed(outcome.failure, runner)
        runner.taken_call = NO_CALL

    def _exit_if_infrastructure_failed(self, failure: Failure | None, own: Runner) -> None:
        if failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if failure.device:
            self.exit_process(LibraryFault(infrastructure.DEVICE_FAILED, failure.message))
        if self._failures_in_a_row >= _MOST_FAILURES_IN_A_ROW:
            with self._handling:
                if self._is_only_busy_slot(own):
                    what = f"{self._failures_in_a_row} calls in a row failed: {failure.message}"
                    self.exit_process(LibraryFault(infrastructure.NODE_FAILED, what))

    def _remove_left_files(self, runner: Runner) -> None:
        self.outbox.send_unsent()
        fault = runner.remove_left_files()
        if fault is not None:
            with self._handling:
                self._fault = fault
                if self._is_only_busy_slot(runner):
                    self.exit_process(fault)

    def _exit_if_process_unfit(self, own: Runner) -> None:
        guard = self._guard
        if guard.unchecked_calls:
            with self._handling:
                fault = guard.restore_and_check(_now()) if self._is_only_busy_slot(own) else None
                if fault is not None:
                    self.exit_process(fault)

    def _is_only_busy_slot(self, own: Runner) -> bool:
        """True if all other slots are idle. A slot is busy until its call's outcome is in the outbox."""
        return all(each is own or each.taken_call == NO_CALL for each in self._runners)

    def exit_process(self, fault: LibraryFault) -> NoReturn:
        """Exit this process. The agent returns the library's calls to the manager."""
        self.outbox.send_unsent()  # also waits for sends of other threads to end
        for runner in self._runners:
            runner.mark_idle()
        with suppress(OSError):  # a call may have lowered the file size limit
            os.write(2, f"the library ends: {fault.text}\n".encode())
        self._exit(fault.code)

    # ---- messages

    def send_message(self, message: Any) -> None:
        self.outbox.send_messages([message])

    def _exit_after_socket_error(self, error: OSError, unreported_calls: list[int]) -> NoReturn:
        if error.errno not in (errno.EBADF, errno.ENOTSOCK):
            self._exit(1)
        if self._runners:
            self._runners[0].record_suspects([*unreported_calls, *(end.call for end in self.outbox.unsent_ends)])
        self._exit(infrastructure.SOCKET_LOST)

    def _wait_and_receive_for_call(self, seconds: float) -> None:
        self._reads_for_call = True
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(seconds * 1000):
                self._receive_without_blocking()
        finally:
            self._reads_for_call = False

    def _receive_without_blocking(self) -> None:
        with self._handling:
            self._receive(block=False)

    def _receive(self, *, block: bool, has_threads: bool = False) -> None:
        if not self._reading.acquire(blocking=block):
            return
        try:
            # With one slot, the attendant thread may have just received a message.
            if block and (self._has_finished() or (not has_threads and len(self._queue))):
                return
            try:
                here = self._reader.receive_bytes(block=block)
            except BlockingIOError:
                return
            except OSError as error:
                if has_threads and self._has_finished():
                    return
                self._exit_after_socket_error(error, [])
            if here:
                self._handle_frames()
            elif not (has_threads and self._has_finished()):
                self._exit(1)
        finally:
            self._reading.release()

    def _handle_frames(self) -> None:
        with self._handling:
            while (frame := self._reader.next_frame()) is not None:
                for message in self._decode(frame).messages:
                    self._handle_message(message)

    def _handle_message(self, message: ToLibrary) -> None:
        match message:
            case Run():
                self._queue_calls(message)
            case GiveBack(count=count, calls=calls, order=order):
                back = self._queue.remove_calls(calls) if calls else self._queue.remove_newest(count)
                if back or not calls:  # answer a count even if the queue contains no call
                    self.send_message(GivenBack(tuple(back), order=order))
            case Evict(call=call):
                for runner in self._runners:
                    if runner.taken_call == call:
                        runner.stop.request()
                        self.meetings.record_address(call, "")
                        self.piece_sender.wake_waiting_calls()
                self._return_calls(self._queue.remove_calls([call]))
            case MeetRankZero(call=call, address=address):
                self.meetings.record_address(call, address)
            case PiecesReceived():
                self.piece_sender.record_taken_pieces(message)
            case Resize(device_memory_bytes=size):
                self._resizes.append(size)
                # With several slots, do not wait for a pause between calls: there may never be one.
                if self._resizer is None or self._slots > 1 or self._runners[0].taken_call == NO_CALL:
                    self._apply_resizes()
            case Sleep() | Wake():
                if self._sleep_or_wake is not None:
                    answer = self._sleep_or_wake(message)
                    self.send_message(answer)
                    if isinstance(answer, SleepFailed):
                        self._exit(1)
            case Stop():
                self._stopping = True
                self._return_calls(self._queue.remove_newest(len(self._queue)))
            case Load():
                pass  # a repeated order is ignored

    def _return_calls(self, calls: list[CallId], *, need_function: bool = False) -> None:
        if calls:
            self.send_message(GivenBack(tuple(calls), need_function=need_function))

    def _queue_calls(self, message: Run) -> None:
        calls = message.calls
        function = None if self._stopping else self._functions.find_or_add(message.function, message.function_blob)
        if function is None:
            self._return_calls([spec.call for spec in calls], need_function=not self._stopping)
            return
        add = self._queue.add
        for spec in calls:
            add(spec.call, RunnableCall(spec, message, function))

    def _apply_resizes(self) -> None:
        while self._resizes:
            size = self._resizes.popleft()
            if self._resizer is not None:
                try:
                    self._resizer(device_memory_bytes=ambient.bytes_per_torch_device(size))
                except Exception:  # the context keeps its former memory size
                    traceback.print_exc()
                    size = NOT_RESIZED
            self.send_message(Resized(device_memory_bytes=size))

    # ---- the attendant

    def _attend_long_calls(self) -> None:
        runner = self._runners[0]
        while True:
            self._attendant_needed.wait()
            self._attendant_needed.clear()
            seen = -1
            while True:
                time.sleep(_ATTENDANT_INTERVAL_S)
                begun, call = runner.begun_calls, runner.call
                if call != NO_CALL and begun == seen:
                    self.outbox.send_unsent()
                    if not self._reads_for_call:
                        self._receive_without_blocking()
                elif call == NO_CALL and begun == seen:
                    break
                seen = begun
            self._is_attendant_idle = True
            if runner.begun_calls != seen:  # a call began just now without setting the event
                self._attendant_needed.set()

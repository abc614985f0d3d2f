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
from stoker.contexts.loading import resize_method_of
from stoker.pilot.core import infrastructure
from stoker.pilot.core.turns import FirstCome
from stoker.pilot.library import connection
from stoker.pilot.library.connection import LibraryOutbox
from stoker.pilot.library.functions import CallCompatibility, Functions, RunnableCall
from stoker.pilot.library.pieces import GangMeetings, PieceSender
from stoker.pilot.library.process import EVERY_S, LibraryFault, ProcessGuard
from stoker.pilot.library.runner import NO_CALL, Runner
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import GivenBack, Resized, SleepFailed
from stoker.protocol.to_library import Evict, GiveBack, Load, Meet, Resize, Run, Sleep, Stop, Taken, ToLibrary, Wake

_PATIENCE_S = 0.001  # seconds after which a thread that runs short calls sends outcomes and reads frames
_SLOW_S = 0.0005  # run time in seconds of a slow function; waiting outcomes are sent before such a call
_TICK_S = 0.02
_FAULTS = 3  # a library exits after 3 calls in a row with infrastructure failures
NOT_RESIZED = -1  # answer to a `Resize` order that the context refused
_now = time.perf_counter


class LibraryServer:
    """Serves calls on one socket until the agent stops the library, or for `calls_allowed` calls (0 = any number)."""

    _exit = staticmethod(os._exit)

    def __init__(
        self, sock: socket.socket, *, library: int, context: Any, calls_allowed: int, guard: ProcessGuard,
        reader: connection.FrameReader | None = None, host: str = "127.0.0.1", gang_key: bytes = b"",
        move: Callable[[Sleep | Wake], Any] | None = None,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._move = move
        self._guard = guard
        self._allowed = calls_allowed
        self._reader = reader or connection.FrameReader(sock)
        self._decode = wire.to_library_decoder()
        self._functions = Functions()
        self.outbox = LibraryOutbox(sock, lost=self._lost)
        self.meetings = GangMeetings(host=host, say=self.send, key=gang_key)
        self.lane = PieceSender(library, send=self.outbox.send_pieces)
        self._reads_for_call = False  # True while a call that waits for its client reads the frames
        self.side_by_side = CallCompatibility()
        self._queue: FirstCome[RunnableCall] = FirstCome()
        self._runners: list[Runner] = []
        self._reading = threading.Lock()
        self._handling = threading.RLock()  # held while a call leaves the queue, and while messages are handled
        self._slots = 1
        self._stopping = False
        self._served = 0
        self._bell = threading.Event()
        self._parked = True
        self._resizer = resize_method_of(context)
        self._resizes: deque[int] = deque()
        self._fault: LibraryFault | None = None  # why the library exits once no call runs
        self._faults = 0  # number of calls in a row that failed because of the infrastructure

    def serve(self, runner: Runner, *, idle: Callable[[], None]) -> None:
        self._runners = [runner]
        self.lane.read = self._wait_and_receive_for_call
        self._handle_frames()
        threading.Thread(target=self._attend, name="stoker-attendant", daemon=True).start()
        take, run, ends = self._queue.take, runner.run, self.outbox.ends
        guard, handling = self._guard, self._handling
        read_at = 0.0
        while not self._over():
            with handling:
                if self._resizes:
                    self._resize()
                entry = take()
                if entry is not None:
                    runner.take(entry[0])
            if entry is None:
                idle()
                self.outbox.send_waiting()
                if runner.ended_at - guard.checked_at > EVERY_S:
                    self._exit_if_process_unfit(runner)
                self._receive(block=True)
                read_at = _now()
                continue
            work = entry[1]
            mean_s = work.function.mean_s
            if not 0.0 < mean_s < EVERY_S or max(runner.ended_at, read_at) - guard.checked_at > EVERY_S:
                self._exit_if_process_unfit(runner)
            runner.begun += 1  # increment before the check of `_parked`: the attendant uses the opposite order
            if self._parked:
                self._parked = False
                self._bell.set()
            if ends and not 0.0 < mean_s < _SLOW_S:
                self.outbox.send_waiting()
            self._note(run(work), runner)
            guard.restore()
            if not runner.is_clean:
                self._clean(runner)
            now = runner.ended_at
            if ends and now - self.outbox.oldest_end > _PATIENCE_S:
                self.outbox.send_waiting()
            if now - read_at > _PATIENCE_S:
                self._receive_without_blocking()
                read_at = now
        idle()
        self.outbox.send_waiting()

    def serve_threads(self, make_runner: Callable[[int], Runner], slots: int, *, idle: Callable[[int], None]) -> None:
        """Run calls in `slots` threads. This thread reads frames once each slot has its runner."""
        self._slots = slots
        self._handle_frames()
        work_came = threading.Condition(self._handling)
        all_made = threading.Barrier(slots + 1)
        side_by_side = self.side_by_side
        threads: list[threading.Thread] = []

        def worker(slot: int) -> None:
            runner = make_runner(slot)
            self._runners.append(runner)
            all_made.wait()
            while True:
                with work_came:
                    if side_by_side.end(slot):
                        work_came.notify_all()
                    while self._fault is not None or (work := side_by_side.take(self._queue, slot)) is None:
                        if self._fault is not None and self._is_only_busy_slot(runner):
                            self.leave(self._fault)
                        if self._over():
                            return
                        idle(slot)
                        work_came.wait()
                    runner.take(work.spec.call)
                if not 0.0 < work.function.mean_s < EVERY_S or _now() - self._guard.checked_at > EVERY_S:
                    self._exit_if_process_unfit(runner)
                self._note(runner.run(work), runner)
                del work
                if not runner.is_clean:
                    self._clean(runner)
                if not len(self._queue):
                    idle(slot)
                self.outbox.send_waiting()
                if _now() - self._guard.checked_at > EVERY_S:
                    self._exit_if_process_unfit(runner)
                if self._over():
                    with work_came:
                        work_came.notify_all()
                    self._sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads frames

        def work_or_end(slot: int) -> None:
            try:
                worker(slot)
            except BaseException:  # exit like a library with one slot; the agent reports the exit
                traceback.print_exc()
                self.outbox.send_waiting()
                self._exit(1)

        for slot in range(slots):
            run = contextvars.copy_context().run  # includes context variables that the loader has set
            name = f"stoker-slot-{slot}"
            threads.append(threading.Thread(target=run, args=(work_or_end, slot), name=name, daemon=True))
            threads[-1].start()
        all_made.wait()
        while not self._over():
            self._receive(block=True, threads=True)
            with work_came:
                work_came.notify(len(self._queue))
        with work_came:
            work_came.notify_all()
        for thread in threads:
            thread.join()
        self.outbox.send_waiting()

    def _over(self) -> bool:
        return (self._stopping and not len(self._queue)) or 0 < self._allowed <= self._served

    def _note(self, outcome: CallEnd | CallProgress, runner: Runner) -> None:
        self._served += 1
        self.outbox.add(outcome, ended_at=runner.ended_at)
        if isinstance(outcome, CallEnd) and (self._faults or outcome.failure is not None):
            self._exit_if_infrastructure_failed(outcome.failure, runner)
        runner.taken = NO_CALL

    def _exit_if_infrastructure_failed(self, failure: Failure | None, own: Runner) -> None:
        if failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
            self._faults = 0
            return
        self._faults += 1
        if failure.device:
            self.leave(LibraryFault(infrastructure.DEVICE_FAILED, failure.message))
        if self._faults >= _FAULTS:
            with self._handling:
                if self._is_only_busy_slot(own):
                    what = f"{self._faults} calls in a row failed: {failure.message}"
                    self.leave(LibraryFault(infrastructure.NODE_FAILED, what))

    def _clean(self, runner: Runner) -> None:
        self.outbox.send_waiting()
        fault = runner.clean()
        if fault is not None:
            with self._handling:
                self._fault = fault
                if self._is_only_busy_slot(runner):
                    self.leave(fault)

    def _exit_if_process_unfit(self, own: Runner) -> None:
        guard = self._guard
        if guard.unchecked:
            with self._handling:
                fault = guard.check(_now()) if self._is_only_busy_slot(own) else None
                if fault is not None:
                    self.leave(fault)

    def _is_only_busy_slot(self, own: Runner) -> bool:
        """True if all other slots are idle. A slot is busy until its call's outcome is in the outbox."""
        return all(each is own or each.taken == NO_CALL for each in self._runners)

    def leave(self, fault: LibraryFault) -> NoReturn:
        """Exit this process. The agent returns the library's calls to the manager."""
        self.outbox.send_waiting()  # also waits for sends of other threads
        for runner in self._runners:
            runner.forgive()
        with suppress(OSError):  # a call may have lowered the file size limit
            os.write(2, f"the library ends: {fault.text}\n".encode())
        self._exit(fault.code)

    # ---- messages

    def send(self, message: Any) -> None:
        self.outbox.send([message])

    def _lost(self, error: OSError, untold: list[int]) -> NoReturn:
        if error.errno not in (errno.EBADF, errno.ENOTSOCK):
            self._exit(1)
        if self._runners:
            self._runners[0].suspect([*untold, *(end.call for end in self.outbox.ends)])
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

    def _receive(self, *, block: bool, threads: bool = False) -> None:
        if not self._reading.acquire(blocking=block):
            return
        try:
            # With one slot, the attendant may have just received a message.
            if block and (self._over() or (not threads and len(self._queue))):
                return
            try:
                here = self._reader.fill(block=block)
            except BlockingIOError:
                return
            except OSError as error:
                if threads and self._over():
                    return
                self._lost(error, [])
            if here:
                self._handle_frames()
            elif not (threads and self._over()):
                self._exit(1)
        finally:
            self._reading.release()

    def _handle_frames(self) -> None:
        with self._handling:
            while (frame := self._reader.next()) is not None:
                for message in self._decode(frame).messages:
                    self._handle(message)

    def _handle(self, message: ToLibrary) -> None:
        match message:
            case Run():
                self._queue_calls(message)
            case GiveBack(count=count, calls=calls, order=order):
                back = self._queue.drop(calls) if calls else self._queue.give_back(count)
                if back or not calls:  # a `GiveBack` with a count is always answered
                    self.send(GivenBack(tuple(back), order=order))
            case Evict(call=call):
                for runner in self._runners:
                    if runner.taken == call:
                        runner.stop.ask()
                        self.meetings.told(call, "")
                        self.lane.wake()
                self._give_back(self._queue.drop([call]))
            case Meet(call=call, address=address):
                self.meetings.told(call, address)
            case Taken():
                self.lane.taken(message)
            case Resize(device_memory_bytes=size):
                self._resizes.append(size)
                # With several slots, resize now, because a call may always be running.
                if self._resizer is None or self._slots > 1 or self._runners[0].taken == NO_CALL:
                    self._resize()
            case Sleep() | Wake():
                if self._move is not None:
                    answer = self._move(message)
                    self.send(answer)
                    if isinstance(answer, SleepFailed):
                        self._exit(1)
            case Stop():
                self._stopping = True
                self._give_back(self._queue.give_back(len(self._queue)))
            case Load():
                pass  # a repeated order is ignored

    def _give_back(self, calls: list[CallId], *, need_function: bool = False) -> None:
        if calls:
            self.send(GivenBack(tuple(calls), need_function=need_function))

    def _queue_calls(self, message: Run) -> None:
        calls = message.calls
        function = None if self._stopping else self._functions.find(message.function, message.function_blob)
        if function is None:
            self._give_back([spec.call for spec in calls], need_function=not self._stopping)
            return
        add = self._queue.add
        for spec in calls:
            add(spec.call, RunnableCall(spec, message, function))

    def _resize(self) -> None:
        while self._resizes:
            size = self._resizes.popleft()
            if self._resizer is not None:
                try:
                    self._resizer(device_memory_bytes=ambient.bytes_per_torch_device(size))
                except Exception:  # the context keeps its former memory size
                    traceback.print_exc()
                    size = NOT_RESIZED
            self.send(Resized(device_memory_bytes=size))

    # ---- the attendant

    def _attend(self) -> None:
        runner = self._runners[0]
        while True:
            self._bell.wait()
            self._bell.clear()
            seen = -1
            while True:
                time.sleep(_TICK_S)
                begun, call = runner.begun, runner.call
                if call != NO_CALL and begun == seen:
                    self.outbox.send_waiting()
                    if not self._reads_for_call:
                        self._receive_without_blocking()
                elif call == NO_CALL and begun == seen:
                    break
                seen = begun
            self._parked = True
            if runner.begun != seen:  # a call began just now without setting the event
                self._bell.set()

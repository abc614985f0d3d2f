"""A library of a TaskVine pool, and the orders with which TaskVine runs calls.

A `PoolLibrary` has at most one open order in TaskVine. TaskVine chooses the worker, and may load the context there
again. A first order without calls loads the context. Short calls share an order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, assert_never

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.log_files import read_last_lines
from stoker.pilot.core.events import Event, FromLibrary, ProcessEnded
from stoker.pilot.core.turns import CallQueue
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedOrder, VineManager
from stoker.pilot.taskvine.messages import MEMORY_LIMIT_EXCEEDED, TIME_LIMIT_EXCEEDED, LibraryNote
from stoker.protocol import to_agent, to_library
from stoker.protocol.calls import CallEnd, CallSpec, Failure, FailureKind, OutputRange
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_library import Run
from stoker.protocol.to_pilot import FunctionBlob, StartLibrary
from stoker.units import show_bytes

_KIND_BY_REASON = {TIME_LIMIT_EXCEEDED: FailureKind.TIMEOUT, MEMORY_LIMIT_EXCEEDED: FailureKind.MEMORY}


def make_library_failure(
    ordered: StartLibrary, note: LibraryNote | None, *, taskvine_message: str, loading: bool, pilot: str
) -> Failure:
    """Return the failure of a library, derived from its note and TaskVine's message."""
    kind, why = FailureKind.CONTEXT if loading else FailureKind.DIED, ""
    if note is not None and note.reason:
        kind, why = _KIND_BY_REASON.get(note.reason, kind), ", which did not stop when Stoker interrupted it"
        if note.reason == MEMORY_LIMIT_EXCEEDED:
            declared = show_bytes(ordered.recipe.needs.memory_bytes)
            why = f", which used more memory than the {declared} that its recipe declares"
    doing = "while it loaded" if loading else "in a call on"
    return Failure(
        kind=kind,
        message=f"lib-{ordered.library} ended {doing} {ordered.recipe.name}{why}; TaskVine reports: {taskvine_message}",
        pilot=pilot, library=ordered.library,
        tail=read_last_lines(note.log, start=note.start) if note is not None else "",
        log=note.log if note is not None else "",
        printed=OutputRange(note.log, note.start, 0) if note is not None and not loading else None,
    )  # fmt: skip


TARGET_ORDER_S = 0.05
"""Seconds that an order of several short calls should take."""
MOST_CALLS_PER_ORDER = 64
_NO_CALLS = messages.PoolOrder(0)


class OrderOutcome(NamedTuple):
    """TaskVine's report on an order. `stopped`: calls that the pool has ordered to stop. `note`: note of a library that
    has ended.
    """

    order: messages.PoolOrder
    result: str
    answer: messages.PoolAnswer | None
    stopped: set[CallId]
    note: LibraryNote | None


class OrderSubmitter:
    def __init__(self, engine: VineManager, setup: messages.VineLibrarySetup) -> None:
        self.setup = setup
        self.slot_cores = 1
        self._engine = engine
        self._open_orders: dict[int, tuple[messages.PoolOrder, Callable[[OrderOutcome], None]]] = {}
        self.function_names: dict[FunctionKey, str] = {}
        self._mean_run_s: dict[FunctionKey, float] = {}
        self._users: Counter[str] = Counter()

    def add_function(self, blob: FunctionBlob) -> None:
        self.function_names[blob.key] = blob.name
        self._engine.add_function(blob)

    def record_run_time(self, function: FunctionKey, run_s: float) -> None:
        mean = self._mean_run_s.get(function, run_s)
        self._mean_run_s[function] = max(1e-6, 0.7 * mean + 0.3 * run_s)

    def take_next_order(self, queue: CallQueue[tuple[Run, CallSpec]]) -> messages.PoolOrder:
        """Take the next calls of one function with equal options. A call with a large argument gets its own order."""
        first = queue.peek()
        assert first is not None
        run, _ = first[1]
        mean = self._mean_run_s.get(run.function, 0.0)
        room = max(1, min(MOST_CALLS_PER_ORDER, int(TARGET_ORDER_S / mean))) if mean else 1
        calls: list[CallSpec] = []
        while len(calls) < room and (entry := queue.peek()) is not None:
            other, spec = entry[1]
            is_large = isinstance(spec.payload, ObjectRef)
            if other.function != run.function or other.options != run.options or (calls and is_large):
                break
            queue.take_first()
            calls.append(spec)
            if is_large:
                break
        return messages.PoolOrder(
            ticket=self._engine.new_ticket(), function=run.function, function_name=self.function_names[run.function],
            calls=calls, options=run.options,
            objects={ref.name: f"argument-{number}" for number, ref in enumerate(_large_arguments(calls))},
        )  # fmt: skip

    def make_order(self, order: messages.PoolOrder = _NO_CALLS, calls: Sequence[CallSpec] = ()) -> messages.PoolOrder:
        return msgspec.structs.replace(order, ticket=self._engine.new_ticket(), calls=list(calls))

    def submit(self, order: messages.PoolOrder, library: StartLibrary, *, then: Callable[[OrderOutcome], None]) -> None:
        large = _large_arguments(order.calls)
        self._open_orders[order.ticket] = order, then
        self._users.update(ref.name for ref in large)
        # Only TaskVine knows the library's slot, so device numbers start at 0.
        kind, _, _ = library.devices[0].partition(":")
        devices = tuple(f"{kind}:{number}" for number in range(len(library.devices)))
        setup = msgspec.structs.replace(self.setup, recipe=library.recipe, devices=devices)
        name = self._engine.install_library(setup, cores=self.slot_cores * len(devices))
        self._engine.submit(name, order, large=large)

    def request_stop(self, order: messages.PoolOrder, calls: Iterable[CallId]) -> None:
        for call in calls:
            with contextlib.suppress(OSError):
                messages.stop_file(self.setup.running, order.ticket, call).touch()

    def handle_finished_order(self, done: FinishedOrder) -> None:
        if done.ticket not in self._open_orders:
            return
        order, then = self._open_orders.pop(done.ticket)
        stopped = set()
        for spec in order.calls:
            with contextlib.suppress(FileNotFoundError):
                messages.stop_file(self.setup.running, order.ticket, spec.call).unlink()
                stopped.add(spec.call)
        large = _large_arguments(order.calls)
        self._users.subtract(ref.name for ref in large)
        for ref in large:
            if self._users[ref.name] <= 0:
                del self._users[ref.name]
                self._engine.forget_object(ref.name)
        answer = note = None
        if done.result == "success":
            answer = messages.decode_answer(done.answer)
        else:
            note = messages.read_and_remove_note(self.setup.running, order.ticket)
        then(OrderOutcome(order, done.result, answer, stopped, note))


def _large_arguments(calls: list[CallSpec]) -> tuple[ObjectRef, ...]:
    return tuple(spec.payload for spec in calls if isinstance(spec.payload, ObjectRef))


log = logging.getLogger("stoker.pilot")

MOST_RETRIES = 3


class PoolLibrary:
    """A library of the pool, until the core deletes its record."""

    def __init__(self, ordered: StartLibrary, orders: OrderSubmitter, tell: Callable[[Event], None]) -> None:
        self.number = ordered.library
        self.devices = ordered.devices
        self.memory_bytes = 0
        """Last measured host memory; 0 = unknown."""
        self._ordered = ordered
        self._orders = orders
        self._handle_event = tell
        self._queue = CallQueue[tuple[Run, CallSpec]]()
        self._open_order: messages.PoolOrder | None = None
        self._tries = 0
        self._ordered_at = time.monotonic()
        self._stops = False
        self._is_over = False

    @property
    def submitted_calls(self) -> tuple[CallId, ...]:
        return tuple(spec.call for spec in self._open_order.calls) if self._open_order is not None else ()

    # ---- messages from the core

    def load(self) -> None:
        self._send_message(to_agent.Hello(self.number, 0))
        self._submit(self._orders.make_order())

    def handle_message(self, message: to_library.ToLibrary) -> None:
        match message:
            case to_library.Run():
                self._queue_calls(message)
            case to_library.GiveBack(count=count, calls=calls, order=order):
                back = self._queue.remove_calls(calls) if calls else self._queue.remove_newest(count)
                if back or not calls:
                    self._send_message(to_agent.GivenBack(tuple(back), order=order))
            case to_library.Stop():
                self._stops = True
                if back := self._queue.remove_newest(len(self._queue)):
                    self._send_message(to_agent.GivenBack(tuple(back)))
                if self._open_order is None:
                    self._end()
            case to_library.Resize(device_memory_bytes=size):
                self._send_message(to_agent.Resized(size))
            case to_library.Evict(call=call):
                self.stop_running_calls({call})
            case (
                to_library.MeetRankZero()
                | to_library.Load()
                | to_library.PiecesReceived()
                | to_library.Sleep()
                | to_library.Wake()
            ):
                pass  # the libraries report that they cannot sleep
            case _:
                assert_never(message)

    def stop_running_calls(self, calls: set[CallId]) -> None:
        if self._open_order is not None:
            self._orders.request_stop(self._open_order, [call for call in self.submitted_calls if call in calls])

    def kill(self) -> None:
        self.stop_running_calls(set(self.submitted_calls))
        self._end(running=self.submitted_calls)

    def _queue_calls(self, run: to_library.Run) -> None:
        calls = tuple(spec.call for spec in run.calls)
        if run.function_blob is not None:
            self._orders.add_function(run.function_blob)
        elif run.function not in self._orders.function_names:
            self._send_message(to_agent.GivenBack(calls, need_function=True))
            return
        if run.gang is not None and run.gang.size > 1:
            text = f'it needs {run.gang.size} devices at once, and engine = "taskvine" does not support gangs'
            failure = Failure(FailureKind.NO_DEVICE, text, library=self.number)
            self._send_message(to_agent.RunsEnded([CallEnd(call, ok=False, failure=failure) for call in calls]))
            return
        for spec in run.calls:
            self._queue.add(spec.call, (run, spec))
        self._submit_next_order()

    # ---- TaskVine

    def _submit_next_order(self) -> None:
        if self._open_order is not None or self._is_over:
            return
        if self._stops:
            self._end()
        elif len(self._queue):
            self._tries = 0
            self._submit(self._orders.take_next_order(self._queue))

    def _submit(self, order: messages.PoolOrder) -> None:
        self._open_order = order
        self._orders.submit(order, self._ordered, then=self._handle_outcome)

    def _handle_outcome(self, outcome: OrderOutcome) -> None:
        self._open_order = None
        if self._is_over:
            return
        order, answer = outcome.order, outcome.answer
        if answer is None:
            self._retry_or_end(outcome)
            return
        held, name = answer.held, self._ordered.recipe.name
        self.memory_bytes = held.resident_bytes
        if held.failure is not None:
            self._end(msgspec.structs.replace(held.failure, library=self.number))
        elif order.calls:
            self._send_message(to_agent.RunsEnded(answer.ends))
            for end in answer.ends:
                self._orders.record_run_time(order.function, end.run_s)
            if not held.orders:
                log.info("TaskVine loaded %s again on %s: %.2f s", name, held.host, held.load_s)
            self._submit_next_order()
        else:
            log.info("lib-%d (%s) is on %s", self.number, name, held.host)
            # Do not report memory: otherwise, the manager would plan several contexts in one slot.
            start_s = max(0.0, time.monotonic() - self._ordered_at - held.load_s)
            self._send_message(to_agent.Loaded(held.load_s, resident_bytes=0, peak_bytes=0, start_s=start_s))

    def _retry_or_end(self, outcome: OrderOutcome) -> None:
        order, note, stopped = outcome.order, outcome.note, outcome.stopped
        if note is not None or not order.calls or self._tries == MOST_RETRIES:
            pilot = self._orders.setup.pilot
            failure = make_library_failure(
                self._ordered, note, taskvine_message=outcome.result, loading=not order.calls, pilot=pilot
            )
            self._end(failure, running=(CallId(note.call),) if note is not None else ())
            return
        self._tries += 1
        if stopped:
            self._send_message(to_agent.GivenBack(tuple(stopped)))
        if calls := [spec for spec in order.calls if spec.call not in stopped]:
            self._submit(self._orders.make_order(order, calls))
        else:
            self._submit_next_order()

    # ---- messages to the core

    def _send_message(self, message: to_agent.ToAgent) -> None:
        self._handle_event(FromLibrary(self.number, (message,)))

    def _end(self, failure: Failure | None = None, *, running: tuple[CallId, ...] = ()) -> None:
        if not self._is_over:
            self._is_over = True
            self._handle_event(ProcessEnded(self.number, running=running, verdict=failure))

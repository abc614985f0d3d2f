"""Orders as TaskVine is given them: files that they need, the calls that go into one, and stop files.

Short calls go several to an order, because an order costs TaskVine milliseconds. A large argument is a file that
TaskVine brings; it is dropped with the last order that needs it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedTicket, VineManager
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_library import Run
from stoker.protocol.to_pilot import FunctionBlob, StartLibrary

ORDER_S = 0.05
"""Short calls go into one order until they take so long together."""
MOST_CALLS = 64


class OrderOutcome(msgspec.Struct, frozen=True):
    """How an order ended: TaskVine's word, and the answer if that is `success`. `stopped`: calls of it that were told
    to stop. `note`: what its library left, if it ended without an answer."""

    order: messages.PoolOrder
    result: str
    answer: messages.PoolAnswer | None
    stopped: frozenset[CallId]
    note: messages.Note | None


class Orders:
    """All orders that TaskVine has of a pool. `setup` is what libraries are told, but for their recipe and devices."""

    def __init__(self, engine: VineManager, setup: messages.Setup) -> None:
        self.setup = setup
        self.slot_cores = 1
        """Cores that go with a slot."""
        self._engine = engine
        self._open: dict[int, tuple[messages.PoolOrder, Callable[[OrderOutcome], None]]] = {}
        self._names: dict[FunctionKey, str] = {}
        self._means: dict[FunctionKey, float] = {}
        """How long calls of a function take, in seconds."""
        self._users: Counter[str] = Counter()
        """Orders that need a large argument, by its name."""

    # ---- functions

    def take_function(self, blob: FunctionBlob) -> None:
        """Keep a function for the calls of it."""
        self._names[blob.key] = blob.name
        self._engine.take_function(blob)

    def knows(self, function: FunctionKey) -> bool:
        """Whether a function is kept."""
        return function in self._names

    def measured(self, function: FunctionKey, run_s: float) -> None:
        """A call of a function has taken so long."""
        mean = self._means.get(function, run_s)
        self._means[function] = max(1e-6, 0.7 * mean + 0.3 * run_s)

    # ---- orders

    def load(self) -> messages.PoolOrder:
        """An order without calls: TaskVine has the context loaded for it."""
        return messages.PoolOrder(self._engine.new_ticket())

    def next_of(self, queue: deque[tuple[Run, CallSpec]]) -> messages.PoolOrder:
        """Take the calls of the next order out of a queue: of one function with the same options, and a large one by
        itself."""
        run, _ = queue[0]
        mean = self._means.get(run.function, 0.0)
        room = max(1, min(MOST_CALLS, int(ORDER_S / mean))) if mean else 1
        calls: list[CallSpec] = []
        while queue and len(calls) < room:
            other, spec = queue[0]
            is_large = isinstance(spec.payload, ObjectRef)
            if other.function != run.function or other.options != run.options or (calls and is_large):
                break
            queue.popleft()
            calls.append(spec)
            if is_large:
                break
        return messages.PoolOrder(
            ticket=self._engine.new_ticket(),
            function=run.function,
            function_name=self._names[run.function],
            calls=calls,
            options=run.options,
            objects={ref.name: f"argument-{number}" for number, ref in enumerate(_large(calls))},
        )

    def again(self, order: messages.PoolOrder, calls: list[CallSpec]) -> messages.PoolOrder:
        """An order with these calls of one that never began."""
        return msgspec.structs.replace(order, ticket=self._engine.new_ticket(), calls=calls)

    def submit(self, order: messages.PoolOrder, library: StartLibrary, *, then: Callable[[OrderOutcome], None]) -> None:
        """Have TaskVine carry out an order in a library of this one's recipe; `then` is told how it ended."""
        large = _large(order.calls)
        self._open[order.ticket] = order, then
        self._users.update(ref.name for ref in large)
        # Which slot it is to be only TaskVine knows: its devices are counted from 0.
        kind, _, _ = library.devices[0].partition(":")
        devices = tuple(f"{kind}:{number}" for number in range(len(library.devices)))
        setup = msgspec.structs.replace(self.setup, recipe=library.recipe, devices=devices)
        name = self._engine.install(setup, cores=self.slot_cores * len(devices))
        self._engine.submit(name, order, large=large)

    def interrupt(self, order: messages.PoolOrder, calls: Iterable[CallId]) -> None:
        """Have TaskVine's library stop these calls of an order (see `watch`).

        The manager may send the same calls again at once, after a worker was lost: they run in another order, which no
        file of this one stops.
        """
        for call in calls:
            with contextlib.suppress(OSError):
                messages.stop_file(self.setup.running, order.ticket, call).touch()

    def finished(self, done: FinishedTicket) -> None:
        """TaskVine is done with an order."""
        order, then = self._open.pop(done.ticket, (None, None))
        if order is None or then is None:
            return
        stopped = self._take_stop_files(order)
        large = _large(order.calls)
        self._users.subtract(ref.name for ref in large)
        for ref in large:
            if self._users[ref.name] <= 0:
                del self._users[ref.name]
                self._engine.forget(ref.name)
        succeeded = done.result == "success"
        answer = messages.decode_answer(done.answer) if succeeded else None
        note = None if succeeded else messages.take_note(self.setup.running, order.ticket)
        then(OrderOutcome(order, done.result, answer, stopped, note))

    def _take_stop_files(self, order: messages.PoolOrder) -> frozenset[CallId]:
        """Remove the stop files of an order that is over; the calls that had one."""
        stopped = set()
        for spec in order.calls:
            with contextlib.suppress(FileNotFoundError):
                messages.stop_file(self.setup.running, order.ticket, spec.call).unlink()
                stopped.add(spec.call)
        return frozenset(stopped)


def _large(calls: list[CallSpec]) -> tuple[ObjectRef, ...]:
    return tuple(spec.payload for spec in calls if isinstance(spec.payload, ObjectRef))

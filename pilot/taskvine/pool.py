"""The manager's picture of a TaskVine pool, and what is done about its orders.

The manager sees one pilot, whose devices are the slots that the pool's workers have together. A library of the
manager's stands for the right to have one call of its context in TaskVine at a time; which worker runs it, and whether
a process there still holds the context, is TaskVine's business. (An order without calls, sent ahead, has it loaded.) As
many libraries of a context as the manager starts, so many processes TaskVine comes to have.

A slot of TaskVine's holds one context at a time: an idle library is killed as soon as another one is wanted on its
worker. So a library that is told to start on a device that another one has waits until that one is idle, or has had its
turn, and then takes its place. Short calls go several to an order, because an order costs TaskVine milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.manager.protocol import to_pilot
from stoker.manager.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.manager.protocol.ids import CallId, LibraryId
from stoker.manager.protocol.to_manager import (
    CallsEnded,
    CallsReturned,
    FromPilot,
    LibraryGone,
    LibraryNews,
    LibraryPhase,
    LibraryReady,
    LibraryResized,
)
from stoker.pilot.core.library import State
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.books import Books, Library
from stoker.pilot.taskvine.engine import Engine, Finished
from stoker.pilot.taskvine.verdict import verdict

log = logging.getLogger("stoker.pilot")

TURN_S = 10.0
"""A busy library keeps its slot for so long when another context wants it."""
ORDER_S = 0.05
"""Short calls go into one order until they take so long together."""
MOST_CALLS = 64
TRIES = 3
"""An order that TaskVine gave up on before it began is sent again so often."""


class Pool:
    """Carries out the manager's orders through TaskVine. `post` says something to the manager.

    `setup` is what libraries are told, but for their recipe and devices.
    """

    def __init__(self, engine: Engine, post: Callable[[FromPilot], None], *, setup: messages.Setup) -> None:
        self.books = Books()
        self.leaving = ""
        self.slot_cores = 1
        """Cores that go with a slot."""
        self._engine = engine
        self._post = post
        self._setup = setup
        self._waiting: list[Library] = []
        """Told to start, on devices that others still have."""
        self._tickets: dict[int, Library] = {}
        self._names: dict[str, str] = {}
        self._means: dict[str, float] = {}
        """How long calls of a function take, in seconds."""
        self._users: Counter[str] = Counter()
        """Orders that need a large argument, by its name."""

    # ---- what the manager wants

    def handle(self, message: to_pilot.ToPilot) -> None:
        """Carry out one order. What concerns the connection is the loop's."""
        match message:
            case to_pilot.StartLibrary():
                self._start(message)
            case to_pilot.RunCalls():
                self._run(message)
            case to_pilot.StopLibrary(library=number, drain=drain, reason=reason):
                self._stop(number, drain=drain, reason=reason)
            case to_pilot.TakeBack(library=number, count=count):
                library = self.books.libraries.get(number)
                if library is not None:
                    self._give_back(library, count)
            case to_pilot.CancelCalls():
                self._cancel(message)
            case to_pilot.ResizeLibrary(library=number, device_memory_bytes=size):
                self._post(LibraryResized(number, size))
            case to_pilot.EvictCall() | to_pilot.MeetGang() | to_pilot.FetchObject():
                pass  # a call in TaskVine cannot be looked into; TaskVine brings objects by itself
            case (
                to_pilot.PilotWelcome() | to_pilot.PilotRefused() | to_pilot.HelloAgain() | to_pilot.Ack()
                | to_pilot.Exit()
            ):  # fmt: skip
                pass
            case _:
                assert_never(message)

    def drain(self, reason: str) -> None:
        """Begin to leave: calls that TaskVine has may finish, the others are given back."""
        self.leaving = self.leaving or reason
        for number in list(self.books.libraries):
            self._stop(number, drain=True, reason=reason)

    def _start(self, message: to_pilot.StartLibrary) -> None:
        if self.leaving:
            self._post(LibraryGone(message.library, loading=True))
            return
        library = self.books.enter(message)
        if library is not None:
            self._waiting.append(library)
            self.look(time.monotonic())

    def _run(self, order: to_pilot.RunCalls) -> None:
        library = self.books.libraries.get(order.library)
        calls = tuple(spec.call for spec in order.calls)
        if library is None or library.state.state is State.DRAINING:
            why = "is not in this pool" if library is None else "is about to end"
            self._post(CallsReturned(order.library, calls, refused=f"lib-{order.library} {why}"))
            return
        if order.function_blob is not None:
            self._names[order.function] = order.function_blob.name
            self._engine.take_function(order.function_blob)
        elif order.function not in self._names:
            self._post(CallsReturned(order.library, calls, need_function=True))
            return
        if order.gang is not None and order.gang.size > 1:
            text = f'it wants {order.gang.size} devices at once, and engine = "taskvine" runs no gangs'
            failure = Failure(FailureKind.NO_DEVICE, text, library=order.library)
            self._post(CallsEnded(order.library, [CallEnd(call, ok=False, failure=failure) for call in calls]))
            return
        library.state.hold(calls, limit_s=order.options.limit_s)
        library.queue.extend((order, spec) for spec in order.calls)
        self._feed(library)

    def _stop(self, number: LibraryId, *, drain: bool, reason: str) -> None:
        library = self.books.libraries.get(number)
        if library is None:
            self._post(LibraryGone(number))
            return
        log.info("lib-%d is told to end: %s", number, reason)
        if not drain or library.order is None or not library.is_ready:
            self._interrupt(library, library.sent)
            self._end(library)
        else:
            self._finish_up(library)

    def _finish_up(self, library: Library) -> None:
        """Have a library end when TaskVine is done with its order; it gives back what it has not begun."""
        if library.state.state is State.READY:
            library.state.move(State.DRAINING)
            self._give_back(library, len(library.queue))

    def _give_back(self, library: Library, count: int) -> None:
        back = [library.queue.pop()[1].call for _ in range(min(count, len(library.queue)))]
        self._post(CallsReturned(library.number, tuple(library.state.returned(back))))

    def _cancel(self, order: to_pilot.CancelCalls) -> None:
        library = self.books.libraries.get(order.library)
        if library is None:
            return
        wanted = set(order.calls)
        strange = [call for call in order.calls if call not in library.state.held]
        dropped = library.state.returned([spec.call for _, spec in library.queue if spec.call in wanted])
        library.queue = deque((run, spec) for run, spec in library.queue if spec.call not in wanted)
        if dropped or strange:
            self._post(CallsReturned(order.library, (*strange, *dropped)))
        if order.running:
            self._interrupt(library, (call for call in library.sent if call in wanted))

    def _interrupt(self, library: Library, calls: Iterable[CallId]) -> None:
        """Have TaskVine's library stop these calls of the order that it works on (see `watch`).

        The manager may send the same calls again at once, after a worker was lost: they run in another order, which no
        file of this one stops.
        """
        if library.order is None:
            return
        for call in calls:
            with contextlib.suppress(OSError):
                messages.stop_file(self._setup.running, library.order.ticket, call).touch()

    # ---- slots

    def look(self, now: float) -> None:
        """Give slots to libraries that wait for them, where those that have them are idle or have had their turn."""
        for library in list(self._waiting):
            rooms = [self._make_room(holder, now) for holder in self.books.holders(library)]
            if all(rooms):
                self._waiting.remove(library)
                self.books.take_slots(library)
                self._load(library)

    def _make_room(self, holder: Library, now: float) -> bool:
        """Whether a library has just left its slots; it is asked to if it has had its turn."""
        if holder.is_ready and not holder.state.held:
            self._end(holder)
            return True
        if holder.state.state is State.READY and now - holder.ready_at > TURN_S:
            log.info("lib-%d has had its turn: another context wants its slot", holder.number)
            self._finish_up(holder)
        return False

    # ---- TaskVine

    def _load(self, library: Library) -> None:
        library.state.move(State.STARTING)
        self._post(LibraryNews(library.number, LibraryPhase.LOADING))
        self._submit(library, messages.Order(self._engine.new_ticket()))

    def _feed(self, library: Library) -> None:
        """Give TaskVine the next calls of a library, if it has none of it."""
        if library.order is not None or library.state.state is not State.READY or not library.queue:
            return
        run, _ = library.queue[0]
        calls, large = self._next_calls(library, run)
        order = messages.Order(
            ticket=self._engine.new_ticket(),
            function=run.function,
            function_name=self._names[run.function],
            calls=calls,
            options=run.options,
            objects={ref.name: f"argument-{number}" for number, ref in enumerate(large)},
        )
        library.tries = 0
        library.large = tuple(large)
        self._submit(library, order)

    def _next_calls(self, library: Library, run: to_pilot.RunCalls) -> tuple[list[CallSpec], list[ObjectRef]]:
        """Calls that go into one order: of one function with the same options, and one of them if it is large."""
        mean = self._means.get(run.function, 0.0)
        room = max(1, min(MOST_CALLS, int(ORDER_S / mean))) if mean else 1
        calls: list[CallSpec] = []
        while library.queue and len(calls) < room:
            other, spec = library.queue[0]
            is_large = isinstance(spec.payload, ObjectRef)
            if other.function != run.function or other.options != run.options or (calls and is_large):
                break
            library.queue.popleft()
            calls.append(spec)
            if is_large:
                break
        return calls, [spec.payload for spec in calls if isinstance(spec.payload, ObjectRef)]

    def _submit(self, library: Library, order: messages.Order) -> None:
        library.order = order
        self._tickets[order.ticket] = library
        self._users.update(ref.name for ref in library.large)
        # Which slot it is to be only TaskVine knows: its devices are counted from 0.
        kind, _, _ = library.state.devices[0].partition(":")
        devices = tuple(f"{kind}:{number}" for number in range(len(library.state.devices)))
        setup = msgspec.structs.replace(self._setup, recipe=library.recipe, devices=devices)
        name = self._engine.install(setup, cores=self.slot_cores * len(devices))
        self._engine.submit(name, order, large=library.large)

    def finished(self, done: Finished) -> None:
        """TaskVine is done with an order."""
        library = self._tickets.pop(done.ticket, None)
        order = library.order if library is not None else None
        if library is None or order is None:
            return
        library.order = None
        stopped = self._take_stop_files(order)
        self._users.subtract(ref.name for ref in library.large)
        for ref in library.large:
            if self._users[ref.name] <= 0:
                del self._users[ref.name]
                self._engine.forget(ref.name)
        if library.state.state is State.GONE:
            return  # ended meanwhile
        if done.result != "success":
            self._failed(library, order, done.result, stopped=stopped)
            return
        answer = messages.decode_answer(done.answer)
        library.memory_bytes = answer.held.resident_bytes
        if answer.held.failure is not None:
            self._end(library, msgspec.structs.replace(answer.held.failure, library=library.number), loading=True)
        elif order.calls:
            self._ended(library, order, answer)
        else:
            self._ready(library, answer.held)

    def _take_stop_files(self, order: messages.Order) -> set[CallId]:
        """Remove the stop files of an order that is over; the calls that had one."""
        stopped = set()
        for spec in order.calls:
            with contextlib.suppress(FileNotFoundError):
                messages.stop_file(self._setup.running, order.ticket, spec.call).unlink()
                stopped.add(spec.call)
        return stopped

    def _ready(self, library: Library, held: messages.Held) -> None:
        now = time.monotonic()
        library.state.move(State.LOADING)
        library.state.move(State.READY)
        library.ready_at = now
        # What it took of memory is not told: the manager would plan to have several contexts in one slot.
        start_s = max(0.0, now - library.ordered_at - held.load_s)
        self._post(LibraryReady(library.number, start_s=start_s, load_s=held.load_s))
        log.info("lib-%d (%s) is on %s: %.2f s to load", library.number, library.recipe.name, held.host, held.load_s)
        self._feed(library)

    def _ended(self, library: Library, order: messages.Order, answer: messages.Answer) -> None:
        here = set(library.state.ended([end.call for end in answer.ends]))
        if here:
            self._post(CallsEnded(library.number, [end for end in answer.ends if end.call in here]))
        for end in answer.ends:
            mean = self._means.get(order.function, end.run_s)
            self._means[order.function] = max(1e-6, 0.7 * mean + 0.3 * end.run_s)
        if not answer.held.orders:
            log.info(
                "TaskVine had %s loaded once more, on %s: %.2f s", library.recipe.name, answer.held.host,
                answer.held.load_s,
            )  # fmt: skip
        if library.state.state is State.DRAINING:
            self._end(library)
        else:
            self._feed(library)

    def _failed(self, library: Library, order: messages.Order, result: str, *, stopped: set[CallId]) -> None:
        """TaskVine has no answer: the process that should have given it has ended, or was never there."""
        note = messages.take_note(self._setup.running, order.ticket)
        if note is None and order.calls and library.tries < TRIES:
            library.tries += 1
            self._send_again(library, order, without=stopped)
            return
        loading = not order.calls
        failure = verdict(library, note, said=result, loading=loading, pilot=self._setup.pilot)
        self._end(library, failure, loading=loading, running=[CallId(note.call)] if note is not None else [])

    def _send_again(self, library: Library, order: messages.Order, *, without: set[CallId]) -> None:
        """Send an order that never began once more; calls that were stopped meanwhile go back to the manager."""
        if without:
            self._post(CallsReturned(library.number, tuple(library.state.returned(without))))
        calls = [spec for spec in order.calls if spec.call not in without]
        if calls:
            self._submit(library, msgspec.structs.replace(order, ticket=self._engine.new_ticket(), calls=calls))
        elif library.state.state is State.DRAINING:
            self._end(library)
        else:
            self._feed(library)

    # ---- ends

    def _end(
        self,
        library: Library,
        failure: Failure | None = None,
        *,
        loading: bool = False,
        running: Iterable[CallId] = (),
    ) -> None:
        """A library of the manager's is no more. TaskVine keeps the context as long as it likes."""
        loading = loading or not library.is_ready
        self.books.remove(library)
        left = library.state.gone(running if failure is not None else library.sent)
        self._post(LibraryGone(library.number, failure, loading, left.running, left.unstarted))
        if failure is not None:
            log.warning("lib-%d (%s) ended: %s", library.number, library.recipe.name, failure.message)
        if library in self._waiting:
            self._waiting.remove(library)

"""Simulate a pilot that follows the protocol in virtual time.

A library starts or grows only when the memory is free. An impossible reservation, a call sent twice to one library, or
a function that was never sent fails the test.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot, wire
from stoker.protocol.calls import CallEnd, CallProgress, CallSpec, Failure, FailureKind, GangPlace
from stoker.protocol.wire import Outbox

if TYPE_CHECKING:
    from core.toy import Toy


class Work(msgspec.Struct, frozen=True):
    """Behaviour of a call. The call reports progress every `step_s`. If `shared`, ranks of a gang connect for `meet_s`
    and divide the work.
    """

    run_s: float = 1.0
    raises: bool = False
    kills: bool = False
    step_s: float = 0.0
    shared: bool = False
    meet_s: float = 0.0
    failed_by: str = ""  # `node` or `device`: cause of failures


class Running:
    def __init__(self, spec: CallSpec, work: Work, started: float, done: float, gang: GangPlace | None) -> None:
        self.spec, self.work, self.started, self.done, self.gang = spec, work, started, done, gang
        several = gang is not None and gang.size > 1
        self.rate = gang.size if work.shared and gang is not None else 1
        self.meet_s = work.meet_s if several else 0.0
        self.takes_s = self.meet_s + (work.run_s - done) / self.rate


class ToyLibrary:
    def __init__(self, order: to_pilot.StartLibrary) -> None:
        self.id = order.library
        self.recipe: Recipe = order.recipe
        self.devices = order.devices
        self.held_bytes = 0
        self.budget_bytes = order.device_memory_bytes
        """Target bytes on each device; `held_bytes` differs while the library waits for memory."""
        self.begun = False
        self.ready = False
        self.moves = ""  # `falls asleep`, `asleep` or `wakes`; empty = serves calls
        self.awake_bytes = 0
        self.wake_to = 0  # Size of a wake order received during falling asleep
        self.stopping = False
        self.waiting: OrderedDict[int, tuple[CallSpec, GangPlace | None]] = OrderedDict()
        self.running: dict[int, Running] = {}
        self.functions: set[str] = set()
        self.served = 0


GIVEN_AGAIN = (to_pilot.RunCalls, to_pilot.StartLibrary, to_pilot.CancelCalls, to_pilot.MeetGang)
"""Orders that a pilot ignores until the manager has answered its last hello. The manager repeats orders missing in the
hello.
"""


class ToyPilot:
    """One pilot. `toy.after` schedules its next steps."""

    def __init__(self, toy: Toy, name: str, devices: tuple[say.DeviceFacts, ...], *, block: str = "") -> None:
        self.toy, self.name, self.devices, self.block = toy, name, devices, block
        self.libraries: dict[int, ToyLibrary] = {}
        self.gone: dict[int, ToyLibrary] = {}  # Ended libraries in their last state
        self.outbox = Outbox()
        self.alive = True
        self.draining = False
        self.hellos = self.answered = 0  # Number of sent hellos, and number of the last hello that the manager answered
        self.refuses = ""  # The reason to refuse offers; empty = accept
        self.began: list[tuple[float, int, int, int]] = []  # (time, call, rank, size) of every begun call

    # ---- orders of the manager
    def hear(self, message: Any) -> None:
        if self.answered != self.hellos and isinstance(message, GIVEN_AGAIN):
            return
        match message:
            case to_pilot.StartLibrary():
                self._start(message)
            case to_pilot.RunCalls():
                self._run(message)
            case to_pilot.TakeBack(id, count):
                library = self.libraries.get(id)
                back = list(reversed(library.waiting))[:count] if library else []
                self._give_back(id, back)
            case to_pilot.CancelCalls(id, calls, running):
                self._cancel(id, calls, running=running)
            case to_pilot.EvictCall(id, call):
                self._evict(id, call)
            case to_pilot.ResizeLibrary(id, size):
                self.toy.after(self.toy.resize_s, lambda: self._resize(id, size))
            case to_pilot.SleepLibrary(id, keeps):
                self._sleep(id, keeps)
            case to_pilot.WakeLibrary(id, size):
                self._wake(id, size)
            case to_pilot.StopLibrary(id):
                library = self.libraries.get(id)
                if library:
                    self._stop(library)
            case to_pilot.Exit(_, drain):
                if not drain:
                    self.alive = False
                    return
                self.leave()
            case to_pilot.Ack(sequence):
                self.outbox.acked(sequence)
            case to_pilot.HelloAgain(acknowledged):
                self.outbox.acked(acknowledged)
                self.toy.greet(self)
            case to_pilot.PilotWelcome(hello=number):
                self.answered = number
            case to_pilot.PilotRefused():
                self.alive = False

    def leave(self) -> None:
        self.draining = True
        for library in list(self.libraries.values()):
            self._stop(library)
        self._leave_if_drained()

    def hello(self) -> say.PilotHello:
        """Return a hello with the state from before the unacknowledged frames."""
        self.hellos += 1
        before = collect_unacknowledged_facts(self.outbox.unacked())
        every = [*self.libraries.values(), *(self.gone[id] for id in before.gone if id in self.gone)]
        return say.PilotHello(
            wire.VERSION, self.toy.session, f"host-{self.name}", 7, self.devices, self.block,
            tuple(
                say.LibraryFacts(
                    x.id, x.recipe.key, x.devices, x.ready and not x.moves and x.id not in before.ready,
                    tuple(dict.fromkeys((*before.left.get(x.id, ()), *x.running, *x.waiting))),
                    reserved_bytes=x.budget_bytes if x.id in self.libraries else 0,
                    sleeps=self.toy.costs[x.recipe.key].sleeps, awake_bytes=x.awake_bytes,
                    asleep=x.moves in ("falls asleep", "asleep") and x.id not in before.ready,
                )
                for x in every
            ),
            acknowledged=self.outbox.acknowledged, number=self.hellos,
            recipes=tuple({x.recipe.key: x.recipe for x in every}.values()),
            last_library=max((*self.libraries, *self.gone), default=0),
        )  # fmt: skip

    # ---- libraries
    def _held(self, device: str) -> int:
        return sum(x.held_bytes for x in self.libraries.values() if device in x.devices)

    def _budgets(self) -> None:
        for facts in self.devices:
            staying = [x for x in self.libraries.values() if facts.device in x.devices and not x.stopping]
            budget = sum(x.budget_bytes for x in staying)
            assert budget <= facts.memory_bytes, f"{facts.device} of {self.name} is promised twice"

    def _takes(self, library: ToyLibrary) -> bool:
        """Give a library its memory budget; return False if too little memory is free."""
        more = library.budget_bytes - library.held_bytes
        facts = [facts for facts in self.devices if facts.device in library.devices]
        if any(self._held(each.device) + more > each.memory_bytes for each in facts):
            return False
        library.held_bytes = library.budget_bytes
        return True

    def _memory_freed(self) -> None:
        for library in list(self.libraries.values()):
            if library.held_bytes < library.budget_bytes and self._takes(library):
                if library.moves:
                    self._wakes_now(library)
                elif library.begun:
                    self.say(say.LibraryResized(library.id, library.held_bytes))
                else:
                    self._load(library)

    def _start(self, order: to_pilot.StartLibrary) -> None:
        assert order.library not in self.libraries, "a library was started twice"
        library = ToyLibrary(order)
        if self.draining:
            self.gone[library.id] = library
            self.say(say.LibraryGone(order.library, None, loading=True))
            return
        self.libraries[order.library] = library
        self._budgets()
        if self._takes(library):
            self._load(library)
        else:
            self.say(say.LibraryUpdate(library.id, say.LibraryPhase.WAITING))

    def _load(self, library: ToyLibrary) -> None:
        library.begun = True
        cost = self.toy.costs[library.recipe.key]
        self.say(say.LibraryUpdate(library.id, say.LibraryPhase.LOADING))
        if cost.broken:
            self.toy.after(cost.load_s, lambda: self._gone(library, Failure(FailureKind.CONTEXT, cost.broken)))
        else:
            self.toy.after(cost.load_s, lambda: self._loaded(library))

    def _loaded(self, library: ToyLibrary) -> None:
        if self.libraries.get(library.id) is library:
            library.ready = True
            cost = self.toy.costs[library.recipe.key]
            if not library.recipe.needs.memory_bytes:
                library.held_bytes = library.budget_bytes = min(library.held_bytes, cost.resident_bytes)
            self.say(
                say.LibraryReady(
                    library.id, 0.1, cost.load_s, cost.resident_bytes, cost.resident_bytes, sleeps=cost.sleeps
                )
            )
            if library.stopping and not library.running:
                self._gone(library, None)
            self._go_on(library)

    def _resize(self, id: int, size: int) -> None:
        library = self.libraries.get(id)
        if library is None or not self.alive:
            return
        library.budget_bytes = size
        if self._takes(library):
            self.say(say.LibraryResized(library.id, size))
            self._memory_freed()

    def _sleep(self, id: int, keeps: int) -> None:
        library = self.libraries.get(id)
        if library is None or library.stopping or library.moves not in ("", "asleep"):
            return
        if library.moves:
            self.say(say.LibraryAsleep(library.id, library.held_bytes))
        elif not library.ready or library.running or library.waiting:
            self.say(say.LibraryAwake(library.id, library.budget_bytes, refused="it is not idle"))
        else:
            library.moves, library.awake_bytes = "falls asleep", library.budget_bytes
            library.budget_bytes = min(library.budget_bytes, keeps)
            self.toy.after(0.2, lambda: self._asleep(library))

    def _asleep(self, library: ToyLibrary) -> None:
        if self.libraries.get(library.id) is not library or not self.alive:
            return
        library.moves = "asleep"
        library.held_bytes = library.budget_bytes = min(
            library.budget_bytes, self.toy.costs[library.recipe.key].resident_bytes
        )
        self.say(say.LibraryAsleep(library.id, library.held_bytes, sleep_s=0.2))
        self._memory_freed()
        if library.wake_to:
            self._wake(library.id, library.wake_to)

    def _wake(self, id: int, size: int) -> None:
        library = self.libraries.get(id)
        if library is None or library.stopping or library.moves == "wakes":
            return
        if not library.moves:
            self.say(say.LibraryAwake(library.id, library.budget_bytes))
        elif library.moves == "falls asleep":
            library.wake_to = size
        else:
            library.moves, library.budget_bytes, library.wake_to = "wakes", size, 0
            self._budgets()
            if self._takes(library):
                self._wakes_now(library)

    def _wakes_now(self, library: ToyLibrary) -> None:
        self.toy.after(0.1, lambda: self._awake(library))

    def _awake(self, library: ToyLibrary) -> None:
        if self.libraries.get(library.id) is library and self.alive:
            library.moves = ""
            self.say(say.LibraryAwake(library.id, library.held_bytes, 0.1))

    def _stop(self, library: ToyLibrary) -> None:
        library.stopping = True
        self._give_back(library.id, list(library.waiting))
        if not library.running and (library.ready or not library.begun):
            self._gone(library, None)

    def _gone(self, library: ToyLibrary, failure: Failure | None) -> None:
        if self.libraries.pop(library.id, None) is None:
            return
        self.gone[library.id] = library
        running, rest = tuple(library.running), tuple(library.waiting)
        self.say(say.LibraryGone(library.id, failure, not library.ready, running, rest))
        self._memory_freed()
        self._leave_if_drained()

    def _leave_if_drained(self) -> None:
        if self.draining and not self.libraries and self.alive:
            self.say(say.PilotLeaving("drained"))
            self.alive = False

    # ---- calls
    def _run(self, order: to_pilot.RunCalls) -> None:
        ids = [spec.call for spec in order.calls]
        library = self.libraries.get(order.library)
        if order.offer and self.refuses:
            self.say(say.CallsReturned(order.library, tuple(ids), self.refuses))
            return
        if library is None or library.stopping or library.moves:
            self.say(say.CallsReturned(order.library, tuple(ids), "the library is about to end, or asleep"))
            return
        if order.function_blob is not None:
            library.functions.add(order.function)
        assert order.function in library.functions, "a function that was never sent"
        for spec in order.calls:
            assert spec.call not in library.waiting, "a call twice in one library"
            assert spec.call not in library.running, "a call twice in one library"
            library.waiting[spec.call] = spec, order.gang
        self._go_on(library)

    def _go_on(self, library: ToyLibrary) -> None:
        while library.ready and library.waiting and len(library.running) < library.recipe.slots:
            id, (spec, gang) = library.waiting.popitem(last=False)
            work = msgspec.msgpack.decode(spec.payload, type=Work)
            done = float(spec.progress or b"0")
            run_s = self.toy.costs[library.recipe.key].run_s
            work = msgspec.structs.replace(work, run_s=run_s) if run_s else work
            run = library.running[id] = Running(spec, work, self.toy.now, done, gang)
            self.began.append((self.toy.now, id, gang.rank if gang else 0, gang.size if gang else 1))
            self.toy.after(run.takes_s, lambda run=run: self._finish(library, run))
            if work.step_s:
                self.toy.after(work.step_s, lambda run=run: self._report(library, run))

    def _here(self, library: ToyLibrary, run: Running) -> bool:
        here = library.running.get(run.spec.call) is run
        return here and self.alive and self.libraries.get(library.id) is library

    def _finish(self, library: ToyLibrary, run: Running) -> None:
        if not self._here(library, run):
            return
        if run.work.kills:
            self._gone(library, Failure(FailureKind.DIED, "signal 11", signal=11))
            return
        del library.running[run.spec.call]
        library.served += 1
        took_s = run.takes_s if run.work.shared else run.work.run_s
        failure = None
        if run.work.failed_by:
            device = run.work.failed_by.removeprefix("node")
            failure = Failure(FailureKind.INFRASTRUCTURE, "it failed the call", library=library.id, device=device)
        ok = not run.work.raises and failure is None
        self.say(say.CallsEnded(library.id, [CallEnd(run.spec.call, ok, b"", took_s, failure)]))
        if failure is not None and failure.device:
            self._gone(library, Failure(FailureKind.PILOT, "its device failed"))
        elif library.stopping and not library.running:
            self._gone(library, None)
        elif 0 < library.recipe.calls_per_library <= library.served:
            self._stop(library)
        else:
            self._go_on(library)

    def _report(self, library: ToyLibrary, run: Running) -> None:
        if self._here(library, run):
            self.say(say.CallsProgress(library.id, [self._progress(run)]))
            self.toy.after(run.work.step_s, lambda: self._report(library, run))

    def _progress(self, run: Running) -> CallProgress:
        done = run.done + max(0.0, self.toy.now - run.started - run.meet_s) * run.rate
        return CallProgress(run.spec.call, done, run.work.run_s, 0.0, str(done).encode())

    def _evict(self, id: int, call: int) -> None:
        library = self.libraries.get(id)
        run = library.running.pop(call, None) if library else None
        if library and run:
            self.say(say.CallEvicted(library.id, self._progress(run)))
            self._go_on(library)
        elif library and call in library.waiting:
            self._give_back(id, [call])

    def _cancel(self, id: int, calls: tuple[int, ...], *, running: bool) -> None:
        library = self.libraries.get(id)
        if library is None:
            return
        self._give_back(id, [call for call in calls if call in library.waiting])
        stopped = [call for call in calls if running and call in library.running]
        if stopped and self.toy.ignore_stops:
            self._gone(library, Failure(FailureKind.CANCELLED, "a call that it ran was cancelled and did not stop"))
            return
        for call in stopped:
            self._evict(id, call)

    def _give_back(self, id: int, calls: list[int]) -> None:
        library = self.libraries.get(id)
        if library is None:
            return
        for call in calls:
            del library.waiting[call]
        self.say(say.CallsReturned(library.id, tuple(calls)))

    # ---- messages
    def say(self, message: Any) -> None:
        if self.alive:
            sequence = self.outbox.next()
            self.outbox.keep(sequence, msgspec.msgpack.encode((sequence, [message])))
            self.toy.from_pilot(self, sequence, [message])

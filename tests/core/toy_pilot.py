"""Simulate a pilot in virtual time: the real core of a pilot, and processes whose calls do nothing.

A call that is sent twice to one library, or a function that was never sent, fails the test.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
from core.pilot_shell import CoreHost

from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.pilot.core import commands, events
from stoker.pilot.core.state import PilotFacts
from stoker.protocol import to_agent, to_library, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallProgress, CallSpec, Failure, FailureKind, GangPlace
from stoker.protocol.ids import CallId
from stoker.protocol.wire import Outbox

if TYPE_CHECKING:
    from core.toy import Toy

_decode = msgspec.msgpack.Decoder(tuple[int, list[say.FromPilot]]).decode


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
    def __init__(self, spec: CallSpec, work: Work, started: float, gang: GangPlace | None) -> None:
        self.spec, self.work, self.started, self.done = spec, work, started, float(spec.progress or b"0")
        self.rate = gang.size if work.shared and gang is not None else 1
        self.meet_s = work.meet_s if gang is not None and gang.size > 1 else 0.0
        self.takes_s = self.meet_s + (work.run_s - self.done) / self.rate

    def progress(self, now: float) -> CallProgress:
        done = self.done + max(0.0, now - self.started - self.meet_s) * self.rate
        return CallProgress(self.spec.call, done, self.work.run_s, 0.0, str(done).encode())


class ToyProcess:
    """The process of a library."""

    def __init__(self, pilot: ToyPilot, order: to_pilot.StartLibrary) -> None:
        self.pilot, self.toy, self.id, self.recipe = pilot, pilot.toy, order.library, order.recipe
        self.cost = self.toy.costs[order.recipe.key]
        self.stops = False
        self.waiting: OrderedDict[CallId, tuple[CallSpec, GangPlace | None]] = OrderedDict()
        self.running: dict[CallId, Running] = {}
        self.functions: set[str] = set()
        self.served = 0
        self.held_bytes = order.device_memory_bytes
        self.say(to_agent.Hello(self.id, self.id))
        self.after(self.cost.load_s, self._load)

    def say(self, message: to_agent.ToAgent) -> None:
        self.pilot.handle(events.FromLibrary(self.id, (message,)))

    def after(self, seconds: float, what: Any) -> None:
        self.toy.after(seconds, lambda: what() if self._is_alive() else None)

    def _is_alive(self) -> bool:
        return self.pilot.alive and self.pilot.processes.get(self.id) is self

    def die(self, *, signal: int = 9, **how: Any) -> None:
        if self._is_alive():
            del self.pilot.processes[self.id]
            self.pilot.handle(events.ProcessEnded(self.id, signal, running=tuple(self.running), **how))

    def _load(self) -> None:
        if self.cost.broken:
            self.say(to_agent.LoadFailed(Failure(FailureKind.CONTEXT, self.cost.broken)))
            self.die(signal=0)
            return
        size = self.cost.resident_bytes
        self.say(to_agent.Loaded(self.cost.load_s, size, size, start_s=0.1, sleeps=self.cost.sleeps))

    def hear(self, message: to_library.ToLibrary) -> None:
        match message:
            case to_library.Run():
                self._run(message)
            case to_library.GiveBack(count=count, calls=named, order=order):
                back = [id for id in self.waiting if id in named] if named else list(reversed(self.waiting))[:count]
                self._give_back(back, order=order)
            case to_library.Evict(call=call) if call in self.running and not self.toy.ignore_stops:
                self.say(to_agent.RunEvicted(self.running.pop(call).progress(self.toy.now)))
                self._go_on()
            case to_library.Resize(device_memory_bytes=size):
                self.after(self.toy.resize_s, lambda: self._resize(size))
            case to_library.Sleep():
                self.after(0.2, lambda: self.say(to_agent.Slept(self.cost.resident_bytes, sleep_s=0.2)))
            case to_library.Wake():
                self.after(0.1, lambda: self.say(to_agent.Woke(0.1)))
            case to_library.Stop():
                self._stop()

    def _resize(self, size: int) -> None:
        self.held_bytes = size
        self.say(to_agent.Resized(size))

    # ---- calls
    def _run(self, order: to_library.Run) -> None:
        if order.function_blob is not None:
            self.functions.add(order.function)
        assert order.function in self.functions, "a function that was never sent"
        for spec in order.calls:
            self.waiting[spec.call] = spec, order.gang
        self._go_on()

    def _go_on(self) -> None:
        while self.waiting and len(self.running) < self.recipe.slots and not self.stops:
            id, (spec, gang) = self.waiting.popitem(last=False)
            work = msgspec.msgpack.decode(spec.payload, type=Work)
            work = msgspec.structs.replace(work, run_s=self.cost.run_s) if self.cost.run_s else work
            run = self.running[id] = Running(spec, work, self.toy.now, gang)
            self.pilot.began.append((self.toy.now, id, gang.rank if gang else 0, gang.size if gang else 1))
            self.after(run.takes_s, lambda run=run: self._finish(run))
            if work.step_s:
                self.after(work.step_s, lambda run=run: self._report(run))
        if self.stops and not self.running:
            self.die(signal=0)

    def _runs(self, run: Running) -> bool:
        return self.running.get(run.spec.call) is run

    def _finish(self, run: Running) -> None:
        if not self._runs(run):
            return
        if run.work.kills:
            self.die(signal=11)
            return
        del self.running[run.spec.call]
        self.served += 1
        took_s = run.takes_s if run.work.shared else run.work.run_s
        failure = None
        if run.work.failed_by:
            device = run.work.failed_by.removeprefix("node")
            failure = Failure(FailureKind.INFRASTRUCTURE, "it failed the call", library=self.id, device=device)
        ok = not run.work.raises and failure is None
        self.say(to_agent.RunsEnded([CallEnd(run.spec.call, ok, b"", took_s, failure)]))
        if failure is not None and failure.device:
            self.die(verdict=Failure(FailureKind.PILOT, "its device failed"))
        elif 0 < self.recipe.calls_per_library <= self.served:
            self._stop()
        else:
            self._go_on()

    def _report(self, run: Running) -> None:
        if self._runs(run):
            self.say(to_agent.Reports([run.progress(self.toy.now)]))
            self.after(run.work.step_s, lambda: self._report(run))

    def _stop(self) -> None:
        self.stops = True
        if self.waiting:
            self._give_back(list(self.waiting))
        self._go_on()

    def _give_back(self, calls: list[CallId], *, order: int = 0) -> None:
        for call in calls:
            del self.waiting[call]
        self.say(to_agent.GivenBack(tuple(calls), order=order))


class ToyPilot(CoreHost):
    """One pilot. `toy.after` schedules its next steps."""

    def __init__(self, toy: Toy, name: str, devices: tuple[say.DeviceFacts, ...], *, block: str = "") -> None:
        self.toy, self.name = toy, name
        facts = PilotFacts(
            pilot=name, session=toy.session, host=f"host-{name}", pid=7, devices=devices, block=block,
            cache_bound_bytes=1 << 60,
        )  # fmt: skip
        super().__init__(facts, clock=lambda: toy.now)
        self.outbox = Outbox()
        self.alive = True
        self.refuses = ""  # The reason to refuse offers; empty = accept
        self.began: list[tuple[float, int, int, int]] = []  # (time, call, rank, size) of every begun call

    def greet(self) -> None:
        unacked = self.outbox.unacknowledged_frames()
        self.handle(events.HelloDue(collect_unacknowledged_facts(unacked), self.outbox.acknowledged, ()))

    def hear(self, message: Any) -> None:
        state = self.core.state
        if isinstance(message, to_pilot.RunCalls) and message.library in state.libraries:
            repeated = [x for x in message.calls if x.call in state.libraries[message.library].held_calls]
            assert not repeated or state.answered_hello != state.hellos, "a call twice in one library"
        self.handle(events.FromManager(message))
        if state.hello_is_due:
            self.greet()
        state.ledger.validate()

    def handle(self, event: events.Event) -> None:
        if not self.alive:
            return
        handled = self.queue.handle_event(event)
        while handled and self.core.state.leaving and self.alive:
            handled = self.queue.handle_event(events.Tick()) - 1

    def carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendToManager(message=message):
                sequence = self.outbox.take_next_number()
                self.outbox.keep(sequence, msgspec.msgpack.encode((sequence, [message])))
                self.toy.from_pilot(self, sequence, [message])
            case commands.SendHello(hello=hello):
                self.toy.from_pilot(self, 0, [hello])
                for frame in self.outbox.unacknowledged_frames():
                    self.toy.from_pilot(self, *_decode(frame))
            case commands.DropAcknowledgedFrames(sequence=sequence):
                self.outbox.acknowledge(sequence)
            case commands.StartProcess(ordered=ordered):
                self.processes[ordered.library] = ToyProcess(self, ordered)
            case commands.ObserveLibrary(library=number) if number in self.processes:
                running = self.processes[number].running
                seen = [(call, self.toy.now - run.started) for call, run in running.items()]
                self.handle(events.LibrariesObserved([events.Observation(number, seen)]))
            case commands.InspectOffer(order=order):
                self.handle(events.OfferInspected(order, why_full=self.refuses))
            case commands.SetTimer(at=at, key=key):
                self.toy.after(at - self.toy.now, lambda: self.handle(events.TimerFired(key)))
            case commands.ExitPilot():
                for last in self.core.handle(events.Farewell(), self.toy.now):
                    self.carry_out(last)
                self.alive = False
            case _:
                super().carry_out(command)

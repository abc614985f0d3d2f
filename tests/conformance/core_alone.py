"""The pilot core alone: the driver sends each event with its time."""

from __future__ import annotations

import math

from conformance.processes import ModelProcess
from conformance.shell import Loads, Shell, answer_to
from core.pilot_shell import CoreHost

from stoker.contexts.recipe import Needs, ObjectRef, Recipe
from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.pilot.core import commands, events, limits
from stoker.pilot.core.state import PilotFacts, Timers
from stoker.protocol import to_agent, wire
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import CallId, DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, PilotHello
from stoker.protocol.to_pilot import ToPilot

GB = 10**9
STEP_S = 0.1


class CoreAlone(CoreHost, Shell):
    def __init__(self, *, walltime_s: float = 0.0) -> None:
        Shell.__init__(self)
        self.now = 100.0
        devices = tuple(DeviceFacts(DeviceId(f"cpu:{number}"), "gpu", 4 * GB) for number in range(2))
        facts = PilotFacts(pilot="p", session="s", host="h", pid=1, devices=devices, cache_bound_bytes=100 * GB)
        CoreHost.__init__(self, facts, clock=lambda: self.now)
        self.timers = Timers()
        self.ran: dict[CallId, float] = {}  # start time of each running call
        self.loads: dict[str, Loads] = {}
        self.unacked: list[FromPilot] | None = None
        self.greeted: PilotHello | None = None
        self.is_over = False
        if walltime_s:
            self.tell(events.WalltimeKnown(walltime_s))
        self.hello()

    def tell(self, event: events.Event) -> None:
        self.queue.handle_event(event)

    def carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendToManager(message=message):
                if self.unacked is not None:
                    self.unacked.append(message)
                self.heard(message)
            case commands.SendHello(hello=hello):
                self.greeted = hello
            case commands.StartProcess(ordered=ordered):
                self.start_process(ordered.library, self.loads[ordered.recipe.key])
            case commands.ObserveLibrary(library=number):
                self.observe(number)
            case commands.RemoveLibrary(library=number):
                self.processes.pop(number, None)
            case commands.SetTimer(at=at, key=key):
                self.timers.set_timer(at, key)
            case commands.ExitPilot():
                self.tell(events.Farewell())
                self.is_over = True
            case _:
                super().carry_out(command)

    def start_process(self, number: LibraryId, loads: Loads) -> None:
        process = self.processes[number] = ModelProcess(number, self.tell)
        match loads:
            case Loads.AT_ONCE | Loads.FILES:
                process.load()
            case Loads.FAILS:
                process.say(to_agent.Hello(number, 7))
                process.say(to_agent.LoadFailed(Failure(FailureKind.CONTEXT, "the loader failed")))
                process.die(signal=0)
            case Loads.NEVER | Loads.WHEN_LET:
                process.say(to_agent.Hello(number, 7))

    def observe(self, number: LibraryId) -> None:
        process = self.processes.get(number)
        running = process.calls[:1] if process is not None else []
        seen = [(call, self.now - self.ran.setdefault(call, self.now)) for call in running]
        self.tell(events.LibrariesObserved([events.Observation(number, seen)]))

    # ---- the driver

    def say(self, message: ToPilot) -> None:
        self.tell(events.FromManager(message))

    def settle(self) -> None:
        for library in list(self.processes):
            self.observe(library)

    def hear(self) -> bool:
        due_in_s = self.timers.next_due_at - self.now
        if due_in_s == math.inf:
            return False
        self.wait(due_in_s + limits.OBSERVATION_INTERVAL_S)
        return True

    def hello(self, *, welcome: bool = True) -> PilotHello:
        before = collect_unacknowledged_facts([wire.encode(self.unacked)] if self.unacked else [])
        self.tell(events.HelloDue(before, 0, tuple(self.cache)))
        assert self.greeted is not None
        if welcome:
            self.say(answer_to(self.greeted))
        return self.greeted

    def recipe(self, loads: Loads) -> Recipe:
        self.numbers += 1
        key = f"recipe-{self.numbers}"
        self.loads[key] = loads
        limit_s = 0.5 if loads is Loads.NEVER else 0.0
        objects = (ObjectRef(f"object-{self.numbers}", GB, "/shared/object"),) if loads is Loads.FILES else ()
        return Recipe(key=key, name=key, needs=Needs(load_limit_s=limit_s), objects=objects)

    def device(self, number: int) -> tuple[str, int]:
        return f"cpu:{number}", 4 * GB

    def let_load(self, library: LibraryId) -> None:
        self.processes[library].load()

    def let_end(self, call: CallId, library: LibraryId) -> None:
        self.processes[library].end(call)

    def ignores_stops(self, library: LibraryId, call: CallId) -> None:
        self.processes[library].deaf.add(call)

    def die(self, library: LibraryId) -> None:
        self.processes[library].die()

    def arrive(self, ref: ObjectRef) -> None:
        self.cache[ref.name] = f"/cache/{ref.name}"
        self.tell(events.ObjectArrived(ref.name, ref.size_bytes, origin_bytes=ref.size_bytes))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        self.settle()
        while self.now < until and not self.is_over:
            self.now += min(STEP_S, limits.OBSERVATION_INTERVAL_S)
            for key in self.timers.take_due(self.now):
                self.tell(events.TimerFired(key))
            self.settle()
            self.tell(events.Tick())

    def signal(self) -> None:
        self.tell(events.SignalReceived("it got SIGTERM"))

    def keep_acks(self) -> None:
        self.unacked = []

    def say_acks(self) -> None:
        self.unacked = None

    def exit_code(self) -> int:
        self.wait(5.0)
        assert self.is_over
        return self.core.state.exit_code

    def close(self) -> None:
        self.core.state.ledger.validate()

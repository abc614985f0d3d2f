"""A simulated pilot; virtual time passes on request."""

from __future__ import annotations

from typing import Any

from conformance.shell import Loads, Shell, answer_to
from sim.worlds import GPU, model, source

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.manager.core.events import FromPilot
from stoker.manager.policies import default_policies
from stoker.manager.sim.library import SimLibrary
from stoker.manager.sim.pilot import SimPilot
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import Delays, World
from stoker.pilot.core.events import HelloDue, UnacknowledgedFacts
from stoker.protocol.calls import Features
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_manager import PilotHello
from stoker.protocol.to_pilot import RunCalls, ToPilot
from stoker.site import Duration

LOAD_S = 10.0
CALL_S = 1000


class Simulated(Shell):
    def __init__(self, *, walltime_s: float = 0.0) -> None:
        super().__init__()
        models = {"plain": model(memory_gb=0, load_s=LOAD_S), "large": model(memory_gb=8, load_s=LOAD_S)}
        delays = Delays(message_s=Duration(0.0), back_s=Duration(1.0), poll_s=Duration(0.0))
        world = World(devices={"gpu": GPU}, sources=(source(1, devices=2),), contexts=models, delays=delays)
        self.sim = _Played(world, self)
        self.pilot = SimPilot(self.sim, world.sources[0], block="", number=0, ends_at=walltime_s)
        self.sim.pilots[self.pilot.id] = self.pilot
        self.hellos: list[PilotHello] = []
        self.pilot.connect()
        self.settle()
        self.say(answer_to(self.hellos[-1]))

    # ---- the driver

    def say(self, message: ToPilot) -> None:
        self.pilot.handle_message(message)
        self.settle()

    def settle(self) -> None:
        while self.sim.agenda.next_entry_at <= self.sim.agenda.now:
            self.sim.agenda.run_entries(1)

    def hear(self) -> bool:
        self.settle()
        loading = [lib for lib in self.pilot.libraries.values() if self.loads_by_itself(lib)]
        if loading:
            self.wait(LOAD_S + 1)
        return bool(loading)

    def loads_by_itself(self, library: SimLibrary) -> bool:
        known = self.pilot.core.state.libraries[library.number]
        return not known.is_serving and "wait" not in library.recipe.key

    def hello(self, *, welcome: bool = True) -> PilotHello:
        self.pilot.handle(HelloDue(UnacknowledgedFacts(), 0, tuple(self.pilot.machine.on_disk)))
        self.settle()
        if welcome:
            self.say(answer_to(self.hellos[-1]))
        return self.hellos[-1]

    def recipe(self, loads: Loads) -> Recipe:
        self.numbers += 1
        key = f"{'wait' if loads is Loads.WHEN_LET else 'recipe'}-{self.numbers}"
        objects = (ObjectRef(f"object-{self.numbers}", 1000, "/shared/object"),) if loads is Loads.FILES else ()
        return Recipe(key=key, name="large" if loads is Loads.FAILS else "plain", objects=objects)

    def device(self, number: int) -> tuple[str, int]:
        return f"gpu:{number}", int(GPU.memory_bytes)

    def as_taken(self, order: RunCalls) -> RunCalls:
        (spec,) = order.calls
        order.calls[:] = [type(spec)(spec.call, spec.payload, Features(items=CALL_S))]
        return order

    def let_load(self, library: LibraryId) -> None:
        self.wait(LOAD_S + 1)

    def let_end(self, call: CallId, library: LibraryId) -> None:
        assert list(self.pilot.libraries[library].running) == [call], "it does not run"
        while call in self.pilot.libraries[library].running:
            self.sim.agenda.run_entries(1)
            if library not in self.pilot.libraries:
                break
        self.settle()

    def die(self, library: LibraryId) -> None:
        self.pilot.libraries[library].end()
        self.settle()

    def wait(self, seconds: float) -> None:
        agenda = self.sim.agenda
        until = agenda.now + seconds
        agenda.schedule_at(until, lambda: None)
        agenda.run_entries(10**6, until_s=until)

    def close(self) -> None:
        self.pilot.core.state.ledger.validate()

    def exit_code(self) -> int:
        assert not self.pilot.is_running
        return self.pilot.core.state.exit_code


class _Played(Simulation):
    """A simulation whose manager only records messages."""

    def __init__(self, world: World, shell: Simulated) -> None:
        super().__init__(world, [], default_policies())
        self._shell = shell

    def handle(self, event: Any) -> None:
        if isinstance(event, FromPilot):
            for message in event.messages:
                if isinstance(message, PilotHello):
                    self._shell.hellos.append(message)
                else:
                    self._shell.heard(message)

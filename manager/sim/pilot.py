"""A simulated pilot: the core that every pilot runs (`stoker.pilot.core`) in a shell of virtual time.

The shell makes processes (`SimLibrary`), fetches objects (`Fetching`), and carries messages to the manager. Left
out: heartbeats, acknowledgements (no frame is lost), limits of memory and time, and everything inside a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, assert_never

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import FromPilot
from stoker.manager.sim.agenda import Entry, cancel
from stoker.manager.sim.device import DeviceTurns, SimulatedDevice
from stoker.manager.sim.fetching import Fetching, Neighbourhood
from stoker.manager.sim.flows import Machine
from stoker.manager.sim.library import SimLibrary
from stoker.manager.sim.log import Happened
from stoker.manager.sim.runs import Gatherer
from stoker.manager.sim.serving import ServedBatch
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import SourceModel
from stoker.pilot.core import commands
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import (
    Event,
    Farewell,
    FromManager,
    HelloDue,
    LibraryPrepared,
    Observation,
    Observed,
    OfferWeighed,
    Pinned,
    Tick,
    TimerFired,
    UnacknowledgedFacts,
    WalltimeKnown,
)
from stoker.pilot.core.state import PilotFacts
from stoker.protocol import to_manager, to_pilot
from stoker.protocol.ids import DeviceId, LibraryId, PilotId

_ANY_BYTES = 1 << 62
"""Disks and caches have no bound."""


class PilotSurroundings(Gatherer, Neighbourhood, Protocol):
    """A simulation with pilots. `busy_s`, `warm_s`: device-seconds of pilots that have ended."""

    busy_s: float
    warm_s: float

    def pilot_ended(self, pilot: SimPilot) -> None:
        """A pilot has ended, by itself or with its job."""


class SimPilot:
    """One pilot on one simulated node."""

    def __init__(self, sim: PilotSurroundings, source: SourceModel, *, block: str, number: int, ends_at: float) -> None:
        self.sim = sim
        self.number = number
        self.id = PilotId(f"{source.name}-{number}")
        self.block = block
        self.kind = source.kind
        self.machine = Machine(self.id, sim.world.links)
        kind = sim.world.devices[source.kind]
        devices = tuple(
            to_manager.DeviceFacts(DeviceId(f"gpu:{n}"), source.kind, int(kind.memory_bytes), speed=kind.speed)
            for n in range(source.devices)
        )
        facts = PilotFacts(
            pilot=self.id, session=sim.session, host=self.id, pid=number, devices=devices, block=block,
            peer=f"{self.id}:1", cache=self.id, cache_bound_bytes=_ANY_BYTES,
        )  # fmt: skip
        self.core = PilotCore(facts)
        self.computes = {device.device: SimulatedDevice(sim.agenda) for device in devices}
        self.device_turns = DeviceTurns(sim.agenda)
        self.libraries: dict[LibraryId, SimLibrary] = {}
        """Processes from the order to start until the core forgets them."""
        self.fetching = Fetching(self)
        self.here = True
        self.left = False
        """It has said that it leaves; earlier messages still arrive."""
        self._ends_at = ends_at
        self._frame: list[to_manager.FromPilot] = []
        """Messages under way."""
        self._queue = EventQueue(self.core, self._carry_out, clock=lambda: sim.agenda.now)
        self._timers: dict[str, Entry] = {}

    def join(self) -> None:
        """Connect to the manager."""
        if not self.here:
            return
        sim = self.sim
        sim.log.note(sim.agenda.now, Happened.PILOT_CAME, pilot=self.number, value=float(len(self.computes)))
        if self._ends_at:
            self.handle(WalltimeKnown(self._ends_at - sim.agenda.now))
        self.handle(HelloDue(UnacknowledgedFacts(), 0, ()))

    def hear(self, message: to_pilot.ToPilot) -> None:
        """Handle a message of the manager."""
        if self.here:
            self.handle(FromManager(message))

    # ---- the shell

    def handle(self, event: Event) -> None:
        """Give the core an event and carry out its commands."""
        handled = self._queue.handle(event)
        while handled and self.core.state.leaving and self.here:
            handled = self._queue.handle(Tick()) - 1  # another one where that led to something

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Tell(message=message):
                self._post(message)
            case commands.TellLibrary(library=number, message=to_library):
                library = self.libraries.get(number)
                if library is not None:
                    library.hear(to_library)
            case commands.Prepare(ordered=ordered):
                self._prepare(ordered)
            case commands.PinObjects(library=number, objects=refs):
                self._pin(number, refs)
            case commands.StartProcess(ordered=ordered):
                self.libraries[ordered.library].start()
            case commands.KillProcess(library=number) | commands.KillZygote(library=number):
                self.libraries[number].end()
            case commands.Forget(library=number):
                library = self.libraries.pop(number, None)
                if library is not None:
                    library.vanish()
            case commands.Observe(library=number):
                library = self.libraries.get(number)
                running = [(call, 0.0) for call in library.running] if library is not None else []  # no limit counts
                self.handle(Observed([Observation(number, running)]))
            case commands.WeighOffer(order=order):
                self.handle(self._weighed(order))
            case commands.StartFetch(order=order):
                self.fetching.told(order)
            case commands.StopFetch(name=name):
                self.fetching.stop(name)
            case commands.Expect(name=name):
                self.fetching.expect(self.core.state.wants[name].ref)
            case commands.SetTimer(at=at, key=key):
                self._set_timer(at, key)
            case commands.Greet(hello=hello):
                self._post(hello)
            case commands.Leave():
                self._gone()
            case (
                commands.WriteLog() | commands.Acknowledged() | commands.Beat() | commands.PassOn() |
                commands.TidySnapshots() | commands.OfferSnapshot() | commands.Probe() | commands.BringArguments() |
                commands.ReleaseArguments() | commands.HandIn()
            ):  # fmt: skip
                pass
            case _:
                assert_never(command)

    def _weighed(self, order: to_pilot.RunCalls) -> OfferWeighed:
        library = self.libraries.get(order.library)
        if library is None or library.batch is None:
            return OfferWeighed(order)
        mine, beside = set(library.batch.device_ids), list[ServedBatch]()
        for other in self.libraries.values():
            if other.batch is not None and not other.is_over and not mine.isdisjoint(other.batch.device_ids):
                beside.append(other.batch)
        [spec] = order.calls
        free_at = max(batch.free_at() for batch in beside)
        model = library.model.engine_on(self.kind)
        required = library.batch.required_bytes(spec, model) if model is not None and model.token_bytes else 0
        pause_s = library.resize_s(order.reserve_bytes) if order.reserve_bytes else 0.0
        engines = [each.outlook(pause_s=pause_s if each is library.batch else 0.0) for each in beside]
        return OfferWeighed(order, library.batch.unread(spec), engines, free_at, required)

    def _post(self, message: to_manager.FromPilot) -> None:
        """Send a message; those that follow before the frame arrives go with it."""
        frame = self._frame
        if not frame:
            self.sim.agenda.after(self.sim.frame_s, self._deliver)
        elif type(message) is to_manager.CallsEnded:
            last = frame[-1]
            if type(last) is to_manager.CallsEnded and last.library == message.library:
                last.ends.extend(message.ends)
                return
        frame.append(message)

    def _deliver(self) -> None:
        frame, self._frame = self._frame, []
        if self.here or self.left:
            self.sim.handle(FromPilot(self.id, 0, frame))

    def _prepare(self, ordered: to_pilot.StartLibrary) -> None:
        number = ordered.library
        self.libraries[number] = SimLibrary(self, ordered)
        self.sim.log.note(
            self.sim.agenda.now, Happened.LIBRARY_STARTED, library=number, pilot=self.number,
            value=float(len(ordered.devices)),
        )  # fmt: skip
        self.handle(LibraryPrepared(number, free_disk_bytes=_ANY_BYTES))

    def _pin(self, number: LibraryId, refs: Sequence[ObjectRef]) -> None:
        here = self.machine.on_disk
        self.handle(Pinned(number, {ref.name: ref.name for ref in refs if ref.name in here}))

    def _set_timer(self, at: float, key: str) -> None:
        agenda = self.sim.agenda
        if key in self._timers:
            cancel(self._timers[key])
        self._timers[key] = agenda.at(max(at, agenda.now), self._fired, key)

    def _fired(self, key: str) -> None:
        self._timers.pop(key, None)
        if self.here:
            self.handle(TimerFired(key))

    # ---- the end

    def _gone(self) -> None:
        if not self.here:
            return
        for command in self.core.handle(Farewell(), self.sim.agenda.now):
            self._carry_out(command)
        self.left = True
        self.vanish()

    def busy_s(self, now: float) -> float:
        """Return the device-seconds until now in which any call ran."""
        return sum(device.busy_s(now) for device in self.computes.values())

    def warm_s(self, now: float) -> float:
        """Return the device-seconds until now in which any library had a device."""
        return sum(device.held_s(now) for device in self.computes.values())

    def steps(self) -> list[StepCounts]:
        """Return the step counts of its present engines."""
        alive = [library for library in self.libraries.values() if not library.is_over]
        return [library.batch.engine.counts for library in alive if library.batch is not None]

    def vanish(self) -> None:
        """End it, whatever it does."""
        if not self.here:
            return
        self.here = False
        for library in self.libraries.values():
            library.vanish()
        for entry in self._timers.values():
            cancel(entry)
        self.fetching.vanish()
        self.sim.busy_s += self.busy_s(self.sim.agenda.now)
        self.sim.warm_s += self.warm_s(self.sim.agenda.now)
        self.sim.log.note(self.sim.agenda.now, Happened.PILOT_WENT, pilot=self.number, value=float(len(self.computes)))
        self.sim.pilot_ended(self)


def object_of(name: str, size_bytes: int) -> ObjectRef:
    """Return a set of files as an object that pilots share."""
    return ObjectRef(name=name, size_bytes=int(size_bytes), source=f"/shared/{name}")

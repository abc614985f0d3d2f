"""A simulated pilot: takes the manager's orders and answers as an agent does, in virtual time.

It keeps the books that the agent keeps, with the agent's own code (`stoker.pilot.core`): the ledger of device memory,
and each library's state and turns. Left out: heartbeats (the manager's shell needs them, not its core),
acknowledgements (frames are not lost here), and everything inside a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import FromPilot
from stoker.manager.protocol import to_manager, to_pilot, wire
from stoker.manager.protocol.calls import CallEnd, Failure, FailureKind
from stoker.manager.protocol.ids import DeviceId, LibraryId, PilotId
from stoker.manager.sim.device import Device
from stoker.manager.sim.fetching import Fetching
from stoker.manager.sim.library import SimLibrary
from stoker.manager.sim.log import Happened
from stoker.manager.sim.machine import Machine
from stoker.pilot.core.ledger import Ledger

if TYPE_CHECKING:
    from stoker.manager.sim.run import Simulation
    from stoker.manager.sim.world import SourceModel


class SimPilot:
    """One pilot on one simulated node."""

    def __init__(self, sim: Simulation, source: SourceModel, *, block: str, number: int, ends_at: float) -> None:
        self.sim = sim
        self.number = number
        self.id = PilotId(f"{source.name}-{number}")
        self.block = block
        self.kind = source.kind
        self.machine = Machine(self.id, sim.world.links)
        kind = sim.world.devices[source.kind]
        self.devices = tuple(
            to_manager.DeviceFacts(DeviceId(f"gpu:{n}"), source.kind, int(kind.memory_bytes), speed=kind.speed)
            for n in range(source.devices)
        )
        self.ledger = Ledger({device.device: device.memory_bytes for device in self.devices})
        self.computes = {device.device: Device(sim.agenda) for device in self.devices}
        self.libraries: dict[LibraryId, SimLibrary] = {}
        self.fetching = Fetching(self)
        self.leaving = ""
        self.here = True
        self.left = False
        """It has said that it leaves: what it said before is still heard."""
        self._ends_at = ends_at
        self._frame: list[to_manager.FromPilot] = []
        """What it has said and the manager has not heard yet."""

    def join(self) -> None:
        """Connect to the manager."""
        if not self.here:
            return
        sim = self.sim
        left_s = self._ends_at - sim.agenda.now if self._ends_at else 0.0
        sim.log.note(sim.agenda.now, Happened.PILOT_CAME, pilot=self.number, value=float(len(self.devices)))
        self.post(
            to_manager.PilotHello(
                wire.VERSION, sim.session, self.id, self.number, self.devices, self.block, ends_in_s=left_s,
                peer=f"{self.id}:1", cache=self.id,
            )
        )  # fmt: skip

    def post(self, message: to_manager.FromPilot) -> None:
        """Say something to the manager. What is said until the frame arrives goes with it: a shell gathers too."""
        frame = self._frame
        if not frame:
            self.sim.agenda.after(self.sim.frame_s, self._deliver)
        frame.append(message)

    def post_end(self, library: LibraryId, end: CallEnd) -> None:
        """Say that a call has ended."""
        frame = self._frame
        last = frame[-1] if frame else None
        if type(last) is to_manager.CallsEnded and last.library == library:
            last.ends.append(end)
        else:
            self.post(to_manager.CallsEnded(library, [end]))

    def _deliver(self) -> None:
        frame, self._frame = self._frame, []
        if self.here or self.left:
            self.sim.handle(FromPilot(self.id, 0, frame))

    # ---- what the manager says

    def hear(self, message: to_pilot.ToPilot) -> None:
        """Carry out one order."""
        if not self.here:
            return
        match message:
            case to_pilot.RunCalls():
                self._run(message)
            case to_pilot.Ack() | to_pilot.PilotWelcome() | to_pilot.HelloAgain() | to_pilot.MeetGang():
                pass
            case to_pilot.StartLibrary():
                self._start(message)
            case to_pilot.StopLibrary(library=number, drain=drain):
                self._stop(number, drain=drain)
            case to_pilot.TakeBack(library=number, count=count):
                library = self.libraries.get(number)
                if library is None:
                    self.post(to_manager.CallsReturned(number, ()))
                else:
                    library.give_back(library.turns.give_back(count))
            case to_pilot.CancelCalls():
                self._cancel(message)
            case to_pilot.EvictCall(library=number, call=call):
                library = self.libraries.get(number)
                if library is not None:
                    library.evict(call)
            case to_pilot.ResizeLibrary(library=number, device_memory_bytes=size):
                self._resize(number, size)
            case to_pilot.FetchObject():
                self.fetching.told(message)
            case to_pilot.PilotRefused(reason=reason) | to_pilot.Exit(reason=reason):
                self._leave(reason, drain=isinstance(message, to_pilot.Exit) and message.drain)
            case _:
                assert_never(message)

    def _run(self, order: to_pilot.RunCalls) -> None:
        library = self.libraries.get(order.library)
        refused = ""
        if library is None or library.told_to_end:
            refused = f"lib-{order.library} is not on this pilot, or about to end"
        elif self.leaving:
            refused = f"the pilot is leaving: {self.leaving}"
        if library is None or refused:
            calls = tuple(spec.call for spec in order.calls)
            self.post(to_manager.CallsReturned(order.library, calls, refused=refused))
        else:
            library.run(order.calls, gang=order.gang, limit_s=order.options.limit_s)

    def _start(self, order: to_pilot.StartLibrary) -> None:
        try:
            self.ledger.reserve(order.library, devices=order.devices, memory_bytes=order.device_memory_bytes)
        except ValueError as error:
            failure = Failure(FailureKind.CONTEXT, str(error), pilot=self.id, library=order.library)
            self.post(to_manager.LibraryGone(order.library, failure, loading=True))
            return
        library = self.libraries[order.library] = SimLibrary(self, order)
        self.sim.log.note(
            self.sim.agenda.now, Happened.LIBRARY_STARTED, library=order.library, pilot=self.number,
            value=float(len(order.devices)),
        )  # fmt: skip
        self.fetching.bring(library.wants, library)

    def _stop(self, number: LibraryId, *, drain: bool) -> None:
        library = self.libraries.get(number)
        if library is None:
            self.post(to_manager.LibraryGone(number))
        elif drain:
            library.drain()
        else:
            library.end()

    def _cancel(self, order: to_pilot.CancelCalls) -> None:
        library = self.libraries.get(order.library)
        if library is None:
            return
        library.give_back(library.turns.drop(order.calls))
        if order.running and any(call in library.running for call in order.calls):
            if order.grace_s:
                library.stop(order.calls)
            else:
                library.end()

    def _resize(self, number: LibraryId, size: int) -> None:
        library = self.libraries.get(number)
        try:
            if library is not None and size < library.model.device_memory_bytes:
                raise ValueError("its context cannot be made smaller")
            self.ledger.resize(number, memory_bytes=size)
        except ValueError:
            size = self.ledger.held(number)
        self.post(to_manager.LibraryResized(number, size))

    def forget(self, library: SimLibrary) -> None:
        """A library has ended."""
        self.libraries.pop(library.number, None)
        self.ledger.release(library.number)
        if self.leaving and not self.libraries:
            self._gone()

    # ---- the end

    def _leave(self, reason: str, *, drain: bool) -> None:
        self.leaving = self.leaving or reason
        for library in list(self.libraries.values()):
            if drain:
                library.drain()
            else:
                library.end()
        if not self.libraries:
            self._gone()

    def _gone(self) -> None:
        if self.here:
            self.post(to_manager.PilotLeaving(self.leaving))
            self.left = True
            self.vanish()

    def busy_s(self, now: float) -> float:
        """Device-seconds until now in which at least one call ran on a device."""
        return sum(device.busy_s(now) for device in self.computes.values())

    def warm_s(self, now: float) -> float:
        """Device-seconds until now in which at least one library had a device, or was loading into it."""
        return sum(device.held_s(now) for device in self.computes.values())

    def vanish(self) -> None:
        """It is over, whatever it was doing."""
        if not self.here:
            return
        self.here = False
        for library in self.libraries.values():
            library.vanish()
            library.state.gone(())
        self.fetching.vanish()
        self.sim.busy_s += self.busy_s(self.sim.agenda.now)
        self.sim.warm_s += self.warm_s(self.sim.agenda.now)
        self.sim.log.note(self.sim.agenda.now, Happened.PILOT_WENT, pilot=self.number, value=float(len(self.devices)))
        self.sim.pilot_ended(self)


def object_of(name: str, size_bytes: int) -> ObjectRef:
    """A set of files as an object that pilots hand on."""
    return ObjectRef(name=name, size_bytes=int(size_bytes), source=f"/shared/{name}")

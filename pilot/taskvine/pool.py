"""A TaskVine pool as a pilot: the core that every pilot runs (`stoker.pilot.core`), with TaskVine behind it.

The manager sees one pilot, whose devices are the slots that the pool's workers have together. Which call goes where,
and what the manager is told, the core decides; what it orders reaches a `PoolLibrary`. Left out is what TaskVine does
by itself: it brings objects, limits memory and time inside of its libraries, and does not let a call be looked into.

A slot of TaskVine's holds one context at a time: an idle library is killed as soon as another one is wanted on its
worker. So a library that is to be made on a device that another one has waits until that one is idle, or has had its
turn, and then takes its place.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol, assert_never

import msgspec

from stoker.pilot.core import commands
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import Event, Farewell, LibraryPrepared, OfferWeighed, Pinned, RoomWanted, TimerFired
from stoker.pilot.core.state import CoreState, PilotFacts, Stage, Timers
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedTicket, VineManager
from stoker.pilot.taskvine.orders import Orders
from stoker.pilot.taskvine.pool_library import PoolLibrary
from stoker.pilot.taskvine.slots import Slots
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, PilotHello

log = logging.getLogger("stoker.pilot")

TURN_S = 10.0
"""A busy library keeps its slot for so long when another context wants it."""
ANY_BYTES = 1 << 62
"""The disks of workers are TaskVine's to fill."""


class ManagerPort(Protocol):
    """What a pool says to its manager: `stoker.pilot.agent.link.ManagerLink`."""

    def post(self, message: FromPilot) -> None:
        """Say something that must arrive."""

    def say(self, message: FromPilot) -> None:
        """Say something that need not arrive."""

    def greet(self, hello: PilotHello) -> None:
        """Say hello, then everything that was not acknowledged."""

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number."""


class VinePool:
    """Carries out what the core wants, through TaskVine. `facts` names no devices: they are not known before the first
    worker has come. `setup` is what libraries are told, but for their recipe and devices."""

    def __init__(self, engine: VineManager, manager: ManagerPort, *, facts: PilotFacts, setup: messages.Setup) -> None:
        self.core = PilotCore(facts)
        self.libraries: dict[LibraryId, PoolLibrary] = {}
        """From the order to start them until the core forgets them."""
        self.timers = Timers()
        self.is_over = False
        """Whether the core has said that everything is done."""
        self._manager = manager
        self._orders = Orders(engine, setup)
        self._slots = Slots()
        self._queue = EventQueue(self.core, self._carry_out, clock=time.monotonic)

    @property
    def state(self) -> CoreState:
        """The core's state, for reading."""
        return self.core.state

    def have_devices(self, devices: tuple[DeviceFacts, ...]) -> None:
        """The first worker has come, so that the devices are known. A core that has none has said nothing yet: another
        one takes its place."""
        self.core = PilotCore(msgspec.structs.replace(self.state.facts, devices=devices))
        self._queue = EventQueue(self.core, self._carry_out, clock=time.monotonic)
        self._orders.slot_cores = devices[0].cores

    # ---- the shell

    def handle(self, event: Event) -> None:
        """Tell the core of an event, and carry out what it wants. What that leads to at once is handled after it."""
        self._queue.handle(event)

    def finished(self, done: FinishedTicket) -> None:
        """TaskVine is done with an order."""
        self._orders.finished(done)

    def farewell(self) -> None:
        """The pilot ends now."""
        self.handle(Farewell({number: library.sent for number, library in self.libraries.items()}))

    def fire_timers(self, now: float) -> None:
        """Tell the core of its timers whose time has come."""
        for key in self.timers.due(now):
            self.handle(TimerFired(key))

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Tell(message=message):
                self._manager.post(message)
            case commands.TellLibrary(library=number, message=to_library):
                library = self.libraries.get(number)
                if library is not None:
                    library.hear(to_library)
            case commands.Acknowledged(sequence=sequence):
                self._manager.acked(sequence)
            case commands.PassOn():
                pass  # its calls are refused if they want to give pieces
            case commands.Beat(message=heartbeat):
                self._manager.say(heartbeat)
            case commands.Greet(hello=hello):
                self._manager.greet(hello)
            case commands.WriteLog(text=text, severity=severity):
                log.log(severity, "%s", text)
            case commands.Prepare(ordered=ordered):
                self.libraries[ordered.library] = PoolLibrary(ordered, self._orders, self.handle)
                self.handle(LibraryPrepared(ordered.library, ANY_BYTES, snapshots_here=tuple(ordered.snapshots)))
            case commands.PinObjects(library=number, objects=refs):
                self.handle(Pinned(number, {ref.name: ref.source for ref in refs}))  # TaskVine brings them
            case commands.StartProcess(ordered=ordered):
                self._slots.want(self.libraries[ordered.library])
                self.share_slots()
            case commands.KillProcess(library=number) | commands.KillZygote(library=number):
                self.libraries[number].kill()
            case commands.WeighOffer(order=order):
                self.handle(OfferWeighed(order))  # its libraries are TaskVine's: nobody sees what their engines do
            case commands.Forget(library=number):
                self._forget(number)
            case commands.SetTimer(at=at, key=key):
                self.timers.set(at, key)
            case commands.Leave():
                self.is_over = True
            case (
                commands.Expect() | commands.StartFetch() | commands.StopFetch() | commands.TidySnapshots()
                | commands.OfferSnapshot() | commands.Probe() | commands.BringArguments() | commands.ReleaseArguments()
                | commands.HandIn() | commands.Observe()
            ):  # fmt: skip
                pass
            case _:
                assert_never(command)

    def _forget(self, number: LibraryId) -> None:
        library = self.libraries.pop(number, None)
        if library is not None:
            self._slots.release(library)
            self.share_slots()

    # ---- slots

    def share_slots(self) -> None:
        """Give slots to libraries that wait for them, where those that have them are idle or have had their turn."""
        for library in self._slots.waiting():
            holders = self._slots.holders(library)
            if not holders:
                self._slots.take(library)
                library.load()
            for holder in holders:
                self._make_room(holder)

    def _make_room(self, holder: PoolLibrary) -> None:
        """Have a library leave its slots if it is idle, or has had its turn."""
        known = self.state.libraries.get(holder.number)
        if known is None or known.stage is not Stage.READY:
            return
        if not known.held:
            self.handle(RoomWanted(holder.number, "another context wants its slot"))
        elif time.monotonic() - known.ready_at > TURN_S:
            self.handle(RoomWanted(holder.number, "it has had its turn: another context wants its slot"))

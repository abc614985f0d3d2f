"""A TaskVine pool as a pilot: the core that every pilot runs (`stoker.pilot.core`), with TaskVine behind it.

The manager sees one pilot, whose devices are the slots that the pool's workers have together. The core decides which
call goes where and what the manager is told; its orders reach a `PoolLibrary`. TaskVine itself brings objects and
limits memory and time inside its libraries; a call cannot be looked into.

A slot of TaskVine holds one context at a time: TaskVine kills an idle library as soon as another one is wanted on its
worker. So a new library for an occupied device waits until the library there is idle, or has had its turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Protocol, assert_never

import msgspec

from stoker.pilot.core import commands
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import Event, Farewell, LibraryPrepared, OfferWeighed, Pinned, RoomWanted, TimerFired
from stoker.pilot.core.state import CoreState, PilotFacts, Stage, Timers
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedTicket, VineManager, VinePlan, VineWorker
from stoker.pilot.taskvine.pool_library import Orders, PoolLibrary
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, PilotHello

# ---- slots


class Slots:
    """Which library has which slots, and which wait for theirs, in the order in which they came."""

    def __init__(self) -> None:
        self._holders: dict[DeviceId, PoolLibrary] = {}
        self._waiting: list[PoolLibrary] = []

    def want(self, library: PoolLibrary) -> None:
        """A library waits for its slots."""
        self._waiting.append(library)

    def waiting(self) -> Iterator[PoolLibrary]:
        """Libraries that wait, also while they are given theirs."""
        for library in tuple(self._waiting):
            if library in self._waiting:
                yield library

    def holders(self, library: PoolLibrary) -> list[PoolLibrary]:
        """The libraries that have the slots of one that waits."""
        found = {self._holders[device] for device in library.devices if device in self._holders}
        return sorted(found, key=lambda holder: holder.number)

    def take(self, library: PoolLibrary) -> None:
        """A library that waited has its slots from now on."""
        self._waiting.remove(library)
        self._holders.update(dict.fromkeys(library.devices, library))

    def release(self, library: PoolLibrary) -> None:
        """A library has ended: its slots are free, and it waits for none."""
        if library in self._waiting:
            self._waiting.remove(library)
        for device in library.devices:
            if self._holders.get(device) is library:
                del self._holders[device]


def slots_of(worker: VineWorker, plan: VinePlan, *, workers: int = 0) -> tuple[DeviceFacts, ...]:
    """Return one device per library that so many workers like this one can hold at once (0: as many workers as there
    may be).

    On GPUs if the plan wants them (or `auto` finds some), else on cores. Memory is shared out evenly; TaskVine does not
    report the kind of GPU, so the kind is `gpu`.
    """
    wanted, _, count = plan.devices.partition(":")
    on_gpu = wanted != "cpu" and worker.gpus > 0
    each = worker.gpus if on_gpu else min(int(count or worker.cores), worker.cores)
    each = max(1, each)
    kind, name = ("gpu (TaskVine)", "cuda") if on_gpu else ("cpu (TaskVine)", "cpu")
    return tuple(
        DeviceFacts(
            device=DeviceId(f"{name}:{number}"),
            kind=kind,
            memory_bytes=worker.memory_bytes // each,
            cores=max(1, worker.cores // each),
        )
        for number in range(each * (workers or plan.most_workers))
    )


# ---- the pool


log = logging.getLogger("stoker.pilot")

TURN_S = 10.0
"""Seconds that a busy library keeps its slot when another context wants it."""
ANY_BYTES = 1 << 62
"""The disks of workers are TaskVine's to fill."""


class ManagerPort(Protocol):
    """The pool's connection to its manager: `stoker.pilot.agent.agent.ManagerLink`."""

    def post(self, message: FromPilot) -> None:
        """Say something that must arrive."""

    def say(self, message: FromPilot) -> None:
        """Say something that need not arrive."""

    def greet(self, hello: PilotHello) -> None:
        """Say hello, then everything that was not acknowledged."""

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number."""


class VinePool:
    """Carries out the core's commands through TaskVine. `facts` names no devices: they are unknown before the first
    worker has come. `setup` holds the settings of libraries, without recipe and devices."""

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
        """Pass an event to the core, and carry out its commands. Events that this causes are handled after it."""
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
        """Give slots to waiting libraries if their holders are idle or have had their turn."""
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

"""A TaskVine pool as a pilot: TaskVine executes the commands of the pilot's core (`stoker.pilot.core`).

The manager sees one pilot, whose devices are the slots of all workers. The core decides where a call runs; TaskVine
transfers objects and limits memory and time.

A slot holds one context at a time, because TaskVine kills an idle library if its worker needs another library. A new
library for an occupied device waits until the library there is idle or has run for `MIN_SLOT_TURN_S`.
"""

from __future__ import annotations

import logging
import time
from typing import assert_never

import msgspec

from stoker.pilot.agent.agent import ManagerLink
from stoker.pilot.core import commands
from stoker.pilot.core.events import DevicesWanted, Event, Farewell, LibraryPrepared, ObjectsPinned, OfferInspected
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import CoreState, PilotFacts, Stage, Timers
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import FinishedOrder, VineManager, VinePlan, VineWorker
from stoker.pilot.taskvine.pool_library import OrderSubmitter, PoolLibrary
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts


def slot_devices(worker: VineWorker, plan: VinePlan, *, workers: int = 0) -> tuple[DeviceFacts, ...]:
    """Return the devices of `workers` workers (0 = the plan's maximum): one per library that can run at once, with an
    even share of the memory.
    """
    wanted, _, count = plan.devices.partition(":")
    on_gpu = wanted != "cpu" and worker.gpus > 0
    each = max(1, worker.gpus if on_gpu else min(int(count or worker.cores), worker.cores))
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


log = logging.getLogger("stoker.pilot")

MIN_SLOT_TURN_S = 10.0
"""Seconds that a busy library keeps its slot while another library waits for the slot."""
UNLIMITED_BYTES = 1 << 62


class VinePool:
    """Executes the pilot core's commands in TaskVine. `facts` has no devices before the first worker joins."""

    def __init__(
        self, engine: VineManager, manager: ManagerLink, *, facts: PilotFacts, setup: messages.VineLibrarySetup
    ) -> None:
        self.core = PilotCore(facts)
        self.libraries: dict[LibraryId, PoolLibrary] = {}
        self.timers = Timers()
        self.is_over = False
        self._manager = manager
        self._orders = OrderSubmitter(engine, setup)
        self._holders: dict[DeviceId, PoolLibrary] = {}
        self._waiting: list[PoolLibrary] = []
        self._queue = EventQueue(self.core, self._execute_command, clock=time.monotonic)

    @property
    def state(self) -> CoreState:
        return self.core.state

    def replace_core_with_devices(self, devices: tuple[DeviceFacts, ...]) -> None:
        """Replace the core, which must not have sent messages yet."""
        self.core = PilotCore(msgspec.structs.replace(self.state.facts, devices=devices))
        self._queue = EventQueue(self.core, self._execute_command, clock=time.monotonic)
        self._orders.slot_cores = devices[0].cores

    # ---- commands

    def handle_event(self, event: Event) -> None:
        self._queue.handle_event(event)

    def handle_finished_order(self, done: FinishedOrder) -> None:
        self._orders.handle_finished_order(done)

    def report_pool_end(self) -> None:
        self.handle_event(Farewell({number: library.submitted_calls for number, library in self.libraries.items()}))

    def _execute_command(self, command: commands.Command) -> None:
        match command:
            case (
                commands.SendToManager() | commands.SendPieces() | commands.SendHeartbeat() | commands.SendHello()
                | commands.DropAcknowledgedFrames()
            ):  # fmt: skip
                self._manager.execute_command(command)
            case commands.SendToLibrary(library=number, message=to_library):
                library = self.libraries.get(number)
                if library is not None:
                    library.handle_message(to_library)
            case commands.WriteLog(text=text, severity=severity):
                log.log(severity, "%s", text)
            case commands.PrepareLibrary(ordered=ordered):
                self.libraries[ordered.library] = PoolLibrary(ordered, self._orders, self.handle_event)
                self.handle_event(
                    LibraryPrepared(ordered.library, UNLIMITED_BYTES, snapshots_here=tuple(ordered.snapshots))
                )
            case commands.PinObjects(library=number, objects=refs):
                paths = {ref.name: ref.source for ref in refs}  # TaskVine transfers the objects
                self.handle_event(ObjectsPinned(number, paths))
            case commands.StartProcess(ordered=ordered):
                self._waiting.append(self.libraries[ordered.library])
                self.give_free_slots()
            case commands.KillProcess(library=number) | commands.KillZygote(library=number):
                self.libraries[number].kill()
            case commands.InspectOffer(order=order):
                self.handle_event(OfferInspected(order))  # the engines of TaskVine's libraries cannot be observed
            case commands.RemoveLibrary(library=number):
                self._remove_library(number)
            case commands.SetTimer(at=at, key=key):
                self.timers.set_timer(at, key)
            case commands.ExitPilot():
                self.is_over = True
            case (
                commands.AnnounceFetch() | commands.StartFetch() | commands.StopFetch()
                | commands.RemoveEvictedSnapshots() | commands.OfferSnapshot() | commands.ProbeDevice()
                | commands.FetchArguments() | commands.ReleaseArguments() | commands.UploadResults()
                | commands.ObserveLibrary()
            ):  # fmt: skip
                pass
            case _:
                assert_never(command)

    def _remove_library(self, number: LibraryId) -> None:
        library = self.libraries.pop(number, None)
        self._waiting = [each for each in self._waiting if each is not library]
        self._holders = {device: holder for device, holder in self._holders.items() if holder is not library}
        self.give_free_slots()

    # ---- slots

    def give_free_slots(self) -> None:
        for library in tuple(self._waiting):
            if library not in self._waiting:  # the library has ended
                continue
            holders = {self._holders[device] for device in library.devices if device in self._holders}
            if not holders:
                self._waiting.remove(library)
                self._holders.update(dict.fromkeys(library.devices, library))
                library.load()
            for holder in sorted(holders, key=lambda holder: holder.number):
                self._free_slot(holder)

    def _free_slot(self, holder: PoolLibrary) -> None:
        known = self.state.libraries.get(holder.number)
        if known is None or known.stage is not Stage.READY:
            return
        if not known.held_calls:
            self.handle_event(DevicesWanted(holder.number, "another context needs its slot"))
        elif time.monotonic() - known.ready_at > MIN_SLOT_TURN_S:
            self.handle_event(DevicesWanted(holder.number, "its turn is over: another context needs its slot"))

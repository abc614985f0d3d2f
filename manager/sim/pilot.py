"""A simulated pilot: the pilot's real core (`stoker.pilot.core`) in virtual time.

Heartbeats, acknowledgements, limits of memory and time, and the inside of calls are not simulated. Transfers are
continuous flows, so a pilot may send bytes that it does not have yet. A fetch therefore completes only when one of its
sources has the whole object. If a source is lost earlier, its missing bytes come from another source.
"""

from __future__ import annotations

from typing import assert_never

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import FromPilot
from stoker.manager.sim.agenda import AgendaEntry, cancel_entry
from stoker.manager.sim.device import DeviceTurns, SimulatedDevice
from stoker.manager.sim.flows import Machine, SharedLink, Transfer
from stoker.manager.sim.library import SimLibrary
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.runs import SimulationBase
from stoker.manager.sim.serving import ServedBatch
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import SourceModel
from stoker.pilot.core import commands, events
from stoker.pilot.core.events import Event
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import PilotFacts
from stoker.protocol import to_manager, to_pilot
from stoker.protocol.ids import DeviceId, LibraryId, PilotId


class _Fetch:
    def __init__(self, ref: ObjectRef, now: float) -> None:
        self.ref = ref
        self.left = float(ref.size_bytes)
        self.began_at = now
        self.transfer: Transfer | None = None
        self.sources: tuple[SimPilot | None, ...] = ()  # Source of each path of the transfer; None means the origin
        self.moved: dict[SimPilot | None, float] = {}  # Bytes from each source until the paths last changed
        self.has_open_operations = False
        self.are_bytes_here = False


class PilotFetches:
    def __init__(self, pilot: SimPilot) -> None:
        self._pilot = pilot
        self._fetches: dict[str, _Fetch] = {}
        self._waiting_for_whole: dict[str, list[tuple[SimPilot, _Fetch]]] = {}
        """Fetches that have all their bytes, some from this pilot, and wait until this pilot has the whole object."""

    def begin_fetch(self, ref: ObjectRef) -> None:
        self._fetches[ref.name] = _Fetch(ref, self._pilot.sim.agenda.now)

    def stop_fetch(self, name: str) -> None:
        fetch = self._fetches.pop(name, None)
        if fetch is not None and fetch.transfer is not None:
            self._pilot.sim.network.stop(fetch.transfer)

    def handle_fetch_order(self, order: to_pilot.FetchObject) -> None:
        fetch = self._fetches.get(order.object.name)
        if fetch is None or fetch.are_bytes_here:
            return
        sim, machine = self._pilot.sim, self._pilot.machine
        paths, failed = list[tuple[SharedLink, ...]](), []
        sources: list[SimPilot | None] = []
        for peer in order.peers:
            other = sim.pilots.get(peer.pilot)
            if other is None or not other.is_running:
                failed.append(peer.pilot)
                continue
            paths.append((other.machine.outward, machine.inward))
            sources.append(other)
        if order.origin:
            paths.append((sim.shared.bytes, machine.shared, machine.inward))
            sources.append(None)
            self._read_operations(fetch)
        self._add_moved_bytes(fetch)
        fetch.sources = tuple(sources)
        if fetch.transfer is None:
            fetch.transfer = sim.network.start(fetch.left, paths, lambda: self._handle_arrived_bytes(fetch))
        else:
            sim.network.reroute(fetch.transfer, paths)
        for peer_id in failed:
            self._pilot.handle(events.SourceFailed(fetch.ref.name, "it is gone", peer_id))

    def _read_operations(self, fetch: _Fetch) -> None:
        sim = self._pilot.sim
        count = sim.operations_of.get(fetch.ref.name, 0)
        if count and not fetch.has_open_operations:
            fetch.has_open_operations = True

            def done() -> None:
                fetch.has_open_operations = False
                self._complete_if_whole(fetch)

            sim.network.start(count, [(sim.shared.operations,)], done)

    def _add_moved_bytes(self, fetch: _Fetch) -> None:
        if fetch.transfer is not None:
            for place, size in fetch.transfer.moved.items():
                source = fetch.sources[place]
                fetch.moved[source] = fetch.moved.get(source, 0.0) + size

    def _handle_arrived_bytes(self, fetch: _Fetch) -> None:
        fetch.are_bytes_here = True
        self._add_moved_bytes(fetch)
        fetch.transfer, fetch.left = None, 0.0
        self._complete_if_whole(fetch)

    def _complete_if_whole(self, fetch: _Fetch) -> None:
        name = fetch.ref.name
        if (
            not self._pilot.is_running
            or not fetch.are_bytes_here
            or fetch.has_open_operations
            or name not in self._fetches
        ):
            return
        givers = [source for source in fetch.moved if source is not None]
        if givers and None not in fetch.sources and not any(name in giver.machine.on_disk for giver in givers):
            for giver in givers:
                giver.fetches._waiting_for_whole.setdefault(name, []).append((self._pilot, fetch))
            return
        del self._fetches[name]
        pilot, sim = self._pilot, self._pilot.sim
        machine, now = pilot.machine, sim.agenda.now
        machine.on_disk[name] = fetch.ref.size_bytes
        machine.in_memory[name] = None
        size = fetch.ref.size_bytes
        origin = min(size, round(fetch.moved.get(None, 0.0)))
        self._log_bytes(origin, size - origin)
        pilot.handle(events.ObjectArrived(name, size, origin, size - origin, now - fetch.began_at))
        for other, waiting in self._waiting_for_whole.pop(name, ()):
            other.fetches._complete_if_whole(waiting)

    def _log_bytes(self, origin: float, peers: float) -> None:
        sim = self._pilot.sim
        for what, size in ((LoggedEvent.BYTES_SHARED, origin), (LoggedEvent.BYTES_PEER, peers)):
            if size:
                sim.log.add_row(sim.agenda.now, what, pilot=self._pilot.number, value=float(size))

    def stop_all_fetches(self) -> None:
        """Stop all fetches. Pilots that fetched from an incomplete copy on this pilot fetch the missing bytes again."""
        for fetch in self._fetches.values():
            if fetch.transfer is not None:
                self._pilot.sim.network.stop(fetch.transfer)
                self._add_moved_bytes(fetch)
                fetch.left = fetch.transfer.units_left
            origin = round(fetch.moved.get(None, 0.0))
            self._log_bytes(origin, round(sum(fetch.moved.values())) - origin)
        left = {name: fetch.left for name, fetch in self._fetches.items()}
        self._fetches.clear()
        waiting, self._waiting_for_whole = self._waiting_for_whole, {}
        for name, others in waiting.items():
            for other, fetch in others:
                other.fetches._refetch_missing(fetch, self._pilot, left=left.get(name, 0.0))

    def _refetch_missing(self, fetch: _Fetch, giver: SimPilot, *, left: float) -> None:
        """Fetch again what the lost pilot `giver` sent: at most `left` bytes, which `giver` lacked, or all if `left` is
        0.
        """
        given = fetch.moved.get(giver, 0.0)
        missing = min(left, given) or given
        if not fetch.are_bytes_here:
            return
        fetch.moved[giver] = given - missing
        fetch.left = missing
        fetch.are_bytes_here = False
        fetch.sources = ()


_UNLIMITED_BYTES = 1 << 62


class PilotSimulationBase(SimulationBase):
    """A simulation with pilots. `busy_s`: device-seconds in which ended pilots ran calls. `warm_s`: device-seconds in
    which ended pilots had libraries. `pilots`: pilots that have not ended.
    """

    pilots: dict[PilotId, SimPilot]
    busy_s = warm_s = 0.0

    def create_pilot(self, source: SourceModel, *, block: str, ends_at: float) -> SimPilot:
        raise NotImplementedError

    def handle_ended_pilot(self, pilot: SimPilot) -> None: ...  # Handle the end of a pilot, whose job may still run

    def send_block_update(self, update: to_manager.BlockUpdate) -> None: ...


class SimPilot:
    def __init__(
        self, sim: PilotSimulationBase, source: SourceModel, *, block: str, number: int, ends_at: float
    ) -> None:
        self.sim = sim
        self.number = number
        self.id = PilotId(f"{source.name}-{number}")
        self.block = block
        self.kind = source.kind
        self.machine = Machine(self.id, sim.world.links)
        kind = sim.world.devices[source.kind]
        devices = tuple(
            to_manager.DeviceFacts(DeviceId(f"gpu:{n}"), source.kind, int(kind.memory_bytes))
            for n in range(source.devices)
        )
        facts = PilotFacts(
            pilot=self.id, session=sim.session, host=self.id, pid=number, devices=devices, block=block,
            peer=f"{self.id}:1", cache=self.id, cache_bound_bytes=_UNLIMITED_BYTES,
            sleeper_bytes=int(source.sleeper_bytes),
        )  # fmt: skip
        self.core = PilotCore(facts)
        self.compute_devices = {device.device: SimulatedDevice(sim.agenda) for device in devices}
        self.device_turns = DeviceTurns(sim.agenda)
        self.libraries: dict[LibraryId, SimLibrary] = {}
        """Libraries, from the order to start them until the core forgets them."""
        self.fetches = PilotFetches(self)
        self.is_running = True
        self.has_left_normally = False
        self._ends_at = ends_at
        self._frame: list[to_manager.FromPilot] = []  # Messages to the manager that have not arrived yet
        self._queue = EventQueue(self.core, self._carry_out, clock=lambda: sim.agenda.now)
        self._timers: dict[str, AgendaEntry] = {}

    def connect(self) -> None:
        if not self.is_running:
            return
        sim = self.sim
        sim.log.add_row(
            sim.agenda.now, LoggedEvent.PILOT_CAME, pilot=self.number, value=float(len(self.compute_devices))
        )
        if self._ends_at:
            self.handle(events.WalltimeKnown(self._ends_at - sim.agenda.now))
        self.handle(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))

    def handle_message(self, message: to_pilot.ToPilot) -> None:
        if self.is_running:
            self.handle(events.FromManager(message))

    def handle(self, event: Event) -> None:
        handled = self._queue.handle_event(event)
        while handled and self.core.state.leaving and self.is_running:
            # Send ticks while they cause other events. The returned count includes the tick itself.
            handled = self._queue.handle_event(events.Tick()) - 1

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendToManager(message=message):
                self._send(message)
            case commands.SendToLibrary(library=number, message=to_library):
                library = self.libraries.get(number)
                if library is not None:
                    library.handle_order(to_library)
            case commands.PrepareLibrary(ordered=ordered):
                self._create_library(ordered)
            case commands.PinObjects(library=number, objects=refs):
                here = self.machine.on_disk
                self.handle(events.ObjectsPinned(number, {ref.name: ref.name for ref in refs if ref.name in here}))
            case commands.StartProcess(ordered=ordered):
                self.libraries[ordered.library].start()
            case commands.KillProcess(library=number) | commands.KillZygote(library=number):
                self.libraries[number].end()
            case commands.RemoveLibrary(library=number):
                library = self.libraries.pop(number, None)
                if library is not None:
                    library.end_silently()
            case commands.ObserveLibrary(library=number):
                library = self.libraries.get(number)
                # The run times are 0, because time limits of calls are not simulated.
                running = [(call, 0.0) for call in library.running] if library is not None else []
                self.handle(events.LibrariesObserved([events.Observation(number, running)]))
            case commands.InspectOffer(order=order):
                self.handle(self._inspect_offer(order))
            case commands.StartFetch(order=order):
                self.fetches.handle_fetch_order(order)
            case commands.StopFetch(name=name):
                self.fetches.stop_fetch(name)
            case commands.AnnounceFetch(name=name):
                self.fetches.begin_fetch(self.core.state.wants[name].ref)
            case commands.SetTimer(at=at, key=key):
                cancel_entry(self._timers.get(key))
                agenda = self.sim.agenda
                self._timers[key] = agenda.schedule_at(max(at, agenda.now), self._handle_fired_timer, key)
            case commands.SendHello(hello=hello):
                self._send(hello)
            case commands.ExitPilot():
                self._exit()
            case (
                commands.WriteLog() | commands.DropAcknowledgedFrames() | commands.SendHeartbeat() |
                commands.SendPieces() | commands.RemoveEvictedSnapshots() | commands.OfferSnapshot() |
                commands.ProbeDevice() | commands.FetchArguments() | commands.ReleaseArguments() |
                commands.UploadResults()
            ):  # fmt: skip
                pass
            case _:
                assert_never(command)

    def _inspect_offer(self, order: to_pilot.RunCalls) -> events.OfferInspected:
        library = self.libraries.get(order.library)
        if library is None or library.batch is None:
            return events.OfferInspected(order)
        mine, beside = set(library.batch.device_ids), list[ServedBatch]()
        for other in self.libraries.values():
            if other.batch is not None and not other.is_over and not mine.isdisjoint(other.batch.device_ids):
                beside.append(other.batch)
        [spec] = order.calls
        free_at = max(batch.engine.next_free_at(self.sim.agenda.now) for batch in beside)
        model = library.engine
        required = library.batch.required_bytes(spec, model) if model is not None and model.token_bytes else 0
        pause_s = library.resize_s(order.reserve_bytes) if order.reserve_bytes else 0.0
        engines = [each.describe_engine(pause_s=pause_s if each is library.batch else 0.0) for each in beside]
        return events.OfferInspected(order, library.batch.make_unread_prompt(spec), engines, free_at, required)

    def _send(self, message: to_manager.FromPilot) -> None:
        """Send a message to the manager, in one frame with earlier messages that have not arrived yet."""
        frame = self._frame
        if not frame:
            self.sim.agenda.schedule_after(self.sim.frame_s, self._send_frame_to_manager)
        elif type(message) is to_manager.CallsEnded:
            last = frame[-1]
            if type(last) is to_manager.CallsEnded and last.library == message.library:
                last.ends.extend(message.ends)
                return
        frame.append(message)

    def _send_frame_to_manager(self) -> None:
        frame, self._frame = self._frame, []
        if self.is_running or self.has_left_normally:
            self.sim.handle(FromPilot(self.id, 0, frame))

    def _create_library(self, ordered: to_pilot.StartLibrary) -> None:
        number = ordered.library
        self.libraries[number] = SimLibrary(self, ordered)
        self.sim.log.add_row(
            self.sim.agenda.now, LoggedEvent.LIBRARY_STARTED, library=number, pilot=self.number,
            value=float(len(ordered.devices)),
        )  # fmt: skip
        self.handle(events.LibraryPrepared(number, free_disk_bytes=_UNLIMITED_BYTES))

    def _handle_fired_timer(self, key: str) -> None:
        self._timers.pop(key, None)
        if self.is_running:
            self.handle(events.TimerFired(key))

    def _exit(self) -> None:
        if not self.is_running:
            return
        for command in self.core.handle(events.Farewell(), self.sim.agenda.now):
            self._carry_out(command)
        self.has_left_normally = True
        self.end_silently()

    def busy_s(self, now: float) -> float:
        return sum(device.busy_s(now) for device in self.compute_devices.values())

    def warm_s(self, now: float) -> float:
        return sum(device.held_s(now) for device in self.compute_devices.values())

    def engine_step_counts(self) -> list[StepCounts]:
        alive = [library for library in self.libraries.values() if not library.is_over]
        return [library.batch.engine.counts for library in alive if library.batch is not None]

    def end_silently(self) -> None:
        if not self.is_running:
            return
        self.is_running = False
        for library in self.libraries.values():
            library.end_silently()
        for entry in self._timers.values():
            cancel_entry(entry)
        self.fetches.stop_all_fetches()
        self.sim.busy_s += self.busy_s(self.sim.agenda.now)
        self.sim.warm_s += self.warm_s(self.sim.agenda.now)
        self.sim.log.add_row(
            self.sim.agenda.now, LoggedEvent.PILOT_WENT, pilot=self.number, value=float(len(self.compute_devices))
        )
        self.sim.handle_ended_pilot(self)


def make_object_ref(name: str, size_bytes: int) -> ObjectRef:
    return ObjectRef(name=name, size_bytes=int(size_bytes), source=f"/shared/{name}")

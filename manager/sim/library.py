"""The process of a simulated library, which runs calls in the order of `stoker.pilot.core.turns`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from stoker.contexts.recipe import Awareness
from stoker.manager.sim.device import DeviceTurns, DeviceWork, SimulatedDevice
from stoker.manager.sim.flows import Machine, SharedLink, Transfer
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.runs import CallRun, RunningLibrary, SimulationBase, SoloRun, get_or_create_run, plan_run
from stoker.manager.sim.serving import EngineRun, ServedBatch
from stoker.manager.sim.virtual_engine import VirtualEngine
from stoker.pilot.core.events import Event, FromLibrary, ProcessEnded
from stoker.pilot.core.reactor import PilotCore
from stoker.pilot.core.turns import CallQueue
from stoker.protocol import to_agent, to_library
from stoker.protocol.calls import CallEnd, CallSpec, Failure, FailureKind, GangPlace
from stoker.protocol.ids import CallId, DeviceId, PilotId
from stoker.protocol.to_pilot import StartLibrary
from stoker.units import show_bytes


class LibraryHost(Protocol):
    id: PilotId
    number: int
    kind: str
    machine: Machine
    core: PilotCore
    compute_devices: dict[DeviceId, SimulatedDevice]
    device_turns: DeviceTurns

    @property
    def sim(self) -> SimulationBase: ...

    def handle(self, event: Event) -> None: ...  # Pass an event to the core of the pilot


_Part = tuple[int, CallRun]  # The rank of a gang member, and the run that it joins
_GB = 1e9
_REFUSED = -1  # The size that a library reports if its context refuses a resize


class SimLibrary(RunningLibrary):
    """One library on a simulated pilot. Before `start`, the library only occupies its devices."""

    def __init__(self, pilot: LibraryHost, ordered: StartLibrary) -> None:
        devices = tuple([pilot.compute_devices[device] for device in ordered.devices])
        super().__init__(pilot.sim, ordered, devices, kind=pilot.kind, pilot=pilot.number)
        self.pilot = pilot
        self.recipe = ordered.recipe
        self.engine = self.model.engine_on_device_kind(pilot.kind)
        self.turns: CallQueue[tuple[CallSpec, _Part | None]] = CallQueue()
        self.running: dict[CallId, CallRun | SoloRun | EngineRun] = {}
        """Calls that occupy slots: they run, or wait for their gang."""
        self._served = 0
        self._started_at = 0.0
        self._is_stopping = False
        self._resizes: deque[int] = deque()  # Sizes in bytes of ordered resizes; the first is in progress
        self._resizing: DeviceWork | None = None
        self._transfers: dict[Transfer, None] = {}
        self.batch: ServedBatch | None = None
        if self.engine is not None:
            seconds = pilot.sim.get_step_seconds(ordered.recipe.name, pilot.kind)
            limits = self.engine.make_batch_limits(ordered.device_memory_bytes)
            virtual = VirtualEngine(seconds, limits, most_output=self.engine.most_output)
            self.batch = ServedBatch(self, virtual, pilot.device_turns, device_ids=ordered.devices)
        for device in self.devices:
            device.add_holder()

    def report_to_pilot(self, message: to_agent.ToAgent) -> None:
        self.pilot.handle(FromLibrary(self.number, (message,)))

    def start(self) -> None:
        self._started_at = self.sim.agenda.now
        self.sim.agenda.schedule_after(self.model.start_s, self._read_files)

    def _read_files(self) -> None:
        if self.is_over:
            return
        self.report_to_pilot(to_agent.Hello(self.number, self.number))
        sim, machine = self.sim, self.pilot.machine
        for files in self.model.files:
            if self.model.awareness is Awareness.NONE:
                size = float(files.size_bytes)
                self._start_transfer(
                    size, sim.shared.bytes, machine.shared, machine.inward, then=self._initialize_context
                )
                sim.log.add_row(sim.agenda.now, LoggedEvent.BYTES_SHARED, pilot=self.pilot.number, value=size)
                self._start_transfer(files.operations, sim.shared.operations, then=self._initialize_context)
            elif self.model.page_cache and files.name in machine.in_memory:
                self._start_transfer(files.size_bytes, machine.memory, then=self._initialize_context)
            else:
                machine.in_memory[files.name] = None
                self._start_transfer(files.size_bytes, machine.disk, then=self._initialize_context)
        if not self._transfers:
            self._initialize_context()

    def _initialize_context(self) -> None:
        if self._transfers or self.is_over:
            return
        model, sim = self.model, self.sim
        factor = sim.chance_of_loads.lognormal_factor(self.number, cv=model.load_cv)
        sim.agenda.schedule_after(
            model.time_on_device_kind(model.load_s, self.pilot.kind) * factor, self._move_context_to_device
        )

    def _move_context_to_device(self) -> None:
        if self.is_over:
            return
        needed, promised = self.model.device_memory_bytes, self.pilot.core.state.ledger.reserved_bytes(self.number)
        if promised < needed:
            what = f"{show_bytes(needed)} of device memory are needed, {show_bytes(promised)} were promised"
            text = f"the loader of {self.recipe.name} ran out of memory: {what}"
            failure = Failure(FailureKind.CONTEXT, text, pilot=self.pilot.id, library=self.number)
            self.report_to_pilot(to_agent.LoadFailed(failure))
            self.end()
            return
        self._start_transfer(needed * len(self.devices), self.pilot.machine.bus, then=self._report_ready)
        if not self._transfers:
            self._report_ready()

    def _report_ready(self) -> None:
        if self._transfers or self.is_over:
            return
        sim, memory = self.sim, int(self.model.device_memory_bytes)
        self.ready_at = now = sim.agenda.now
        pilot, whole_s = self.pilot.number, now - self.ordered_at
        sim.log.add_row(now, LoggedEvent.LIBRARY_READY, library=self.number, pilot=pilot, value=whole_s)
        slots = 0 if self.recipe.slots else self.slots
        load_s = now - self._started_at - float(self.model.start_s)
        self.report_to_pilot(to_agent.Loaded(load_s, memory, memory, memory, slots=slots, sleeps=self.model.sleeps))

    def _start_transfer(self, size: float, *path: SharedLink, then: Callable[[], None]) -> None:
        if not size:
            return

        def done() -> None:
            self._transfers.pop(transfer, None)
            then()

        transfer = self.sim.network.start(size, [path], done)
        self._transfers[transfer] = None

    def handle_order(self, message: to_library.ToLibrary) -> None:
        match message:
            case to_library.Run():
                self._run_or_queue_calls(message.calls, gang=message.gang)
            case to_library.GiveBack(count=count, calls=calls, order=order):
                back = self.turns.remove_calls(calls) if calls else self.turns.remove_newest(count)
                if back or not calls:
                    self._give_back_calls(back, order=order)
            case to_library.Evict(call=call):
                self._evict_call(call)
            case to_library.Resize(device_memory_bytes=size):
                self._resizes.append(size)
                if len(self._resizes) == 1:
                    self._begin_next_resize()
            case to_library.Sleep() | to_library.Wake():
                self._move_context(goes_to_sleep=isinstance(message, to_library.Sleep))
            case to_library.Stop():
                self._is_stopping = True
                if len(self.turns):
                    self._give_back_calls(self.turns.remove_newest(len(self.turns)))
                if not self.running:
                    self.end()
            case to_library.MeetRankZero() | to_library.Load() | to_library.PiecesReceived():
                pass

    def _run_or_queue_calls(self, calls: list[CallSpec], *, gang: GangPlace | None) -> None:
        turns, slots, running = self.turns, self.slots, self.running
        begins = not turns
        for spec in calls:
            part = None
            if gang is not None and gang.size > 1:
                part = gang.rank, get_or_create_run(self.sim, spec, size=gang.size)
            if begins and len(running) < slots:
                self._begin_call(spec, part)
            else:
                turns.add(spec.call, (spec, part))

    def resize_s(self, size: int) -> float:
        """Return the seconds that a resize to `size` bytes takes. A resize does not move an engine's weights."""
        moved = size - self.engine.weights_bytes if self.engine is not None else size
        return float(self.model.resize_s) * moved / _GB

    def _begin_next_resize(self) -> None:
        size = self._resizes[0]
        if size < self.model.device_memory_bytes:
            self._report_resize(_REFUSED)
            return
        seconds = self.resize_s(size)
        if self.batch is None:
            self._resizing = self.begin_work(seconds, part=1.0, then=self._finish_resize, args=(size,))
            return
        self.batch.pause_steps(seconds)
        self.sim.agenda.schedule_after(seconds, self._finish_resize, size)

    def _finish_resize(self, size: int) -> None:
        if self.batch is not None and self.engine is not None and not self.is_over:
            fits = self.batch.resize_cache(self.engine, size)
            self.batch.resume_steps()
            self._report_resize(size if fits else _REFUSED)
        elif self._resizing is not None:
            self.devices[0].finish_work(self._resizing)
            self._resizing = None
            self._report_resize(size)

    def _report_resize(self, size: int) -> None:
        self._resizes.popleft()
        self.report_to_pilot(to_agent.Resized(size))
        if self._resizes and not self.is_over:
            self._begin_next_resize()

    def _move_context(self, *, goes_to_sleep: bool) -> None:
        memory, began = int(self.model.device_memory_bytes) * len(self.devices), self.sim.agenda.now

        def moved() -> None:
            seconds = self.sim.agenda.now - began
            if not goes_to_sleep:
                self.ordered_at, self.ready_at = began, self.sim.agenda.now
            self.report_to_pilot(
                to_agent.Slept(memory, memory, sleep_s=seconds) if goes_to_sleep else to_agent.Woke(seconds)
            )

        self._start_transfer(memory, self.pilot.machine.bus, then=moved)
        if not self._transfers:
            moved()

    def _give_back_calls(self, calls: list[CallId], *, order: int = 0) -> None:
        self.report_to_pilot(to_agent.GivenBack(tuple(calls), order=order))

    def _evict_call(self, call: CallId) -> None:
        run = self.running.pop(call, None)
        if run is None:
            if self.turns.remove_calls([call]):
                self._give_back_calls([call])
            return
        self._served += 1
        self.report_to_pilot(to_agent.RunEvicted(run.leave_run(self, is_time_useful=True)))
        self._start_next_call()

    def _begin_call(self, spec: CallSpec, part: _Part | None) -> None:
        sim, call = self.sim, spec.call
        if self.batch is not None:
            joined = self.batch.begin_request(spec)
            if isinstance(joined, str):  # the text says why the engine can never serve the call
                self.report_to_pilot(to_agent.RunsEnded([CallEnd(call, False)]))
                return
            self.running[call] = joined
            sim.calls_log.log_start(sim.agenda.now, spec, self.log_place, rank=0)
        elif part is not None:
            rank, run = part
            self.running[call] = run
            run.join(self, rank=rank)
        elif sim.progress_s:
            self.running[call] = run = CallRun(sim, spec, size=1)
            run.join(self, rank=0)
        else:
            work = self.begin_work(
                self._run_time_s(spec), part=self.device_share, then=self._finish_solo_run, args=(spec,)
            )
            self.running[call] = SoloRun(spec, work)
            sim.calls_log.log_start(sim.agenda.now, spec, self.log_place, rank=0)

    def end_served_call(self, call: CallId) -> None:
        sim, run = self.sim, self.running[call]
        assert isinstance(run, EngineRun)
        sim.calls_log.log_end(sim.agenda.now, run.spec, self.log_place, rank=0, items=1)
        self.finish_call(call, ran_s=sim.agenda.now - run.began_at)

    def _run_time_s(self, spec: CallSpec) -> float:
        sim, model, features, items = self.sim, self.model, spec.features, self.sim.count_true_items(spec)
        if spec.progress or (features is not None and features.seconds_before_first_item(1)):
            seconds = plan_run(sim, spec, (self,)).whole_s
        else:
            seconds = self.call_s + items * self.item_s
            if model.item_cv:
                seconds *= sim.chance_of_calls.lognormal_factor(spec.call, cv=model.item_cv)
        if self._items < model.warm_items:
            seconds += self.count_cold_items(items) * model.warm_item_s
        return seconds

    def _finish_solo_run(self, spec: CallSpec) -> None:
        sim, run = self.sim, cast(SoloRun, self.running[spec.call])
        ran_s = self.devices[0].finish_work(run.work)
        sim.calls_log.log_end(sim.agenda.now, spec, self.log_place, rank=0, items=sim.count_true_items(spec))
        self.finish_call(spec.call, ran_s=ran_s)

    def finish_call(self, call: CallId, *, ran_s: float) -> None:
        del self.running[call]
        self._served += 1
        self.report_to_pilot(to_agent.RunsEnded([CallEnd(call, True, b"", ran_s)]))
        self._start_next_call()

    def _start_next_call(self) -> None:
        if self.is_over:
            return
        if 0 < self.recipe.calls_per_library <= self._served or (self._is_stopping and not self.running):
            self.end()
            return
        while (
            not self._is_stopping and len(self.running) < self.slots and (turn := self.turns.take_first()) is not None
        ):
            self._begin_call(*turn[1])

    def end(self) -> None:
        if self.is_over:
            return
        ran = tuple(self.running)
        self.end_silently()
        self.pilot.handle(ProcessEnded(self.number, running=ran))

    def end_silently(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        sim = self.sim
        if self._resizing is not None:
            self.devices[0].stop_work(self._resizing)
            self._resizing = None
        if self.batch is not None:
            self.batch.end_silently()
        for run in self.running.values():
            run.leave_run(self)
        self.running.clear()
        for device in self.devices:
            device.remove_holder()
        for transfer in self._transfers:
            sim.network.stop(transfer)
        self._transfers.clear()
        sim.log.add_row(sim.agenda.now, LoggedEvent.LIBRARY_ENDED, library=self.number, pilot=self.pilot.number)

"""Simulated runs of calls, on one library or on a gang. A run on n members takes

    T(n) = head + gang [n > 1] + shared / n + items * item / S(n),    S(n) = n * e ^ log2 n

The head is `fixed_s` plus the context's time per call. The efficiency e is `ContextModel.gang_efficiency`: the share of
a linear speedup that remains with each doubling of n (PromptTuner, §2.2). The slowest member determines the time. A
checkpoint contains the completed share of the head and of the items.

A member waits in its slot until all members are ready. Then the run is one unit of work on all their devices. If a
member is lost, the others stop until the manager sends an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from stoker.chance import Stream
from stoker.contexts.step_times import StepSeconds
from stoker.manager.core.events import Event
from stoker.manager.sim.agenda import Agenda, AgendaEntry, cancel_entry
from stoker.manager.sim.device import DeviceWork, SimulatedDevice, begin_work
from stoker.manager.sim.flows import Network, SharedStorage
from stoker.manager.sim.log import (
    CallsLog,
    CountedCallsLog,
    EachCallLog,
    EventLog,
    LibraryPlace,
    TokenTimes,
    count_items,
)
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import TICK_S, ContextModel, World
from stoker.protocol import to_agent
from stoker.protocol.calls import CallProgress, CallSpec
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import StartLibrary


class SimulationBase:
    """The part of a simulation that libraries and runs use. Times are in seconds."""

    def __init__(self, world: World, *, seed: int, counted: bool, honours: frozenset[str]) -> None:
        self.session = "simulated"
        self.world = world
        self.honours = honours
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.shared = SharedStorage(world.links)
        self.log = EventLog()
        self.calls_log: CallsLog = CountedCallsLog(self.log) if counted else EachCallLog(self.log)
        self.operations_of = {
            files.name: files.operations for model in world.contexts.values() for files in model.files
        }
        self.chance_of_calls, self.chance_of_loads = Stream(seed, "calls"), Stream(seed, "loads")
        self.frame_s = world.delays.frame_s + world.delays.message_s  # Delay of a pilot's message to the manager
        self.client_collects_for_s = float(world.delays.frame_s) if counted else 0.0
        self.progress_s = float(world.delays.progress_s)
        self.gathering_runs: dict[CallId, CallRun] = {}  # For each call, its latest run that waits for gang members
        # Values that policies must not see: the true number of items of calls that end early, and token times of open
        # calls to engines
        self.true_items: dict[CallId, int] = {}
        self.tokens: dict[CallId, TokenTimes] = {}
        self.engine_steps = StepCounts()
        self._step_seconds: dict[tuple[int, float], StepSeconds] = {}

    def handle(self, event: Event) -> None:
        """Pass an event to the manager."""
        raise NotImplementedError

    def count_true_items(self, spec: CallSpec) -> int:
        return self.true_items.get(spec.call) or count_items(spec)

    def get_step_seconds(self, context: str, kind: str) -> StepSeconds:
        engine, speed = self.world.contexts[context].engine_on_device_kind(kind), self.world.devices[kind].speed
        assert engine is not None
        same = id(engine.times), speed  # models of the same size share one `times` object
        if same not in self._step_seconds:
            self._step_seconds[same] = StepSeconds(engine.times, factor=1 / speed)
        return self._step_seconds[same]


def compute_speedup(size: int, *, efficiency: float) -> float:
    return size * efficiency ** math.log2(size) if size > 1 else 1.0


def compute_best_speedup(gang: tuple[int, int], *, efficiency: float) -> float:
    return max(compute_speedup(size, efficiency=efficiency) for size in gang)


class CompletedWork(NamedTuple):
    """The completed part of a call. `head`: completed share of the time before the first item. `items`: completed
    items.
    """

    head: float = 0.0
    items: float = 0.0

    def to_bytes(self) -> bytes:
        return f"{self.head!r} {self.items!r}".encode()


def parse_completed_work(spec: CallSpec) -> CompletedWork:
    return CompletedWork(*map(float, spec.progress.split()))


class RunSchedule(msgspec.Struct, frozen=True, gc=False):
    """Seconds from a run's start until the gang has connected, the next item begins, and the run ends. `before`: work
    that earlier runs completed.
    """

    before: CompletedWork
    items: int
    meet_s: float
    first_s: float
    whole_s: float

    def work_done_after(self, seconds: float) -> CompletedWork:
        if seconds < self.first_s:
            head = max(0.0, seconds - self.meet_s) / (self.first_s - self.meet_s) if self.first_s > self.meet_s else 1.0
            return CompletedWork(self.before.head + (1.0 - self.before.head) * head, self.before.items)
        items_s = self.whole_s - self.first_s
        share = min(1.0, (seconds - self.first_s) / items_s) if items_s else 1.0
        return CompletedWork(1.0, self.before.items + (self.items - self.before.items) * share)


def plan_run_schedule(
    model: ContextModel, spec: CallSpec, *, call_s: float, item_s: float, items: int, factor: float, size: int = 1
) -> RunSchedule:
    """Return the schedule of a run. `call_s`, `item_s`: seconds per call and per item of the slowest member. `factor`:
    run time divided by the mean.
    """
    before = parse_completed_work(spec)
    before_s = spec.features.seconds_before_first_item(size) if spec.features is not None else 0.0
    meet_s = float(model.gang_s) if size > 1 else 0.0
    first_s = meet_s + (1.0 - before.head) * (factor * call_s + before_s)
    left = max(0.0, items - before.items)
    items_s = factor * left * item_s / compute_speedup(size, efficiency=model.gang_efficiency)
    return RunSchedule(before, items, meet_s, first_s, first_s + items_s)


def minimum_call_s(model: ContextModel, call_s: float, items_s: float, *, gang: tuple[int, int]) -> float:
    """Return the seconds of a call on its fastest gang. `call_s`: fixed part. `items_s`: items' time on one library."""
    together_s = model.gang_s + items_s / compute_best_speedup(gang, efficiency=model.gang_efficiency)
    return call_s + (together_s if gang[0] > 1 else min(items_s, together_s))


class RunningLibrary:
    """The process of a library. `begin_work` starts work on the library's devices. `device_share`: the share of each
    device that a call uses.
    """

    def __init__(
        self, sim: SimulationBase, ordered: StartLibrary, devices: tuple[SimulatedDevice, ...], *, kind: str, pilot: int
    ) -> None:
        self.sim = sim
        self.number = ordered.library
        self.model = model = sim.world.contexts[ordered.recipe.name]
        speed = sim.world.devices[kind].speed
        self.call_s = model.time_on_device_kind(model.call_s, kind) / speed
        self.item_s = model.time_on_device_kind(model.item_s, kind) / speed
        self.devices = devices
        self.begin_work: Callable[..., DeviceWork] = partial(begin_work, devices)
        self.slots = model.slots_on_device_kind(kind)
        self.device_share = 1 / self.slots
        self.log_place = LibraryPlace(ordered.library, pilot, len(ordered.devices))
        self.ordered_at = sim.agenda.now
        self.ready_at = math.inf
        self.is_over = False
        self._items = 0

    def count_cold_items(self, items: int) -> int:
        """Count `items` more items as begun. Return how many of these items take longer because the process is new."""
        cold = min(items, self.model.warm_items - self._items) if self._items < self.model.warm_items else 0
        self._items += items
        return cold

    def report_to_pilot(self, message: to_agent.ToAgent) -> None: ...  # Send a message to the pilot

    def finish_call(self, call: CallId, *, ran_s: float) -> None: ...  # End a call on this library; start the next call

    def end_served_call(self, call: CallId) -> None: ...  # End a call after the engine's last token


class SoloRun(msgspec.Struct, frozen=True, gc=False):
    """A run on one library without progress reports."""

    spec: CallSpec
    work: DeviceWork

    def leave_run(self, library: RunningLibrary, *, is_time_useful: bool = False) -> CallProgress:
        """Stop the run and return the call's progress. `is_time_useful`: count the run's time as useful."""
        sim, spec, device = library.sim, self.spec, library.devices[0]
        plan = replace(plan_run(sim, spec, (library,)), whole_s=self.work.seconds)
        done = plan.work_done_after(device.reached_s(self.work))
        ran_s = sim.agenda.now - self.work.began_at
        device.stop_work(self.work)
        sim.calls_log.log_stop(sim.agenda.now, spec, library.log_place, rank=0, kept_s=ran_s if is_time_useful else 0.0)
        return _make_progress_report(spec, done)


class CallRun:
    """One run of a call on its member libraries. `is_over`: the run has ended or a member has left."""

    __slots__ = (
        "_began_at", "_done", "_kept_at", "_next", "_schedule", "_sim", "_size", "has_begun", "is_over", "members",
        "ordered_at", "spec", "work",
    )  # fmt: skip

    work: DeviceWork
    _schedule: RunSchedule

    def __init__(self, sim: SimulationBase, spec: CallSpec, *, size: int) -> None:
        self._sim = sim
        self.spec = spec
        self.ordered_at = sim.agenda.now
        self._size = size
        self.members: dict[int, RunningLibrary] = {}
        self.has_begun = self.is_over = False
        self._began_at = self._kept_at = 0.0
        self._done = parse_completed_work(spec)
        self._next: AgendaEntry | None = None

    def join(self, library: RunningLibrary, *, rank: int) -> None:
        """Add a library that is ready. The run begins when the last library joins, unless a library has left."""
        self.members[rank] = library
        if len(self.members) < self._size or self.is_over:
            return
        sim, spec = self._sim, self.spec
        devices: Sequence[SimulatedDevice] = library.devices
        if self._size > 1:
            self._stop_gathering()
            self.members = dict(sorted(self.members.items()))
            devices = [device for member in self.members.values() for device in member.devices]
        self.has_begun = True
        plan = plan_run(sim, spec, tuple(self.members.values()))
        cold = max([member.count_cold_items(sim.count_true_items(spec)) for member in self.members.values()])
        self._schedule = replace(plan, whole_s=plan.whole_s + cold * library.model.warm_item_s)
        self._began_at = self._kept_at = sim.agenda.now
        self.work = begin_work(devices, self._schedule.whole_s, part=library.device_share, then=self._end_run, args=())
        for rank, member in self.members.items():
            sim.calls_log.log_start(sim.agenda.now, spec, member.log_place, rank=rank)
        if sim.progress_s:
            self._next = sim.agenda.schedule_after(sim.progress_s, self._report_progress)

    def _report_progress(self) -> None:
        reached_s = self.members[0].devices[0].reached_s(self.work)
        if reached_s < self._schedule.first_s - TICK_S:
            self._next = self._sim.agenda.schedule_after(self._schedule.first_s - reached_s, self._report_progress)
            return
        self._done = self._schedule.work_done_after(reached_s)
        self._send_progress()
        if self.is_over:  # in reply to the report, the pilot has ended the run
            return
        self._kept_at = self._sim.agenda.now
        self._next = self._sim.agenda.schedule_after(self._sim.progress_s, self._report_progress)

    def _end_run(self) -> None:
        sim, spec = self._sim, self.spec
        ran_s = self.members[0].devices[0].finish_work(self.work)
        self.is_over = True
        items = sim.count_true_items(spec)
        if self._next is not None:
            cancel_entry(self._next)
            self._done = CompletedWork(1.0, items)
            self._send_progress()
        for rank, member in self.members.items():
            sim.calls_log.log_end(sim.agenda.now, spec, member.log_place, rank=rank, items=items)
            member.finish_call(spec.call, ran_s=ran_s)

    def leave_run(self, library: RunningLibrary, *, is_time_useful: bool = False) -> CallProgress:
        """Remove a library, stop the run on all its libraries, and return the progress of the call."""
        sim, spec = self._sim, self.spec
        if not self.is_over:
            self._stop()
            if is_time_useful:
                self._kept_at = sim.agenda.now
        rank = next(rank for rank, member in self.members.items() if member is library)
        del self.members[rank]
        if self.has_begun:
            sim.calls_log.log_stop(
                sim.agenda.now, spec, library.log_place, rank=rank, kept_s=self._kept_at - self._began_at
            )
        return _make_progress_report(spec, self._done)

    def _stop(self) -> None:
        self.is_over = True
        if not self.has_begun:
            self._stop_gathering()
            return
        first = next(iter(self.members.values())).devices[0]
        self._done = self._schedule.work_done_after(first.reached_s(self.work))
        first.stop_work(self.work)
        cancel_entry(self._next)

    def _stop_gathering(self) -> None:
        gathering = self._sim.gathering_runs
        if gathering.get(self.spec.call) is self:
            del gathering[self.spec.call]

    def _send_progress(self) -> None:
        self.members[0].report_to_pilot(to_agent.Reports([_make_progress_report(self.spec, self._done)]))


def get_or_create_run(sim: SimulationBase, spec: CallSpec, *, size: int) -> CallRun:
    """Return the run that a library joins now. Libraries that receive orders for a call at the same time join the same
    run.
    """
    run = sim.gathering_runs.get(spec.call)
    if run is None or run.ordered_at != sim.agenda.now:
        run = sim.gathering_runs[spec.call] = CallRun(sim, spec, size=size)
    return run


def plan_run(sim: SimulationBase, spec: CallSpec, members: Sequence[RunningLibrary]) -> RunSchedule:
    model = members[0].model
    return plan_run_schedule(
        model, spec, call_s=max([member.call_s for member in members]),
        item_s=max([member.item_s for member in members]),
        items=sim.count_true_items(spec), size=len(members),
        factor=sim.chance_of_calls.lognormal_factor(spec.call, cv=model.item_cv) if model.item_cv else 1.0,
    )  # fmt: skip


def _make_progress_report(spec: CallSpec, done: CompletedWork) -> CallProgress:
    return CallProgress(spec.call, done=done.items, total=float(count_items(spec)), state=done.to_bytes())

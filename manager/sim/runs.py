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
from stoker.manager.sim.agenda import Agenda, Entry, cancel
from stoker.manager.sim.device import RunningWork, SimulatedDevice, begin_work
from stoker.manager.sim.flows import Network, SharedFiles
from stoker.manager.sim.log import CallsLog, CountedCallsLog, EachCallLog, EventLog, LibraryPlace, TokenTimes, items_of
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import TICK_S, ContextModel, World
from stoker.protocol import to_agent
from stoker.protocol.calls import CallProgress, CallSpec
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import StartLibrary


class Surroundings:
    """The part of a simulation that libraries and runs use. Times are in seconds."""

    def __init__(self, world: World, *, seed: int, counted: bool, honours: frozenset[str]) -> None:
        self.session = "simulated"
        self.world = world
        self.honours = honours
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.shared = SharedFiles(world.links)
        self.log = EventLog()
        self.calls_log: CallsLog = CountedCallsLog(self.log) if counted else EachCallLog(self.log)
        self.operations_of = {
            files.name: files.operations for model in world.contexts.values() for files in model.files
        }
        self.chance_of_calls, self.chance_of_loads = Stream(seed, "calls"), Stream(seed, "loads")
        self.frame_s = world.delays.frame_s + world.delays.message_s  # Delay of a pilot's message to the manager
        self.client_gathers_s = float(world.delays.frame_s) if counted else 0.0
        self.progress_s = float(world.delays.progress_s)
        self.gathering: dict[CallId, CallRun] = {}  # For each call, its latest run that waits for gang members
        # Values that policies must not see: the true number of items of calls that end early, and token times of open
        # calls to engines
        self.really: dict[CallId, int] = {}
        self.tokens: dict[CallId, TokenTimes] = {}
        self.engine_steps = StepCounts()
        self._step_seconds: dict[tuple[int, float], StepSeconds] = {}

    def handle(self, event: Event) -> None:
        """Pass an event to the manager."""
        raise NotImplementedError

    def items_of(self, spec: CallSpec) -> int:
        return self.really.get(spec.call) or items_of(spec)

    def step_seconds(self, context: str, kind: str) -> StepSeconds:
        engine, speed = self.world.contexts[context].engine_on_device_kind(kind), self.world.devices[kind].speed
        assert engine is not None
        same = id(engine.times), speed  # models of the same size share one `times` object
        if same not in self._step_seconds:
            self._step_seconds[same] = StepSeconds(engine.times, factor=1 / speed)
        return self._step_seconds[same]


def speedup(size: int, *, efficiency: float) -> float:
    return size * efficiency ** math.log2(size) if size > 1 else 1.0


def best_speedup(gang: tuple[int, int], *, efficiency: float) -> float:
    return max(speedup(size, efficiency=efficiency) for size in gang)


class WorkDone(NamedTuple):
    """The completed part of a call. `head`: completed share of the time before the first item. `items`: completed
    items.
    """

    head: float = 0.0
    items: float = 0.0

    def written(self) -> bytes:
        return f"{self.head!r} {self.items!r}".encode()


def parse_completed_work(spec: CallSpec) -> WorkDone:
    return WorkDone(*map(float, spec.progress.split()))


class RunSchedule(msgspec.Struct, frozen=True, gc=False):
    """Seconds until the gang has connected, the next item begins, and the run ends. `before`: work that earlier runs
    completed.
    """

    before: WorkDone
    items: int
    meet_s: float
    first_s: float
    whole_s: float

    def after(self, seconds: float) -> WorkDone:
        if seconds < self.first_s:
            head = max(0.0, seconds - self.meet_s) / (self.first_s - self.meet_s) if self.first_s > self.meet_s else 1.0
            return WorkDone(self.before.head + (1.0 - self.before.head) * head, self.before.items)
        items_s = self.whole_s - self.first_s
        share = min(1.0, (seconds - self.first_s) / items_s) if items_s else 1.0
        return WorkDone(1.0, self.before.items + (self.items - self.before.items) * share)


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
    items_s = factor * left * item_s / speedup(size, efficiency=model.gang_efficiency)
    return RunSchedule(before, items, meet_s, first_s, first_s + items_s)


def least_s(model: ContextModel, call_s: float, items_s: float, *, gang: tuple[int, int]) -> float:
    """Return the seconds of a call on its fastest gang. `call_s`, `items_s`: seconds on one library."""
    together_s = model.gang_s + items_s / best_speedup(gang, efficiency=model.gang_efficiency)
    return call_s + (together_s if gang[0] > 1 else min(items_s, together_s))


class RunningLibrary:
    """The process of a library. `compute` starts work on the library's devices. A call uses the share `part` of each
    device.
    """

    def __init__(
        self, sim: Surroundings, ordered: StartLibrary, devices: tuple[SimulatedDevice, ...], *, kind: str, pilot: int
    ) -> None:
        self.sim = sim
        self.number = ordered.library
        self.model = model = sim.world.contexts[ordered.recipe.name]
        speed = sim.world.devices[kind].speed
        self.call_s = model.of_kind(model.call_s, kind) / speed
        self.item_s = model.of_kind(model.item_s, kind) / speed
        self.devices = devices
        self.compute: Callable[..., RunningWork] = partial(begin_work, devices)
        self.slots = model.slots_on_device_kind(kind)
        self.part = 1 / self.slots
        self.where = LibraryPlace(ordered.library, pilot, len(ordered.devices))
        self.ordered_at = sim.agenda.now
        self.ready_at = math.inf
        self.is_over = False
        self._items = 0

    def count_cold_items(self, items: int) -> int:
        """Count `items` more items as begun. Return how many of these items take longer because the process is new."""
        cold = min(items, self.model.warm_items - self._items) if self._items < self.model.warm_items else 0
        self._items += items
        return cold

    def say(self, message: to_agent.ToAgent) -> None: ...  # Send a message to the pilot

    def ended(self, call: CallId, *, ran_s: float) -> None: ...  # End a call on this member; start the next call

    def served(self, call: CallId) -> None: ...  # End a call after the engine's last token


class SoloRun(msgspec.Struct, frozen=True, gc=False):
    """A run on one library without progress reports."""

    spec: CallSpec
    work: RunningWork

    def leave(self, library: RunningLibrary, *, keep: bool = False) -> CallProgress:
        """Stop the run and return the call's progress. `keep`: count the run's time as useful."""
        sim, spec, device = library.sim, self.spec, library.devices[0]
        plan = replace(planned(sim, spec, (library,)), whole_s=self.work.seconds)
        done = plan.after(device.reached(self.work))
        ran_s = sim.agenda.now - self.work.began_at
        device.stop(self.work)
        sim.calls_log.stopped(sim.agenda.now, spec, library.where, rank=0, kept_s=ran_s if keep else 0.0)
        return _report(spec, done)


class CallRun:
    """One run of a call on its member libraries. `over`: the run has ended or a member has left."""

    __slots__ = (
        "_began_at", "_course", "_done", "_kept_at", "_next", "_sim", "_size", "begun", "members", "ordered_at",
        "over", "spec", "work",
    )  # fmt: skip

    work: RunningWork
    _course: RunSchedule

    def __init__(self, sim: Surroundings, spec: CallSpec, *, size: int) -> None:
        self._sim = sim
        self.spec = spec
        self.ordered_at = sim.agenda.now
        self._size = size
        self.members: dict[int, RunningLibrary] = {}
        self.begun = self.over = False
        self._began_at = self._kept_at = 0.0
        self._done = parse_completed_work(spec)
        self._next: Entry | None = None

    def join(self, library: RunningLibrary, *, rank: int) -> None:
        """Add a library that is ready. The run begins when the last library joins, unless a library has left."""
        self.members[rank] = library
        if len(self.members) < self._size or self.over:
            return
        sim, spec = self._sim, self.spec
        devices: Sequence[SimulatedDevice] = library.devices
        if self._size > 1:
            self._forget()
            self.members = dict(sorted(self.members.items()))
            devices = [device for member in self.members.values() for device in member.devices]
        self.begun = True
        plan = planned(sim, spec, tuple(self.members.values()))
        cold = max([member.count_cold_items(sim.items_of(spec)) for member in self.members.values()])
        self._course = replace(plan, whole_s=plan.whole_s + cold * library.model.warm_item_s)
        self._began_at = self._kept_at = sim.agenda.now
        self.work = begin_work(devices, self._course.whole_s, part=library.part, then=self._ended, args=())
        for rank, member in self.members.items():
            sim.calls_log.began(sim.agenda.now, spec, member.where, rank=rank)
        if sim.progress_s:
            self._next = sim.agenda.after(sim.progress_s, self._tell)

    def _tell(self) -> None:
        reached_s = self.members[0].devices[0].reached(self.work)
        if reached_s < self._course.first_s - TICK_S:
            self._next = self._sim.agenda.after(self._course.first_s - reached_s, self._tell)
            return
        self._done = self._course.after(reached_s)
        self._say()
        if self.over:  # the pilot has ended the run in reply to the report
            return
        self._kept_at = self._sim.agenda.now
        self._next = self._sim.agenda.after(self._sim.progress_s, self._tell)

    def _ended(self) -> None:
        sim, spec = self._sim, self.spec
        ran_s = self.members[0].devices[0].done(self.work)
        self.over = True
        items = sim.items_of(spec)
        if self._next is not None:
            cancel(self._next)
            self._done = WorkDone(1.0, items)
            self._say()
        for rank, member in self.members.items():
            sim.calls_log.ended(sim.agenda.now, spec, member.where, rank=rank, items=items)
            member.ended(spec.call, ran_s=ran_s)

    def leave(self, library: RunningLibrary, *, keep: bool = False) -> CallProgress:
        """Remove a library, stop the run on all its libraries, and return the progress of the call."""
        sim, spec = self._sim, self.spec
        if not self.over:
            self._stop()
            if keep:
                self._kept_at = sim.agenda.now
        rank = next(rank for rank, member in self.members.items() if member is library)
        del self.members[rank]
        if self.begun:
            sim.calls_log.stopped(sim.agenda.now, spec, library.where, rank=rank, kept_s=self._kept_at - self._began_at)
        return _report(spec, self._done)

    def _stop(self) -> None:
        self.over = True
        if not self.begun:
            self._forget()
            return
        first = next(iter(self.members.values())).devices[0]
        self._done = self._course.after(first.reached(self.work))
        first.stop(self.work)
        cancel(self._next)

    def _forget(self) -> None:
        gathering = self._sim.gathering
        if gathering.get(self.spec.call) is self:
            del gathering[self.spec.call]

    def _say(self) -> None:
        self.members[0].say(to_agent.Reports([_report(self.spec, self._done)]))


def get_or_create_run(sim: Surroundings, spec: CallSpec, *, size: int) -> CallRun:
    """Return the run that a library joins now. Libraries that receive orders for a call at the same time join the same
    run.
    """
    run = sim.gathering.get(spec.call)
    if run is None or run.ordered_at != sim.agenda.now:
        run = sim.gathering[spec.call] = CallRun(sim, spec, size=size)
    return run


def planned(sim: Surroundings, spec: CallSpec, members: Sequence[RunningLibrary]) -> RunSchedule:
    model = members[0].model
    return plan_run_schedule(
        model, spec, call_s=max([member.call_s for member in members]),
        item_s=max([member.item_s for member in members]),
        items=sim.items_of(spec), size=len(members),
        factor=sim.chance_of_calls.factor(spec.call, cv=model.item_cv) if model.item_cv else 1.0,
    )  # fmt: skip


def _report(spec: CallSpec, done: WorkDone) -> CallProgress:
    return CallProgress(spec.call, done=done.items, total=float(items_of(spec)), state=done.written())

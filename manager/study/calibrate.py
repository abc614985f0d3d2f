"""Create a simulated world from a live session's measurements.

The module replays the session's journal through the manager's core, whose commands show which pilots loaded libraries
and which libraries received calls. Pilots become sources of the world, one per kind of node. A context's load time is
the mean of its loads, per kind of device. The run time of a context's calls is their mean. If calls have different
numbers of items, it is a fixed time plus a time per item (least squares). The extra time of a library's first call is
its warm-up. The gap between two calls of a library is the library's own time. If the second call was sent after the
first call ended, the gap also includes two messages. Links are not modelled. Calls keep their recorded arrival times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median, pstdev
from typing import TypeVar

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.errors import SessionError
from stoker.manager.core import events
from stoker.manager.core.events import Command, ContextAdvice, Event
from stoker.manager.core.seams import Policies
from stoker.manager.core.state import State
from stoker.manager.live.restore import JournalReplay
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import count_items
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, SourceModel, World
from stoker.protocol import to_manager, to_pilot
from stoker.protocol.blocks import ProvisioningRule
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import DeviceFacts
from stoker.site import Duration, Size


class RecordedLoad(msgspec.Struct, frozen=True):
    """A successful load. `whole_s`: seconds from the load order to the reported end of the load."""

    recipe: str
    kind: str
    start_s: float
    whole_s: float
    memory_bytes: int
    slots: int = 1


class RecordedRun(msgspec.Struct, frozen=True):
    """A run of a call. `is_first`: True for the first run in each slot of a library. `was_sent_early`: True if
    the call was sent before the library was free.

    `between_s`: seconds during which a free library had the call but did not run it (-1: unknown, for several slots).
    """

    recipe: str
    kind: str
    items: int
    run_s: float
    is_first: bool
    between_s: float
    was_sent_early: bool


class RecordedConnection(msgspec.Struct):
    """The period during which a pilot was connected. `left_at` is infinite until the pilot leaves."""

    devices: tuple[DeviceFacts, ...]
    joined_at: float
    left_at: float = math.inf
    cut_at: float = 0.0


class _LoadedLibrary(msgspec.Struct):
    recipe: Recipe
    kind: str
    ordered_at: float
    free_since: float = 0.0
    served: int = 0
    sent: dict[int, float] = {}
    slots: int = 1


class RecordedSession:
    """The measurements of a session, in seconds since the epoch."""

    def __init__(self) -> None:
        self.recipes: dict[str, Recipe] = {}
        self.advice: dict[str, dict[str, ContextAdvice]] = {}
        self.loads: list[RecordedLoad] = []
        self.runs: list[RecordedRun] = []
        self.submitted: dict[int, Arrival] = {}  # the context of each arrival is a recipe key
        self.end_times: dict[int, float] = {}
        self.stays: dict[str, RecordedConnection] = {}
        self._libraries: dict[int, _LoadedLibrary] = {}

    @property
    def calls(self) -> list[Arrival]:
        return [call for id, call in self.submitted.items() if id in self.end_times]

    @property
    def makespan_s(self) -> float:
        calls = self.calls
        return max(self.end_times.values()) - calls[0].at_s if calls else 0.0

    def start_from_state(self, state: State, *, since: float) -> None:
        self.recipes = {key: context.recipe for key, context in state.contexts.items()}
        self.advice = {key: dict(context.advice) for key, context in state.contexts.items() if context.advice}
        for pilot in state.pilots.values():
            self.stays[pilot.id] = RecordedConnection(tuple(device.facts for device in pilot.devices.values()), since)
        for call in state.calls.values():
            key, priority = call.group.context.recipe.key, call.group.options.priority
            self.submitted[call.id] = Arrival(call.submitted_at, key, count_items(call.spec), priority=priority)
        kinds = [device.facts.kind for device in state.devices()]
        for key, context in state.contexts.items():
            if context.loads:
                kind = next((x.devices[0].facts.kind for x in context.libraries.values()), kinds[0] if kinds else "cpu")
                self.loads.append(RecordedLoad(key, kind, 0.0, context.load_s, context.resident_bytes, context.slots))
        for library in state.libraries.values():
            sent = {id: call.sent_at for id, call in library.held.items()}
            kind = library.devices[0].facts.kind
            self._libraries[library.id] = _LoadedLibrary(
                library.context.recipe, kind, library.started_at, library.used_at, library.served, sent, library.slots
            )

    def record_event(self, now: float, event: Event) -> None:
        match event:
            case events.FromClient(messages=messages):
                for message in messages:
                    self._on_client_message(now, message)
            case events.FromPilot(pilot=pilot, messages=said):
                for each in said:
                    self._on_pilot_message(now, pilot, each)
            case events.PilotCut(pilot=pilot) if pilot in self.stays:
                self.stays[pilot].cut_at = now
            case events.PilotLost(pilot=pilot):
                self._on_pilot_left(now, pilot)
            case events.AdviceArrived(about=events.OfContext(recipe=recipe), advice=advice) if not self.loads:
                self.advice[recipe] = advice.by_kind if isinstance(advice, events.CostAdvice) else {}

    def record_commands(self, now: float, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case events.ToPilot(pilot=pilot, message=to_pilot.StartLibrary() as order):
                    kinds = {facts.device: facts.kind for facts in self.stays[pilot].devices}
                    self._libraries[order.library] = _LoadedLibrary(order.recipe, kinds[order.devices[0]], now, sent={})
                case events.ToPilot(message=to_pilot.RunCalls() as order) if order.library in self._libraries:
                    self._libraries[order.library].sent.update((spec.call, now) for spec in order.calls)

    def _on_client_message(self, now: float, message: to_manager.FromClient) -> None:
        if isinstance(message, to_manager.DefineRecipe):
            self.recipes.setdefault(message.recipe.key, message.recipe)
        elif isinstance(message, to_manager.Submit):
            for spec in message.calls:
                call = Arrival(now, message.recipe, count_items(spec), priority=message.options.priority)
                self.submitted.setdefault(spec.call, call)

    def _on_pilot_message(self, now: float, pilot: str, message: to_manager.FromPilot) -> None:
        match message:
            case to_manager.PilotHello(devices=devices):
                stay = self.stays.setdefault(pilot, RecordedConnection(devices, now))
                stay.left_at, stay.cut_at = math.inf, 0.0
            case to_manager.PilotLeaving():
                self._on_pilot_left(now, pilot)
            case to_manager.LibraryReady(library=number) if number in self._libraries:
                self._on_library_ready(now, self._libraries[number], message)
            case to_manager.CallsEnded(library=number, ends=ends) if number in self._libraries:
                self._on_calls_ended(now, self._libraries[number], ends)

    def _on_pilot_left(self, now: float, pilot: str) -> None:
        if pilot in self.stays:
            self.stays[pilot].left_at = self.stays[pilot].cut_at or now

    def _on_library_ready(self, now: float, library: _LoadedLibrary, message: to_manager.LibraryReady) -> None:
        library.free_since = now
        library.slots = message.slots or library.recipe.slots or 1
        memory, whole_s = message.device_bytes or message.resident_bytes, now - library.ordered_at
        self.loads.append(
            RecordedLoad(library.recipe.key, library.kind, message.start_s, whole_s, memory, library.slots)
        )

    def _on_calls_ended(self, now: float, library: _LoadedLibrary, ends: list[CallEnd]) -> None:
        known = [end for end in ends if end.call in library.sent]  # the pilot may report an end twice
        if not known:
            return
        busy_s = sum(end.run_s for end in known)
        sent_at = min(library.sent.pop(end.call) for end in known)
        waiting = sent_at < library.free_since
        between_s = (now - max(sent_at, library.free_since) - busy_s) / len(known) if library.slots == 1 else -1.0
        for end in known:
            if end.failure is not None or end.call not in self.submitted:
                continue
            library.served += 1
            self.end_times[end.call] = now
            key, items, first = library.recipe.key, self.submitted[end.call].items, library.served <= library.slots
            self.runs.append(RecordedRun(key, library.kind, items, end.run_s, first, between_s, waiting))
        library.free_since = now


def read_recorded_session(path: Path, *, session: str, policies: Policies) -> RecordedSession:
    """Return the session that a journal recorded under `policies`. Raises SessionError if no call completed."""
    found = RecordedSession()
    again = JournalReplay(path, session, policies)
    if again.core is not None:
        found.start_from_state(again.core.state, since=again.since)
    for now, event in again.read_events():
        found.record_event(now, event)
        found.record_commands(now, again.handle(event, now))
    if not found.calls:
        raise SessionError(
            f"no call of session {session} ended with a result, so its times cannot be measured", session=session
        )
    return found


MOST_CV = 5.0
LEAST_WARM_UP_SHARE = 0.05
"""A first call shows a warm-up if it takes longer than a normal call by more than this share."""
_SOON_S = 1e-6
M = TypeVar("M", RecordedLoad, RecordedRun)


class CalibratedSession(msgspec.Struct, frozen=True):
    """The simulated world and calls of a session. `advice`: the manager's estimates before a context's first load."""

    world: World
    arrivals: tuple[Arrival, ...]
    makespan_s: float
    advice: dict[str, dict[str, ContextAdvice]]


class MakespanComparison(msgspec.Struct, frozen=True):
    live_s: float
    simulated_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """Relative error of the median simulated makespan."""
        return median(self.simulated_s) / self.live_s - 1.0


def calibrate_world(recorded: RecordedSession) -> CalibratedSession:
    """Return the simulated world of a recorded session. Raises SessionError for contexts that span several devices."""
    calls = recorded.calls
    wanted = {call.context: recorded.recipes[call.context] for call in calls}
    for recipe in wanted.values():
        if recipe.needs.devices > 1:
            needed = f"context {recipe.name} needs {recipe.needs.devices} devices"
            raise SessionError(f"{needed}; only contexts on one device can be calibrated")
    names: dict[str, str] = {}
    for key, recipe in wanted.items():
        names[key] = f"{recipe.name}-{key[:12]}" if recipe.name in names.values() else recipe.name
    start = min([calls[0].at_s, *(stay.joined_at for stay in recorded.stays.values())])
    own_s, message_s = _measure_call_gaps(recorded.runs)
    contexts = {
        names[key]: _fit_context_model(
            recipe, [load for load in recorded.loads if load.recipe == key],
            [run for run in recorded.runs if run.recipe == key], own_s=own_s, message_s=message_s,
        )
        for key, recipe in wanted.items()
    }  # fmt: skip
    stays = list(recorded.stays.values())
    world = World(
        devices={facts.kind: DeviceKind(Size(facts.memory_bytes)) for stay in stays for facts in stay.devices},
        sources=_make_source_models(stays, start=start, until=max(recorded.end_times.values())),
        contexts=contexts,
        delays=Delays(message_s=Duration(message_s), poll_s=Duration(0.0)),
    )
    arrivals = tuple(
        msgspec.structs.replace(call, at_s=call.at_s - start, context=names[call.context])
        for call in sorted(calls, key=lambda call: call.at_s)
    )
    advice = {names[key]: said for key, said in recorded.advice.items() if key in names}
    return CalibratedSession(world, arrivals, recorded.makespan_s, advice)


def compare_makespans(
    calibrated: CalibratedSession, *, policies: Callable[[], Policies], seeds: Iterable[int]
) -> MakespanComparison:
    simulated = tuple(_simulate_makespan_s(calibrated, policies(), seed) for seed in seeds)
    return MakespanComparison(calibrated.makespan_s, simulated)


def _simulate_makespan_s(calibrated: CalibratedSession, policies: Policies, seed: int) -> float:
    simulation = Simulation(calibrated.world, calibrated.arrivals, policies, seed=seed)
    first: dict[str, float] = {}
    for arrival in calibrated.arrivals:
        first.setdefault(arrival.context, arrival.at_s)
    for context, by_kind in calibrated.advice.items():
        advice = events.AdviceArrived(events.OfContext(RecipeKey(context)), events.CostAdvice(by_kind))
        simulation.agenda.schedule_at(first[context] + _SOON_S, simulation.handle, advice)
    return simulation.run().ended_at - calibrated.arrivals[0].at_s


def _make_source_models(stays: Sequence[RecordedConnection], *, start: float, until: float) -> tuple[SourceModel, ...]:
    groups: dict[tuple[str, int, int], list[RecordedConnection]] = defaultdict(list)
    for stay in stays:
        if stay.joined_at <= until and stay.devices:
            facts = stay.devices[0]
            groups[facts.kind, len(stay.devices), facts.memory_bytes].append(stay)
    return tuple(
        SourceModel(
            name=f"pilots-{number}", kind=kind, capacity=_capacity_steps(group, start=start, until=until),
            devices=devices, rule=ProvisioningRule.FIXED, init_blocks=len(group), max_blocks=len(group),
        )
        for number, ((kind, devices, _), group) in enumerate(groups.items())
    )  # fmt: skip


def _capacity_steps(
    stays: Sequence[RecordedConnection], *, start: float, until: float
) -> tuple[tuple[float, int], ...]:
    changes = [(stay.joined_at, 1) for stay in stays] + [(stay.left_at, -1) for stay in stays if stay.left_at < until]
    steps: list[tuple[float, int]] = []
    count = 0
    for at, change in sorted(changes):
        count += change
        after = round(at - start, 6)
        steps.append((max(after, steps[-1][0] + _SOON_S) if steps else after, count))
    return tuple(steps)


def _fit_context_model(
    recipe: Recipe, loads: Sequence[RecordedLoad], runs: Sequence[RecordedRun], *, own_s: float, message_s: float
) -> ContextModel:
    start_s = fmean(load.start_s for load in loads) if loads else 0.0
    means = {kind: fmean(load.whole_s for load in group) for kind, group in _group_by_kind(loads).items()}
    load_s = {kind: Duration(max(0.0, mean_s - start_s - 2 * message_s)) for kind, mean_s in means.items()}
    warm = {run.kind for run in runs if not run.is_first}
    later = [run for run in runs if not run.is_first or run.kind not in warm]
    fits = {kind: _fit_run_times(group) for kind, group in _group_by_kind(later).items()}
    expected = [_expected_run_s(run, fits) for run in later]
    ratios = [run.run_s / each for run, each in zip(later, expected, strict=True) if each]
    warm_items, warm_item_s = _measure_warm_up([run for run in runs if run.is_first and run.kind in warm], fits)
    return ContextModel(
        awareness=recipe.awareness, device_memory_bytes=Size(_memory_bytes(recipe, loads)), kinds=recipe.needs.kinds,
        slots=recipe.slots or max((load.slots for load in loads), default=1),
        start_s=Duration(start_s), load_s=_with_mean_as_default(load_s),
        load_cv=_coefficient_of_variation([load.whole_s / means[load.kind] for load in loads if means[load.kind]]),
        call_s=_with_mean_as_default({kind: Duration(fixed + own_s) for kind, (fixed, _) in fits.items()}),
        item_s=_with_mean_as_default({kind: Duration(each) for kind, (_, each) in fits.items()}),
        item_cv=_coefficient_of_variation(ratios), warm_items=warm_items, warm_item_s=Duration(warm_item_s),
    )  # fmt: skip


def _memory_bytes(recipe: Recipe, loads: Sequence[RecordedLoad]) -> int:
    on_cpu = any(load.kind.startswith("cpu") for load in loads)
    declared = max(recipe.needs.device_memory_bytes, recipe.needs.memory_bytes if on_cpu else 0)
    return declared or max((load.memory_bytes for load in loads), default=0)


def _with_mean_as_default(times: dict[str, Duration]) -> dict[str, Duration]:
    return {**times, "": Duration(fmean(times.values()))} if times else {}


def _group_by_kind(measured: Sequence[M]) -> dict[str, list[M]]:
    groups: dict[str, list[M]] = defaultdict(list)
    for each in measured:
        groups[each.kind].append(each)
    return dict(groups)


def _fit_run_times(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Return fitted seconds per call and per item. If the slope is not positive, return the mean run time and 0."""
    items, seconds = [run.items for run in runs], [run.run_s for run in runs]
    each, fixed = linear_regression(items, seconds) if len(set(items)) > 1 else (0.0, 0.0)
    if each <= 0.0:
        return fmean(seconds), 0.0
    return (fixed, each) if fixed >= 0.0 else (0.0, fmean(seconds) / fmean(items))


def _expected_run_s(run: RecordedRun, fits: dict[str, tuple[float, float]]) -> float:
    fixed, each = fits[run.kind]
    return fixed + each * run.items


def _measure_warm_up(firsts: Sequence[RecordedRun], fits: dict[str, tuple[float, float]]) -> tuple[int, float]:
    if not firsts:
        return 0, 0.0
    more_s = fmean(run.run_s - _expected_run_s(run, fits) for run in firsts)
    if more_s <= LEAST_WARM_UP_SHARE * fmean(_expected_run_s(run, fits) for run in firsts):
        return 0, 0.0
    items = max(1, round(fmean(run.items for run in firsts)))
    return items, more_s / items


def _measure_call_gaps(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    waited = [run.between_s for run in runs if run.between_s >= 0.0 and run.was_sent_early]
    sent = [run.between_s for run in runs if run.between_s >= 0.0 and not run.was_sent_early]
    own_s = median(waited) if waited else 0.0
    return own_s, max(0.0, median(sent) - own_s) / 2 if sent else Delays().message_s


def _coefficient_of_variation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return min(MOST_CV, pstdev(values) / mean) if mean > 0 and math.isfinite(mean) else 0.0

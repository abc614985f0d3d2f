"""Compute the earliest time at which any policy can end a scenario's calls: the largest of several bounds.

*One call.* A call takes at least these steps. The first call of its context arrives. A pilot starts, fetches the files
and loads the context. The call runs on the best device.

*All calls.* For each arrival time r, the devices need time for all calls that arrive from r on. Dividing calls among
devices is a linear program. By weak duality, any prices for device time give a bound: each call costs at least its
cheapest price. Tried prices are the devices' speeds, and the speeds of each context's calls.

*Capacity.* Let s be the shortest time from a block's start to its first call. A block is useful at time t only if it
has run since t - s. So at most the smallest capacity within [t - s, t] is useful. With a walltime w, a block that runs
for l <= w is useful for at most l (w - s) / w.

The bound is 0 for gangs and worlds with checkpoints. It assumes the shortest waits, boots and loads, and may split
calls. It ignores messages, polling, drains, reruns, contention, warm-up, and the loads of contexts that do not stay
loaded.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from stoker.chance import Stream, min_random_factor
from stoker.contexts.recipe import Awareness
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import TICK_S, ContextModel, EngineFloor, Links, SourceModel, World
from stoker.protocol.ids import make_call_id

Steps = list[tuple[float, float]]  # Pairs of a time and the value from then on; before the first pair, the value is 0


def limit_blocks(capacity: Iterable[tuple[float, int]], *, most: int, from_s: float) -> Steps:
    """Return the number of blocks that may run at each time: the capacity, at most `most`, and 0 before `from_s`."""
    return start_steps_at([(at, float(min(blocks, most))) for at, blocks in capacity], from_s=from_s)


def start_steps_at(steps: Steps, *, from_s: float) -> Steps:
    at_first = next((value for at, value in reversed(steps) if at <= from_s), 0.0)
    return [(from_s, at_first), *((at, value) for at, value in steps if at > from_s)]


def count_usable_blocks(steps: Steps, *, setup_s: float) -> Steps:
    """Return how many blocks can have run for `setup_s` seconds: the smallest capacity during these seconds."""
    times = [at for at, _ in steps]
    values = [0.0, *(value for _, value in steps)]  # the first 0 is the value before the first step
    moments = sorted({*times, *(at + setup_s for at in times)})
    found: Steps = []
    for at, until in pairwise([*moments, math.inf]):
        middle = at + setup_s + 1.0 if until == math.inf else (at + until) / 2
        first, last = bisect_right(times, middle - setup_s), bisect_right(times, middle)
        found.append((at, min(values[first : last + 1])))
    return found


class DeviceTimeSupply:
    """Computes how much work devices can do by a given time. `parts`: device counts over time, each with its price."""

    def __init__(self, parts: Sequence[tuple[Steps, float]]) -> None:
        events = sorted((at, number, value) for number, (steps, _) in enumerate(parts) for at, value in steps)
        now = [0.0] * len(parts)
        self._times: list[float] = []
        self._rates: list[float] = []
        for at, number, value in events:
            now[number] = value * parts[number][1]
            if self._times and self._times[-1] == at:
                self._rates[-1] = math.fsum(now)
            else:
                self._times.append(at)
                self._rates.append(math.fsum(now))
        spans = (rate * (b - a) for rate, (a, b) in zip(self._rates, pairwise(self._times), strict=False))
        self._amounts = [0.0, *accumulate(spans)] if self._times else []

    def work_until(self, at: float) -> float:
        place = bisect_right(self._times, at) - 1
        if place < 0:
            return 0.0
        return self._amounts[place] + self._rates[place] * (at - self._times[place])

    def earliest_time_for(self, amount: float) -> float:
        """Return the earliest time by which the devices can have done `amount` of work; infinity = never."""
        if amount <= 0:
            return 0.0
        place = bisect_left(self._amounts, amount) - 1
        if place < 0:
            return math.inf
        rate = self._rates[place]
        return self._times[place] + (amount - self._amounts[place]) / rate if rate else math.inf


_MOST_LOAD_STEPS = 10  # A load has at most this many simulated steps; rounding may shorten each step by `TICK_S`


class _Call(NamedTuple):
    """A call. `factor`: its run time divided by the mean run time."""

    arrival: Arrival
    factor: float


class Placement(msgspec.Struct, frozen=True):
    """A context on a source's devices, with minimum times. `first_s`: time from a pilot's start to its first call."""

    context: str
    source: int
    speed: float
    slots: int
    starts_at: float
    boot_s: float
    first_s: float
    begins_at: float
    call_s: float
    item_s: float
    devices: int
    engine_floor: EngineFloor | None = None

    def run_s(self, call: _Call) -> float:
        one = call.arrival
        if self.engine_floor is not None:
            return self.engine_floor.run_s(one.prompt_tokens, one.output_tokens)
        run_s = call.factor * (self.call_s + (one.items_done or one.items) * self.item_s)
        return max(0.0, run_s + (one.fixed_s + one.shared_s) - TICK_S)

    def device_s(self, call: _Call) -> float:
        if self.engine_floor is None:
            return self.run_s(call) / self.slots
        return self.engine_floor.device_s(call.arrival.prompt_tokens, call.arrival.output_tokens)


def find_placements(world: World, first_at: Mapping[str, float]) -> list[Placement]:
    """Return the possible placements of contexts. `first_at`: time at which the first call of each context arrives."""
    pilots_at = {
        number: at for number, source in enumerate(world.sources) if (at := _earliest_pilot_start(source)) < math.inf
    }
    found = (
        _make_placement(world, name, number, pilots_at=pilots_at, first_at=first_at)
        for name in first_at
        for number in pilots_at
    )
    return [place for place in found if place is not None]


def _make_placement(
    world: World, name: str, number: int, *, pilots_at: Mapping[int, float], first_at: Mapping[str, float]
) -> Placement | None:
    source, model = world.sources[number], world.contexts[name]
    device = world.devices[source.kind]
    if not world.fits_on_node(model, source):
        return None
    fetch_s, kept_s, afresh_s = _fetch_and_load_times_s(world.links, model, source.kind)
    here_at = max(pilots_at[number], first_at[name])
    first_s, begins_at = afresh_s, here_at + afresh_s
    if model.awareness is not Awareness.NONE:
        first_s = min(fetch_s + kept_s, afresh_s)
        fetched_at = _earliest_fetched_at(world, model, number, pilots_at=pilots_at, first_at=first_at)
        begins_at = min(begins_at, max(here_at, fetched_at) + kept_s)
    boot_s = _minimum_boot_s(source)
    if source.walltime_s and boot_s + first_s >= source.walltime_s:
        return None
    engine = model.engine_on_device_kind(source.kind)
    return Placement(
        context=name, source=number, speed=device.speed, slots=model.slots_on_device_kind(source.kind),
        starts_at=_minimum_queue_wait_s(source), boot_s=boot_s, first_s=first_s, begins_at=begins_at,
        devices=model.devices,
        engine_floor=EngineFloor(engine, speed=device.speed) if engine is not None else None,
        call_s=model.time_on_device_kind(model.call_s, source.kind) / device.speed,
        item_s=model.time_on_device_kind(model.item_s, source.kind) / device.speed,
    )  # fmt: skip


def _earliest_fetched_at(
    world: World, model: ContextModel, number: int, *, pilots_at: Mapping[int, float], first_at: Mapping[str, float]
) -> float:
    """Return the earliest time at which a node of source `number` has all files of a context."""
    links, wanted_at = world.links, dict.fromkeys((files.name for files in model.files), math.inf)
    for name, at in first_at.items():
        if world.contexts[name].awareness is not Awareness.NONE:
            wanted_at.update(
                (f.name, min(at, wanted_at[f.name])) for f in world.contexts[name].files if f.name in wanted_at
            )
    nodes = sum(source.nodes * min(source.max_blocks, max(n for _, n in source.steps)) for source in world.sources)
    all_read = min(links.shared, nodes * min(links.shared_node, links.network))
    fetched_at = 0.0
    for from_s in set(wanted_at.values()):
        late = [files for files in model.files if wanted_at[files.name] >= from_s]
        size, operations = sum(files.size_bytes for files in late), sum(files.operations for files in late)
        copy_s = max(size / all_read, operations / (links.shared_operations or math.inf))
        read_at = max(min(pilots_at.values()), from_s) + copy_s
        fetched_at = max(fetched_at, max(pilots_at[number], from_s) + size / links.network, read_at)
    return fetched_at


def _fetch_and_load_times_s(links: Links, model: ContextModel, kind: str) -> tuple[float, float, float]:
    """Return three times: to fetch the files to a node, to load from the node, to load from the shared storage."""
    size = sum(files.size_bytes for files in model.files)
    operations_s = sum(files.operations for files in model.files) / (links.shared_operations or math.inf)
    one_node = min(links.shared_node, links.network)
    work_s = model.start_s + model.time_on_device_kind(model.load_s, kind) * min_random_factor(cv=model.load_cv)
    work_s += model.devices * model.device_memory_bytes / links.bus - _MOST_LOAD_STEPS * TICK_S
    read_s = size / (max(links.memory, links.disk) if model.page_cache else links.disk)
    afresh_s = max(size / min(links.shared, one_node), operations_s) + work_s
    return size / links.network, max(0.0, read_s + work_s), max(0.0, afresh_s)


def _minimum_queue_wait_s(source: SourceModel) -> float:
    return max(0.0, source.wait_s * min_random_factor(cv=source.wait_cv) - TICK_S)


def _minimum_boot_s(source: SourceModel) -> float:
    return max(0.0, source.boot_s * min_random_factor(cv=source.boot_cv) - TICK_S)


def _earliest_pilot_start(source: SourceModel) -> float:
    starts_at, blocks = _minimum_queue_wait_s(source), 0
    for at, count in (*source.steps, (math.inf, 0)):
        if at > starts_at and blocks:
            break
        starts_at, blocks = max(starts_at, at), count
    return starts_at + _minimum_boot_s(source)


class BoundReason(enum.Enum):
    DEVICES = "device time"
    CALL = "one call"
    NEVER = "devices"
    UNKNOWN = "nothing that is known"


class LowerBound(msgspec.Struct, frozen=True):
    """A lower bound of the time at which the last call ends, in seconds; infinity = never."""

    ends_at: float
    limit: BoundReason


def compute_lower_bound(world: World, arrivals: Iterable[Arrival], *, seed: int = 0) -> LowerBound:
    chance, calls, first_at = Stream(seed, "calls"), list[_Call](), dict[str, float]()
    for number, arrival in enumerate(arrivals):
        cv = world.contexts[arrival.context].item_cv
        calls.append(_Call(arrival, chance.lognormal_factor(make_call_id(client=0, sequence=number), cv=cv)))
        first_at.setdefault(arrival.context, arrival.at_s)
    if not calls:
        return LowerBound(0.0, BoundReason.CALL)
    if world.delays.progress_s or any(call.arrival.gang != (1, 1) for call in calls):
        return LowerBound(0.0, BoundReason.UNKNOWN)
    case = _BoundProblem(world, calls, find_placements(world, first_at))
    if case.placements_of_context.keys() < first_at.keys():
        return LowerBound(math.inf, BoundReason.NEVER)
    bounds = [
        LowerBound(case.bound_from_single_call(), BoundReason.CALL),
        *(LowerBound(ends_at, BoundReason.DEVICES) for ends_at in case.bounds_from_all_calls()),
    ]
    largest = max(bounds, key=lambda bound: bound.ends_at)
    return LowerBound(math.inf, BoundReason.NEVER) if largest.ends_at == math.inf else largest


_Prices = dict[int, float]


class _BoundProblem:
    def __init__(self, world: World, calls: list[_Call], places: list[Placement]) -> None:
        self.world, self.calls, self.places = world, calls, places
        self.placements_of_context: dict[str, list[Placement]] = {}
        for place in places:
            self.placements_of_context.setdefault(place.context, []).append(place)

    def bound_from_single_call(self) -> float:
        return max(
            min(
                max(call.arrival.at_s, place.begins_at) + place.run_s(call)
                for place in self.placements_of_context[call.arrival.context]
            )
            for call in self.calls
        )

    def bounds_from_all_calls(self) -> Iterator[float]:
        has_walltimes = any(source.walltime_s for source in self.world.sources)
        for prices in self._candidate_source_prices():
            yield self._bound_from_device_time(prices, by_walltime=False)
            if has_walltimes:
                yield self._bound_from_device_time(prices, by_walltime=True)

    def _candidate_source_prices(self) -> Iterator[_Prices]:
        tried = {_normalize_prices({place.source: place.speed for place in self.places}): None}
        for name, places in self.placements_of_context.items():
            mine = [call for call in self.calls if call.arrival.context == name]
            seconds = {place.source: math.fsum(map(place.device_s, mine)) for place in places}
            if all(seconds.values()):
                worth = {place.source: 0.0 for place in self.places}
                worth.update({source: 1.0 / took for source, took in seconds.items()})
                tried[_normalize_prices(worth)] = None
        yield from map(dict, tried)

    def _bound_from_device_time(self, prices: _Prices, *, by_walltime: bool) -> float:
        """Return a bound. `by_walltime`: the setup time shortens each walltime; otherwise it delays the capacity."""
        parts = []
        for number, source in enumerate(self.world.sources):
            mine = [place for place in self.places if place.source == number]
            if not mine:
                continue
            steps, share = limit_blocks(source.steps, most=source.max_blocks, from_s=mine[0].starts_at), 1.0
            setup_s = min(place.boot_s + place.first_s for place in mine)
            if by_walltime and source.walltime_s:
                share = max(0.0, 1.0 - setup_s / source.walltime_s)
            else:
                steps = start_steps_at(
                    count_usable_blocks(steps, setup_s=setup_s), from_s=min(place.begins_at for place in mine)
                )
            parts.append((steps, prices[number] * source.nodes * source.devices * share))
        devices, calls, needed, later = DeviceTimeSupply(parts), self.calls, 0.0, 0.0
        worth = {place: prices[place.source] * place.devices for place in self.places}
        for place, call in enumerate(reversed(calls), start=1):
            at_s, where = call.arrival.at_s, self.placements_of_context[call.arrival.context]
            later += min(worth[each] * each.device_s(call) for each in where)
            if not by_walltime and (place == len(calls) or calls[-place - 1].arrival.at_s < at_s):
                needed = max(needed, devices.work_until(at_s) + later)
        return devices.earliest_time_for(later if by_walltime else needed)


def _normalize_prices(prices: _Prices) -> tuple[tuple[int, float], ...]:
    highest = max(prices.values())
    return tuple((source, worth / highest) for source, worth in prices.items())

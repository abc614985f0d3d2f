"""A clairvoyant lower bound: no policy can have a scenario's calls done sooner, whatever it knew beforehand.

Each of these is a reason why a run takes at least so long. All of them hold for every policy, so the largest counts.

*One call.* Its context must be known (the first call that wants it has come), some pilot must have started, have got
the context's files and loaded it; then the call itself takes what it takes on the device that is best for all this.

*All calls.* Work is done by devices, and only so many are there (`stoker.manager.sim.supply`): a device is of use from
the end of its first load on, the cheapest one that there is. What comes after a time r must be done after r, so for
each r in which calls come, the devices must have had time for all that comes from r on.

- Where devices differ, calls may be shared out in the best of all ways. How well that can be done is a linear program:
  so much of each call on each kind of device, no kind for longer than it is there. Any prices for device time give a
  bound on it, by weak duality: what the calls cost at least, each on the kind where it is cheapest, is paid with what
  all devices earn. Prices in proportion to the kinds' speeds for one of the contexts are tried, and so are the
  scenario's own speeds. With one context, or kinds that differ by a factor, that is the optimum.
- A library of several devices takes them all, and so does what it runs.
- A call to an engine takes its part of each step that it is in; a step of a full batch costs each of its requests least
  (`stoker.manager.sim.engine_model`).
- What a device can compute is shared by all calls on it, of however many libraries (`stoker.manager.sim.device`): a
  call of a context with several slots takes up that part of the device, for as long as it runs at full speed.
- Loads take up memory, and no more than a device has. A library holds what its context takes from its start to its
  end; how many do so at once is a packing problem, of which the dual feasible functions of Fekete and Schepers ("New
  classes of fast lower bounds for bin packing problems", Mathematical Programming 91, 2001) give bounds: where k + 1
  of a context do not fit, each takes a k-th of the device.
- Where blocks have a walltime, the time that each needs before it is of use is lost again and again.
- Contexts of lower awareness are loaded for each call; those of full awareness once on each device, for all that is
  known. A context that may be kept may also be forgotten, so this bounds what baselines do as well.

*The shared storage.* What has no awareness reads its files from there for each call.

A run comes to less than this only where calls fail, or a policy drops them: they take no time.

It is not for gangs, nor for worlds whose calls leave checkpoints: there a call may begin on one kind of device and go
on elsewhere as soon as something better is there. Nothing is said of such (zero, which no run is below).

What is left out makes the bound lower, never higher: messages, polling, drains, calls that run again, bytes that flows
take from each other, the first items of a process, and spreads of what a policy could try again until chance is kind
(waits, boots, loads: the least that chance can do is taken). How long a call takes is known to the clairvoyant. Calls
may be cut into pieces (they may be evicted with their progress), so that three calls on two devices take one and a half
times one call. The agenda rounds times to microseconds: what follows each other in a run counts that much less.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from stoker.chance import Stream
from stoker.contexts.recipe import Awareness
from stoker.manager.sim import supply
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.costs import LeastCall, Placement, places_of
from stoker.manager.sim.supply import Supply
from stoker.manager.sim.world import SourceModel, World
from stoker.protocol.ids import make_call_id


class Limit(enum.Enum):
    """What holds a run up, at the least."""

    DEVICES = "device time"
    """All calls together, on all the devices that there can be."""
    CALL = "one call"
    """A call that comes late or takes long, after the way to a loaded context."""
    STORAGE = "the shared storage"
    """Files that are read for each call."""
    NEVER = "devices"
    """There are not enough of them, however long one waits."""
    UNKNOWN = "nothing that is known"
    """Calls of gangs, or ones that leave checkpoints."""


class Bound(msgspec.Struct, frozen=True):
    """When the last call can have ended, at the earliest, in seconds; infinite if that can never be."""

    ends_at: float
    limit: Limit


def lower_bound(world: World, arrivals: Iterable[Arrival], *, seed: int = 0) -> Bound:
    """When a run of this world with these calls can be over, at the earliest, under this seed."""
    calls = list(_bound_calls(world, arrivals, Stream(seed, "calls")))
    if not calls:
        return Bound(0.0, Limit.CALL)
    if world.delays.progress_s or any(call.gang for call in calls):
        return Bound(0.0, Limit.UNKNOWN)
    first_at: dict[str, float] = {}
    for call in calls:
        first_at.setdefault(call.context, call.at_s)
    places = places_of(world, first_at)
    if any(not any(place.context == name for place in places) for name in first_at):
        return Bound(math.inf, Limit.NEVER)
    bounds = [
        Bound(_one_call(calls, places), Limit.CALL),
        Bound(_storage(world, calls, places), Limit.STORAGE),
        *(Bound(ends_at, Limit.DEVICES) for ends_at in _devices(world, calls, places)),
    ]
    largest = max(bounds, key=lambda bound: bound.ends_at)
    return Bound(math.inf, Limit.NEVER) if largest.ends_at == math.inf else largest


def _bound_calls(world: World, arrivals: Iterable[Arrival], chance: Stream) -> Iterator[LeastCall]:
    for number, arrival in enumerate(arrivals):
        cv = world.contexts[arrival.context].item_cv
        factor = chance.factor(make_call_id(client=0, sequence=number), cv=cv)
        items, gang = arrival.items_done or arrival.items, arrival.gang != (1, 1)
        yield LeastCall(
            arrival.at_s, arrival.context, items, factor, arrival.fixed_s + arrival.shared_s, gang, arrival.prompt,
            arrival.written,
        )  # fmt: skip


def _one_call(calls: list[LeastCall], places: list[Placement]) -> float:
    """The end of the call that ends last, had it everything to itself."""
    of = _by_context(places)
    return max(min(max(call.at_s, place.begins_at) + place.run_s(call) for place in of[call.context]) for call in calls)


def _storage(world: World, calls: list[LeastCall], places: list[Placement]) -> float:
    """When the files that are read again for each call can all have been read."""
    sizes, operations = 0.0, 0.0
    for call in calls:
        model = world.contexts[call.context]
        if model.awareness is Awareness.NONE:
            sizes += sum(files.size_bytes for files in model.files)
            operations += sum(files.operations for files in model.files)
    most = world.links.shared_operations or math.inf
    return min(place.pilot_at for place in places) + max(sizes / world.links.shared, operations / most)


# ---- all calls


def _devices(world: World, calls: list[LeastCall], places: list[Placement]) -> Iterator[float]:
    """When all devices together can have done it all: one bound for each way of looking at them."""
    loads_again = any(place.again_s for place in places)
    lasting = any(source.walltime_s for source in world.sources)
    for prices in _prices(calls, places):
        computing = _priced(places, prices, {place: _DeviceShare(1.0, 0.0) for place in places})
        yield _runs(world, calls, places, computing, prices)
        if lasting:
            yield _runs_and_loads(world, calls, places, computing, prices, Placement.device_s)
        for k in sorted({0, *map(_at_once, places)}) if loads_again else ():
            holding = {
                place: _DeviceShare(_dual_feasible(place, k) / place.at_once, _dual_feasible(place, k))
                for place in places
            }
            yield _runs_and_loads(world, calls, places, _priced(places, prices, holding), prices, Placement.run_s)


class _DeviceShare(NamedTuple):
    """What part of a device a call takes up for a second of its own, and of the load before it, so that what is there
    at once is at most one."""

    run: float
    load: float


_Priced = dict[str, list[tuple[Placement, _DeviceShare]]]
"""Where each context may be, and what a second of a call and of a load costs there."""


def _priced(places: list[Placement], prices: dict[int, float], parts: dict[Placement, _DeviceShare]) -> _Priced:
    return {
        name: [
            (place, _DeviceShare(*(prices[place.source] * place.devices * part for part in parts[place])))
            for place in mine
        ]
        for name, mine in _by_context(places).items()
    }


def _runs(
    world: World, calls: list[LeastCall], places: list[Placement], of: _Priced, prices: dict[int, float]
) -> float:
    """Calls alone, against devices on which something has been loaded. What comes from a time on is done after it."""
    parts = []
    for number, source, mine in _sources(world, places):
        may_run = supply.limited(source.steps, most=source.max_blocks, from_s=mine[0].starts_at)
        windows = supply.useful(may_run, setup_s=min(place.boot_s + place.first_s for place in mine))
        steps = supply.clipped(windows, from_s=min(place.begins_at for place in mine))
        parts.append((steps, prices[number] * source.nodes * source.devices))
    devices = Supply(parts)
    needed, later = 0.0, 0.0
    for place, call in enumerate(reversed(calls), start=1):
        later += min(price.run * where.device_s(call) for where, price in of[call.context])
        if place == len(calls) or calls[-place - 1].at_s < call.at_s:
            needed = max(needed, devices.until(call.at_s) + later)
    return devices.when(needed)


def _runs_and_loads(
    world: World, calls: list[LeastCall], places: list[Placement], of: _Priced, prices: dict[int, float],
    takes_s: Callable[[Placement, LeastCall], float],
) -> float:  # fmt: skip
    """Calls, with the loads that each of them needs, against devices whose blocks end at their walltime. `takes_s`: the
    seconds of a call in which it takes up its part of a device."""
    parts = []
    for number, source, mine in _sources(world, places):
        steps = supply.limited(source.steps, most=source.max_blocks, from_s=mine[0].starts_at)
        setup_s, share = min(place.boot_s + place.once_s for place in mine), 1.0
        if source.walltime_s:
            share = max(0.0, 1.0 - setup_s / source.walltime_s)
        else:
            known_at = min(place.known_at for place in mine)
            steps = supply.clipped(supply.useful(steps, setup_s=setup_s), from_s=known_at)
        parts.append((steps, prices[number] * source.nodes * source.devices * share))
    needed = math.fsum(
        min(price.load * where.again_s + price.run * takes_s(where, call) for where, price in of[call.context])
        for call in calls
    )
    return Supply(parts).when(needed)


def _sources(world: World, places: list[Placement]) -> Iterator[tuple[int, SourceModel, list[Placement]]]:
    """Sources that are of use, by number, and the contexts that may be there."""
    for number, source in enumerate(world.sources):
        mine = [place for place in places if place.source == number]
        if mine:
            yield number, source, mine


def _at_once(place: Placement) -> int:
    """How many libraries of the context a device holds at the same time; 0: any number."""
    return place.device_bytes // place.memory_bytes if place.memory_bytes else 0


def _dual_feasible(place: Placement, k: int) -> float:
    """u(k) of Fekete and Schepers, of the part of the device's memory that the context takes: parts that sum up to one
    at most are given numbers that do so too. k = 0: the parts themselves."""
    whole, rest = divmod((k + 1) * place.memory_bytes, place.device_bytes or 1)
    return whole / k if k and rest else place.memory_bytes / (place.device_bytes or 1)


def _prices(calls: list[LeastCall], places: list[Placement]) -> Iterator[dict[int, float]]:
    """What device time of each source is worth, in a few ways; none twice."""
    of = _by_context(places)
    tried = {_scaled({place.source: place.speed for place in places}): None}
    for name in of:
        mine = [call for call in calls if call.context == name]
        seconds = {place.source: math.fsum(map(place.device_s, mine)) for place in of[name]}
        if all(seconds.values()):
            worth = {place.source: 0.0 for place in places}
            worth.update({source: 1.0 / took for source, took in seconds.items()})
            tried[_scaled(worth)] = None
    for prices in tried:
        yield dict(prices)


def _scaled(prices: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """The same prices, the highest of them one."""
    highest = max(prices.values())
    return tuple((source, worth / highest) for source, worth in prices.items())


def _by_context(places: list[Placement]) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = {}
    for place in places:
        found.setdefault(place.context, []).append(place)
    return found

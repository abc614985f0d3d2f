"""Residency, as in Pervasive Context Management (§3): a context is loaded where it is wanted and kept until room is
needed.

A context with waiting calls is loaded on one more device as long as its calls would wait longer behind the libraries
that are hot or on their way than the load takes, and no more libraries than calls. While no run was measured the wait
counts as endless: idle devices cost nothing. So does the wait behind calls that have run for longer than a load takes
and far longer than usual (`stoker.manager.core.stuck`). Several contexts share a device while their memory fits: what a
context takes is what it declares, else what was measured, else (the first time) what is free on the device but for a
corner for calls that want no context, given back once measured.

Where nothing fits, idle libraries are evicted, least recently used first, just enough on one device, and the context is
loaded in their place: its pilot fetches its files meanwhile and begins when their memory is free. Where nothing is
idle either, a context that has no library at all and has waited for `patience_s` gets a device from the context that
holds most of them: without this a long queue of one context would starve all others, a case on which the paper is
silent.

Loads that fail are probed, one at a time, on pilots where they have not failed twice; the core gives up when two in a
row have failed and nothing holds the context. Libraries of a pilot that is cut off count for `cut_s` more: it may be a
blip. A pilot whose disk does not take a context is left alone (`stoker.manager.core.fitness`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from stoker.manager.core.fitness import is_lasting, unfit
from stoker.manager.core.nouns import Context, Device, Library, Pilot
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.seams import Action, FailCall, FailWaiting, Load, Provisioning, Timer, Unload, View
from stoker.manager.core.stuck import lingers
from stoker.manager.policies import durations
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.sizes import bare_bytes, declared_bytes, is_of_kind, known_bytes, takes_one_process
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.ids import RecipeKey
from stoker.manager.protocol.to_manager import DeviceFacts
from stoker.units import show_bytes, show_seconds

GIVE_UP_ON_PILOT = 2
"""A pilot on which a context failed to load so often is left alone while others hold the context or could."""

UNKNOWN_LOAD_S = 10.0
"""How long a load is taken to last before one was measured."""

_SHOWN_LINES = 5

_May = Callable[[Library], bool]
_Rank = Callable[[Library], tuple[float, ...]]


class LoadWhereWanted(Quiet):
    """The default residency policy."""

    def __init__(
        self,
        *,
        patience_s: float = 10.0,
        ask_again_s: float = 1.0,
        cut_s: float = 3.0,
        provisioning: Provisioning | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.ask_again_s = ask_again_s
        self.cut_s = cut_s
        self.provisioning: Provisioning = provisioning or TakeWhatComes()

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Loads that pay, evictions that make room for one, or a word that it can never be."""
        key = RecipeKey(context.recipe.key)
        plan: list[Action] = [Timer(view.now + self.ask_again_s, key), *self.hopeless_gangs(view, context)]
        alive = [x for x in context.libraries.values() if self._counts(view, x)]
        if context.queue.count <= _kept(context):
            return plan
        load_s = context.load_s or UNKNOWN_LOAD_S
        more = self.worth_loading(context, [x for x in alive if not lingers(view.now, x, load_s=load_s)])
        if context.apart_lacks and context.queue.apart and not any(x.state is LibraryState.LOADING for x in alive):
            more = max(more, 1)
        if more <= 0:
            return plan
        loads = [
            Load(key, devices[0].pilot.id, tuple(d.id for d in devices), self.reservation(context, devices))
            for devices in islice(self.open_places(view, context, desperate=not alive), more)
        ]
        if loads:
            return plan + loads
        if not alive:
            impossible = self._impossible(view, context) or self._unfit_everywhere(view, context)
            if impossible is not None:
                return (FailWaiting(key, impossible),)
        return plan + (self._evict_idle(view, context) or self._share(view, context))

    def timer(self, view: View, key: str) -> Sequence[Action]:
        """Look again at a context whose calls still wait."""
        context = view.contexts.get(key)
        return self.wanted(view, context) if context is not None and context.queue.count else ()

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        """What it declares, else what it was measured to take and a tenth more; all that it has while that is not
        known, and of a device that takes one process."""
        needs, facts = library.context.recipe.needs, library.devices[0].facts
        declared = declared_bytes(needs, facts)
        took = library.memory_bytes if facts.on_host else library.device_bytes
        if declared or not took or not library.context.recipe.loader or takes_one_process(facts):
            return declared or library.promised_bytes
        return min(library.promised_bytes, int(took * 1.1))

    # ---- how many

    def _counts(self, view: View, library: Library) -> bool:
        """Whether a library is hot or on its way, as far as anybody knows, and not about to retire."""
        most = library.context.recipe.calls_per_library
        if library.state not in (LibraryState.LOADING, LibraryState.READY) or 0 < most <= library.served:
            return False
        if library.pilot.reserved is not None:
            return False
        if library.pilot.state is PilotState.HERE:
            return True
        since = library.context.starved_since
        return library.pilot.state is PilotState.CUT and (since is None or view.now - since < self.cut_s)

    def worth_loading(self, context: Context, alive: list[Library]) -> int:
        """How many more libraries pay, beside those that are hot or on their way."""
        slots, waiting = context.recipe.slots, context.queue.count
        head = context.queue.head()
        gang = head.group.options.gang[0] if head is not None else 1
        # A library that is still loading has room for `slots` of the waiting calls; a gang takes one library a member.
        loading = sum(x.state is LibraryState.LOADING for x in alive)
        least = gang - len(alive) if gang > 1 or not alive else 0
        most = max(-(-(waiting - loading * slots) // slots), least)
        if context.load_failures:
            return 0 if loading else min(most, 1)
        run_s = context.run_s
        if head is not None and not context.recipe.loader:  # all functions' that want no context: only its own counts
            run_s = head.group.cost.run_s
        if not run_s and not (context.recipe.loader and context.runs):
            return most
        if context.recipe.calls_per_library:
            least = min(most, max(least, _successors(context, alive)))
        load_s = context.load_s or UNKNOWN_LOAD_S
        # With so many slots the queue would be done in the time that a load takes: more of them come too late.
        worth = waiting * run_s / load_s
        return min(most, max(least, math.ceil(worth / slots) - len(alive)))

    # ---- where

    def open_places(self, view: View, context: Context, *, desperate: bool) -> Iterator[tuple[Device, ...]]:
        """Device sets with room for the context and without it, in order of preference. Those of pilots where it failed
        to load twice are left out, unless `desperate`."""
        needs, failed_on = context.recipe.needs, context.failed_on
        open_devices = [
            d
            for d in view.devices()
            if not _holds(d, context)  # first, for it is quick: with thousands of pilots nearly all of them do
            and self._fits(context, d)
            and _in_time(view, context, d)
            and not unfit(d.pilot, context.recipe.key, view.now)
            and (desperate or failed_on.get(d.pilot.id, 0) < GIVE_UP_ON_PILOT)
        ]
        open_devices.sort(key=lambda d: (failed_on.get(d.pilot.id, 0), *self.preference(context, d), d.pilot.id, d.id))
        if needs.devices == 1:
            for device in open_devices:
                yield (device,)
            return
        by_pilot: dict[str, list[Device]] = {}
        for device in open_devices:
            together = by_pilot.setdefault(device.pilot.id, [])
            together.append(device)
            if len(together) == needs.devices:
                yield tuple(by_pilot.pop(device.pilot.id))

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:  # noqa: ARG002
        """Which of the devices with room is taken: the one with the least of this. Here the least busy."""
        return _busy(device), -device.free_bytes

    def _fits(self, context: Context, device: Device) -> bool:
        return self._suits(context, device) and device.free_bytes >= self.minimum(context, device) > 0

    def _suits(self, context: Context, device: Device) -> bool:
        return not device.fault and is_of_kind(context, device.facts)

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:
        """What to promise on each device while it loads."""
        known = max(known_bytes(context, device.facts) for device in devices)
        if known:
            return min(known, *(d.free_bytes for d in devices)) if len(devices) > 1 else known
        return min(d.free_bytes - _corner(d) for d in devices)

    def minimum(self, context: Context, device: Device) -> int:
        """Free bytes without which it is not tried. An unknown context wants a third of the device, at least."""
        return known_bytes(context, device.facts) or device.facts.memory_bytes // 3

    # ---- making room

    def _evict_idle(self, view: View, context: Context) -> list[Action]:
        """Evict just enough idle libraries, those that were used longest ago."""
        loading = any(x.state is LibraryState.LOADING for x in context.libraries.values())
        if loading or not any(other.idle for other in view.contexts.values() if other is not context):
            return []
        chosen = self._make_room(
            view, context, may_go=lambda x: _idle(x) and not _saved(x, context), rank=lambda x: (x.used_at, x.id)
        )
        plan: list[Action] = [Unload(x.id, f"idle, and room is needed for {context.recipe.name}") for x in chosen]
        return plan + self._in_their_place(context, chosen)

    def _in_their_place(self, context: Context, leaving: Sequence[Library]) -> list[Action]:
        """The load for which these libraries are to end, in the same plan: its pilot begins it when their memory is
        free. None where what it takes is known only then."""
        rooms = {device: device.budget_bytes for library in leaving for device in library.devices}
        for library in leaving:
            for device in library.devices:
                rooms[device] += library.promised_bytes
        able = [d for d, room in rooms.items() if self._suits(context, d) and room >= self.minimum(context, d)]
        able.sort(key=lambda device: (-rooms[device], device.id))
        devices = tuple(able[: context.recipe.needs.devices])
        if not devices or len(devices) < context.recipe.needs.devices:
            return []
        memory_bytes = self.reservation(context, devices)
        if not all(self.minimum(context, device) <= memory_bytes <= rooms[device] for device in devices):
            return []
        key = RecipeKey(context.recipe.key)
        return [Load(key, devices[0].pilot.id, tuple(device.id for device in devices), memory_bytes)]

    def _share(self, view: View, context: Context) -> list[Action]:
        """A context that has waited long without the libraries that it needs gets a device from whoever holds most of
        them, and has had it for as long as it took to load."""
        lacking = context.lacking
        waited = view.now - lacking[1] if lacking is not None else 0.0
        if waited < self.patience_s:
            return []

        def has_had_its_turn(library: Library) -> bool:
            age = view.now - library.ready_at
            ready = library.state is LibraryState.READY and not _saved(library, context)
            return ready and age > max(self.patience_s, library.context.load_s)

        chosen = self._make_room(
            view, context, may_go=has_had_its_turn, rank=lambda x: (-len(x.context.libraries), x.ready_at)
        )
        return [Unload(x.id, f"{context.recipe.name} has waited {waited:.0f} s for a device") for x in chosen]

    def _make_room(self, view: View, context: Context, *, may_go: _May, rank: _Rank) -> list[Library]:
        """Libraries to end so that the context fits on devices of one pilot: of those that may go, the lowest in rank.
        None of them when room is on its way (which ranks before all), or cannot be made."""
        best: tuple[tuple[float, ...], list[Library]] | None = None
        for pilot in view.pilots.values():
            if pilot.state is not PilotState.HERE or context.failed_on.get(pilot.id, 0) >= GIVE_UP_ON_PILOT:
                continue
            if unfit(pilot, context.recipe.key, view.now):
                continue
            ways = [self._way(context, device, may_go, rank) for device in pilot.devices.values()]
            open_ways = sorted((way for way in ways if way is not None), key=lambda way: way[0])
            open_ways = open_ways[: context.recipe.needs.devices]
            if len(open_ways) < context.recipe.needs.devices:
                continue
            worst, chosen = open_ways[-1][0], {x.id: x for _, libraries in open_ways for x in libraries}
            if best is None or worst < best[0]:
                best = worst, list(chosen.values())
        return [] if best is None else best[1]

    def _way(
        self, context: Context, device: Device, may_go: _May, rank: _Rank
    ) -> tuple[tuple[float, ...], list[Library]] | None:
        """Libraries to end so that the context fits on this device, after the highest rank among them; or None."""
        if not self._suits(context, device) or _holds(device, context):
            return None
        short = self.minimum(context, device) - device.free_bytes
        short -= sum(x.promised_bytes for x in device.libraries.values() if x.state is LibraryState.STOPPING)
        candidates = sorted((x for x in device.libraries.values() if may_go(x)), key=rank, reverse=True)
        worst: tuple[float, ...] = (-math.inf,)
        chosen: list[Library] = []
        while short > 0 and candidates:
            chosen.append(candidates.pop())
            worst = rank(chosen[-1])
            short -= chosen[-1].promised_bytes
        return (worst, chosen) if short <= 0 else None

    def _impossible(self, view: View, context: Context) -> Failure | None:
        """Why no device of this site can ever hold the context, if that is so."""
        too_short = _too_short(view, context)
        if too_short is not None:
            return too_short
        pilots = [p for p in view.pilots.values() if p.state is PilotState.HERE]
        needs = context.recipe.needs
        if not pilots or self.provisioning.may_bring(view, context):
            return None
        if any(self._is_able(context, pilot) for pilot in pilots):
            return None
        seen: dict[str, int] = {}
        for pilot in pilots:
            for device in pilot.devices.values():
                what = f"{device.facts.kind} {show_bytes(device.facts.memory_bytes)}"
                seen[what] = seen.get(what, 0) + 1
        wants = [f"{needs.devices} devices on one pilot"] if needs.devices > 1 else []
        if needs.kinds:
            wants.append("kind " + " or ".join(needs.kinds))
        memory = max(known_bytes(context, d.facts) for p in pilots for d in p.devices.values())
        if memory:
            wants.append(f"{show_bytes(memory)} of memory")
        return Failure(
            FailureKind.NO_DEVICE,
            f"context {context.recipe.name} can be loaded nowhere: it needs {', '.join(wants) or 'a device'}; "
            "devices seen: " + ", ".join(f"{what} x {count}" for what, count in seen.items()),
        )

    def hopeless_gangs(self, view: View, context: Context) -> list[FailCall]:
        """An end for waiting gangs that want more libraries than this site could ever hold at once."""
        if not context.queue.gangs or not view.pilots:
            return []
        most = self._most_libraries(view, context)
        hopeless = [call for call in context.queue.waiting_gangs() if call.group.options.gang[0] > most]
        plan = []
        for call in sorted(hopeless, key=lambda call: call.id):
            wants = call.group.options.gang[0]
            text = (
                f"a gang of {wants} can run nowhere: at most {most:g} libraries of context {context.recipe.name} fit on"
                " the devices that there are and that may come; ask for fewer (@app(gang=...), or the count of "
                "session.warm), or for more devices in the site file ([pilot] max_blocks, [provider] nodes)"
            )
            plan.append(FailCall(call.id, Failure(FailureKind.NO_DEVICE, text)))
        return plan

    def _most_libraries(self, view: View, context: Context) -> float:
        """How many libraries of a context could be there at once, if it had all devices that are here or may come."""
        here: dict[str, list[int]] = {}
        for pilot in view.pilots.values():
            if pilot.state in (PilotState.HERE, PilotState.CUT):
                facts = [device.facts for device in pilot.devices.values()]
                here.setdefault(pilot.source, []).append(_most_of(context, facts))
        if not view.sources:
            rooms = [room for of_source in here.values() for room in of_source]
            known = view.most_pilots.values()
            more = sum(known) if known and all(known) else math.inf
            return max(sum(rooms), more * max(rooms, default=0)) if any(rooms) else math.inf
        total = 0.0
        for name, source in view.sources.items():
            rooms = here.pop(name, [])
            each = float(source.source.slots // context.recipe.needs.devices) or math.inf
            if source.devices:
                each = float(max([_most_of(context, source.devices), *rooms]))
            total += max(sum(rooms), source.source.most * source.source.nodes * each)
        return total + sum(map(sum, here.values()))

    def _is_able(self, context: Context, pilot: Pilot) -> bool:
        """Whether a pilot has the devices for a context, were they all free."""
        able = [
            device
            for device in pilot.devices.values()
            if self._suits(context, device) and self.minimum(context, device) <= device.facts.memory_bytes
        ]
        return len(able) >= context.recipe.needs.devices

    def _unfit_everywhere(self, view: View, context: Context) -> Failure | None:
        """What is wrong with the pilots, if that is so with each that could hold the context, and no other comes.

        A disk may be full for seconds: each of them was tried several times by then.
        A pilot that is cut off may come back. So may those of a block that has lost its pilots, or it is replaced.
        """
        waited = view.now - context.starved_since if context.starved_since is not None else 0.0
        emptied = any(block.emptied_at is not None and not block.leaving for block in view.blocks.values())
        if waited < self.patience_s or emptied or any(source.coming for source in view.sources.values()):
            return None
        there = (PilotState.HERE, PilotState.CUT)
        able = [p for p in view.pilots.values() if p.state in there and self._is_able(context, p)]
        reasons = [unfit(pilot, context.recipe.key, view.now) for pilot in able]
        if not reasons or not all(reasons) or not all(is_lasting(pilot, context.recipe.key) for pilot in able):
            return None
        said = [f"none of the pilots that are here can hold context {context.recipe.name}:", *dict.fromkeys(reasons)]
        if len(said) > _SHOWN_LINES:
            said[_SHOWN_LINES:] = [f"and {len(said) - _SHOWN_LINES} more like these"]
        return Failure(FailureKind.PILOT, "\n  ".join(said))


def _most_of(context: Context, devices: Iterable[DeviceFacts]) -> int:
    """How many libraries of a context these devices of one pilot could hold, were they all free and well."""
    able = [x for x in devices if is_of_kind(context, x) and known_bytes(context, x) <= x.memory_bytes]
    return len(able) // context.recipe.needs.devices


def _kept(context: Context) -> int:
    """Waiting calls of a context for which one of its libraries is kept (`stoker.manager.core.suspects`)."""
    reserved = (library.pilot.reserved for library in context.libraries.values())
    return len({call.id for call in reserved if call is not None and call.id in context.queue.apart})


def _successors(context: Context, alive: list[Library]) -> int:
    """Libraries that must be loaded in any case, because those that are there retire before all calls are done. To
    load them on devices that are free costs nothing more than to load them later."""
    most = context.recipe.calls_per_library
    served_here = sum(max(0, most - library.served - library.load) for library in alive)
    return -(-(context.queue.count - served_here) // most)


def _corner(device: Device) -> int:
    """What a context of unknown size leaves free for calls that want no context."""
    return 0 if any(not x.context.recipe.loader for x in device.libraries.values()) else bare_bytes(device.facts)


def _in_time(view: View, context: Context, device: Device) -> bool:
    """Whether the context would be loaded, and a call done, before the walltime of the device's pilot is over."""
    pilot, kind = device.pilot, device.facts.kind
    left_s = pilot.ends_at - view.now
    return not pilot.ends_at or durations.has_time(context, kind, left_s=left_s, lasts_s=pilot.lasts_s)


def _too_short(view: View, context: Context) -> Failure | None:
    """Why no pilot of the session can ever live long enough for the context, if that is so."""
    sources = [source.source for source in view.sources.values()]
    if not sources or any(durations.fits(context, source) for source in sources):
        return None
    if any(_in_time(view, context, device) for pilot in view.pilots.values() for device in pilot.devices.values()):
        return None
    have = ", ".join(f"{source.name} {show_seconds(source.walltime_s)}" for source in sources)
    return Failure(
        FailureKind.NO_DEVICE,
        f"context {context.recipe.name} {durations.in_words(context)}, longer than a pilot may live (walltime: {have}; "
        "a part of it is kept to end in good order); ask for more in the site file ([provider] walltime)",
    )


def _holds(device: Device, context: Context) -> bool:
    for library in device.libraries.values():  # noqa: SIM110 (a generator costs more than what it goes through)
        if library.context is context:
            return True
    return False


def _busy(device: Device) -> int:
    return sum(bool(x.held) or x.state is LibraryState.LOADING for x in device.libraries.values())


def _saved(library: Library, context: Context) -> bool:
    """Whether a library that is free waits for the rest of a gang that is before this context in line. Of two gangs
    that need the same devices the first in line gets them all."""
    if not _idle(library):
        return False
    mine, other = context.lacking, _gathers(library.context)
    return other is not None and (mine is None or other < mine)


def _gathers(context: Context) -> tuple[int, float, int] | None:
    """The place in line of a context whose first call is a gang that is not all ready: what is on its way to it would
    be in vain if those that came first were taken away meanwhile."""
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if head is None or gang == 1 or sum(x.state is LibraryState.READY for x in context.libraries.values()) >= gang:
        return context.lacking
    return -head.group.options.priority, head.submitted_at, head.id


def _idle(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.held and not library.zombies

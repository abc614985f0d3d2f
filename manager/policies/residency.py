"""Residency, as in Pervasive Context Management (§3): load a context where it is wanted, keep it until room is
needed.

A context is loaded on one more device while its calls would wait longer for the present and loading libraries
than a load takes. Before a run is measured the wait counts as endless. A context takes its declared size, else
the measured one, else all that is free but a corner for calls without a context.

If nothing fits, just enough idle libraries on one device are evicted, least recently used first. If none is idle,
a context without libraries that has waited for `patience_s` gets a device from the context with the most
libraries. The paper has no such rule; without it a long queue would starve others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, PilotState
from stoker.manager.core.queues import is_lingering
from stoker.manager.core.seams import Action, FailCall, FailWaiting, Load, Provisioning, Timer, Unload, View
from stoker.manager.policies import keep_alive
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.keep_alive import KeepAlive, able_first, lacks_able_one, room_for_more, runs_next, unable
from stoker.manager.policies.making_room import IdleKeeper, anyone, holds, idle_to_end, room_by_turns
from stoker.manager.policies.nowhere import hopeless_gangs, why_nowhere
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.reactions import Unpacking, quarantines
from stoker.manager.policies.where_to_load import (
    bare_bytes,
    failures,
    is_probed,
    known_bytes,
    may_load,
    probes,
    spare_rank,
    suits,
)
from stoker.pilot.core.memory import declared_bytes, takes_one_process
from stoker.protocol.calls import Failure
from stoker.protocol.ids import RecipeKey

UNKNOWN_LOAD_S = 10.0  # Assumed seconds of a load before one was measured


class LoadWhereWanted(Quiet):
    """The default residency policy."""

    honours = keep_alive.HONOURS

    def __init__(
        self,
        *,
        patience_s: float = 10.0,
        ask_again_s: float = 1.0,
        cut_s: float = 3.0,
        provisioning: Provisioning | None = None,
        keeper: IdleKeeper | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.ask_again_s = ask_again_s
        self.cut_s = cut_s
        self.provisioning: Provisioning = provisioning or TakeWhatComes()
        self.keeper = keeper
        self._keep_alive = KeepAlive()
        self._unpacking = Unpacking()

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Return loads that pay, evictions that make room for one, or a failure if it can never be loaded."""
        key = RecipeKey(context.recipe.key)
        plan: list[Action] = [Timer(view.now + self.ask_again_s, key), *self.hopeless_gangs(view, context)]
        alive = [x for x in context.libraries.values() if is_alive(view, x, cut_s=self.cut_s)]
        if context.queue.count <= _kept(context):
            return plan
        load_s = context.load_s or UNKNOWN_LOAD_S
        more = self.worth_loading(context, [x for x in alive if not is_lingering(view.now, x, load_s=load_s)])
        room = room_for_more(view, context, cut_s=self.cut_s)
        if room is not None and room <= 0 < more:
            plan += self._leave_for_able_one(view, context)
        if room is not None:
            more = min(more, room)
        if lacks_able_one(context) and (room is None or room >= 0):
            more = max(more, 1)
        if more <= 0:
            return plan
        places: Iterable[tuple[Device, ...]] = self.open_places(view, context, desperate=not alive)
        if room is not None:
            places = sorted(places, key=lambda devices: able_first(view, context, devices[0].pilot))
        loads = [
            Load(key, devices[0].pilot.id, tuple(d.id for d in devices), self.reservation(context, devices))
            for devices in islice(places, more)
        ]
        if loads:
            return plan + loads
        if not alive:
            nowhere = self.why_nowhere(view, context)
            if nowhere is not None:
                return (FailWaiting(key, nowhere),)
        return plan + self.make_room(view, context)

    def idle(self, view: View, library: Library) -> Sequence[Action]:
        return self._keep_alive.idle(view, library)

    def timer(self, view: View, key: str) -> Sequence[Action]:
        if ends := self._keep_alive.fired(view, key):
            return ends
        context = view.contexts.get(key)
        return self.wanted(view, context) if context is not None and context.queue.count else ()

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
        return quarantines(view, about, verdict)

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        """Move the later of two calls that slow each other down on a device."""

        def places(view: View, context: Context) -> Iterator[tuple[Device, ...]]:
            return self.open_places(view, context, desperate=False)

        return self._unpacking.plan(view, about, pace, places=places, reservation=self.reservation)

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        """Return what it declares, else what was measured plus 10 %, else all that it was promised."""
        needs, facts = library.context.recipe.needs, library.devices[0].facts
        declared = declared_bytes(needs, facts)
        took = library.memory_bytes if facts.on_host else library.device_bytes
        if declared or not took or not library.context.recipe.loader or takes_one_process(facts):
            return declared or library.promised_bytes
        return min(library.promised_bytes, int(took * 1.1))

    # ---- how many

    def worth_loading(self, context: Context, alive: list[Library]) -> int:
        """Return how many more libraries pay next to the ready and loading ones."""
        slots, waiting = context.slots, context.queue.count
        head = context.queue.head()
        gang = head.group.options.gang[0] if head is not None else 1
        # A library that is still loading has room for `slots` of the waiting calls; a gang takes one library a member.
        loading = sum(x.state is LibraryState.LOADING for x in alive)
        least = gang - len(alive) if gang > 1 or not alive else 0
        most = max(-(-(waiting - loading * slots) // slots), least)
        if is_probed(context):
            return min(most, probes(alive))
        run_s = context.run_s
        if head is not None and not context.recipe.loader:  # its runs are the runs of all functions without a context
            run_s = head.group.cost.run_s
        if not run_s and not (context.recipe.loader and context.runs):
            return most
        if context.recipe.calls_per_library:
            # Libraries that retire before all calls are done: their successors cost no more now than later.
            serves = context.recipe.calls_per_library
            served_here = sum(max(0, serves - library.served - library.load) for library in alive)
            least = min(most, max(least, -(-(waiting - served_here) // serves)))
        load_s = context.load_s or UNKNOWN_LOAD_S
        # With more slots than this the queue would be done before a load ends.
        worth = waiting * run_s / load_s
        return min(most, max(least, math.ceil(worth / slots) - len(alive)))

    # ---- where

    def open_places(self, view: View, context: Context, *, desperate: bool) -> Iterator[tuple[Device, ...]]:
        """Yield device sets with room for the context and without it, in order of preference.

        Pilots where it failed to load twice are left out, unless `desperate`.
        """
        needs = context.recipe.needs
        open_devices = [
            d
            for d in view.devices()
            if not holds(d, context)  # first because it is quick: with thousands of pilots nearly all hold it
            and self.fits(context, d)
            and may_load(view, context, d, desperate=desperate)
        ]
        open_devices.sort(key=lambda d: (failures(context, d.pilot), *self.preference(context, d), d.pilot.id, d.id))
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

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:
        """Rank a device with room, lowest first: spare cores as `kinds` says, then the least busy."""
        busy = sum(bool(x.held) or x.state is LibraryState.LOADING for x in device.libraries.values())
        return spare_rank(context, device.facts), busy, -device.free_bytes

    def fits(self, context: Context, device: Device) -> bool:
        return suits(context, device) and device.free_bytes >= self.minimum(context, device) > 0

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:
        known = max(known_bytes(context, device.facts) for device in devices)
        if known:
            return min(known, *(d.free_bytes for d in devices)) if len(devices) > 1 else known
        return min(d.free_bytes - _corner(d) for d in devices)

    def minimum(self, context: Context, device: Device) -> int:
        """Return the free bytes without which it is not tried: for an unknown context a third of the device."""
        return known_bytes(context, device.facts) or device.facts.memory_bytes // 3

    # ---- without room

    def _leave_for_able_one(self, view: View, context: Context) -> list[Action]:
        """At the limit, unload a library that cannot run the next call if one that can be loaded elsewhere could."""
        leaving = unable(view, context)
        if not leaving or any(x.state is LibraryState.STOPPING for x in context.libraries.values()):
            return []
        could = {
            d.pilot: None
            for d in view.devices()
            if not holds(d, context) and suits(context, d) and may_load(view, context, d)
        }
        if not any(runs_next(view, context, pilot) for pilot in could):
            return []
        is_open = any(
            runs_next(view, context, devices[0].pilot) for devices in self.open_places(view, context, desperate=False)
        )
        for library in leaving:
            if is_open or not may_load(view, context, library.devices[0]):  # otherwise it may be loaded there again
                return [Unload(library.id, "the next call would not end before its pilot does")]
        return []

    def make_room(self, view: View, context: Context) -> list[Action]:
        """Unload idle libraries, or one that another context can spare."""
        minimum, may_leave = self.minimum, anyone if self.keeper is None else self.keeper.may_leave
        leaving = idle_to_end(view, context, minimum=minimum, may_leave=may_leave)
        if not leaving:
            return room_by_turns(view, context, minimum=minimum, patience_s=self.patience_s, may_leave=may_leave)
        plan: list[Action] = [Unload(x.id, f"idle, and room is needed for {context.recipe.name}") for x in leaving]
        return plan + self.in_their_place(context, leaving)

    def in_their_place(self, context: Context, leaving: Sequence[Library]) -> list[Action]:
        """Return the load that replaces `leaving` in the same plan; empty if its size is unknown until they are
        gone.
        """
        rooms = {device: device.budget_bytes for library in leaving for device in library.devices}
        for library in leaving:
            for device in library.devices:
                rooms[device] += library.promised_bytes
        able = [d for d, room in rooms.items() if suits(context, d) and room >= self.minimum(context, d)]
        able.sort(key=lambda device: (-rooms[device], device.id))
        devices = tuple(able[: context.recipe.needs.devices])
        if not devices or len(devices) < context.recipe.needs.devices:
            return []
        memory_bytes = self.reservation(context, devices)
        if not all(self.minimum(context, device) <= memory_bytes <= rooms[device] for device in devices):
            return []
        key = RecipeKey(context.recipe.key)
        return [Load(key, devices[0].pilot.id, tuple(device.id for device in devices), memory_bytes)]

    def why_nowhere(self, view: View, context: Context) -> Failure | None:
        return why_nowhere(
            view, context, minimum=self.minimum, provisioning=self.provisioning, patience_s=self.patience_s
        )

    def hopeless_gangs(self, view: View, context: Context) -> list[FailCall]:
        """Fail waiting gangs that want more libraries than this site could ever hold."""
        return hopeless_gangs(view, context)


def is_alive(view: View, library: Library, *, cut_s: float) -> bool:
    """True if a library is ready or loading, and not about to retire."""
    most = library.context.recipe.calls_per_library
    if library.state not in (LibraryState.LOADING, LibraryState.READY) or 0 < most <= library.served:
        return False
    if library.pilot.reserved is not None:
        return False
    if library.pilot.state is PilotState.HERE:
        return True
    since = library.context.starved_since
    return library.pilot.state is PilotState.CUT and (since is None or view.now - since < cut_s)


def _kept(context: Context) -> int:
    reserved = (library.pilot.reserved for library in context.libraries.values())
    return len({call.id for call in reserved if call is not None and call.id in context.queue.apart})


def _corner(device: Device) -> int:
    return 0 if any(not x.context.recipe.loader for x in device.libraries.values()) else bare_bytes(device.facts)


class WholeDevice(LoadWhereWanted):
    """Residency: one library a device, whatever its context needs, as batch systems assign GPUs."""

    def minimum(self, context: Context, device: Device) -> int:
        return max(device.facts.memory_bytes, known_bytes(context, device.facts))

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:  # noqa: ARG002
        """Return all of each device (of unequal ones, of the smallest)."""
        return min(device.facts.memory_bytes for device in devices)

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.promised_bytes

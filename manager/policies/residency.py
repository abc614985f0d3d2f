"""Default residency, as in Pervasive Context Management (§3): load a context where it is needed, and keep it loaded.

A context is loaded on another device if its calls would wait longer than a load takes. Calls of unknown run time count
as endless. A context gets its declared or measured size, or else all free memory except a part for calls without a
context. A sleeping library wakes instead if this is faster (`sleeping`).

If no device has enough memory, as few idle libraries as possible on one device sleep or stop, least recently used
first. If no library is idle, a context without libraries gets a device of the context with the most libraries after
`patience_s` (not in the paper).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, PilotState
from stoker.manager.core.queues import is_unlikely_to_free_slot
from stoker.manager.core.seams import Action, FailCall, FailWaiting, Provisioning, Timer, Unload, View, Wake
from stoker.manager.policies import keep_alive, making_room, sleeping
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.making_room import StopGuard, has_library_of
from stoker.manager.policies.nowhere import hopeless_gangs, why_nowhere
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.manager.policies.reactions import CallSeparator, quarantine_after_failures
from stoker.manager.policies.where_to_load import (
    assumed_bytes_without_loader,
    can_use_device,
    count_failed_loads,
    has_failed_loads,
    iter_device_sets,
    make_load,
    may_load,
    probe_load_count,
    rank_spare_cores,
    required_bytes_if_known,
)
from stoker.pilot.core.memory import declared_bytes, is_limited_to_one_process
from stoker.protocol.calls import Failure
from stoker.protocol.ids import RecipeKey

UNKNOWN_LOAD_S = 10.0


class LoadWhereWanted(Quiet):
    """The default residency policy."""

    honours = keep_alive.SUPPORTED_LIMITS
    lets_sleep = True  # If False, idle libraries stop instead of sleeping

    def __init__(
        self,
        *, patience_s: float = 10.0, ask_again_s: float = 1.0, cut_s: float = 3.0,
        provisioning: Provisioning | None = None, keeper: StopGuard | None = None,
    ) -> None:  # fmt: skip
        self.patience_s = patience_s
        self.ask_again_s = ask_again_s
        self.cut_s = cut_s
        self.provisioning: Provisioning = provisioning or ExternalPilots()
        self.keeper = keeper
        if keeper is not None:  # with a keeper, the policy never wakes libraries, so none may sleep
            self.lets_sleep = False
        self._keep_alive = keep_alive.IdleLibraryLimits(sleeps=self.lets_sleep)
        self._call_separator = CallSeparator()

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        key = RecipeKey(context.recipe.key)
        plan: list[Action] = [Timer(view.now + self.ask_again_s, key), *self.hopeless_gangs(view, context)]
        alive = [x for x in context.libraries.values() if is_ready_or_loading(view, x, cut_s=self.cut_s)]
        if context.queue.count <= _reserved_calls(context):
            return plan
        load_s = context.load_s or UNKNOWN_LOAD_S
        soon_free = [x for x in alive if not is_unlikely_to_free_slot(view.now, x, load_s=load_s)]
        more = self.worth_loading(context, soon_free)
        wakes = self._wake_sleepers(view, context, more)
        plan += wakes
        more -= sum(isinstance(action, Wake) for action in wakes) + sleeping.count_libraries_falling_asleep(context)
        if wakes and more <= 0:
            return plan
        room = keep_alive.remaining_library_quota(view, context, cut_s=self.cut_s)
        if room is not None:
            if room <= 0 < more:
                plan += self._unload_for_able_pilot(view, context)
            more = min(more, room)
        if keep_alive.lacks_library_for_waiting_call(context) and (room is None or room >= 0):
            more = max(more, 1)
        if more <= 0:
            return plan
        places: Iterable[tuple[Device, ...]] = self.open_places(view, context, ignores_failed_loads=not alive)
        if room is not None:
            places = sorted(
                places, key=lambda devices: keep_alive.pilot_rank_for_next_call(view, context, devices[0].pilot)
            )
        loads = [make_load(context, devices, self.reservation(context, devices)) for devices in islice(places, more)]
        if loads:
            return plan + loads
        if not alive and not any(x.state is LibraryState.ASLEEP for x in context.libraries.values()):
            nowhere = self.why_nowhere(view, context)
            if nowhere is not None:
                return (FailWaiting(key, nowhere),)
        return plan + self.make_room(view, context)

    def on_idle_library(self, view: View, library: Library) -> Sequence[Action]:
        return self._keep_alive.handle_idle_library(view, library)

    def on_timer(self, view: View, key: str) -> Sequence[Action]:
        if ends := self._keep_alive.handle_timer(view, key):
            return ends
        context = view.contexts.get(key)
        return self.on_waiting_calls(view, context) if context is not None and context.queue.count else ()

    def on_failure_verdict(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
        return quarantine_after_failures(view, about, verdict)

    def on_pace_advice(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        places = partial(self.open_places, ignores_failed_loads=False)
        return self._call_separator.plan(view, about, pace, places=places, reservation=self.reservation)

    def reservation_after_load(self, view: View, library: Library) -> int:  # noqa: ARG002
        """Return the bytes to reserve for a library: declared, or measured plus 10 %, or promised."""
        needs, facts = library.context.recipe.needs, library.devices[0].facts
        declared = declared_bytes(needs, facts)
        took = library.memory_bytes if facts.on_host else library.device_bytes
        if declared or not took or not library.context.recipe.loader or is_limited_to_one_process(facts):
            return declared or library.promised_bytes
        return min(library.promised_bytes, int(took * 1.1))

    def worth_loading(self, context: Context, alive: list[Library]) -> int:
        slots, waiting = context.slots, context.queue.count
        head = context.queue.head()
        gang = head.group.options.gang[0] if head is not None else 1
        # A loading library will serve `slots` of the waiting calls. A gang needs one library per member.
        loading = sum(x.state is LibraryState.LOADING for x in alive)
        least = gang - len(alive) if gang > 1 or not alive else 0
        most = max(-(-(waiting - loading * slots) // slots), least)
        if has_failed_loads(context):
            return min(most, probe_load_count(alive))
        run_s = context.run_s
        if head is not None and not context.recipe.loader:  # a function whose context other functions share
            run_s = head.group.cost.run_s
        if not run_s and not (context.recipe.loader and context.runs):
            return most
        if context.recipe.calls_per_library:
            # A library retires after `calls_per_library` calls. Load its successor early, because it is needed anyway.
            serves = context.recipe.calls_per_library
            served_here = sum(max(0, serves - library.served - library.load) for library in alive)
            least = min(most, max(least, -(-(waiting - served_here) // serves)))
        load_s = context.load_s or UNKNOWN_LOAD_S
        # With this many slots, the waiting calls end in the time of a load, so a further library would come too late.
        worth = waiting * run_s / load_s
        return min(most, max(least, math.ceil(worth / slots) - len(alive)))

    def open_places(self, view: View, context: Context, *, ignores_failed_loads: bool) -> Iterator[tuple[Device, ...]]:
        """Yield free device sets that fit the context, best first.

        `ignores_failed_loads`: include pilots on which two loads failed."""
        open_devices = [
            d
            for d in view.devices()
            if not has_library_of(d, context)  # a fast check that excludes most devices
            and self.fits(context, d)
            and may_load(view, context, d, ignores_failed_loads=ignores_failed_loads)
        ]
        open_devices.sort(
            key=lambda d: (count_failed_loads(context, d.pilot), *self.preference(context, d), d.pilot.id, d.id)
        )
        yield from iter_device_sets(open_devices, context.recipe.needs.devices)

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:
        busy = sum(bool(x.held) or x.state is LibraryState.LOADING for x in device.libraries.values())
        return rank_spare_cores(context, device.facts), busy, -device.free_bytes

    def fits(self, context: Context, device: Device) -> bool:
        return can_use_device(context, device) and device.free_bytes >= self.minimum(context, device) > 0

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:
        known = max(required_bytes_if_known(context, device.facts) for device in devices)
        if known:
            return min(known, *(d.free_bytes for d in devices)) if len(devices) > 1 else known
        return min(d.free_bytes - _bytes_without_context(d) for d in devices)

    def minimum(self, context: Context, device: Device) -> int:
        return required_bytes_if_known(context, device.facts) or device.facts.memory_bytes // 3

    def _wake_sleepers(self, view: View, context: Context, most: int) -> list[Action]:
        """Wake up to `most` sleeping libraries. Free memory for this, unless a load elsewhere is faster."""
        plan: list[Action] = []
        for sleeper in sleeping.wakeable_libraries(view, context)[: max(0, most)]:
            needed = sleeping.extra_bytes_to_wake(sleeper)
            if all(device.budget_bytes >= needed for device in sleeper.devices):
                plan.append(Wake(sleeper.id))
            elif not plan and not self._is_load_faster_than_wake(view, context):
                leaving = making_room.idle_libraries_to_stop(
                    view, context, minimum=self.minimum, keeper=self.keeper, sleeper=sleeper
                )
                if leaving:
                    needs = dict.fromkeys(sleeper.devices, needed)
                    why = f"idle, and room is needed for {context.recipe.name}"
                    ends, _ = sleeping.plan_stops_and_sleeps(needs, leaving, why=why, sleeps=self.lets_sleep)
                    return [*ends, Wake(sleeper.id)]
        return plan

    def _is_load_faster_than_wake(self, view: View, context: Context) -> bool:
        if not context.load_s or 2 * context.wake_s < context.load_s:
            return False
        return any(True for _ in self.open_places(view, context, ignores_failed_loads=False))

    def _unload_for_able_pilot(self, view: View, context: Context) -> list[Action]:
        """Unload a library that cannot run the next call, so that another pilot may load a context at its limit."""
        awake = sleeping.wakeable_libraries(view, context)
        leaving = [
            *keep_alive.libraries_unfit_for_next_call(view, context),
            *(x for x in context.libraries.values() if sleeping.is_asleep(x) and x not in awake),
        ]
        if not leaving or any(x.state is LibraryState.STOPPING for x in context.libraries.values()):
            return []
        could = (d for d in view.devices() if not has_library_of(d, context) and can_use_device(context, d))
        pilots = {d.pilot: None for d in could if may_load(view, context, d)}
        if not any(keep_alive.can_run_next_call(view, context, pilot) for pilot in pilots):
            return []
        places = self.open_places(view, context, ignores_failed_loads=False)
        is_open = any(keep_alive.can_run_next_call(view, context, devices[0].pilot) for devices in places)
        for library in leaving:
            # Without this check, the context could be loaded on the same device again.
            if is_open or not may_load(view, context, library.devices[0]):
                return [Unload(library.id, "the next call would run longer than its pilot")]
        return []

    def make_room(self, view: View, context: Context) -> list[Action]:
        minimum, keeper = self.minimum, self.keeper
        leaving = making_room.idle_libraries_to_stop(view, context, minimum=minimum, keeper=keeper)
        if not leaving:
            return making_room.preempt_for_starved_context(
                view, context, minimum=minimum, patience_s=self.patience_s, keeper=keeper
            )
        devices = {device for x in leaving for device in x.devices if can_use_device(context, device)}
        needs = {device: minimum(context, device) for device in devices}
        why = f"idle, and room is needed for {context.recipe.name}"
        plan, rooms = sleeping.plan_stops_and_sleeps(needs, leaving, why=why, sleeps=self.lets_sleep)
        return plan + self._load_on_devices_with_room(context, rooms)

    def replacement_load(self, context: Context, leaving: Sequence[Library]) -> list[Action]:
        """Return the load that replaces the `leaving` libraries; empty if the size of the load is still unknown."""
        _, rooms = sleeping.plan_stops_and_sleeps({}, leaving, why="", sleeps=False)
        return self._load_on_devices_with_room(context, rooms)

    def _load_on_devices_with_room(self, context: Context, rooms: Mapping[Device, int]) -> list[Action]:
        able = [d for d, room in rooms.items() if can_use_device(context, d) and room >= self.minimum(context, d)]
        able.sort(key=lambda device: (-rooms[device], device.id))
        devices = next(iter_device_sets(able, context.recipe.needs.devices), None)
        if devices is None:
            return []
        memory_bytes = self.reservation(context, devices)
        if not all(self.minimum(context, device) <= memory_bytes <= rooms[device] for device in devices):
            return []
        return [make_load(context, devices, memory_bytes)]

    def why_nowhere(self, view: View, context: Context) -> Failure | None:
        return why_nowhere(
            view, context, minimum=self.minimum, provisioning=self.provisioning, patience_s=self.patience_s
        )

    def hopeless_gangs(self, view: View, context: Context) -> list[FailCall]:
        return hopeless_gangs(view, context)


def is_ready_or_loading(view: View, library: Library, *, cut_s: float) -> bool:
    """Return True if a library is ready or loading, and will not retire soon."""
    most = library.context.recipe.calls_per_library
    if library.state not in (LibraryState.LOADING, LibraryState.READY) or 0 < most <= library.served:
        return False
    if library.pilot.reserved_for is not None:
        return False
    if library.pilot.state is PilotState.HERE:
        return True
    since = library.context.starved_since
    return library.pilot.state is PilotState.CUT and (since is None or view.now - since < cut_s)


def _reserved_calls(context: Context) -> int:
    reserved = (library.pilot.reserved_for for library in context.libraries.values())
    return len({call.id for call in reserved if call is not None and call.id in context.queue.set_aside_calls})


def _bytes_without_context(device: Device) -> int:
    return (
        0
        if any(not x.context.recipe.loader for x in device.libraries.values())
        else assumed_bytes_without_loader(device.facts)
    )


class WholeDevice(LoadWhereWanted):
    """Residency with one library per device, as batch systems assign GPUs."""

    def minimum(self, context: Context, device: Device) -> int:
        return max(device.facts.memory_bytes, required_bytes_if_known(context, device.facts))

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:  # noqa: ARG002
        return min(device.facts.memory_bytes for device in devices)

    def reservation_after_load(self, view: View, library: Library) -> int:  # noqa: ARG002
        return library.promised_bytes

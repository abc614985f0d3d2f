"""Choose libraries to stop on occupied devices, so that a context can be loaded.

`idle_libraries_to_stop` chooses as few idle libraries and sleepers as possible, least recently used first.
`preempt_for_starved_context` takes a device from the context with the most libraries for a starved context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from stoker.manager.core.nouns import Context, Device, Library, LibraryState, PilotState
from stoker.manager.core.seams import Action, Unload, View, Wake
from stoker.manager.policies.sleeping import extra_bytes_to_wake, is_asleep, is_idle, wakeable_libraries
from stoker.manager.policies.where_to_load import can_use_device, iter_device_sets, may_load

Minimum = Callable[[Context, Device], int]  # Returns the free bytes that a device needs to load a context
StopChoice = tuple[tuple[float, ...], list[Library]]  # Highest rank of the libraries to stop on a device; the libraries


class StopGuard(Protocol):
    def may_stop_for(self, view: View, library: Library, context: Context) -> bool: ...  # True if the library may stop


_May = Callable[[Library], bool]
_Rank = Callable[[Library], tuple[float, ...]]


def idle_libraries_to_stop(
    view: View, context: Context, *, minimum: Minimum, keeper: StopGuard | None, sleeper: Library | None = None
) -> list[Library]:
    """Return the idle and sleeping libraries to stop so that a context can be loaded, or its `sleeper` can wake."""

    def may_stop(library: Library) -> bool:
        if library.context is context:
            return False
        unused = is_idle(library) or (is_asleep(library) and not library.context.queue.count)
        free = unused and not _is_kept_for_gang(library, context)
        return free and (keeper is None or keeper.may_stop_for(view, library, context))

    def rank(library: Library) -> tuple[float, ...]:
        return library.used_at, library.id

    if sleeper is not None:
        return _libraries_to_stop_for_wake(sleeper, may_stop, rank)
    loading = any(x.state is LibraryState.LOADING for x in context.libraries.values())
    idle = any(other.idle for other in view.contexts.values() if other is not context)
    if loading or not (idle or any(map(is_asleep, view.libraries.values()))):
        return []
    return _libraries_to_stop_for_context(view, context, minimum, may_stop=may_stop, rank=rank)


def preempt_for_starved_context(
    view: View, context: Context, *, minimum: Minimum, patience_s: float, keeper: StopGuard | None
) -> list[Action]:
    """Take a device from the context with the most libraries if another context lacked libraries for `patience_s`."""
    lacking = context.starvation_order
    waited = view.now - lacking[1] if lacking is not None else 0.0
    if waited < patience_s:
        return []
    why = f"{context.recipe.name} has waited {waited:.0f} s for a device"

    def may_stop(library: Library) -> bool:
        age = view.now - library.ready_at
        ready = library.state is LibraryState.READY and not _is_kept_for_gang(library, context)
        had_its_turn = ready and age > max(patience_s, library.context.load_s)
        return had_its_turn and (keeper is None or keeper.may_stop_for(view, library, context))

    def rank(library: Library) -> tuple[float, ...]:
        return -len(library.context.libraries), library.ready_at

    for sleeper in wakeable_libraries(view, context):
        if chosen := _libraries_to_stop_for_wake(sleeper, may_stop, rank):
            return [*(Unload(x.id, why) for x in chosen), Wake(sleeper.id)]
    return [
        Unload(x.id, why) for x in _libraries_to_stop_for_context(view, context, minimum, may_stop=may_stop, rank=rank)
    ]


def _libraries_to_stop_for_wake(sleeper: Library, may_stop: _May, rank: _Rank) -> list[Library]:
    needed = extra_bytes_to_wake(sleeper)
    ways = [_choose_libraries_on_device(device, needed, may_stop, rank) for device in sleeper.devices]
    if None in ways:
        return []
    return list({x.id: x for way in ways if way is not None for x in way[1]}.values())


def _libraries_to_stop_for_context(
    view: View, context: Context, minimum: Minimum, *, may_stop: _May, rank: _Rank
) -> list[Library]:
    def choose_stops(device: Device) -> StopChoice | None:
        if not can_use_device(context, device) or has_library_of(device, context):
            return None
        return _choose_libraries_on_device(device, minimum(context, device), may_stop, rank)

    return libraries_to_stop_on_one_pilot(view, context, choose_stops)


def libraries_to_stop_on_one_pilot(
    view: View,
    context: Context,
    choose_stops: Callable[[Device], StopChoice | None],
    *,
    ignores_failed_loads: bool = False,
) -> list[Library]:
    """Return the libraries to stop so that a context fits on a pilot, lowest ranks first; empty if impossible."""
    best: StopChoice | None = None
    for pilot in view.pilots.values():
        if pilot.state is not PilotState.HERE:
            continue
        able = (
            device
            for device in pilot.devices.values()
            if may_load(view, context, device, ignores_failed_loads=ignores_failed_loads)
        )
        ways = {device: way for device in able if (way := choose_stops(device)) is not None}
        ranked = sorted(ways, key=lambda device: ways[device][0])
        devices = next(iter_device_sets(ranked, context.recipe.needs.devices), None)
        if devices is None:
            continue
        worst = max(ways[device][0] for device in devices)
        if best is None or worst < best[0]:
            best = worst, list({x.id: x for device in devices for x in ways[device][1]}.values())
    return [] if best is None else best[1]


def _choose_libraries_on_device(device: Device, needed: int, may_stop: _May, rank: _Rank) -> StopChoice | None:
    short = needed - device.free_bytes
    short -= sum(x.promised_bytes for x in device.libraries.values() if x.state is LibraryState.STOPPING)
    candidates = sorted((x for x in device.libraries.values() if may_stop(x)), key=rank, reverse=True)
    worst: tuple[float, ...] = (-math.inf,)
    chosen: list[Library] = []
    while short > 0 and candidates:
        chosen.append(candidates.pop())
        worst = rank(chosen[-1])
        short -= chosen[-1].promised_bytes
    return (worst, chosen) if short <= 0 else None


def has_library_of(device: Device, context: Context) -> bool:
    for library in device.libraries.values():  # noqa: SIM110 (a generator costs more than its loop)
        if library.context is context:
            return True
    return False


def _is_kept_for_gang(library: Library, context: Context) -> bool:
    if not is_idle(library):
        return False
    mine, other = context.starvation_order, _incomplete_gang_rank(library.context)
    return other is not None and (mine is None or other < mine)


def _incomplete_gang_rank(context: Context) -> tuple[int, float, int] | None:
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if head is None or gang == 1 or sum(x.state is LibraryState.READY for x in context.libraries.values()) >= gang:
        return context.starvation_order
    return -head.group.options.priority, head.submitted_at, head.id

"""Decide which idle libraries sleep instead of stopping, and which sleeping libraries wake (docs/decisions/063).

A library may sleep if its context supports sleep, if this frees enough memory of its devices, and if its pilot has
enough host memory. To free host memory, sleeping libraries are stopped, least recently used first. A library that
sleeps on a CPU keeps its weights in memory. The policy counts a wake as a load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.manager.core.libraries import device_bytes_while_asleep, host_bytes_for_sleep
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import Action, Sleep, Unload, View
from stoker.manager.policies.where_to_load import may_load


def is_idle(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.load


def is_asleep(library: Library) -> bool:
    return library.state is LibraryState.ASLEEP and library.has_confirmed_sleep


def count_libraries_falling_asleep(context: Context) -> int:
    """Return how many libraries of a context are being put to sleep. These libraries can wake soonest."""
    return sum(x.state is LibraryState.ASLEEP and not x.has_confirmed_sleep for x in context.libraries.values())


def may_sleep(library: Library) -> bool:
    context = library.context
    if not library.can_sleep or not is_idle(library) or library.unanswered_resizes or context.sleep_failure:
        return False
    # If a device allows few processes, sleep does not help: a sleeping library is still a process.
    if library.pilot.state is not PilotState.HERE or library.devices[0].facts.processes:
        return False
    return not 0 < context.load_s <= context.wake_s


def can_sleep_in_host_memory(library: Library) -> bool:
    if not may_sleep(library) or library.devices[0].facts.on_host:
        return False
    return host_bytes_for_sleep(library) <= library.pilot.free_host_bytes_for_sleep


def wakeable_libraries(view: View, context: Context) -> list[Library]:
    """Return the sleeping libraries of a context that may wake, last used first."""
    found = [
        x
        for x in context.libraries.values()
        if is_asleep(x)
        and x.pilot.state is PilotState.HERE
        and x.pilot.reserved_for is None
        and all(not device.fault and may_load(view, context, device) for device in x.devices)
    ]
    return sorted(found, key=lambda x: (x.used_at, x.id), reverse=True)


def extra_bytes_to_wake(library: Library) -> int:
    return max(0, library.awake_bytes - library.promised_bytes)


def plan_stops_and_sleeps(
    needs: Mapping[Device, int], leaving: Sequence[Library], *, why: str, sleeps: bool
) -> tuple[list[Action], dict[Device, int]]:
    """Return actions that stop libraries or put them to sleep, and the bytes free on their devices afterwards.

    `needs`: bytes that must be free. `why`: reason for stopping a library. `sleeps`: False if each library must stop.
    """
    rooms = {device: device.budget_bytes for x in leaving for device in x.devices}
    for library in leaving:
        for device in library.devices:
            rooms[device] += library.promised_bytes
    free_host_bytes: dict[Pilot, int] = {}
    ended = set[int]()

    def make_host_room(library: Library) -> list[Action] | None:
        """Reserve host memory for a library. Return the unloads of sleepers that this needs; None if impossible."""
        pilot, needed = library.pilot, host_bytes_for_sleep(library)
        free = free_host_bytes.get(pilot, pilot.free_host_bytes_for_sleep)
        others = (x for x in pilot.libraries.values() if is_asleep(x) and x.host_bytes and x.id not in ended)
        leaves: list[Library] = []
        for other in sorted(others, key=lambda x: (x.used_at, x.id)):
            if free >= needed:
                break
            if not other.context.queue.count:
                free += other.host_bytes
                leaves.append(other)
        if free < needed:
            return None
        free_host_bytes[pilot] = free - needed
        ended.update(other.id for other in leaves)
        why = f"asleep, and its host memory is needed for {library.context.recipe.name}"
        return [Unload(other.id, why) for other in leaves]

    plan: list[Action] = []
    for library in sorted(leaving, key=lambda x: (x.used_at, x.id), reverse=True):
        if library.id in ended:
            continue
        stays = library.state is LibraryState.ASLEEP
        keeps = library.promised_bytes if stays else device_bytes_while_asleep(library)
        fits = all(rooms[device] - needs.get(device, 0) >= keeps for device in library.devices)
        ends: list[Action] | None = None
        if sleeps and fits:
            ends = [] if stays else make_host_room(library) if may_sleep(library) else None
        if ends is None:
            plan.append(Unload(library.id, why))
            continue
        plan += ends if stays else [*ends, Sleep(library.id)]
        for device in library.devices:
            rooms[device] -= keeps
    return plan, rooms

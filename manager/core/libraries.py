"""A library's way: told to load, ready, told to stop, gone. And the promises of device memory that go along."""

from __future__ import annotations

from stoker.manager.core import (
    call_records,
    ending,
    holding,
    indexing,
    loads,
    objects,
    queues,
    snapshots,
)
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Device, Library, Pilot
from stoker.manager.core.phases import CallState, LibraryState
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import State
from stoker.protocol.calls import Failure
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_manager import LibraryResized
from stoker.protocol.to_pilot import ResizeLibrary, StartLibrary, StopLibrary
from stoker.units import show_bytes

_MOST_MEASURED = 64
"""Measurements of a library's memory that are kept, the newest."""

LIBRARY_GAP = 1000
KEPT_LIBRARIES = 200
"""So many libraries that are gone are kept for their stories."""

# ---- promises


def promise(library: Library, memory_bytes: int) -> None:
    """Change what a library should come to hold of each of its devices. Raises PolicyError where that exceeds the
    budget. (One that is told to end keeps what it has until it is gone.)"""
    more = memory_bytes - library.promised_bytes
    for device in library.devices:
        if more > 0 and device.budget_bytes < more and library.state is not LibraryState.STOPPING:
            raise PolicyError(
                f"{device.id} of {library.pilot.id} has {device.budget_bytes} bytes left,"
                f" {library.context.recipe.name} wants {more} more"
            )
    for device in library.devices:
        device.promised_bytes += more
    library.promised_bytes = memory_bytes


def resize(manager: Manager, library: Library, memory_bytes: int) -> None:
    """Tell a library to change its reservation. The budget changes now; the pilot lets one library grow when another
    has really shrunk. Raises PolicyError where that exceeds the budget."""
    resizes(library, memory_bytes)
    manager.say(library.pilot, ResizeLibrary(library.id, memory_bytes))


def resizes(library: Library, memory_bytes: int) -> None:
    """A library is told to change its reservation; the caller tells it. Raises as `resize`."""
    promise(library, memory_bytes)
    library.resizing.append(memory_bytes)


def resize_again(manager: Manager, library: Library) -> None:
    """A pilot is back: tell a library again what size it was told last, if it has not answered."""
    if library.resizing:
        manager.say(library.pilot, ResizeLibrary(library.id, library.resizing[-1]))
        del library.resizing[:-1]


def resized(manager: Manager, library: Library, message: LibraryResized) -> None:
    """A library says what it holds of its devices from now on: because it was told to resize, or was measured."""
    size, waiting = message.device_memory_bytes, library.resizing
    if message.measured:
        _holds(manager, library, size)
        return
    ordered = message.ordered_bytes if message.ordered_bytes >= 0 else size
    if not waiting or (message.ordered_bytes >= 0 and ordered not in waiting):
        manager.state.refuse("resize that nobody asked for")  # an order is repeated after a hello, and answered twice
        return
    answered = waiting.index(ordered) + 1 if ordered in waiting else 1
    del waiting[:answered]
    if not waiting:  # else the last order counts, which is still to be answered
        _holds(manager, library, size)


def _holds(manager: Manager, library: Library, size: int) -> None:
    """Promise a library what it holds of its devices, as far as the budget goes."""
    room = max(0, min(device.budget_bytes for device in library.devices))
    if size > library.promised_bytes + room:
        library.note(manager.state.now, f"uses {show_bytes(size)} of its device, more than is left there")
    promise(library, min(size, library.promised_bytes + room))
    manager.changed("libraries", library.id)
    manager.supply_changed = True


def devices_back(manager: Manager, pilot: Pilot) -> None:
    """The devices of a pilot that was given up are here again: the time between counts for no tier."""
    for device in pilot.devices.values():
        device.tier_since = manager.state.now


def tier(manager: Manager, device: Device) -> None:
    """Account the time that a device has spent cold or warm."""
    tiers, now = manager.state.tier_seconds, manager.state.now
    tiers[device.tier] = tiers.get(device.tier, 0.0) + now - device.tier_since
    device.tier_since = now
    warm = any(library.state is LibraryState.READY for library in device.libraries.values())
    device.tier = "warm" if warm else "cold"


# ---- loading


def attach(manager: Manager, library: Library) -> None:
    """A library is one of its context's, its pilot's and its devices'."""
    state = manager.state
    state.libraries[library.id] = library
    state.gone_libraries.pop(library.id, None)
    library.context.libraries[library.id] = library
    library.pilot.libraries[library.id] = library
    for device in library.devices:
        device.libraries[library.id] = library


def leave_gap(state: State) -> None:
    """Begin the next libraries' numbers at a round one behind those that may have been given away."""
    state.next_library += LIBRARY_GAP - state.next_library % LIBRARY_GAP


def number_is_known(state: State, number: int) -> None:
    """A pilot knows a library by this number: give it to no other."""
    state.next_library = max(state.next_library, number + 1)


def load(manager: Manager, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int) -> Library:
    """Promise the memory and tell the pilot to start a library. Raises PolicyError where the memory is not there."""
    state = manager.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, 0, state.now)
    promise(library, memory_bytes)
    state.next_library += 1
    attach(manager, library)
    queues.starving(manager, context)
    kind = devices[0].facts.kind
    forms = snapshots.offered(manager, context, kind)
    advice = context.advice.get(kind)
    manager.say(
        pilot,
        StartLibrary(
            library.id, context.recipe, tuple(d.id for d in devices), context.recipe.needs.memory_bytes, memory_bytes,
            snapshots={form: snapshot.object for form, snapshot in forms.items()},
            snapshot_wait_s=max((snapshot.made_s for snapshot in forms.values()), default=0.0),
            planned=objects.plan_for(manager, pilot, context.recipe),
            steps=advice.steps if advice is not None else None,
        ),
    )  # fmt: skip
    manager.changed("libraries", library.id)
    return library


# ---- the end


def stop(manager: Manager, library: Library, *, reason: str) -> None:
    """Tell a library to end after what it runs. Its memory stays promised until the pilot says that it is gone."""
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.note(manager.state.now, f"told to stop: {reason}")
    holding.unsend(manager, library, why=f"back in the queue: lib-{library.id} is to stop")
    indexing.relist(manager, library)
    for device in library.devices:
        tier(manager, device)
    queues.starving(manager, library.context)
    if library.context.queue.gangs:
        holding.serve_after(manager, library.context)
    manager.changed("libraries", library.id)
    manager.say(library.pilot, StopLibrary(library.id, reason))


def lost(manager: Manager, library: Library, *, reason: str) -> None:
    """A library vanished with its pilot. What it ran runs again elsewhere, and is no try of its (see `suspects`)."""
    run_again(manager, min(library.slots, len(library.held)))
    library.note(manager.state.now, f"gone with its pilot: {reason}")
    why = f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
    holding.requeue(manager, detach(manager, library), why=why)


def detach(manager: Manager, library: Library) -> list[Call]:
    """Take a library out of everything that names it, and return the calls that it held, in order."""
    call_records.forgive(manager.state, library)
    held = holding.abandon(manager, library)
    library.state = LibraryState.GONE
    indexing.relist(manager, library)
    promise(library, 0)
    for device in library.devices:
        device.libraries.pop(library.id, None)
        tier(manager, device)
    library.context.libraries.pop(library.id, None)
    library.pilot.libraries.pop(library.id, None)
    library.pilot.used_at = manager.state.now
    manager.state.libraries.pop(library.id, None)
    remembered = manager.state.gone_libraries
    remembered[library.id] = library
    if len(remembered) > KEPT_LIBRARIES:
        del remembered[next(iter(remembered))]
    queues.starving(manager, library.context)
    if library.context.queue.gangs:
        holding.serve_after(manager, library.context)
    manager.supply_changed = True
    manager.changed("libraries", library.id)
    return held


def found(manager: Manager, library: Library, *, reserved_bytes: int, is_hot: bool) -> None:
    """A pilot has a library that the manager did not know of. Raises PolicyError where its memory is not there."""
    promise(library, reserved_bytes)
    library.found(manager.state.now)
    attach(manager, library)
    if is_hot:
        library.state = LibraryState.READY
    for device in library.devices:
        tier(manager, device)
    queues.starving(manager, library.context)
    manager.changed("libraries", library.id)


def back(manager: Manager, library: Library, promised_bytes: int, was: LibraryState) -> None:
    """A library of a pilot that was given up is the manager's again, as it was: hot, loading, or told to stop."""
    library.state = was if was in (LibraryState.STOPPING, LibraryState.READY) else LibraryState.LOADING
    attach(manager, library)
    promise(library, promised_bytes)
    for device in library.devices:
        tier(manager, device)
    library.note(manager.state.now, "back, as it was")
    indexing.relist(manager, library)
    queues.starving(manager, library.context)


def now_ready(manager: Manager, library: Library) -> None:
    """A library holds its context."""
    library.state = LibraryState.READY
    library.ready_at = library.used_at = manager.state.now
    for device in library.devices:
        tier(manager, device)


def is_idle(manager: Manager, library: Library) -> None:
    """A library has nothing to do."""
    library.used_at = manager.state.now


def uses(library: Library, *, memory_bytes: int, device_bytes: int, now: float) -> None:
    """What a library was measured to use."""
    library.memory_bytes, library.device_bytes = memory_bytes, device_bytes
    library.measured.append((now, max(memory_bytes, device_bytes)))
    del library.measured[:-_MOST_MEASURED]


def used_since(library: Library, at: float) -> int:
    """The most that a library was measured to use since then, in bytes of a GPU or of the host, whichever is more; 0 if
    no measurement since then has differed from the one before it."""
    return max((size for when, size in library.measured if when >= at), default=0)


def said_slots(library: Library, slots: int) -> None:
    """A library says how many calls it runs at once (0: it does not say). It has to be listed anew after that."""
    if slots:
        library.slots = slots
        loads.said_slots(library.context, slots)


def run_again(manager: Manager, count: int) -> None:
    """Count calls that were running in a library that is gone, and run again."""
    manager.state.rerun_calls += count


def fail_waiting(manager: Manager, context: Context, failure: Failure) -> None:
    """End every waiting call of a context with this failure; the next one that comes finds a clean slate."""
    loads.clean_slate(manager.state, context)
    for call in list(context.queue):
        if call.state is CallState.WAITING:
            ending.fail(manager, call, failure)

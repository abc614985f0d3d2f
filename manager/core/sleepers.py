"""Manage sleeping libraries: estimate their memory, order sleep and wake-up, and record the pilots' answers.

A library that was ordered to wake counts as loading. It cannot be woken before its pilot has answered the order to
sleep (`Library.slept`). If `sleep` or `wake` fails, the context never sleeps again (docs/decisions/063).
"""

from __future__ import annotations

from stoker.manager.core import holding, libraries
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.core.seams import PolicyError
from stoker.protocol.to_manager import LibraryAsleep, LibraryAwake, LibraryFacts
from stoker.protocol.to_pilot import SleepLibrary, WakeLibrary
from stoker.units import show_bytes, show_seconds

_ESTIMATE_FACTOR = 1.1


def asleep_bytes(library: Library) -> int:
    """Return the bytes that a sleeping library keeps on each device, measured or estimated."""
    context, facts = library.context, library.devices[0].facts
    known = context.asleep.get(facts.kind)
    if known is not None:
        keeps = known[0]
    elif facts.on_host:  # a CPU library keeps its weights, estimated from the memory used after the load
        keeps = int(_ESTIMATE_FACTOR * (context.resident_bytes or library.memory_bytes)) // len(library.devices)
    else:
        keeps = facts.process_bytes
    return min(keeps, library.promised_bytes)


def host_bytes(library: Library) -> int:
    """Return the host memory that a library needs to sleep, measured or estimated; 0 on a CPU device."""
    context, facts = library.context, library.devices[0].facts
    if facts.on_host:
        return 0
    known = context.asleep.get(facts.kind)
    if known is not None:
        return known[1]
    uses = max(context.resident_bytes, library.device_bytes) or library.promised_bytes
    return max(0, uses - facts.process_bytes) * len(library.devices)


def order_sleep(manager: Manager, library: Library) -> None:
    """Put a library to sleep. Raise PolicyError if it cannot sleep now, or its pilot lacks the host memory."""
    keeps, host, pilot = asleep_bytes(library), host_bytes(library), library.pilot
    if library.state is not LibraryState.READY or library.load or library.resizing or not library.sleeps:
        raise PolicyError(
            f"library {library.id} cannot sleep: it is {library.state.value}, with load {library.load}"
            f"{', being resized' * bool(library.resizing)}{'' if library.sleeps else ', and its context cannot'}"
        )
    if host > pilot.free_host_bytes_for_sleep:
        raise PolicyError(
            f"{pilot.id} has {pilot.free_host_bytes_for_sleep} bytes left for sleepers, {host} are needed"
        )
    library.awake_bytes, library.host_bytes = library.promised_bytes, host
    _mark_library_asleep(manager, library, keeps, slept=False)
    library.note(manager.state.now, "falls asleep")
    manager.say(pilot, SleepLibrary(library.id, keeps, host))


def order_wake(manager: Manager, library: Library) -> None:
    """Wake a library. Raise PolicyError if it does not sleep, or its memory before the sleep is not free."""
    if library.state is not LibraryState.ASLEEP or not library.slept:
        raise PolicyError(f"library {library.id} is {library.state.value}; only a sleeping library can be woken")
    libraries.promise(library, max(library.awake_bytes, library.promised_bytes))
    libraries.mark_library_waking(manager, library)
    manager.say(library.pilot, WakeLibrary(library.id, library.promised_bytes))


def _mark_library_asleep(manager: Manager, library: Library, keeps: int, *, slept: bool) -> None:
    for call in tuple(library.held.values()):  # held calls exist only if the journal was lost; the pilot refuses them
        holding.withdraw(manager, call, running=True)
        holding.requeue(manager, (call,), why=f"back in the queue: lib-{library.id} sleeps")
    library.slept = slept
    libraries.promise(library, min(keeps, library.promised_bytes))
    libraries.put_to_sleep(manager, library)


def record_library_asleep(manager: Manager, library: Library, message: LibraryAsleep) -> None:
    keeps, host, state = message.device_memory_bytes, message.host_bytes, manager.state
    library.context.asleep[library.devices[0].facts.kind] = keeps, host
    if library.state is LibraryState.READY:  # the journal lost the manager's order to sleep
        _mark_library_asleep(manager, library, keeps, slept=True)
    if library.state is not LibraryState.ASLEEP:
        return
    room = library.host_bytes + library.pilot.free_host_bytes_for_sleep
    library.slept, library.host_bytes = True, min(host, max(0, room))
    libraries.holds(manager, library, keeps)
    where = f" and {show_bytes(host)} of host memory" if host else ""
    took = f", {show_seconds(message.sleep_s)} to fall asleep" if message.sleep_s else ""
    library.note(state.now, f"asleep: keeps {show_bytes(keeps)} of its device{where}{took}")


def library_awake(manager: Manager, library: Library, message: LibraryAwake) -> bool:
    """Record that a library serves calls again. Return True if the library was not ready before."""
    if library.state not in (LibraryState.ASLEEP, LibraryState.LOADING):
        return False
    library.host_bytes = 0
    libraries.holds(manager, library, message.device_memory_bytes)
    if not message.refused:
        library.context.wake_s = message.wake_s
    library.note(manager.state.now, message.refused or f"awake: {show_seconds(message.wake_s)} to wake")
    return True


def found(library: Library, facts: LibraryFacts) -> None:
    room = max(0, library.pilot.free_host_bytes_for_sleep)
    library.sleeps, library.awake_bytes = facts.sleeps, facts.awake_bytes
    library.host_bytes = min(facts.host_bytes, room)


def compare(manager: Manager, library: Library, facts: LibraryFacts) -> bool:
    """Compare a library with its pilot's hello, and repeat unanswered orders. Return True if it sleeps or wakes."""
    if facts.asleep and library.state in (LibraryState.READY, LibraryState.LOADING) and not library.is_waking:
        library.awake_bytes = facts.awake_bytes
        _mark_library_asleep(manager, library, library.promised_bytes, slept=False)
    if library.is_waking:
        manager.say(library.pilot, WakeLibrary(library.id, library.promised_bytes))
        return True
    if library.state is LibraryState.ASLEEP:
        manager.say(library.pilot, SleepLibrary(library.id, library.promised_bytes, library.host_bytes))
        return True
    return False

"""Manage libraries from their load to their end, with their promised memory, failed loads, snapshots and sleep.

Snapshots of loaded contexts (`stoker.contexts.snapshot`) are stored by recipe and device kind. A pilot waits for a
snapshot at most as long as its creation took.

A library that was ordered to wake counts as loading. A sleeping library can wake only after its pilot has answered the
order to sleep (`Library.slept`). If `sleep` or `wake` fails, the context never sleeps again (docs/decisions/063).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.manager.core import blame, ending, holding, objects, queues
from stoker.manager.core.events import ContextAdvice, RecordSteps
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState, Pilot
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import State, forget_oldest
from stoker.manager.core.transfers import Snapshot
from stoker.protocol import to_manager
from stoker.protocol.calls import Failure
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_manager import LibraryPhase
from stoker.protocol.to_pilot import ResizeLibrary, SleepLibrary, StartLibrary, StopLibrary, WakeLibrary
from stoker.units import show_bytes, show_seconds

LOAD_TRIES = 2  # Failed loads in a row after which the waiting calls of a context fail
LOADS = 4  # Waiting calls of a context fail if this many pilots in a row were lost while loading only that context


def apply_load_advice(context: Context, by_kind: Mapping[str, ContextAdvice], *, source: str) -> None:
    if not context.loads and not context.advice:
        context.advised_by = source
    slots = [advice.slots for advice in by_kind.values() if advice.slots]
    if slots and not context.recipe.slots and not context.loads:
        context.slots = min(slots)  # the smallest, because the device kind of the next load is unknown
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.load_s:
            context.load_s = advice.load_s


def record_load(library: Library, message: to_manager.LibraryReady) -> None:
    context, facts = library.context, library.devices[0].facts
    seconds = context.load_s = message.start_s + message.load_s + message.fetch_s
    context.loads += 1
    context.load_total_s += seconds
    # On a GPU only the device memory counts.
    context.resident_bytes = message.resident_bytes if facts.on_host else message.device_bytes
    peak_bytes = message.peak_bytes if facts.on_host else message.device_bytes
    before = context.advice.get(facts.kind, ContextAdvice())
    context.advice[facts.kind] = ContextAdvice(
        seconds, context.resident_bytes, peak_bytes, context.run_s, slots=library.slots, steps=before.steps,
        speed=before.speed, cache=message.cache,
    )  # fmt: skip


def record_failed_load(library: Library, failure: Failure) -> bool:
    context = library.context
    context.load_failures += 1
    context.last_failure = failure
    context.failed_on[library.pilot.id] = context.failed_on.get(library.pilot.id, 0) + 1
    return has_too_many_failed_loads(context)


def has_too_many_failed_loads(context: Context) -> bool:
    return context.load_failures >= LOAD_TRIES


def forget_failures_on_gone_pilots(state: State) -> None:
    for context in state.contexts.values():
        context.failed_on = {name: count for name, count in context.failed_on.items() if name in state.pilots}


def register_snapshot(manager: Manager, pilot: Pilot, message: to_manager.SnapshotHere) -> None:
    if message.recipe not in manager.state.contexts:
        manager.state.refuse("snapshot of an unknown context")
        return
    snapshot = Snapshot(message.form, message.object, message.made_s)
    if message.manifest:
        objects.define_manifest(manager, message.object.name, message.manifest)
    arrival = to_manager.ObjectArrival(message.object.name, message.object.size_bytes)
    objects.record_arrived_objects(manager, pilot, to_manager.ObjectsHere((arrival,)))
    for kind in dict.fromkeys(device.facts.kind for device in pilot.devices.values()):
        known = manager.state.transfers.snapshots.setdefault(message.recipe, {}).setdefault(kind, {})
        if message.form not in known or not _is_snapshot_available(manager, known[message.form]):
            known[message.form] = snapshot


def _is_snapshot_available(manager: Manager, snapshot: Snapshot) -> bool:
    object = manager.state.transfers.objects.get(snapshot.object.name)
    return object is not None and bool(object.whole)


_MOST_MEASURED = 64  # Number of newest memory measurements that are kept for each library
KEPT_LIBRARIES = 200  # Number of ended libraries whose histories are kept


def promise(library: Library, memory_bytes: int) -> None:
    """Promise a library memory on each of its devices, in bytes. Raise PolicyError if a device lacks this memory."""
    if memory_bytes < 0:
        raise PolicyError(f"{memory_bytes} bytes cannot be promised: the number is negative")
    more = memory_bytes - library.promised_bytes
    for device in library.devices:
        if more > 0 and device.budget_bytes < more and library.state is not LibraryState.STOPPING:
            raise PolicyError(
                f"{device.id} of {library.pilot.id} has {device.budget_bytes} bytes left;"
                f" {library.context.recipe.name} wants {more} more"
            )
    for device in library.devices:
        device.promised_bytes += more
    library.promised_bytes = memory_bytes


def resize(manager: Manager, library: Library, memory_bytes: int, *, orders: bool = True) -> None:
    """Change a library's promised memory. `orders`: False if another order tells the pilot the new size."""
    promise(library, memory_bytes)
    library.resizing.append(memory_bytes)
    if orders:
        manager.say(library.pilot, ResizeLibrary(library.id, memory_bytes))


def adopt_pilot_memory_promise(library: Library, memory_bytes: int) -> None:
    """Record that the pilot has changed a library's memory. The promise is at most the devices' free memory."""
    promise(library, min(memory_bytes, _most_bytes(library)))
    library.resizing.append(memory_bytes)


def _most_bytes(library: Library) -> int:
    return library.promised_bytes + max(0, min(device.budget_bytes for device in library.devices))


def resized(manager: Manager, library: Library, message: to_manager.LibraryResized) -> None:
    size, waiting = message.device_memory_bytes, library.resizing
    if message.measured:
        holds(manager, library, size)
        return
    ordered = message.ordered_bytes if message.ordered_bytes >= 0 else size
    if not waiting or (message.ordered_bytes >= 0 and ordered not in waiting):
        # After a hello the manager repeats its last order, so the pilot may answer this order twice.
        manager.state.refuse("resize that the manager did not order")
        return
    answered = waiting.index(ordered) + 1 if ordered in waiting else 1
    del waiting[:answered]
    if not waiting:  # otherwise the last order is not answered yet
        holds(manager, library, size)


def holds(manager: Manager, library: Library, size: int) -> None:
    """Promise a library the `size` bytes of memory that it uses, but at most the free memory of its devices."""
    most = _most_bytes(library)
    if size > most:
        library.note(manager.state.now, f"uses {show_bytes(size)} of its device, more than is free")
    promise(library, min(size, most))
    manager.changed("libraries", library.id)
    manager.supply_changed = True


def update_tiers(manager: Manager, devices: Iterable[Device]) -> None:
    tiers, now = manager.state.tier_seconds, manager.state.now
    for device in devices:
        tiers[device.tier] = tiers.get(device.tier, 0.0) + now - device.tier_since
        device.tier_since = now
        warm = any(library.state is LibraryState.READY for library in device.libraries.values())
        device.tier = "warm" if warm else "cold"


def _owners(manager: Manager, library: Library) -> tuple[Device | Context | Pilot | State, ...]:
    return *library.devices, library.context, library.pilot, manager.state


def _attach_library(manager: Manager, library: Library) -> None:
    manager.state.gone_libraries.pop(library.id, None)
    for owner in _owners(manager, library):
        owner.libraries[library.id] = library


def load_library(
    manager: Manager, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int
) -> None:
    """Promise memory to a new library and start it. Raise PolicyError if the memory is not free."""
    state = manager.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, state.now)
    promise(library, memory_bytes)
    state.next_library += 1
    _attach_library(manager, library)
    queues.update_starved_since(manager, context)
    kind = devices[0].facts.kind
    known = state.transfers.snapshots.get(context.recipe.key, {}).get(kind, {})
    forms = {form: snapshot for form, snapshot in known.items() if _is_snapshot_available(manager, snapshot)}
    advice = context.advice.get(kind)
    order = StartLibrary(
        library.id, context.recipe, tuple(d.id for d in devices), context.recipe.needs.memory_bytes, memory_bytes,
        snapshots={form: snapshot.object for form, snapshot in forms.items()},
        snapshot_wait_s=max((snapshot.made_s for snapshot in forms.values()), default=0.0),
        planned=objects.plan_recipe_fetches(manager, pilot, context.recipe),
        steps=advice.steps if advice is not None else None
    )  # fmt: skip
    manager.say(pilot, order)
    manager.changed("libraries", library.id)


def stop_library(manager: Manager, library: Library, *, reason: str) -> None:
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.note(manager.state.now, f"stopping: {reason}")
    holding.requeue_unsent_calls(manager, library, why=f"back in the queue: lib-{library.id} stops")
    _stop_serving(manager, library)
    manager.say(library.pilot, StopLibrary(library.id, reason))


def _stop_serving(manager: Manager, library: Library) -> None:
    queues.update_load_index(manager, library)
    update_tiers(manager, library.devices)
    queues.update_starved_since(manager, library.context)
    if library.context.queue.gangs:
        holding.schedule_queue_serving(manager, library.context)
    manager.changed("libraries", library.id)


def remove_lost_library(manager: Manager, library: Library, *, reason: str) -> None:
    manager.state.rerun_calls += min(library.slots, len(library.held))
    library.note(manager.state.now, f"lost with its pilot: {reason}")
    why = f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
    holding.requeue(manager, detach_library(manager, library), why=why)


def detach_library(manager: Manager, library: Library) -> list[Call]:
    """Remove an ended library. Return the calls that the library held."""
    holding.forgive_broken_gangs(manager.state, library)
    held = holding.release_library_calls(manager, library)
    library.state = LibraryState.GONE
    promise(library, 0)
    for owner in _owners(manager, library):
        owner.libraries.pop(library.id, None)
    library.pilot.used_at = manager.state.now
    manager.state.gone_libraries[library.id] = library
    forget_oldest(manager.state.gone_libraries, most=KEPT_LIBRARIES)
    _stop_serving(manager, library)
    manager.supply_changed = True
    return held


def adopt_found_library(manager: Manager, library: Library, *, reserved_bytes: int, is_hot: bool) -> None:
    """Record a library that the manager did not know. Raise PolicyError if its memory is not free."""
    promise(library, reserved_bytes)
    places = ", ".join(device.id for device in library.devices)
    library.notes = [(manager.state.now, f"found on {places}: the manager did not know of it")]
    _attach_library(manager, library)
    if is_hot:
        library.state = LibraryState.READY
    update_tiers(manager, library.devices)
    queues.update_starved_since(manager, library.context)
    manager.changed("libraries", library.id)


def readmit_libraries(manager: Manager, pilot: Pilot, there: Iterable[to_manager.LibraryFacts]) -> None:
    """Restore the libraries of a returned pilot that are listed in the pilot's hello."""
    kept, pilot.kept = pilot.kept or {}, None
    for device in pilot.devices.values():
        device.tier_since = manager.state.now
    for facts in there:
        if facts.library not in kept:
            continue
        library, promised_bytes, was = kept[facts.library]
        library.state = was
        _attach_library(manager, library)
        promise(library, promised_bytes)
        update_tiers(manager, library.devices)
        library.note(manager.state.now, "reconnected with its pilot")
        queues.update_load_index(manager, library)
        queues.update_starved_since(manager, library.context)


def mark_ready(manager: Manager, library: Library) -> None:
    context = library.context
    library.state = LibraryState.READY
    library.ready_at = library.used_at = manager.state.now
    update_tiers(manager, library.devices)
    context.load_failures = context.cut_loads = 0
    context.lost_loads.clear()
    context.last_failure = None
    context.failed_on.pop(library.pilot.id, None)
    blame.mark_pilot_fit(library.pilot, context.recipe.key)


def update_phase(manager: Manager, library: Library, message: to_manager.LibraryUpdate) -> None:
    if message.phase is not library.phase or not message.line:
        library.note(manager.state.now, message.phase.value)
    library.phase, library.line = message.phase, message.line


def record_engine_load(manager: Manager, library: Library, message: to_manager.LibraryBatch) -> None:
    library.batch, library.batch_at = message.load, manager.state.now
    manager.changed("libraries", library.id)
    if message.times.samples:
        manager.out.append(RecordSteps(RecipeKey(library.context.recipe.key), library.kind, message.times))


def record_memory_use(library: Library, memory_bytes: int, device_bytes: int, *, now: float) -> None:
    library.memory_bytes, library.device_bytes = memory_bytes, device_bytes
    library.measured.append((now, max(memory_bytes, device_bytes)))
    del library.measured[:-_MOST_MEASURED]


def set_slots(library: Library, slots: int) -> None:
    if slots:
        library.slots = library.context.slots = slots


def fail_waiting_calls(manager: Manager, context: Context, failure: Failure) -> None:
    context.load_failures = context.cut_loads = 0
    context.failed_on.clear()
    for pilot in manager.state.pilots.values():
        blame.mark_pilot_fit(pilot, context.recipe.key)
    for call in list(context.queue):
        if call.state is CallState.WAITING:
            ending.fail_call(manager, call, failure)


# ---- sleep
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
            f"{', is being resized' * bool(library.resizing)}{'' if library.sleeps else ', its context cannot sleep'}"
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
    """Wake a library. Raise PolicyError if it is not asleep, or if its devices lack the memory that it had."""
    if library.state is not LibraryState.ASLEEP or not library.slept:
        raise PolicyError(f"library {library.id} is {library.state.value}; only a sleeping library can be woken")
    promise(library, max(library.awake_bytes, library.promised_bytes))
    library.state, library.phase = LibraryState.LOADING, LibraryPhase.WAKING
    library.started_at = manager.state.now
    library.note(manager.state.now, "wakes")
    queues.update_starved_since(manager, library.context)
    manager.changed("libraries", library.id)
    manager.say(library.pilot, WakeLibrary(library.id, library.promised_bytes))


def _mark_library_asleep(manager: Manager, library: Library, keeps: int, *, slept: bool) -> None:
    for call in tuple(library.held.values()):  # held calls exist only if the journal was lost; the pilot refuses them
        holding.withdraw(manager, call, running=True)
        holding.requeue(manager, (call,), why=f"back in the queue: lib-{library.id} sleeps")
    library.slept = slept
    promise(library, min(keeps, library.promised_bytes))
    library.state = LibraryState.ASLEEP
    _stop_serving(manager, library)


def record_library_asleep(manager: Manager, library: Library, message: to_manager.LibraryAsleep) -> None:
    keeps, host, state = message.device_memory_bytes, message.host_bytes, manager.state
    library.context.asleep[library.kind] = keeps, host
    if library.state is LibraryState.READY:  # the journal lost the manager's order to sleep
        _mark_library_asleep(manager, library, keeps, slept=True)
    if library.state is not LibraryState.ASLEEP:
        return
    room = library.host_bytes + library.pilot.free_host_bytes_for_sleep
    library.slept, library.host_bytes = True, min(host, max(0, room))
    holds(manager, library, keeps)
    where = f" and {show_bytes(host)} of host memory" if host else ""
    took = f", {show_seconds(message.sleep_s)} to fall asleep" if message.sleep_s else ""
    library.note(state.now, f"asleep: keeps {show_bytes(keeps)} of its device{where}{took}")


def record_library_awake(manager: Manager, library: Library, message: to_manager.LibraryAwake) -> bool:
    """Record that a library serves calls again. Return True if the library was not ready before."""
    if library.state not in (LibraryState.ASLEEP, LibraryState.LOADING):
        return False
    library.host_bytes = 0
    holds(manager, library, message.device_memory_bytes)
    if not message.refused:
        library.context.wake_s = message.wake_s
    library.note(manager.state.now, message.refused or f"awake: {show_seconds(message.wake_s)} to wake")
    return True


def resume_sleeper(manager: Manager, library: Library, facts: to_manager.LibraryFacts) -> bool:
    """Compare a library with its pilot's hello, and repeat an unanswered order. Return True if the library sleeps or
    wakes.
    """
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

"""Manage libraries from their load to their end: promised memory, failed loads, snapshots and sleep.

Snapshots of loaded contexts (`stoker.contexts.snapshot`) are stored by recipe and device kind. A pilot waits for a
snapshot at most as long as the snapshot took to create.

A library that was ordered to wake counts as loading. It can wake only after its pilot has confirmed that it sleeps
(`Library.has_confirmed_sleep`). If a library fails to sleep or wake, its context never sleeps again
(docs/decisions/063).
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

MAX_FAILED_LOADS = 2  # After this many failed loads in a row, the waiting calls of the context fail
MAX_PILOTS_LOST_WHILE_LOADING = 4  # Waiting calls of a context fail if this many pilots were lost while they loaded it


def apply_load_advice(context: Context, by_kind: Mapping[str, ContextAdvice], *, source: str) -> None:
    if not context.loads and not context.advice:
        context.advised_by = source
    slots = [advice.slots for advice in by_kind.values() if advice.slots]
    if slots and not context.recipe.slots and not context.loads:
        context.slots = min(slots)  # the device kind of the next load is unknown, so use the smallest number
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.load_s:
            context.load_s = advice.load_s


def record_load(library: Library, message: to_manager.LibraryReady) -> None:
    context, facts = library.context, library.devices[0].facts
    seconds = context.load_s = message.start_s + message.load_s + message.fetch_s
    context.loads += 1
    context.load_total_s += seconds
    # A library on a GPU is limited by its device memory, so ignore its host memory.
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
    context.failed_loads_by_pilot[library.pilot.id] = context.failed_loads_by_pilot.get(library.pilot.id, 0) + 1
    return has_too_many_failed_loads(context)


def has_too_many_failed_loads(context: Context) -> bool:
    return context.load_failures >= MAX_FAILED_LOADS


def forget_failures_on_gone_pilots(state: State) -> None:
    for context in state.contexts.values():
        context.failed_loads_by_pilot = {
            name: count for name, count in context.failed_loads_by_pilot.items() if name in state.pilots
        }


def register_snapshot(manager: Manager, pilot: Pilot, message: to_manager.SnapshotWritten) -> None:
    if message.recipe not in manager.state.contexts:
        manager.state.count_refusal("snapshot of an unknown context")
        return
    snapshot = Snapshot(message.form, message.object, message.made_s)
    if message.manifest:
        objects.define_manifest(manager, message.object.name, message.manifest)
    arrival = to_manager.ObjectArrival(message.object.name, message.object.size_bytes)
    objects.record_arrived_objects(manager, pilot, to_manager.ObjectsCached((arrival,)))
    for kind in dict.fromkeys(device.facts.kind for device in pilot.devices.values()):
        known = manager.state.transfers.snapshots.setdefault(message.recipe, {}).setdefault(kind, {})
        if message.form not in known or not _is_snapshot_available(manager, known[message.form]):
            known[message.form] = snapshot


def _is_snapshot_available(manager: Manager, snapshot: Snapshot) -> bool:
    object = manager.state.transfers.objects.get(snapshot.object.name)
    return object is not None and bool(object.whole)


_MAX_MEASUREMENTS = 64  # Number of newest memory measurements that are kept for each library
KEPT_LIBRARIES = 200  # Maximum number of ended libraries whose histories are kept


def promise_memory(library: Library, memory_bytes: int) -> None:
    """Promise a library this many bytes on each of its devices. Raise PolicyError if a device has too little memory."""
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


def change_promised_memory(manager: Manager, library: Library, memory_bytes: int, *, sends_order: bool = True) -> None:
    """Change the promised memory of a library. `sends_order`: False if the pilot learns the size from another order."""
    promise_memory(library, memory_bytes)
    library.unanswered_resizes.append(memory_bytes)
    if sends_order:
        manager.send_to_pilot(library.pilot, ResizeLibrary(library.id, memory_bytes))


def adopt_pilot_memory_promise(library: Library, memory_bytes: int) -> None:
    """Promise a library the memory that its pilot has given it, but at most the free memory of its devices."""
    promise_memory(library, min(memory_bytes, _max_promised_bytes(library)))
    library.unanswered_resizes.append(memory_bytes)


def _max_promised_bytes(library: Library) -> int:
    return library.promised_bytes + max(0, min(device.budget_bytes for device in library.devices))


def handle_resize_answer(manager: Manager, library: Library, message: to_manager.LibraryResized) -> None:
    size, waiting = message.device_memory_bytes, library.unanswered_resizes
    if message.measured:
        promise_used_memory(manager, library, size)
        return
    ordered = message.ordered_bytes if message.ordered_bytes >= 0 else size
    if not waiting or (message.ordered_bytes >= 0 and ordered not in waiting):
        # After a reconnection, the manager repeats its last order, so the pilot may answer the same order twice.
        manager.state.count_refusal("resize that the manager did not order")
        return
    answered = waiting.index(ordered) + 1 if ordered in waiting else 1
    del waiting[:answered]
    if not waiting:  # otherwise the pilot still has to answer a newer order
        promise_used_memory(manager, library, size)


def promise_used_memory(manager: Manager, library: Library, used_bytes: int) -> None:
    """Promise a library the `used_bytes` bytes of memory that it uses, but at most the free memory of its devices."""
    most = _max_promised_bytes(library)
    if used_bytes > most:
        library.note(manager.state.now, f"uses {show_bytes(used_bytes)} of its device, more than is free")
    promise_memory(library, min(used_bytes, most))
    manager.mark_changed("libraries", library.id)
    manager.supply_changed = True


def update_device_tiers(manager: Manager, devices: Iterable[Device]) -> None:
    tiers, now = manager.state.tier_seconds, manager.state.now
    for device in devices:
        tiers[device.tier] = tiers.get(device.tier, 0.0) + now - device.tier_since
        device.tier_since = now
        warm = any(library.state is LibraryState.READY for library in device.libraries.values())
        device.tier = "warm" if warm else "cold"


def _records_with_libraries(manager: Manager, library: Library) -> tuple[Device | Context | Pilot | State, ...]:
    return *library.devices, library.context, library.pilot, manager.state


def _attach_library(manager: Manager, library: Library) -> None:
    manager.state.gone_libraries.pop(library.id, None)
    for owner in _records_with_libraries(manager, library):
        owner.libraries[library.id] = library


def load_library(
    manager: Manager, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int
) -> None:
    """Promise memory to a new library and start it. Raise PolicyError if the memory is not free."""
    state = manager.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, state.now)
    promise_memory(library, memory_bytes)
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
    manager.send_to_pilot(pilot, order)
    manager.mark_changed("libraries", library.id)


def stop_library(manager: Manager, library: Library, *, reason: str) -> None:
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.note(manager.state.now, f"stopping: {reason}")
    holding.requeue_unsent_calls(manager, library, why=f"back in the queue: lib-{library.id} stops")
    _stop_serving(manager, library)
    manager.send_to_pilot(library.pilot, StopLibrary(library.id, reason))


def _stop_serving(manager: Manager, library: Library) -> None:
    queues.update_load_index(manager, library)
    update_device_tiers(manager, library.devices)
    queues.update_starved_since(manager, library.context)
    if library.context.queue.gang_count:
        holding.schedule_queue_serving(manager, library.context)
    manager.mark_changed("libraries", library.id)


def remove_lost_library(manager: Manager, library: Library, *, reason: str) -> None:
    manager.state.rerun_calls += min(library.slots, len(library.held))
    library.note(manager.state.now, f"lost with its pilot: {reason}")
    why = f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
    holding.requeue_calls(manager, detach_library(manager, library), why=why)


def detach_library(manager: Manager, library: Library) -> list[Call]:
    """Remove an ended library. Return the calls that the library held."""
    holding.uncount_broken_gang_runs(manager.state, library)
    held = holding.release_library_calls(manager, library)
    library.state = LibraryState.GONE
    promise_memory(library, 0)
    for owner in _records_with_libraries(manager, library):
        owner.libraries.pop(library.id, None)
    library.pilot.used_at = manager.state.now
    manager.state.gone_libraries[library.id] = library
    forget_oldest(manager.state.gone_libraries, max_records=KEPT_LIBRARIES)
    _stop_serving(manager, library)
    manager.supply_changed = True
    return held


def adopt_found_library(manager: Manager, library: Library, *, reserved_bytes: int, is_loaded: bool) -> None:
    """Record a library that only its pilot knew. Raise PolicyError if its memory is not free."""
    promise_memory(library, reserved_bytes)
    places = ", ".join(device.id for device in library.devices)
    library.notes = [(manager.state.now, f"found on {places}: the manager did not know of it")]
    _attach_library(manager, library)
    if is_loaded:
        library.state = LibraryState.READY
    update_device_tiers(manager, library.devices)
    queues.update_starved_since(manager, library.context)
    manager.mark_changed("libraries", library.id)


def restore_returned_libraries(manager: Manager, pilot: Pilot, there: Iterable[to_manager.LibraryFacts]) -> None:
    """Restore those libraries of a returned pilot that are listed in its hello."""
    kept, pilot.restorable_libraries = pilot.restorable_libraries or {}, None
    for device in pilot.devices.values():
        device.tier_since = manager.state.now
    for facts in there:
        if facts.library not in kept:
            continue
        library, promised_bytes, was = kept[facts.library]
        library.state = was
        _attach_library(manager, library)
        promise_memory(library, promised_bytes)
        update_device_tiers(manager, library.devices)
        library.note(manager.state.now, "reconnected with its pilot")
        queues.update_load_index(manager, library)
        queues.update_starved_since(manager, library.context)


def mark_library_ready(manager: Manager, library: Library) -> None:
    context = library.context
    library.state = LibraryState.READY
    library.ready_at = library.used_at = manager.state.now
    update_device_tiers(manager, library.devices)
    context.load_failures = context.loads_cut_by_walltime = 0
    context.pilots_lost_while_loading.clear()
    context.last_failure = None
    context.failed_loads_by_pilot.pop(library.pilot.id, None)
    blame.mark_pilot_fit(library.pilot, context.recipe.key)


def update_loading_phase(manager: Manager, library: Library, message: to_manager.LibraryUpdate) -> None:
    if message.phase is not library.phase or not message.line:
        library.note(manager.state.now, message.phase.value)
    library.phase, library.last_output_line = message.phase, message.line


def record_engine_load(manager: Manager, library: Library, message: to_manager.LibraryEngineReport) -> None:
    library.batch, library.batch_at = message.load, manager.state.now
    manager.mark_changed("libraries", library.id)
    if message.times.sample_count:
        manager.commands.append(RecordSteps(RecipeKey(library.context.recipe.key), library.kind, message.times))


def record_memory_use(library: Library, memory_bytes: int, device_bytes: int, *, now: float) -> None:
    library.memory_bytes, library.device_bytes = memory_bytes, device_bytes
    library.memory_measurements.append((now, max(memory_bytes, device_bytes)))
    del library.memory_measurements[:-_MAX_MEASUREMENTS]


def set_library_slots(library: Library, slots: int) -> None:
    if slots:
        library.slots = library.context.slots = slots


def fail_waiting_calls(manager: Manager, context: Context, failure: Failure) -> None:
    context.load_failures = context.loads_cut_by_walltime = 0
    context.failed_loads_by_pilot.clear()
    for pilot in manager.state.pilots.values():
        blame.mark_pilot_fit(pilot, context.recipe.key)
    for call in list(context.queue):
        if call.state is CallState.WAITING:
            ending.fail_call(manager, call, failure)


# ---- sleep
_MEMORY_SAFETY_FACTOR = 1.1


def device_bytes_while_asleep(library: Library) -> int:
    """Return the bytes that a library keeps on each device while it sleeps, measured or estimated."""
    context, facts = library.context, library.devices[0].facts
    known = context.asleep.get(facts.kind)
    if known is not None:
        keeps = known[0]
    elif facts.on_host:  # a CPU library keeps its weights; estimate their size by the memory use after the load
        keeps = int(_MEMORY_SAFETY_FACTOR * (context.resident_bytes or library.memory_bytes)) // len(library.devices)
    else:
        keeps = facts.process_bytes
    return min(keeps, library.promised_bytes)


def host_bytes_for_sleep(library: Library) -> int:
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
    keeps, host, pilot = device_bytes_while_asleep(library), host_bytes_for_sleep(library), library.pilot
    if library.state is not LibraryState.READY or library.load or library.unanswered_resizes or not library.can_sleep:
        raise PolicyError(
            f"library {library.id} cannot sleep: it is {library.state.value}, with load {library.load}"
            f"{', is being resized' * bool(library.unanswered_resizes)}"
            f"{'' if library.can_sleep else ', its context cannot sleep'}"
        )
    if host > pilot.free_host_bytes_for_sleep:
        raise PolicyError(
            f"{pilot.id} has {pilot.free_host_bytes_for_sleep} bytes left for sleepers, {host} are needed"
        )
    library.awake_bytes, library.host_bytes = library.promised_bytes, host
    _mark_library_asleep(manager, library, keeps, has_confirmed=False)
    library.note(manager.state.now, "falls asleep")
    manager.send_to_pilot(pilot, SleepLibrary(library.id, keeps, host))


def order_wake(manager: Manager, library: Library) -> None:
    """Wake a library. Raise PolicyError if it is not asleep, or if the devices have too little free memory for it."""
    if library.state is not LibraryState.ASLEEP or not library.has_confirmed_sleep:
        raise PolicyError(f"library {library.id} is {library.state.value}; only a sleeping library can be woken")
    promise_memory(library, max(library.awake_bytes, library.promised_bytes))
    library.state, library.phase = LibraryState.LOADING, LibraryPhase.WAKING
    library.started_at = manager.state.now
    library.note(manager.state.now, "wakes")
    queues.update_starved_since(manager, library.context)
    manager.mark_changed("libraries", library.id)
    manager.send_to_pilot(library.pilot, WakeLibrary(library.id, library.promised_bytes))


def _mark_library_asleep(manager: Manager, library: Library, kept_bytes: int, *, has_confirmed: bool) -> None:
    for call in tuple(library.held.values()):  # calls are here only if the journal lost records; the pilot refuses them
        holding.withdraw_call(manager, call, stops_running=True)
        holding.requeue_calls(manager, (call,), why=f"back in the queue: lib-{library.id} sleeps")
    library.has_confirmed_sleep = has_confirmed
    promise_memory(library, min(kept_bytes, library.promised_bytes))
    library.state = LibraryState.ASLEEP
    _stop_serving(manager, library)


def record_library_asleep(manager: Manager, library: Library, message: to_manager.LibraryAsleep) -> None:
    keeps, host, state = message.device_memory_bytes, message.host_bytes, manager.state
    library.context.asleep[library.kind] = keeps, host
    if library.state is LibraryState.READY:  # the journal lost the manager's order to sleep
        _mark_library_asleep(manager, library, keeps, has_confirmed=True)
    if library.state is not LibraryState.ASLEEP:
        return
    room = library.host_bytes + library.pilot.free_host_bytes_for_sleep
    library.has_confirmed_sleep, library.host_bytes = True, min(host, max(0, room))
    promise_used_memory(manager, library, keeps)
    where = f" and {show_bytes(host)} of host memory" if host else ""
    took = f", {show_seconds(message.sleep_s)} to fall asleep" if message.sleep_s else ""
    library.note(state.now, f"asleep: keeps {show_bytes(keeps)} of its device{where}{took}")


def record_library_awake(manager: Manager, library: Library, message: to_manager.LibraryAwake) -> bool:
    """Record that a library is awake. Return True if it must start to serve calls now."""
    if library.state not in (LibraryState.ASLEEP, LibraryState.LOADING):
        return False
    library.host_bytes = 0
    promise_used_memory(manager, library, message.device_memory_bytes)
    if not message.refused:
        library.context.wake_s = message.wake_s
    library.note(manager.state.now, message.refused or f"awake: {show_seconds(message.wake_s)} to wake")
    return True


def repeat_sleep_or_wake_order(manager: Manager, library: Library, facts: to_manager.LibraryFacts) -> bool:
    """After a reconnection, repeat the order to sleep or wake, because it may have been lost. Return True if the
    library sleeps or wakes.
    """
    if facts.asleep and library.state in (LibraryState.READY, LibraryState.LOADING) and not library.is_waking:
        library.awake_bytes = facts.awake_bytes
        _mark_library_asleep(manager, library, library.promised_bytes, has_confirmed=False)
    if library.is_waking:
        manager.send_to_pilot(library.pilot, WakeLibrary(library.id, library.promised_bytes))
        return True
    if library.state is LibraryState.ASLEEP:
        manager.send_to_pilot(library.pilot, SleepLibrary(library.id, library.promised_bytes, library.host_bytes))
        return True
    return False

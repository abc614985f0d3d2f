"""Starts a library in four steps: folder, objects and snapshots, memory, process. Also stores engines' step times."""

from __future__ import annotations

from stoker.contexts.recipe import Awareness
from stoker.contexts.step_times import StepTimes
from stoker.pilot.core import lifecycle, memory, objects, running, sleeping
from stoker.pilot.core.commands import PinObjects, PrepareLibrary, SetTimer, Severity, StartProcess
from stoker.pilot.core.events import FetchFailure, LibraryPrepared, ObjectArrived, ObjectsPinned, ProcessEnded
from stoker.pilot.core.running import make_load_failure
from stoker.pilot.core.state import CoreState, PilotLibrary, Stage
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.to_manager import LibraryGone, LibraryPhase, LibraryUpdate
from stoker.protocol.to_pilot import StartLibrary
from stoker.units import show_bytes


# ---- step times of engines
def learn_step_times(state: CoreState, library: PilotLibrary, times: StepTimes | None) -> None:
    if times is None or not times.sample_count or not times.has_plausible_numbers():
        return
    key = _step_times_key(state, library)
    known = state.step_times.get(key)
    state.step_times[key] = times if known is None else known.joined_with(times)


def known_step_times(state: CoreState, library: PilotLibrary) -> StepTimes | None:
    """Return the measured step times of a library's engine; None until prefill and decode are both measured."""
    times = state.step_times.get(_step_times_key(state, library))
    return times if times is not None and times.prefill and times.decode else None


def _step_times_key(state: CoreState, library: PilotLibrary) -> tuple[str, str]:
    return library.recipe.key, state.devices_of(library)[0].kind


# ---- starting
def start_library(state: CoreState, message: StartLibrary) -> None:
    number = message.library
    state.last_library = max(state.last_library, number)
    if number in state.libraries or number in state.ended_libraries:
        return  # a repeated order
    reason = f"the pilot is leaving: {state.leaving}" if state.leaving else ""
    reason = reason or state.ledger.explain_impossible_size(message.devices, message.device_memory_bytes)
    if reason:
        state.write_log(f"lib-{number} refused: {reason}", Severity.WARNING)
        failure = Failure(kind=FailureKind.CONTEXT, message=reason, pilot=state.facts.pilot, library=number)
        state.tell_manager(LibraryGone(library=number, failure=None if state.leaving else failure, loading=True))
        return
    library = state.libraries[number] = PilotLibrary(message, state.now)
    if _step_times_key(state, library) not in state.step_times:  # otherwise this pilot has newer measurements
        learn_step_times(state, library, message.steps)
    objects.record_planned_fetches(state, library)
    state.commands.append(PrepareLibrary(message))


def check_node_and_fetch_objects(state: CoreState, library: PilotLibrary, event: LibraryPrepared) -> None:
    """Check this node against the needs of a library, then fetch the library's objects."""
    if library.stage is not Stage.FETCHING or library.missing_objects or library.awaits_snapshots:
        return  # a repeated event
    recipe, facts = library.recipe, state.facts
    advice = "free disk space there, or set [pilot] scratch to another disk"
    if event.error:
        what = f"{facts.pilot} cannot create a folder for a library: {event.error}; {advice}"
        refuse_start(state, library, what)
        return
    from_sources = recipe.awareness is Awareness.NONE and not facts.is_carried
    needed = recipe.needs.disk_bytes
    lacks_disk = event.free_disk_bytes < needed
    if lacks_disk or (recipe.objects and not from_sources) or library.ordered.snapshots:
        state.tell_manager(LibraryUpdate(library=library.number, phase=LibraryPhase.FETCHING))
    if lacks_disk:
        what = (
            f"{facts.pilot} has {show_bytes(event.free_disk_bytes)} free on its scratch disk, and {recipe.name} needs "
            f"{show_bytes(needed)} (@context(disk=...)); {advice}"
        )
        refuse_start(state, library, what)
        return
    ordered = library.ordered
    if ordered.snapshot_wait_s > 0:
        here = frozenset(event.snapshots_here)
        library.snapshot_forms = {ref.name: form for form, ref in ordered.snapshots.items() if form not in here}
    if recipe.objects and not from_sources:
        sizes, bound = {ref.name: ref.size_bytes for ref in recipe.objects}, facts.cache_bound_bytes
        size = sum(sizes.values())
        if size > bound and len(sizes) > 1:  # a single object that is too large is reported by the cache, with its name
            why = f"its files ({show_bytes(size)}) are larger than the whole cache ({show_bytes(bound)}); raise"
            why += " [pilot] cache_size (--cache-size)"
            fail_start(state, library, FetchFailure(why, is_pilots_fault=True))
            return
        library.missing_objects = set(sizes)
        state.commands.append(PinObjects(library.number, recipe.objects))
    elif event.changed:
        why = f"{event.changed} has changed since the recipe was made; make the recipe again"
        fail_start(state, library, FetchFailure(why))
    else:
        library.paths = {ref.name: ref.source for ref in recipe.objects}
        _pin_snapshots_or_start(state, library)


def continue_with_pinned_objects(state: CoreState, library: PilotLibrary, event: ObjectsPinned) -> None:
    if library.stage is not Stage.FETCHING:
        return
    if event.failed is not None:
        handle_missing_objects(state, library, event.failed)
        return
    library.paths.update(event.paths)
    objects.report_cached_objects(state, event.paths)
    library.has_pins |= bool(event.paths)
    library.missing_objects -= event.paths.keys()
    refs = {ref.name: ref for ref in (*library.recipe.objects, *library.ordered.snapshots.values())}
    objects.request_objects(state, library, [ref for name, ref in refs.items() if name in library.missing_objects])
    if not library.missing_objects:
        (_claim_memory_and_start if library.awaits_snapshots else _pin_snapshots_or_start)(state, library)


def pin_arrived_object(state: CoreState, event: ObjectArrived) -> None:
    """Pin an arrived object in the cache, once for each library that waits for it."""
    found = objects.report_arrival(state, event)
    sources = f"{event.origin_bytes} bytes from its origin, {event.peer_bytes} from peers"
    state.write_log(f"{event.name} arrived: {sources}, {event.seconds:.2f} s")
    if found is not None:
        state.commands += [PinObjects(number, (found.ref,)) for number in found.libraries if number in state.libraries]


def handle_lost_object(state: CoreState, name: str, lack: FetchFailure) -> None:
    """Fail the libraries that wait for an object that no source has. Libraries that lack only snapshots start without
    them.
    """
    found = objects.abandon_object_fetch(state, name)
    for number in tuple(found.libraries) if found is not None else ():
        library = state.libraries.get(number)
        if library is not None and library.stage is Stage.FETCHING:
            handle_missing_objects(state, library, lack)


def handle_missing_objects(state: CoreState, library: PilotLibrary, lack: FetchFailure) -> None:
    """Start a library without its missing snapshots, or fail the library if other objects are missing."""
    if library.awaits_snapshots:
        _start_without_snapshots(state, library, lack.reason)
    else:
        fail_start(state, library, lack)


def stop_waiting_for_snapshots(state: CoreState, library: PilotLibrary) -> None:
    if library.stage is Stage.FETCHING and library.awaits_snapshots:
        _start_without_snapshots(state, library, f"no snapshot arrived within {library.ordered.snapshot_wait_s:.1f} s")


def fail_start(state: CoreState, library: PilotLibrary, lack: FetchFailure) -> None:
    library.cache_lacks_bytes = lack.in_use_bytes.get(library.number, 0)
    _end_with_failure(
        state, library, make_load_failure(state, library, lack.reason, is_pilots_fault=lack.is_pilots_fault)
    )


def refuse_start(state: CoreState, library: PilotLibrary, what: str) -> None:
    """End a library that cannot start on this pilot. The manager loads its context elsewhere."""
    _end_with_failure(state, library, Failure(FailureKind.PILOT, what, pilot=state.facts.pilot, library=library.number))


def _end_with_failure(state: CoreState, library: PilotLibrary, failure: Failure) -> None:
    running.set_end_cause(library, failure)
    lifecycle.release_ended_library(state, library, ProcessEnded(library.number))


def _pin_snapshots_or_start(state: CoreState, library: PilotLibrary) -> None:
    library.awaits_snapshots = True
    if not library.snapshot_forms:
        _claim_memory_and_start(state, library)
        return
    library.missing_objects = set(library.snapshot_forms)
    refs = tuple(ref for ref in library.ordered.snapshots.values() if ref.name in library.snapshot_forms)
    state.commands.append(PinObjects(library.number, refs))
    state.commands.append(SetTimer(state.now + library.ordered.snapshot_wait_s, f"snapshots/{library.number}"))


def _start_without_snapshots(state: CoreState, library: PilotLibrary, why: str) -> None:
    state.write_log(f"lib-{library.number} loads without a snapshot: {why}")
    objects.remove_library_from_wants(state, library)
    for name in library.snapshot_forms:
        library.paths.pop(name, None)
    _claim_memory_and_start(state, library)


def _claim_memory_and_start(state: CoreState, library: PilotLibrary) -> None:
    library.fetched_at = state.now
    if memory.claim_memory(state, library, library.ordered.device_memory_bytes):
        start_process(state, library)
        return
    lifecycle.change_stage(library, Stage.WAITING)
    state.tell_manager(LibraryUpdate(library=library.number, phase=LibraryPhase.WAITING))


def start_process(state: CoreState, library: PilotLibrary) -> None:
    lifecycle.change_stage(library, Stage.STARTING)
    library.started_at = state.now
    state.tell_manager(LibraryUpdate(library=library.number, phase=LibraryPhase.STARTING))
    paths = {library.snapshot_forms.get(name, name): path for name, path in library.paths.items()}
    budget_bytes = library.ordered.device_memory_bytes if memory.has_declared_device_memory(state, library) else 0
    state.commands.append(StartProcess(library.ordered, paths, device_memory_bytes=budget_bytes))


# ---- room for a process
def grant_memory_claims(state: CoreState) -> None:
    for library, memory_bytes in memory.reserve_claimed_memory(state):
        if library.stage is Stage.WAITING:
            start_process(state, library)
        elif library.stage is Stage.WAKING:
            sleeping.send_wake_order(state, library)
        else:
            memory.send_resize_order(state, library, memory_bytes)


def check_memory_claim(state: CoreState, library: PilotLibrary) -> None:
    """End sleeping libraries if a library's memory claim needs their memory. Refuse the claim if no other library on
    the same devices will free memory.
    """
    wanted = state.claims.get(library.number)
    if wanted is None:
        return
    why = memory.explain_hopeless_claim(state, library)
    if not why or sleeping.end_sleepers_for_claim(state, library):
        memory.schedule_memory_claim_check(state, library)
        return
    why += ", and no library on the device will end or shrink"
    if library.stage is Stage.WAITING:
        refuse_start(state, library, why)
    elif library.stage is Stage.WAKING:
        sleeping.end_unwakeable_library(state, library, why)
    else:
        memory.refuse_resize(state, library, why, ordered_bytes=wanted)

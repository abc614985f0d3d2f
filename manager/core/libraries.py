"""Libraries from load to end: memory promised to them, loads that failed, snapshots.

What is known of loading contexts: what it costs, and how it went. This file alone writes that into contexts.

`LOAD_TRIES` loads of a context that fail in a row, with none between that worked, give it up, as do `LOADS` pilots that
were lost in a row while they loaded it. A pilot that lacks what a load needs is another matter (`blame`).

Loaded contexts that were written as objects: whoever loads the same context elsewhere gets one from a peer.

A context that takes long to load may be kept in a form that loads fast, a *snapshot* (`stoker.contexts.snapshot`). The
first library that makes one, or finds one, offers it; the manager remembers it by recipe and device kind, since the
form depends on the device. A pilot that is told to load the context waits for the snapshot no longer than it took to
make.

A library's way: told to load, ready, told to stop, gone. And the promises of device memory that go along.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contexts.inference.adapter import EngineLoad
from stoker.manager.core import blame, ending, holding, objects, queues
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState, Pilot
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import State
from stoker.manager.core.transfers import Snapshot
from stoker.protocol.calls import Failure
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_manager import LibraryPhase, LibraryReady, LibraryResized, ObjectArrival, SnapshotHere
from stoker.protocol.to_pilot import ResizeLibrary, StartLibrary, StopLibrary
from stoker.units import show_bytes

# A context whose loads have failed this often in a row, with none between that worked, cannot be loaded.
LOAD_TRIES = 2

# Pilots that are lost in a row while they load one context, and do nothing else.
LOADS = 4


def take_load_advice(context: Context, by_kind: Mapping[str, ContextAdvice], *, source: str) -> None:
    """Take advice where nothing was measured yet. `source`: where it comes from."""
    if not context.loads and not context.advice:
        context.advised_by = source
    slots = [advice.slots for advice in by_kind.values() if advice.slots]
    if slots and not context.recipe.slots and not context.loads:
        context.slots = min(slots)  # it is not known on which kind of device it will be loaded
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.load_s:
            context.load_s = advice.load_s


def record_load(library: Library, message: LibraryReady) -> None:
    """A load has worked, and cost this."""
    context, facts = library.context, library.devices[0].facts
    seconds = message.start_s + message.load_s + message.fetch_s
    context.loads += 1
    context.load_s = seconds
    context.load_total_s += seconds
    # Of a GPU's library only device memory counts: host memory is none of the GPU's.
    context.resident_bytes = message.resident_bytes if facts.on_host else message.device_bytes
    peak_bytes = message.peak_bytes if facts.on_host else message.device_bytes
    before = context.advice.get(facts.kind)
    context.advice[facts.kind] = ContextAdvice(
        seconds, 0.0, context.resident_bytes, peak_bytes, context.run_s, 0.0, slots=library.slots,
        steps=before.steps if before is not None else None,
    )  # fmt: skip


def set_context_slots(context: Context, slots: int) -> None:
    """A library of a context has said how many calls it runs at once: others will run as many."""
    context.slots = slots


def record_good_load(library: Library) -> None:
    """A library has loaded its context: what went wrong before is forgiven."""
    context = library.context
    context.load_failures = context.cut_loads = 0
    context.lost_loads.clear()
    context.last_failure = None
    context.failed_on.pop(library.pilot.id, None)
    blame.forgive_pilot(library.pilot, context.recipe.key)


def record_failed_load(library: Library, failure: Failure) -> bool:
    """A load has failed. True if that was once too often."""
    context = library.context
    context.load_failures += 1
    context.last_failure = failure
    context.failed_on[library.pilot.id] = context.failed_on.get(library.pilot.id, 0) + 1
    return has_given_up(context)


def has_given_up(context: Context) -> bool:
    """Whether loads of a context have failed so often in a row that it is given up."""
    return context.load_failures >= LOAD_TRIES


def record_pilot_lack(context: Context, failure: Failure) -> None:
    """A load has failed for what its pilot lacks."""
    context.last_failure = failure


def record_cut_load(library: Library, now: float) -> None:
    """A load was under way when the walltime of its pilot was over."""
    context = library.context
    context.cut_loads += 1
    context.cut_after_s = max(context.cut_after_s, now - library.started_at)


def record_lost_load(context: Context, pilot: Pilot) -> None:
    """A pilot was lost while it loaded a context and did nothing else."""
    context.lost_loads.append(pilot)


def undo_lost_load(state: State, pilot: Pilot) -> None:
    """A pilot that counted as lost has come back."""
    for context in state.contexts.values():
        if pilot in context.lost_loads:
            context.lost_loads.remove(pilot)


def lost_pilots(context: Context) -> list[Pilot]:
    """The pilots that a context has taken along when it was loaded, if that is certain and once too often."""
    counted = [x for x in context.lost_loads if x.loss is not None and not x.loss.explained]
    if len(counted) < LOADS or not all(pilot.loss_settled for pilot in counted):
        return []
    context.lost_loads.clear()
    return counted


def clean_slate(state: State, context: Context) -> None:
    """Whatever went wrong before, the next call that comes has the context tried anew."""
    context.load_failures = context.cut_loads = 0
    context.failed_on.clear()
    for pilot in state.pilots.values():
        blame.forgive_pilot(pilot, context.recipe.key)


def forget_pilots(state: State) -> None:
    """Forget failures on pilots that are gone."""
    for context in state.contexts.values():
        for name in [name for name in context.failed_on if name not in state.pilots]:
            del context.failed_on[name]


# ---- snapshots
def snapshot_made(manager: Manager, pilot: Pilot, message: SnapshotHere) -> None:
    """A pilot has a snapshot. It stays the one that others get for as long as somebody has it."""
    if message.recipe not in manager.state.contexts:
        manager.state.refuse("snapshot of an unknown context")
        return
    snapshot = Snapshot(message.form, message.object, message.made_s)
    if message.manifest:
        objects.define_manifest(manager, message.object.name, message.manifest)
    objects.object_arrived(manager, pilot, ObjectArrival(message.object.name, message.object.size_bytes))
    for kind in dict.fromkeys(device.facts.kind for device in pilot.devices.values()):
        known = manager.state.transfers.snapshots.setdefault((message.recipe, kind), {})
        if message.form not in known or not _to_be_had(manager, known[message.form]):
            known[message.form] = snapshot


def offered_snapshots(manager: Manager, context: Context, kind: str) -> dict[str, Snapshot]:
    """The snapshots of a context that a pilot could get from a peer now, for a device of this kind, by their form."""
    known = manager.state.transfers.snapshots.get((context.recipe.key, kind), {})
    return {form: snapshot for form, snapshot in known.items() if _to_be_had(manager, snapshot)}


def _to_be_had(manager: Manager, snapshot: Snapshot) -> bool:
    object = manager.state.transfers.objects.get(snapshot.object.name)
    return object is not None and bool(object.whole)


# ---- libraries
_MOST_MEASURED = 64  # Measurements of a library's memory that are kept, the newest

LIBRARY_GAP = 1000
KEPT_LIBRARIES = 200  # So many libraries that are gone are kept for their stories


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


def update_tier(manager: Manager, device: Device) -> None:
    """Account the time that a device has spent cold or warm."""
    tiers, now = manager.state.tier_seconds, manager.state.now
    tiers[device.tier] = tiers.get(device.tier, 0.0) + now - device.tier_since
    device.tier_since = now
    warm = any(library.state is LibraryState.READY for library in device.libraries.values())
    device.tier = "warm" if warm else "cold"


# ---- loading
def attach_library(manager: Manager, library: Library) -> None:
    """A library is one of its context's, its pilot's and its devices'."""
    state = manager.state
    state.libraries[library.id] = library
    state.gone_libraries.pop(library.id, None)
    library.context.libraries[library.id] = library
    library.pilot.libraries[library.id] = library
    for device in library.devices:
        device.libraries[library.id] = library


def skip_library_numbers(state: State) -> None:
    """Begin the next libraries' numbers at a round one behind those that may have been given away."""
    state.next_library += LIBRARY_GAP - state.next_library % LIBRARY_GAP


def reserve_library_number(state: State, number: int) -> None:
    """A pilot knows a library by this number: give it to no other."""
    state.next_library = max(state.next_library, number + 1)


def load_library(
    manager: Manager, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int
) -> Library:
    """Promise the memory and tell the pilot to start a library. Raises PolicyError where the memory is not there."""
    state = manager.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, 0, state.now)
    promise(library, memory_bytes)
    state.next_library += 1
    attach_library(manager, library)
    queues.note_starving(manager, context)
    kind = devices[0].facts.kind
    forms = offered_snapshots(manager, context, kind)
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
def stop_library(manager: Manager, library: Library, *, reason: str) -> None:
    """Tell a library to end after what it runs. Its memory stays promised until the pilot says that it is gone."""
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.note(manager.state.now, f"told to stop: {reason}")
    holding.unsend(manager, library, why=f"back in the queue: lib-{library.id} is to stop")
    queues.relist_library(manager, library)
    for device in library.devices:
        update_tier(manager, device)
    queues.note_starving(manager, library.context)
    if library.context.queue.gangs:
        holding.serve_after(manager, library.context)
    manager.changed("libraries", library.id)
    manager.say(library.pilot, StopLibrary(library.id, reason))


def lose_library(manager: Manager, library: Library, *, reason: str) -> None:
    """A library vanished with its pilot. What it ran runs again elsewhere, and is no try of its (see `retries`)."""
    count_runs_again(manager, min(library.slots, len(library.held)))
    library.note(manager.state.now, f"gone with its pilot: {reason}")
    why = f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
    holding.requeue(manager, detach_library(manager, library), why=why)


def detach_library(manager: Manager, library: Library) -> list[Call]:
    """Take a library out of everything that names it, and return the calls that it held, in order."""
    holding.forgive_broken_gangs(manager.state, library)
    held = holding.release_all_of(manager, library)
    library.state = LibraryState.GONE
    queues.relist_library(manager, library)
    promise(library, 0)
    for device in library.devices:
        device.libraries.pop(library.id, None)
        update_tier(manager, device)
    library.context.libraries.pop(library.id, None)
    library.pilot.libraries.pop(library.id, None)
    library.pilot.used_at = manager.state.now
    manager.state.libraries.pop(library.id, None)
    remembered = manager.state.gone_libraries
    remembered[library.id] = library
    if len(remembered) > KEPT_LIBRARIES:
        del remembered[next(iter(remembered))]
    queues.note_starving(manager, library.context)
    if library.context.queue.gangs:
        holding.serve_after(manager, library.context)
    manager.supply_changed = True
    manager.changed("libraries", library.id)
    return held


def adopt_found_library(manager: Manager, library: Library, *, reserved_bytes: int, is_hot: bool) -> None:
    """A pilot has a library that the manager did not know of. Raises PolicyError where its memory is not there."""
    promise(library, reserved_bytes)
    library.found(manager.state.now)
    attach_library(manager, library)
    if is_hot:
        library.state = LibraryState.READY
    for device in library.devices:
        update_tier(manager, device)
    queues.note_starving(manager, library.context)
    manager.changed("libraries", library.id)


def readmit_library(manager: Manager, library: Library, promised_bytes: int, was: LibraryState) -> None:
    """A library of a pilot that was given up is the manager's again, as it was: hot, loading, or told to stop."""
    library.state = was if was in (LibraryState.STOPPING, LibraryState.READY) else LibraryState.LOADING
    attach_library(manager, library)
    promise(library, promised_bytes)
    for device in library.devices:
        update_tier(manager, device)
    library.note(manager.state.now, "back, as it was")
    queues.relist_library(manager, library)
    queues.note_starving(manager, library.context)


def mark_ready(manager: Manager, library: Library) -> None:
    """A library holds its context."""
    library.state = LibraryState.READY
    library.ready_at = library.used_at = manager.state.now
    for device in library.devices:
        update_tier(manager, device)


def note_idle(manager: Manager, library: Library) -> None:
    """A library has nothing to do."""
    library.used_at = manager.state.now


def update_phase(state: State, library: Library, phase: LibraryPhase, line: str) -> None:
    """A library loads: its phase, and the last line that it printed if it loads for long."""
    if phase is not library.phase or not line:
        library.note(state.now, phase.value)
    library.phase, library.line = phase, line


def update_batch(state: State, library: Library, load: EngineLoad) -> None:
    """The engine of a library has this much in its batch."""
    library.batch, library.batch_at = load, state.now


def record_use(library: Library, *, memory_bytes: int, device_bytes: int, now: float) -> None:
    """What a library was measured to use."""
    library.memory_bytes, library.device_bytes = memory_bytes, device_bytes
    library.measured.append((now, max(memory_bytes, device_bytes)))
    del library.measured[:-_MOST_MEASURED]


def used_since(library: Library, at: float) -> int:
    """The most that a library was measured to use since then, in bytes of a GPU or of the host, whichever is more; 0 if
    no measurement since then has differed from the one before it."""
    return max((size for when, size in library.measured if when >= at), default=0)


def set_slots(library: Library, slots: int) -> None:
    """A library says how many calls it runs at once (0: it does not say). It has to be listed anew after that."""
    if slots:
        library.slots = slots
        set_context_slots(library.context, slots)


def count_runs_again(manager: Manager, count: int) -> None:
    """Count calls that were running in a library that is gone, and run again."""
    manager.state.rerun_calls += count


def fail_waiting_calls(manager: Manager, context: Context, failure: Failure) -> None:
    """End every waiting call of a context with this failure; the next one that comes finds a clean slate."""
    clean_slate(manager.state, context)
    for call in list(context.queue):
        if call.state is CallState.WAITING:
            ending.fail_call(manager, call, failure)

"""A library's way: told to load, ready, told to stop, gone. And the promises of device memory that go along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker.manager.core import blocks, cache_room, calls, feeding, fitness, gangs, pilots, snapshots, suspects
from stoker.manager.core.commands import RecordLoad
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.phases import CallState, LibraryState
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import Call, Context, Device, Library, Pilot
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.ids import LibraryId, RecipeKey
from stoker.manager.protocol.to_manager import LibraryGone, LibraryReady, LibraryResized
from stoker.manager.protocol.to_pilot import ResizeLibrary, StartLibrary, StopLibrary
from stoker.units import show_bytes

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

LOAD_TRIES = 2
"""A context whose loads have failed this often in a row, with none between that worked, cannot be loaded."""


KEPT_LIBRARIES = 200
"""So many libraries that are gone are kept for their stories."""

BLAMELESS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT, FailureKind.PILOT})
"""A library that was ended for one call's sake, or its pilot's, is not the fault of the others that it ran."""
OF_OTHERS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT})
"""It was ended for the sake of one call, which has left it by then."""


# ---- promises


def promise(library: Library, memory_bytes: int) -> None:
    """Change what a library is promised on each of its devices. Raises PolicyError where it does not fit."""
    more = memory_bytes - library.promised_bytes
    for device in library.devices:
        if more > 0 and device.free_bytes < more:
            raise PolicyError(
                f"{device.id} of {library.pilot.id} has {device.free_bytes} bytes left, {library.context.recipe.name} "
                f"wants {more} more"
            )
    for device in library.devices:
        device.promised_bytes += more
    library.promised_bytes = memory_bytes


def resize(core: Core, library: Library, memory_bytes: int) -> None:
    """Tell a library to change its reservation. What it grows by is promised now; what it shrinks by is free when the
    pilot says that it is done. Raises PolicyError where it does not fit."""
    if memory_bytes > library.promised_bytes:
        promise(library, memory_bytes)
    library.resizing.append(memory_bytes)
    core.say(library.pilot, ResizeLibrary(library.id, memory_bytes))


def resized(core: Core, library: Library, message: LibraryResized) -> None:
    """A library has changed its reservation. Resizes that it has still to answer may need more than it has now."""
    size, waiting = message.device_memory_bytes, library.resizing
    if message.measured:
        _measured(core, library, size)
        return
    if not waiting or size > library.promised_bytes:
        core.state.refuse("resize that nobody asked for")
        return
    answered = waiting.index(size) + 1 if size in waiting else 1
    del waiting[:answered]
    promise(library, max(size, *waiting) if waiting else size)
    core.changed("libraries", library.id)
    core.supply_changed = True


def _measured(core: Core, library: Library, size: int) -> None:
    """The pilot has measured what a library uses of its devices: promise it that, as far as there is room."""
    room = min(device.free_bytes for device in library.devices)
    if size > library.promised_bytes + room:
        library.notes.append((core.state.now, f"uses {show_bytes(size)} of its device, more than is left there"))
    promise(library, max(0, min(size, library.promised_bytes + room)))
    core.changed("libraries", library.id)
    core.supply_changed = True


def tier(core: Core, device: Device) -> None:
    """Account the time that a device has spent cold or warm."""
    tiers, now = core.state.tier_seconds, core.state.now
    tiers[device.tier] = tiers.get(device.tier, 0.0) + now - device.tier_since
    device.tier_since = now
    warm = any(library.state is LibraryState.READY for library in device.libraries.values())
    device.tier = "warm" if warm else "cold"


# ---- loading


def load(core: Core, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int) -> Library:
    """Promise the memory and tell the pilot to start a library. Raises PolicyError where the memory is not there."""
    state = core.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, 0, state.now)
    promise(library, memory_bytes)
    state.next_library += 1
    state.libraries[library.id] = library
    context.libraries[library.id] = library
    context.starved_since = None
    pilot.libraries[library.id] = library
    for device in devices:
        device.libraries[library.id] = library
    forms = snapshots.offered(core, context, devices[0].facts.kind)
    core.say(
        pilot,
        StartLibrary(
            library.id, context.recipe, tuple(d.id for d in devices), context.recipe.needs.memory_bytes, memory_bytes,
            snapshots={form: snapshot.object for form, snapshot in forms.items()},
            snapshot_wait_s=max((snapshot.made_s for snapshot in forms.values()), default=0.0),
        ),
    )  # fmt: skip
    core.changed("libraries", library.id)
    return library


def ready(core: Core, library: Library, message: LibraryReady) -> None:
    """A library holds its context: remember what that cost, keep only what it really takes, give it calls."""
    state, context = core.state, library.context
    if library.state is not LibraryState.LOADING:
        if library.state is not LibraryState.STOPPING:  # else it was told to stop meanwhile
            state.refuse("library ready twice")
        return
    library.memory_bytes, library.device_bytes = message.resident_bytes, message.device_bytes
    library.notes.append((state.now, f"ready: {message.start_s:.2f} s to start, {message.load_s:.2f} s to load"))
    kind = library.devices[0].facts.kind
    seconds = message.start_s + message.load_s + message.fetch_s
    context.loads += 1
    context.load_s = seconds
    context.load_total_s += seconds
    on_host = library.devices[0].facts.on_host  # else only device memory counts: host memory is no GPU's
    context.resident_bytes = message.resident_bytes if on_host else message.device_bytes
    peak_bytes = message.peak_bytes if on_host else message.device_bytes
    context.advice[kind] = ContextAdvice(seconds, 0.0, context.resident_bytes, peak_bytes, context.run_s, 0.0)
    core.out.append(
        RecordLoad(
            RecipeKey(context.recipe.key), context.recipe.name, kind, message.start_s, message.load_s,
            message.resident_bytes, message.peak_bytes, message.device_bytes,
        )
    )  # fmt: skip
    hot(core, library)


def hot(core: Core, library: Library) -> None:
    """A library serves calls from now on."""
    state, context = core.state, library.context
    library.state = LibraryState.READY
    library.ready_at = library.used_at = state.now
    context.load_failures = context.cut_loads = 0
    context.lost_loads.clear()
    context.last_failure = None
    context.failed_on.pop(library.pilot.id, None)
    fitness.forgive(library.pilot, context.recipe.key)
    blocks.proved(core, library.pilot)
    wanted = core.policies.residency.measured(state, library)
    if wanted < library.promised_bytes:  # where nothing was declared, the pilot holds no more than was measured
        core.supply_changed = True
        promise(library, wanted)
    for device in library.devices:
        tier(core, device)
    core.changed("libraries", library.id)
    feeding.reclass(core, library)
    suspects.supply(core, context)
    feeding.pull(core, library)


def advise(context: Context, by_kind: Mapping[str, ContextAdvice]) -> None:
    """Take advice where nothing was measured yet."""
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.run_s:
            context.run_s = advice.run_s
        if not context.load_s:
            context.load_s = advice.load_s
    sizes = {size for advice in by_kind.values() for size in advice.paces} - set(context.paces.known)
    if sizes:  # of several kinds the slowest counts: nobody knows where a call will run
        slowest = {size: max(advice.paces.get(size, 0.0) for advice in by_kind.values()) for size in sorted(sizes)}
        meet_s = max(advice.meet_s for advice in by_kind.values()) or context.paces.meet_s
        context.paces.tell(slowest, meet_s=meet_s)


# ---- the end


def stop(core: Core, library: Library, *, reason: str) -> None:
    """Tell a library to end after what it runs. Its memory stays promised until the pilot says that it is gone."""
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.notes.append((core.state.now, f"told to stop: {reason}"))
    feeding.unsend(core, library, why=f"back in the queue: lib-{library.id} is to stop")
    feeding.reclass(core, library)
    for device in library.devices:
        tier(core, device)
    calls.starving(core, library.context)
    if library.context.queue.gangs:
        feeding.serve_after(core, library.context)
    core.changed("libraries", library.id)
    core.say(library.pilot, StopLibrary(library.id, reason))


def gone(core: Core, library: Library, message: LibraryGone) -> None:
    """A library has ended; its calls go elsewhere, or end if they killed it once too often."""
    state, context, failure = core.state, library.context, message.failure
    running = {id for id in message.running if id in library.held}
    broken = gangs.broken(core, library, message.running)
    unasked = library.state is LibraryState.LOADING and message.loading and failure is None
    survivors = _detach(core, library)
    library.notes.append((state.now, f"ended: {failure.message}" if failure is not None else "ended"))
    why = f"back in the queue: lib-{library.id} on {library.pilot.id} ended"
    blamed = failure if failure is not None and not message.loading and failure.kind not in BLAMELESS else None
    back = []
    if failure is None and not message.loading:
        suspects.cut_off(core, library, [call for call in survivors if call.id in running])
    for call in survivors:
        killer = blamed is not None and call.id in running
        if failure is not None and failure.kind in OF_OTHERS and call.id in running:
            calls.cut_beside(core, library, call, failure)
        if not (killer and blamed and calls.killed_its_library(core, library, call, blamed, alone=len(running) == 1)):
            back.append(call)
    if blamed is not None:
        for call in broken:
            calls.killed_its_library(core, library, call, blamed, alone=len(message.running) == 1)
    calls.requeue(core, back, why=f"{why} ({failure.message})" if failure else why)
    if failure is None:
        state.rerun_calls += sum(call.id in running for call in back)
    if failure is not None and failure.kind is FailureKind.PILOT:
        context.last_failure = failure
        again_s = 0.0
        if message.cache_lacks_bytes > 0:
            again_s = cache_room.make(core, library.pilot, context, message.cache_lacks_bytes)
        fitness.blame(state, library, failure, loading=message.loading, waits_s=again_s)
        core.changed("contexts", context.recipe.key)
    elif message.loading and failure is not None:
        _load_failed(core, context, library, failure)
    if unasked:
        pilots.leaves(core, library.pilot)


def lost(core: Core, library: Library, *, reason: str) -> None:
    """A library vanished with its pilot. What it ran runs again elsewhere, and is no try of its (see `suspects`)."""
    core.state.rerun_calls += min(library.slots, len(library.held))
    library.notes.append((core.state.now, f"gone with its pilot: {reason}"))
    why = f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
    calls.requeue(core, _detach(core, library), why=why)


def _detach(core: Core, library: Library) -> list[Call]:
    """Take a library out of everything that names it, and return the calls that it held, in order."""
    core.sends.pop(library, None)
    held = list(library.held.values())
    gangs.forgive(core, library)
    library.held.clear()
    library.zombies.clear()
    library.state = LibraryState.GONE
    feeding.reclass(core, library)
    promise(library, 0)
    for device in library.devices:
        device.libraries.pop(library.id, None)
        tier(core, device)
    library.context.libraries.pop(library.id, None)
    library.pilot.libraries.pop(library.id, None)
    library.pilot.used_at = core.state.now
    core.state.libraries.pop(library.id, None)
    remembered = core.state.gone_libraries
    remembered[library.id] = library
    if len(remembered) > KEPT_LIBRARIES:
        del remembered[next(iter(remembered))]
    calls.starving(core, library.context)
    if library.context.queue.gangs:
        feeding.serve_after(core, library.context)
    core.supply_changed = True
    core.changed("libraries", library.id)
    return held


def _load_failed(core: Core, context: Context, library: Library, failure: Failure) -> None:
    context.load_failures += 1
    context.last_failure = failure
    context.failed_on[library.pilot.id] = context.failed_on.get(library.pilot.id, 0) + 1
    core.changed("contexts", context.recipe.key)
    alive = any(x.state in (LibraryState.LOADING, LibraryState.READY) for x in context.libraries.values())
    if context.load_failures < LOAD_TRIES or alive:
        return
    text = f"context {context.recipe.name} could not be loaded: {failure.message}"
    evidence = Failure(
        FailureKind.CONTEXT, text, failure.pilot, failure.library, failure.signal, failure.exit_code, failure.tail,
        failure.log,
    )  # fmt: skip
    fail_waiting(core, context, evidence)


def fail_waiting(core: Core, context: Context, failure: Failure) -> None:
    """End every waiting call of a context with this failure; the next one that comes finds a clean slate."""
    context.load_failures = context.cut_loads = 0
    context.failed_on.clear()
    for pilot in core.state.pilots.values():
        fitness.forgive(pilot, context.recipe.key)
    for call in list(context.queue):
        if call.state is CallState.WAITING:
            calls.fail(core, call, failure)

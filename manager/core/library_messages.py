"""What libraries say of themselves: ready, resized, gone."""

from __future__ import annotations

import msgspec

from stoker.manager.core import (
    blocks,
    cache_room,
    call_records,
    faults,
    feeding,
    fitness,
    gangs,
    holding,
    indexing,
    libraries,
    loads,
    pilot_states,
    poison,
    reservations,
    suspects,
    variants,
    verdicts,
)
from stoker.manager.core.commands import RecordLoad, RecordSteps
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.phases import LibraryState
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import LibraryBatch, LibraryGone, LibraryReady

# A library that was ended for one call's sake, or its pilot's, is not the fault of the others that it ran.
BLAMELESS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT, FailureKind.PILOT})

# It was ended for the sake of one call, which has left it by then.
OF_OTHERS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT})


def ready(manager: Manager, library: Library, message: LibraryReady) -> None:
    """A library holds its context: remember what that cost, keep only what it really takes, give it calls."""
    state, context = manager.state, library.context
    if library.state is not LibraryState.LOADING:
        if library.state is not LibraryState.STOPPING:  # else it was told to stop meanwhile
            state.refuse("library ready twice")
        return
    libraries.uses(library, memory_bytes=message.resident_bytes, device_bytes=message.device_bytes, now=state.now)
    libraries.said_slots(library, message.slots)
    at_once = f", runs {message.slots} calls at once" if message.slots else ""
    library.note(state.now, f"ready: {message.start_s:.2f} s to start, {message.load_s:.2f} s to load{at_once}")
    kind = library.devices[0].facts.kind
    loads.measured(library, message)
    manager.out.append(
        RecordLoad(
            RecipeKey(context.recipe.key), context.recipe.name, kind, message.start_s, message.load_s,
            message.resident_bytes, message.peak_bytes, message.device_bytes, message.slots,
        )
    )  # fmt: skip
    hot(manager, library)


def hot(manager: Manager, library: Library) -> None:
    """A library serves calls from now on."""
    state, context = manager.state, library.context
    libraries.now_ready(manager, library)
    loads.worked(library)
    blocks.proved(manager, library.pilot)
    wanted = manager.policies.residency.measured(state, library)
    if wanted < library.promised_bytes:  # where nothing was declared, the pilot holds no more than was measured
        manager.supply_changed = True
        libraries.promise(library, wanted)
    manager.changed("libraries", library.id)
    indexing.relist(manager, library)
    reservations.places_changed(manager, context)
    feeding.pull(manager, library)


def batch(manager: Manager, library: Library, message: LibraryBatch) -> None:
    """A library says how full its batch is: show that, and remember what its steps took."""
    library.batch, library.batch_at = message.load, manager.state.now
    manager.changed("libraries", library.id)
    if message.times.samples:
        kind = library.devices[0].facts.kind
        manager.out.append(RecordSteps(RecipeKey(library.context.recipe.key), kind, message.times))


def gone(manager: Manager, library: Library, message: LibraryGone) -> None:
    """A library has ended; its calls go elsewhere, or end if they killed it once too often."""
    state, context, failure = manager.state, library.context, message.failure
    running = {id for id in message.running if id in library.held}
    broken = call_records.broken(state, library, message.running)
    unasked = library.state is LibraryState.LOADING and message.loading and failure is None
    survivors = libraries.detach(manager, library)
    library.note(state.now, f"ended: {failure.message}" if failure is not None else "ended")
    why = f"back in the queue: lib-{library.id} on {library.pilot.id} ended"
    blamed = failure if failure is not None and not message.loading and failure.kind not in BLAMELESS else None
    crowding = None  # the death of a library for want of memory that others hold
    if failure is not None and failure.kind is FailureKind.PILOT and failure.signal and not message.loading:
        crowding = failure
    back = []
    if failure is None and not message.loading:
        suspects.cut_off(manager, library, [call for call in survivors if call.id in running])
    for call in survivors:
        if crowding is not None and call.id in running and _crowded_out(manager, library, call, crowding):
            continue
        killer = blamed is not None and call.id in running
        if failure is not None and failure.kind in OF_OTHERS and call.id in running:
            poison.cut_beside(manager, library, call, failure)
        if not (
            killer and blamed and poison.killed_its_library(manager, library, call, blamed, alone=len(running) == 1)
        ):
            back.append(call)
    if blamed is not None:
        for call in broken:
            poison.killed_its_library(manager, library, call, blamed, alone=len(message.running) == 1)
    if crowding is not None:
        for call in broken:
            gangs.crowded_out(manager, library, call, crowding)
    holding.requeue(manager, back, why=f"{why} ({failure.message})" if failure else why)
    if failure is None:
        libraries.run_again(manager, sum(call.id in running for call in back))
    if failure is not None and failure.kind is FailureKind.PILOT:
        loads.pilot_lacks(context, failure)
        again_s = 0.0
        if message.cache_lacks_bytes > 0:
            again_s = cache_room.make(manager, library.pilot, context, message.cache_lacks_bytes)
        fitness.blame(state, library, failure, loading=message.loading, waits_s=again_s)
        manager.changed("contexts", context.recipe.key)
    elif message.loading and failure is not None:
        _load_failed(manager, context, library, failure)
        verdicts.load_failed(manager, library, failure)
    if unasked:
        pilot_states.leaves(manager, library.pilot)


def _crowded_out(manager: Manager, library: Library, call: Call, failure: Failure) -> bool:
    """The kernel has killed a library with a call that it ran, because others hold the memory. Returns whether the
    call needs nothing more here; if not, it goes back into the queue."""
    if call.group.options.gang[1] > 1:
        return gangs.crowded_out(manager, library, call, failure)
    evidence = msgspec.structs.replace(failure, kind=FailureKind.INFRASTRUCTURE)
    faults.failed(manager, library, call, CallEnd(call.id, False, failure=evidence))
    return True


def _load_failed(manager: Manager, context: Context, library: Library, failure: Failure) -> None:
    """A load has failed. Once too often, calls end for which nothing else is or can be loaded."""
    is_over = loads.failed(library, failure)
    manager.changed("contexts", context.recipe.key)
    if not is_over:
        return
    lost = [each for each in (context, *context.listed_by.values()) if _has_no_hope(each)]
    text = f"context {context.recipe.name} could not be loaded: {failure.message}"
    evidence = Failure(
        FailureKind.CONTEXT, text, failure.pilot, failure.library, failure.signal, failure.exit_code, failure.tail,
        failure.log,
    )  # fmt: skip
    for each in lost:
        libraries.fail_waiting(manager, each, evidence)


def _has_no_hope(context: Context) -> bool:
    """Whether calls wait for a context, no context that can serve them has a library, and the loads of each of these
    have failed too often."""
    alive = any(x.state in (LibraryState.LOADING, LibraryState.READY) for x in variants.libraries_for(context))
    return context.queue.count > 0 and not alive and all(map(loads.gave_up, (context, *context.lists.values())))

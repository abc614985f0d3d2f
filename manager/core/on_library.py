"""What a library says of calls that have ended.

The hot path. What is done here a call is done a million times, so the ends of one frame are handled together, and what
is counted is counted a batch.

What pilots say of calls that have not ended: given back, how far they are, made to leave.

An object cache that is full of what hot libraries use. Idle ones of them end for a context that calls wait for.

A pilot keeps the objects of each library as long as that lives. It refuses a context whose objects would fit if other
libraries let go of theirs (`LibraryGone.cache_lacks_bytes`). If those of idle libraries come to that, the manager ends
them, those that were used longest ago first. Else the calls wait for busy libraries, and the idle ones stay.

What libraries say of themselves: ready, resized, gone.

The backlog of a library that is stuck goes back to the queue (`stuck`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import (
    blame,
    blocks,
    dispatch,
    ending,
    gangs,
    holding,
    libraries,
    pilots,
    queues,
    retries,
    sending,
)
from stoker.manager.core.events import DiscardObject, RecordLoad, RecordSteps
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Gang, Group, Library, LibraryState, Pilot
from stoker.manager.core.queues import LINGERS, STUCK_S, STUCK_TIMER, full_since
from stoker.manager.core.state import State
from stoker.protocol import pace, to_client
from stoker.protocol.bounds import is_sound
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import ClientId, RecipeKey
from stoker.protocol.to_manager import CallsProgress, CallsReturned, LibraryBatch, LibraryGone, LibraryReady

# ---- call ends


def calls_ended(manager: Manager, library: Library, ends: list[CallEnd]) -> None:
    """Calls of a library have ended."""
    open_calls = manager.state.calls
    plain = not manager.watch and not manager.tracked
    first = not library.context.runs
    group: Group | None = None
    good: list[CallEnd] = []
    others, seconds, total = 0, 0.0, 0
    rest, place = iter(ends), 0
    while place < len(ends):
        if plain:
            count, call, group, seconds = holding.end_good(manager, library, rest, group, seconds)
            good += ends[place : place + count]
            place += count
            if place == len(ends):
                break
        else:
            call = holding.take_out(library, ends[place].call)
        outcome, place = ends[place], place + 1
        if call is None or call.holder is not library:
            total += _odd_end(manager, library, call, outcome)
            continue
        if retries.is_fault(outcome):
            retries.requeue_after_fault(manager, library, call, outcome)
            continue
        if call.group is not group:
            if group is not None:
                total += ending.account_runs(manager, library, group, good, others=others, seconds=seconds)
            group, good, others, seconds = call.group, [], 0, 0.0
        seconds += outcome.run_s
        if plain and outcome.ok:
            holding.end_one(manager, call)
            good.append(outcome)
            continue
        others += 1
        if not outcome.ok:
            total += ending.account_runs(manager, library, group, good, others=others, seconds=seconds)
            good, others, seconds = [], 0, 0.0
        ending.end_call(manager, call, outcome)  # watched: it costs what any other does, or a replay would differ
    if group is not None:
        total += ending.account_runs(manager, library, group, good, others=others, seconds=seconds)
        if first and library.context.queue.count:
            manager.dirty[library.context] = None
    holding.drop_records_of_ended(manager.state, ends)
    if manager.state.trials:
        for outcome in ends:
            if outcome.call not in open_calls:
                holding.trial_ended(manager, outcome.call)
    if library.stuck:
        queues.unmark_stuck(library)
    holding.progressed(manager, library)
    for outcome in reversed(ends):
        if outcome.printed is not None:
            library.printed_to = outcome.printed.end
            break
    library.served += total
    library.context.served += total
    library.pilot.ended += total
    if total:
        now = manager.state.now
        second = int(now)
        for counts in (manager.state.rate, library.context.rate, library.pilot.rate):
            if counts and counts[-1][0] == second:  # `recent.add`, without the call
                counts[-1][1] += total
            else:
                pace.count_recent(counts, total, now=now)
    dispatch.feed_library(manager, library)


def _odd_end(manager: Manager, library: Library, call: Call | None, outcome: CallEnd) -> int:
    """The end of a call that this library does not hold alone. Returns how many calls it ran for that: 0 or 1."""
    if call is not None and type(call.holder) is Gang:
        gangs.gang_member_ended(manager, call, library, outcome)
        return 1
    if not holding.slot_is_free(library, outcome.call):
        manager.state.refuse("late or repeated end of a call")
        return 0
    still_open = manager.state.calls.get(outcome.call)
    if retries.is_fault(outcome):
        pilots.orphan_failed(manager.state, outcome.call)
        return 1
    if still_open is not None and _may_count(still_open, library):
        ending.end_where_first_run(manager, still_open, library, outcome)
        return 1
    if pilots.end_orphan(manager.state, outcome) or outcome.call in manager.state.forgotten:
        return 1
    if isinstance(outcome.payload, ObjectRef):
        manager.out.append(DiscardObject(outcome.payload.source))
    return 1


def _may_count(call: Call, library: Library) -> bool:
    """Whether an end counts that comes from a pilot which had been given up: its call is still open."""
    options = call.group.options  # of a stream its client may lack pieces that came from there
    return options.gang[1] == 1 and not options.stream and not any(device.fault for device in library.devices)


# ---- call updates


def calls_returned(manager: Manager, library: Library, message: CallsReturned) -> None:
    """A library gives calls back that it has not begun, or refuses them."""
    state = manager.state
    back: list[Call] = []
    for id in message.calls:
        call = holding.take_out(library, id)
        if call is not None:
            back.append(call)
            if message.need_function:
                sending.forget_sent_function(library, call.group)
        elif not holding.slot_is_free(library, id):
            state.refuse("return of a call that the library does not hold")
    queues.relist_library(manager, library)
    if message.refused:
        library.required_bytes = message.required_bytes
        if not all(call.offered for call in back):  # what was no offer is refused by a library that is about to end
            libraries.stop_library(manager, library, reason=message.refused)
        for call in back:
            dispatch.retry_call(
                manager, call, why=f"refused by lib-{library.id} on {library.pilot.id}: {message.refused}"
            )
    else:
        holding.gave_back(library)
        holding.requeue(manager, back, why=f"taken back from lib-{library.id}, which had not begun it")
    if not library.held and library.state is LibraryState.READY and not message.refused:
        dispatch.feed_library(manager, library)


def calls_progressed(manager: Manager, library: Library, message: CallsProgress) -> None:
    """Running calls say how far they are."""
    state = manager.state
    by_client: dict[ClientId, list[CallProgress]] = {}
    for report in message.reports:
        if not is_sound(report.done, report.total):
            state.refuse("progress of a call that cannot be")
            continue
        call = library.held.get(report.call)
        if call is None:
            if report.call not in library.zombies:
                state.refuse("progress of a call that the library does not hold")
            continue
        if isinstance(call.holder, Gang):
            if call.holder.members[0] is not library:  # every rank may report; the first one's counts
                continue
            gangs.gang_progressed(manager, call, call.holder, report)
        holding.record_progress(state, report)
        if report.state:
            call.spec = msgspec.structs.replace(call.spec, progress=report.state)
        by_client.setdefault(call.group.client.id, []).append(report)
    for id, reports in by_client.items():
        client = state.clients[id]
        if client.connected:
            manager.tell(client, to_client.ProgressReports(reports))


def call_evicted(manager: Manager, library: Library, progress: CallProgress) -> None:
    """A call has made room, and goes on elsewhere from what it left."""
    call = holding.take_out(library, progress.call)
    if call is None:
        if not holding.slot_is_free(library, progress.call):
            manager.state.refuse("eviction of a call that the library does not hold")
    else:
        if progress.state:
            call.spec = msgspec.structs.replace(call.spec, progress=progress.state)
        holding.record_progress(manager.state, progress)
    queues.relist_library(manager, library)
    if call is not None:
        why = f"evicted from lib-{library.id} with its progress kept ({progress.done:g} done)"
        dispatch.retry_call(manager, call, why=why)
    dispatch.feed_library(manager, library)


# ---- cache room


ENDING_S = 2.0
"""A library that is told to end has let go of its files after so long, mostly."""
BUSY_S = 10.0
"""So often it is tried whether busy libraries have let go of theirs."""


def make_cache_room(manager: Manager, pilot: Pilot, context: Context, lacks_bytes: int) -> float:
    """End idle libraries, of all pilots that share the cache of this one, if that makes the room that the objects of a
    context lack. Seconds after which the context should be tried again; 0 = no library of the session is in its way."""
    users: dict[Context, list[Library]] = {}
    for library in _users(manager.state, pilot):
        if library.context is not context:
            users.setdefault(library.context, []).append(library)
    use = _Use(manager.state, context, users)
    if use.frees_bytes(users) < lacks_bytes:
        return 0.0
    idle = [other for other, those in users.items() if all(map(_is_idle, those))]
    idle.sort(key=lambda other: max(library.used_at for library in users[other]))
    ending: list[Context] = []
    while idle and use.frees_bytes(ending) < lacks_bytes:
        ending.append(idle.pop(0))
    if use.frees_bytes(ending) < lacks_bytes:
        return BUSY_S
    for other in tuple(ending):  # a context that is not needed for the room stays
        rest = [each for each in ending if each is not other]
        if use.frees_bytes(rest) >= lacks_bytes:
            ending = rest
    for other in ending:
        for library in users[other]:
            reason = f"its files make room in the object cache for {context.recipe.name}"
            libraries.stop_library(manager, library, reason=reason)
    return ENDING_S


class _Use:
    """What contexts have in a cache, beside one that is to come."""

    def __init__(self, state: State, coming: Context, others: Iterable[Context]) -> None:
        self._coming = {ref.name for ref in coming.recipe.objects}
        self._of = {other: _objects(state, other) for other in others}

    def frees_bytes(self, ending: Collection[Context]) -> int:
        """What is not used any more when these have ended."""
        used = self._coming.union(*(self._of[other] for other in self._of if other not in ending))
        free = {name: size for other in ending for name, size in self._of[other].items() if name not in used}
        return sum(free.values())


def _objects(state: State, context: Context) -> dict[str, int]:
    """The objects that a library of a context may use, its snapshots too, with their sizes in bytes."""
    found = {ref.name: ref.size_bytes for ref in context.recipe.objects}
    for (key, _), forms in state.transfers.snapshots.items():
        if key == context.recipe.key:
            found |= {snapshot.object.name: snapshot.object.size_bytes for snapshot in forms.values()}
    return found


def _users(state: State, pilot: Pilot) -> Iterator[Library]:
    """The libraries that have objects in a pilot's cache."""
    peer = state.transfers.peers.get(pilot.id)
    near = state.transfers.caches.get(peer.cache, {}) if peer is not None else {}
    for id in {pilot.id: None, **dict.fromkeys(near)}:
        for library in state.pilots[id].libraries.values():
            if library.context.recipe.objects and library.state is not LibraryState.GONE:
                yield library


def _is_idle(library: Library) -> bool:
    """Whether a library has nothing to do, or ends already."""
    if library.state is LibraryState.STOPPING:
        return True
    is_free = library.state is LibraryState.READY and not library.held and not library.zombies
    return is_free and not library.context.queue.count


# ---- library messages


# A library that was ended for one call's sake, or its pilot's, is not the fault of the others that it ran.
BLAMELESS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT, FailureKind.PILOT})

# It was ended for the sake of one call, which has left it by then.
OF_OTHERS = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT})


def library_ready(manager: Manager, library: Library, message: LibraryReady) -> None:
    """A library holds its context: remember what that cost, keep only what it really takes, give it calls."""
    state, context = manager.state, library.context
    if library.state is not LibraryState.LOADING:
        if library.state is not LibraryState.STOPPING:  # else it was told to stop meanwhile
            state.refuse("library ready twice")
        return
    libraries.record_use(library, memory_bytes=message.resident_bytes, device_bytes=message.device_bytes, now=state.now)
    libraries.set_slots(library, message.slots)
    at_once = f", runs {message.slots} calls at once" if message.slots else ""
    library.note(state.now, f"ready: {message.start_s:.2f} s to start, {message.load_s:.2f} s to load{at_once}")
    kind = library.devices[0].facts.kind
    libraries.record_load(library, message)
    manager.out.append(
        RecordLoad(
            RecipeKey(context.recipe.key), context.recipe.name, kind, message.start_s, message.load_s,
            message.resident_bytes, message.peak_bytes, message.device_bytes, message.slots,
        )
    )  # fmt: skip
    library_hot(manager, library)


def library_hot(manager: Manager, library: Library) -> None:
    """A library serves calls from now on."""
    state, context = manager.state, library.context
    libraries.mark_ready(manager, library)
    libraries.record_good_load(library)
    blocks.note_useful(manager, library.pilot)
    wanted = manager.policies.residency.measured(state, library)
    if wanted < library.promised_bytes:  # where nothing was declared, the pilot holds no more than was measured
        manager.supply_changed = True
        libraries.promise(library, wanted)
    manager.changed("libraries", library.id)
    queues.relist_library(manager, library)
    holding.places_changed(manager, context)
    dispatch.feed_library(manager, library)


def engine_batch_report(manager: Manager, library: Library, message: LibraryBatch) -> None:
    """A library says how full its batch is: show that, and remember what its steps took."""
    library.batch, library.batch_at = message.load, manager.state.now
    manager.changed("libraries", library.id)
    if message.times.samples:
        kind = library.devices[0].facts.kind
        manager.out.append(RecordSteps(RecipeKey(library.context.recipe.key), kind, message.times))


def library_gone(manager: Manager, library: Library, message: LibraryGone) -> None:
    """A library has ended; its calls go elsewhere, or end if they killed it once too often."""
    state, context, failure = manager.state, library.context, message.failure
    running = {id for id in message.running if id in library.held}
    broken = holding.gang_calls_broken_by(state, library, message.running)
    unasked = library.state is LibraryState.LOADING and message.loading and failure is None
    survivors = libraries.detach_library(manager, library)
    library.note(state.now, f"ended: {failure.message}" if failure is not None else "ended")
    why = f"back in the queue: lib-{library.id} on {library.pilot.id} ended"
    blamed = failure if failure is not None and not message.loading and failure.kind not in BLAMELESS else None
    crowding = None  # the death of a library for want of memory that others hold
    if failure is not None and failure.kind is FailureKind.PILOT and failure.signal and not message.loading:
        crowding = failure
    back = []
    if failure is None and not message.loading:
        retries.note_cut_calls(manager, library, [call for call in survivors if call.id in running])
    for call in survivors:
        if crowding is not None and call.id in running and _crowded_out(manager, library, call, crowding):
            continue
        killer = blamed is not None and call.id in running
        if failure is not None and failure.kind in OF_OTHERS and call.id in running:
            retries.cut_beside(manager, library, call, failure)
        if not (killer and blamed and retries.blame_killer(manager, library, call, blamed, alone=len(running) == 1)):
            back.append(call)
    if blamed is not None:
        for call in broken:
            retries.blame_killer(manager, library, call, blamed, alone=len(message.running) == 1)
    if crowding is not None:
        for call in broken:
            gangs.gang_lost_memory(manager, library, call, crowding)
    holding.requeue(manager, back, why=f"{why} ({failure.message})" if failure else why)
    if failure is None:
        libraries.count_runs_again(manager, sum(call.id in running for call in back))
    if failure is not None and failure.kind is FailureKind.PILOT:
        libraries.record_pilot_lack(context, failure)
        again_s = 0.0
        if message.cache_lacks_bytes > 0:
            again_s = make_cache_room(manager, library.pilot, context, message.cache_lacks_bytes)
        blame.blame_pilot(state, library, failure, loading=message.loading, waits_s=again_s)
        manager.changed("contexts", context.recipe.key)
    elif message.loading and failure is not None:
        _load_failed(manager, context, library, failure)
        blame.ask_why_load_failed(manager, library, failure)
    if unasked:
        pilots.pilot_leaves(manager, library.pilot)


def _crowded_out(manager: Manager, library: Library, call: Call, failure: Failure) -> bool:
    """The kernel has killed a library with a call that it ran, because others hold the memory. Returns whether the
    call needs nothing more here; if not, it goes back into the queue."""
    if call.group.options.gang[1] > 1:
        return gangs.gang_lost_memory(manager, library, call, failure)
    evidence = msgspec.structs.replace(failure, kind=FailureKind.INFRASTRUCTURE)
    retries.requeue_after_fault(manager, library, call, CallEnd(call.id, False, failure=evidence))
    return True


def _load_failed(manager: Manager, context: Context, library: Library, failure: Failure) -> None:
    """A load has failed. Once too often, calls end for which nothing else is or can be loaded."""
    is_over = libraries.record_failed_load(library, failure)
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
        libraries.fail_waiting_calls(manager, each, evidence)


def _has_no_hope(context: Context) -> bool:
    """Whether calls wait for a context, no context that can serve them has a library, and the loads of each of these
    have failed too often."""
    alive = any(x.state in (LibraryState.LOADING, LibraryState.READY) for x in queues.libraries_for(context))
    return (
        context.queue.count > 0 and not alive and all(map(libraries.has_given_up, (context, *context.lists.values())))
    )


# ---- backlogs


def requeue_stuck_backlogs(manager: Manager) -> None:
    """Take the backlog of every stuck library back to the queue."""
    state = manager.state
    looked = False
    for context in state.contexts.values():
        for library in tuple(context.index.least_loaded()):
            looked = True
            full = full_since(library)
            if full is None or state.now - full < max(STUCK_S, LINGERS * context.run_s):
                continue
            queues.mark_stuck(manager, library)
            waiting = library.load - library.taking - library.slots
            if waiting > 0:
                holding.ask_back(manager, library, waiting)
    if looked and STUCK_TIMER not in state.timers:
        queues.schedule_backlog_check(manager)

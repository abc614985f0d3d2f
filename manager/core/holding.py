"""Which library holds which call, and what is recorded of open calls. Only this file writes that.

Pilots that are reserved for one call, which is to run alone there.

What is remembered of open calls besides themselves, until they end: progress, forecasts, broken runs of gangs.

This file alone writes that. A million calls have none of it, so it stands in dicts of its own.

Which library holds which call. This file alone writes that.

A call is given to a library here (`give`, `give_all`, `give_gang`, `offer`, `resume`), and leaves it here: it has
ended, the library gave it back, or it is taken away. What is taken away keeps its slot as a *zombie* until the pilot
says that the slot is free. Where a call is (`Call.state`, its holder) changes here alone too; a call that waits is in
its context's queue (`queues`). Calls given and orders to drop some leave when the event is over (`sending`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from stoker.manager.core import queues
from stoker.manager.core.events import PaceAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Context, Gang, Group, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import State, StreamFacts, Trial
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, CallSpec
from stoker.protocol.ids import CallId
from stoker.protocol.to_client import ProgressReports
from stoker.protocol.to_pilot import TakeBack


def places_changed(manager: Manager, context: Context) -> None:
    """Libraries of a context, or their pilots, have changed: calls that are apart may find a place now."""
    manager.apart_due |= any(each.queue.apart for each in (context, *context.listed_by.values()))


def trial_of(manager: Manager, call: Call) -> Trial:
    """What a call has lost, nothing at first."""
    return manager.state.trials.setdefault(call.id, Trial())


def reserve_pilot(manager: Manager, trial: Trial, pilot: Pilot, call: Call) -> None:
    """A pilot is given nothing but this call from now on."""
    trial.pilot, pilot.reserved = pilot, call
    manager.state.reserved[pilot.id] = pilot
    for library in pilot.libraries.values():
        queues.relist_library(manager, library)


def trial_ended(manager: Manager, id: int) -> None:
    """A call has ended."""
    trial = manager.state.trials.pop(id, None)
    if trial is not None:
        free_reserved_pilot(manager, trial)


def release_reservation(manager: Manager, call: Call) -> None:
    """A call is held by no library any more: the pilot that was reserved for it serves others."""
    trial = manager.state.trials.get(call.id)
    if trial is not None:
        free_reserved_pilot(manager, trial)


def free_reserved_pilot(manager: Manager, trial: Trial) -> None:
    """The pilot that was reserved serves others again."""
    pilot, trial.pilot = trial.pilot, None
    if pilot is None:
        return
    pilot.reserved = None
    manager.state.reserved.pop(pilot.id, None)
    manager.supply_changed = manager.apart_due = True
    for library in pilot.libraries.values():
        queues.relist_library(manager, library)
        if library.context.queue.count:
            manager.returned[library.context] = None


# ---- call records
def record_progress(state: State, progress: CallProgress) -> None:
    """A call has said how far it is."""
    state.reports[progress.call] = progress


def record_printed_progress(manager: Manager, call: Call, pace: PaceAdvice) -> None:
    """A call that does not say how far it is has printed it: its client is told as if it had said so."""
    state, client = manager.state, call.group.client
    if call.id in state.reports:
        return
    said = state.printed[call.id] = CallProgress(call.id, pace.done, pace.total)
    if client.connected:
        manager.tell(client, ProgressReports([said]))


def reset_progress(state: State, call: Call) -> None:
    """A call that ran waits again: what it has printed does not tell how far its next run is."""
    state.printed.pop(call.id, None)


def stream_of(state: State, call: int, run: int) -> StreamFacts:
    """What is known of the pieces of a call, in this run of it."""
    facts = state.streams.get(call)
    if facts is None or facts.run != run:
        facts = state.streams[call] = StreamFacts(run)
    return facts


def record_forecast(manager: Manager, call: Call, ends_at: float, *, in_time: bool) -> None:
    """A call is expected to end then: its client is told when the event is over."""
    said = manager.state.forecasts[call.id] = CallForecast(call.id, ends_at, in_time)
    manager.forecasts.setdefault(call.group.client, []).append(said)


def count_broken_gang(state: State, call: Call) -> int:
    """The ranks of a gang have lost each other. Returns how often they have by now."""
    breaks = state.breaks[call.id] = state.breaks.get(call.id, 0) + 1
    state.broken_runs[call.id] = call.sent_at
    return breaks


def count_lost_rank(state: State, call: Call) -> int:
    """A gang has lost the library of a rank, and its call is not to blame. Returns how often it was broken by now."""
    state.breaks[call.id] = state.breaks.get(call.id, 0) + 1
    return state.breaks[call.id]


def gang_calls_broken_by(state: State, library: Library, running: Iterable[int]) -> list[Call]:
    """Gang calls that a library ran when it died, and that were taken away because other ranks noticed that first."""
    here = [state.calls[id] for id in running if id in library.zombies and id in state.calls]
    # Of ranks that die together one counts; those of a run that was broken off before have nothing to do with it.
    return [call for call in here if state.broken_runs.pop(call.id, None) == call.sent_at]


def forgive_broken_gangs(state: State, library: Library) -> None:
    """A library is lost. If other ranks of its gangs have noticed before, that was no quarrel of theirs."""
    breaks = state.breaks
    for id in library.zombies:
        if id in breaks:
            breaks[id] -= 1
            if not breaks[id]:
                del breaks[id]


def drop_records(state: State, call: Call) -> None:
    """A call has ended."""
    state.reports.pop(call.id, None)
    state.printed.pop(call.id, None)
    state.forecasts.pop(call.id, None)
    state.streams.pop(call.id, None)
    state.breaks.pop(call.id, None)
    state.broken_runs.pop(call.id, None)


def drop_records_of_ended(state: State, ends: list[CallEnd]) -> None:
    """Calls have ended, if they are not open any more."""
    lists: tuple[dict[int, Any], ...] = (state.reports, state.printed, state.forecasts, state.streams)
    for kept in lists:
        if kept:
            for outcome in ends:
                if outcome.call not in state.calls:
                    kept.pop(outcome.call, None)


# ---- calls of libraries
# What a member of a gang that is taken apart has to end by itself, before its library is ended for it.
GANG_GRACE_S = 10.0


def accept(manager: Manager, group: Group, specs: list[CallSpec]) -> list[Call]:
    """Calls of one group have come: they are open until they end. Returns those that were not open before."""
    state, calls = manager.state, manager.state.calls
    now = state.now
    fresh: list[Call] = []
    for spec in specs:  # the hot path
        id = spec.call
        if id in calls:
            if group.client.unnamed is None:
                state.refuse("repeated call")
            continue
        calls[id] = call = Call(id, spec, group, now)
        fresh.append(call)
    return fresh


# ---- calls come to libraries
def takes(manager: Manager, library: Library, call: Call) -> bool:
    """Whether a library may be given one more call of this kind just now."""
    group = call.group
    return (
        library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and serves(library, group)
        and library.load < queues.free_slots(manager, library)
        and library.admits(call)
    )


def give(manager: Manager, library: Library, call: Call) -> None:
    """A call that is in no queue goes to a library when the event is over."""
    give_all(manager, library, [call])
    queues.relist_library(manager, library)


def give_all(manager: Manager, library: Library, calls: list[Call]) -> None:
    """Calls that are in no queue go to a library when the event is over; the caller lists the library anew."""
    held, now, is_held = library.held, manager.state.now, CallState.HELD
    for call in calls:
        call.state = is_held
        call.holder = library
        call.sent_at = now
        held[call.id] = call
    batch = manager.sends.get(library)
    if batch is None:
        manager.sends[library] = calls
    else:
        batch += calls
    queues.note_given(library, len(calls), now)


def offer(manager: Manager, library: Library, call: Call) -> None:
    """A library holds a call that its pilot may refuse; the caller sends it."""
    give(manager, library, call)
    manager.sends[library].remove(call)
    call.offered = True


def give_gang(manager: Manager, members: tuple[Library, ...], call: Call) -> None:
    """Libraries hold a call together; the caller sends it to each of them."""
    call.state = CallState.HELD
    call.holder = Gang(members)
    call.sent_at = manager.state.now
    for library in members:
        library.held[call.id] = call


def may_go_on(library: Library, call: Call) -> bool:
    """Whether a call that runs in a library already may count as held there."""
    suspect = library.suspect is not None or (call.by_itself and library.slots > 1)
    return serves(library, call.group) and call.group.options.gang[1] == 1 and not suspect


def serves(library: Library, group: Group) -> bool:
    """Whether calls of a group may run in libraries of this one's context."""
    return library.context is group.context or library.context.recipe.key in group.options.variants


def resume(manager: Manager, library: Library, call: Call, *, why: str) -> None:
    """A call that is in no queue runs in this library already: the library holds it from now on."""
    library.zombies.pop(call.id, None)
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = manager.state.now
    call.note(manager.state.now, f"lib-{library.id} on {library.pilot.id}: {why}")
    library.held[call.id] = call
    queues.relist_library(manager, library)


# ---- they leave them
def end_good(
    manager: Manager,
    library: Library,
    ends: Iterator[CallEnd],
    group: Group | None,
    seconds: float,
) -> tuple[int, Call | None, Group | None, float]:
    """End calls of one group that a library alone held and that have ended well: the hot path. `group` is that of the
    first, if it is None. Returns how many of `ends` these were; the call of the next end, which is taken out (None: the
    library does not hold it, or there is no other end); the group; and `seconds` with their run time added."""
    held, open_calls, has_ended = library.held, manager.state.calls, CallState.ENDED
    before = len(held)
    for outcome in ends:
        id = outcome.call
        call = held.pop(id, None)
        if call is None:
            return before - len(held), None, group, seconds
        if call.group is not group or call.holder is not library or not outcome.ok:
            if group is not None or call.holder is not library or not outcome.ok:
                return before - len(held) - 1, call, group, seconds
            group = call.group
        call.state = has_ended
        call.holder = None
        del open_calls[id]
        seconds += outcome.run_s
    return before - len(held), None, group, seconds


def end_one(manager: Manager, call: Call) -> None:
    """A call that was taken out of the one library that held it has ended well."""
    call.state = CallState.ENDED
    call.holder = None
    del manager.state.calls[call.id]


def take_out(library: Library, id: int) -> Call | None:
    """A library has ended a call, or gives it back; None if it does not hold it."""
    return library.held.pop(id, None)


def release_ended(manager: Manager, call: Call) -> None:
    """A call has its end: nobody holds it."""
    release_holder(manager, call)
    call.state = CallState.ENDED
    del manager.state.calls[call.id]


def release_holder(manager: Manager, call: Call) -> None:
    """A held call is held by nobody any more. A gang's other members are told; one library knows already."""
    if type(call.holder) is Gang:
        withdraw(manager, call, running=True)
    call.holder = None
    if manager.state.trials:
        release_reservation(manager, call)


def wait_again(manager: Manager, call: Call, *, why: str) -> None:
    """A call that a library held waits again; the caller finds it its place."""
    release_holder(manager, call)
    reset_progress(manager.state, call)
    call.offered = False
    call.state = CallState.WAITING
    call.note(manager.state.now, why)
    manager.changed("calls", call.id)


def requeue(manager: Manager, calls: Iterable[Call], *, why: str) -> None:
    """Held calls go back to where their arrival puts them in their queues, and to free libraries after the event."""
    for call in calls:
        wait_again(manager, call, why=why)
        context = call.group.context
        queues.wait_again_apart(manager, call)
        manager.returned[context] = None
        manager.dirty[context] = None


def withdraw(manager: Manager, call: Call, *, running: bool) -> None:
    """Take a held call away from its libraries; its slot stays taken until the pilot says that it is free."""
    holder = call.holder
    members = holder.members if isinstance(holder, Gang) else (holder,)
    for library in members:
        if library is not None and library.held.pop(call.id, None) is not None:
            batch = manager.sends.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.ended_at = manager.state.now
                drop(manager, library, call.id, running=running, of_gang=isinstance(holder, Gang))
            queues.relist_library(manager, library)
    call.holder = None


def withdraw_to_queue(manager: Manager, call: Call) -> None:
    """Take a held call away from its libraries, back into its queue without a word: it ends at once."""
    withdraw(manager, call, running=False)
    call.state = CallState.WAITING
    queues.enqueue_in_place(call)


def unsend(manager: Manager, library: Library, *, why: str) -> None:
    """What a library was given in this very event, and was not sent yet, goes back."""
    unsent = manager.sends.pop(library, None)
    if unsent:
        for call in unsent:
            del library.held[call.id]
        requeue(manager, unsent, why=why)


def release_all_of(manager: Manager, library: Library) -> list[Call]:
    """A library is gone. Returns the calls that it held, in order; the caller requeues them."""
    manager.sends.pop(library, None)
    held = list(library.held.values())
    library.held.clear()
    library.zombies.clear()
    return held


def forget_unsent(manager: Manager) -> None:
    """Everything ends: nothing that libraries were to be told about calls needs to be said."""
    manager.sends.clear()
    manager.drops.clear()


def progressed(manager: Manager, library: Library) -> None:
    """Calls of a library have ended."""
    library.ended_at = manager.state.now


# ---- slots that stay taken
def drop(manager: Manager, library: Library, id: CallId, *, running: bool, of_gang: bool = False) -> None:
    """A library is told to drop a call that it does not hold any more (`running`: even if it runs), when the event is
    over. The call takes a slot there until the pilot says that it is gone."""
    library.zombies[id] = running
    manager.drops.setdefault((library, running, GANG_GRACE_S if of_gang else 0.0), []).append(id)


def occupy(library: Library, id: CallId) -> None:
    """A library runs a call that nobody submitted: it takes a slot."""
    library.zombies[id] = False


def slot_is_free(library: Library, id: int) -> bool:
    """A call that was taken away is gone from a library. False if it took no slot there."""
    return library.zombies.pop(id, None) is not None


def now_holds(library: Library, listed: Container[int]) -> list[Call]:
    """A pilot has said what a library has: `listed`. Returns calls that it should hold and lacks; the caller requeues
    them."""
    missing = [call for id, call in library.held.items() if id not in listed]
    for call in missing:
        del library.held[call.id]
    return missing


def now_occupies(library: Library, listed: Container[int]) -> None:
    """A pilot has said what a library has: `listed`. Other slots are free, and no call is on its way back."""
    library.zombies = {id: running for id, running in library.zombies.items() if id in listed}
    library.taking = 0


# ---- backlogs
def ask_back(manager: Manager, library: Library, count: int) -> None:
    """Ask a library to give back calls that it has not begun."""
    library.taking += count
    manager.say(library.pilot, TakeBack(library.id, count))


def gave_back(library: Library) -> None:
    """A library has answered: it gives back no more than it has."""
    library.taking = 0


def serve_after(manager: Manager, context: Context) -> None:
    """Serve a context's queue at the end of the event, where a gang that libraries were kept for may be none any more:
    it left, or too few libraries are left for it."""
    if context.queue.count and context.index:
        manager.returned[context] = None

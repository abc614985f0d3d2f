"""Record which library holds which call. Only this module writes these records.

A withdrawn call occupies its library slot as a *zombie* until the pilot reports that the slot is free. Calls and drop
orders are sent at the end of the event.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from stoker.manager.core import blame, queues
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Context, Gang, Group, Library, Pilot
from stoker.manager.core.state import State, Trial
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import CancelCalls, RunCalls, TakeBack

_GROUP = attrgetter("group")


# ---- records of few calls
def mark_special_placement_due(manager: Manager, context: Context) -> None:
    """Record that calls that wait apart from the queue (see `retries`) may find a library now."""
    manager.apart_due |= any(each.queue.apart for each in (context, *context.listed_by.values()))


def get_or_create_trial(manager: Manager, call: Call) -> Trial:
    """Return a call's record of losses, walltime cuts and faults since it last saved its progress."""
    trial = manager.state.trials.setdefault(call.id, Trial())
    if call.spec.progress != trial.saved:
        trial = manager.state.trials[call.id] = Trial(saved=call.spec.progress, pilot=trial.pilot)
    return trial


def reserve_pilot(manager: Manager, trial: Trial, pilot: Pilot, call: Call) -> None:
    trial.pilot, pilot.reserved = pilot, call
    manager.state.reserved[pilot.id] = pilot
    for library in pilot.libraries.values():
        queues.update_load_index(manager, library)


def remove_call_trial(manager: Manager, id: int) -> None:
    trial = manager.state.trials.pop(id, None)
    if trial is not None:
        free_reserved_pilot(manager, trial)


def free_reserved_pilot(manager: Manager, trial: Trial) -> None:
    pilot, trial.pilot = trial.pilot, None
    if pilot is None:
        return
    pilot.reserved = None
    manager.state.reserved.pop(pilot.id, None)
    manager.supply_changed = manager.apart_due = True
    for library in pilot.libraries.values():
        queues.update_load_index(manager, library)
        if library.context.queue.count:
            manager.returned[library.context] = None


def pop_broken_gang_calls(state: State, library: Library, running: Iterable[int]) -> list[Call]:
    """Return the gang calls of a dead library whose current run ended because another rank failed."""
    here = [state.calls[id] for id in running if id in library.zombies and id in state.calls]
    # If several ranks die together, the manager counts one death, and only for the run in which the ranks died.
    return [call for call in here if state.broken_runs.pop(call.id, None) == call.sent_at]


def forgive_broken_gangs(state: State, library: Library) -> None:
    """Subtract one broken run from the count of each gang call that a lost library ran."""
    breaks = state.breaks
    for id in library.zombies:
        if id in breaks:
            breaks[id] -= 1
            if not breaks[id]:
                del breaks[id]


def drop_records(state: State, ids: Iterable[int]) -> None:
    records: tuple[dict[int, Any], ...] = (
        state.reports, state.printed, state.forecasts, state.streams, state.breaks, state.broken_runs
    )  # fmt: skip
    for kept in records:
        if kept:
            for id in ids:
                kept.pop(id, None)


# ---- send calls to libraries
# If a rank of a withdrawn gang call does not end within this many seconds, its library is killed.
GANG_GRACE_S = 10.0


def accept(manager: Manager, group: Group, specs: list[CallSpec]) -> list[Call]:
    state, calls, now = manager.state, manager.state.calls, manager.state.now
    fresh: dict[int, Call] = {spec.call: Call(spec.call, spec, group, now) for spec in specs if spec.call not in calls}
    if len(fresh) < len(specs) and group.client.unnamed is None:
        state.refuse("repeated call", len(specs) - len(fresh))
    calls.update(fresh)
    return list(fresh.values())


def takes(manager: Manager, library: Library, call: Call) -> bool:
    if not library.is_serving:
        return False
    most = manager.policies.dispatch.window(manager.state, library)
    if library.stuck and library.slots < most:
        most = library.slots
    return serves(library, call.group) and library.load < most and library.admits(call)


def give(manager: Manager, library: Library, call: Call) -> None:
    assign_calls_to_library(manager, library, [call])
    queues.update_load_index(manager, library)


def assign_calls_to_library(manager: Manager, library: Library, calls: list[Call]) -> None:
    """Assign calls that are in no queue to a library. The caller must update the library's entry in the load index."""
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
    library.context.index.gave(library, len(calls), now)


def offer(manager: Manager, library: Library, call: Call) -> None:
    give(manager, library, call)
    manager.sends[library].remove(call)
    call.offered = True


def assign_call_to_gang(manager: Manager, members: tuple[Library, ...], call: Call) -> None:
    """Assign a call to the libraries of a gang. The caller must send the call."""
    call.state = CallState.HELD
    call.holder = Gang(members)
    call.sent_at = manager.state.now
    for library in members:
        library.held[call.id] = call


def can_continue_call(library: Library, call: Call) -> bool:
    suspect = library.suspect is not None or (call.runs_alone and library.slots > 1)
    return serves(library, call.group) and call.group.options.gang[1] == 1 and not suspect


def serves(library: Library, group: Group) -> bool:
    return library.context is group.context or library.context.recipe.key in group.options.variants


def resume(manager: Manager, library: Library, call: Call, *, why: str) -> None:
    library.zombies.pop(call.id, None)
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = manager.state.now
    call.note(manager.state.now, f"lib-{library.id} on {library.pilot.id}: {why}")
    library.held[call.id] = call
    queues.update_load_index(manager, library)


# ---- remove calls from libraries
def end_successful_calls(
    manager: Manager, library: Library, ends: Iterator[CallEnd], group: Group | None, seconds: float
) -> tuple[int, Call | None, Group | None, float]:
    """End calls of one group until a result failed or belongs to another group. This function is performance-critical.

    Return the number of ended calls, the call of the last result, the group, and `seconds` plus the run times of these
    calls. The call is None if no result is left or the library does not hold it.
    """
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
    call.state = CallState.ENDED
    call.holder = None
    del manager.state.calls[call.id]


def remove_held_call(library: Library, id: int) -> Call | None:
    return library.held.pop(id, None)


def release_ended_call(manager: Manager, call: Call) -> None:
    _detach_call_from_libraries(manager, call)
    end_one(manager, call)


def _detach_call_from_libraries(manager: Manager, call: Call) -> None:
    if type(call.holder) is Gang:
        withdraw(manager, call, running=True)
    call.holder = None
    trial = manager.state.trials.get(call.id)
    if trial is not None:
        free_reserved_pilot(manager, trial)


def mark_call_waiting(manager: Manager, call: Call, *, why: str) -> None:
    _detach_call_from_libraries(manager, call)
    manager.state.printed.pop(call.id, None)  # the old progress does not apply to the next run
    call.offered = False
    call.state = CallState.WAITING
    call.note(manager.state.now, why)
    manager.changed("calls", call.id)


def requeue(manager: Manager, calls: Iterable[Call], *, why: str) -> None:
    for call in calls:
        mark_call_waiting(manager, call, why=why)
        context = call.group.context
        queues.put_call_back_in_queue(manager, call)
        manager.returned[context] = None
        manager.dirty[context] = None


def withdraw(manager: Manager, call: Call, *, running: bool) -> None:
    """Remove a call from its libraries. The slot stays occupied until the pilot frees it."""
    of_gang = isinstance(call.holder, Gang)
    for library in call.libraries:
        if library.held.pop(call.id, None) is not None:
            batch = manager.sends.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.ended_at = manager.state.now
                drop(manager, library, call.id, running=running, of_gang=of_gang)
            queues.update_load_index(manager, library)
    call.holder = None


def withdraw_to_queue(manager: Manager, call: Call) -> None:
    withdraw(manager, call, running=False)
    call.state = CallState.WAITING
    call.group.context.queue.put_back(call)


def requeue_unsent_calls(manager: Manager, library: Library, *, why: str) -> None:
    unsent = manager.sends.pop(library, None)
    if unsent:
        for call in unsent:
            del library.held[call.id]
        requeue(manager, unsent, why=why)


def release_library_calls(manager: Manager, library: Library) -> list[Call]:
    manager.sends.pop(library, None)
    held = list(library.held.values())
    library.held.clear()
    library.zombies.clear()
    return held


# ---- slots of withdrawn calls
def drop(manager: Manager, library: Library, id: CallId, *, running: bool, of_gang: bool = False) -> None:
    """Order a library to drop a call. `running`: True if a call that already runs is dropped, too."""
    library.zombies[id] = running
    manager.drops.setdefault((library, running, GANG_GRACE_S if of_gang else 0.0), []).append(id)


def occupy_library_slot(library: Library, id: CallId) -> None:
    library.zombies[id] = False


def free_withdrawn_slot(library: Library, id: int) -> bool:
    """Free the library slot that a withdrawn call occupies. Return False if the call occupies no slot."""
    return library.zombies.pop(id, None) is not None


def remove_unlisted_calls(library: Library, listed: Container[int]) -> list[Call]:
    missing = [call for id, call in library.held.items() if id not in listed]
    for call in missing:
        del library.held[call.id]
    return missing


def free_unlisted_slots(library: Library, listed: Container[int]) -> None:
    """Free the slots of withdrawn calls that are not in `listed`, the pilot's list of the library's calls."""
    library.zombies = {id: running for id, running in library.zombies.items() if id in listed}
    library.taking = 0


def request_calls_back(manager: Manager, library: Library, count: int) -> None:
    library.taking += count
    manager.say(library.pilot, TakeBack(library.id, count))


def schedule_queue_serving(manager: Manager, context: Context) -> None:
    if context.queue.count and context.index:
        manager.returned[context] = None


# ---- the end of an event
def send_calls(manager: Manager) -> None:
    sends, manager.sends = manager.sends, {}
    for library, given in sends.items():
        if not given:
            continue
        group = given[0].group
        specs = [call.spec for call in given if call.group is group]  # this fast path usually covers all calls
        if len(specs) == len(given):
            _send(manager, library, group, specs)
        else:
            for group, some in groupby(given, _GROUP):
                _send(manager, library, group, [call.spec for call in some])


def _send(manager: Manager, library: Library, group: Group, specs: list[CallSpec]) -> None:
    manager.say(library.pilot, build_run_order(library, group, specs))
    if blame.PRINTING_TIMER not in manager.state.timers and library.pilot.folder:
        manager.set_timer(blame.PRINTING_TIMER, manager.state.now + blame.EVERY_S)


def build_run_order(library: Library, group: Group, specs: list[CallSpec], **more: Any) -> RunCalls:
    """Return an order to run calls. It includes their function if the library does not have the function yet."""
    function = group.function
    blob = None if function.key in library.functions else function
    library.functions.add(function.key)
    return RunCalls(library.id, function.key, specs, group.options, blob, **more)


def send_call_drop_orders(manager: Manager) -> None:
    for (library, running, grace_s), dropped in manager.drops.items():
        manager.say(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
    manager.drops.clear()

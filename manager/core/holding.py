"""Record which library holds which call. Only this module writes these records.

If the manager withdraws a call from a library, the call occupies its slot until the pilot reports that the slot is
free. The manager sends calls, and orders to drop calls, after it has handled the whole event.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from stoker.manager.core import blame, queues
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallGroup, CallState, Context, Gang, Library, Pilot
from stoker.manager.core.state import CallSetbacks, State
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import CancelCalls, RunCalls, TakeBack

_GROUP = attrgetter("group")


# ---- records of few calls
def mark_set_aside_calls_due(manager: Manager, context: Context) -> None:
    """Record that a library may now be free for calls outside the queue (see `retries`)."""
    manager.set_aside_calls_due |= any(each.queue.set_aside_calls for each in (context, *context.variant_of.values()))


def get_or_create_setbacks(manager: Manager, call: Call) -> CallSetbacks:
    """Return the losses, walltime cuts and faults of a call since it last saved its progress."""
    setbacks = manager.state.setbacks.setdefault(call.id, CallSetbacks())
    if call.spec.progress != setbacks.saved_progress:
        setbacks = manager.state.setbacks[call.id] = CallSetbacks(
            saved_progress=call.spec.progress, pilot=setbacks.pilot
        )
    return setbacks


def reserve_pilot(manager: Manager, setbacks: CallSetbacks, pilot: Pilot, call: Call) -> None:
    setbacks.pilot, pilot.reserved_for = pilot, call
    manager.state.reserved_pilots[pilot.id] = pilot
    for library in pilot.libraries.values():
        queues.update_load_index(manager, library)


def remove_setbacks(manager: Manager, id: int) -> None:
    setbacks = manager.state.setbacks.pop(id, None)
    if setbacks is not None:
        free_reserved_pilot(manager, setbacks)


def free_reserved_pilot(manager: Manager, setbacks: CallSetbacks) -> None:
    pilot, setbacks.pilot = setbacks.pilot, None
    if pilot is None:
        return
    pilot.reserved_for = None
    manager.state.reserved_pilots.pop(pilot.id, None)
    manager.supply_changed = manager.set_aside_calls_due = True
    for library in pilot.libraries.values():
        queues.update_load_index(manager, library)
        if library.context.queue.count:
            manager.contexts_to_serve[library.context] = None


def pop_broken_gang_calls(state: State, library: Library, running: Iterable[int]) -> list[Call]:
    """For a dead library, return those gang calls whose current run ended because another rank failed."""
    here = [state.calls[id] for id in running if id in library.withdrawn_calls and id in state.calls]
    # If several ranks die in the same run of a call, the run counts for only one of their libraries.
    return [call for call in here if state.broken_runs.pop(call.id, None) == call.sent_at]


def uncount_broken_gang_runs(state: State, library: Library) -> None:
    """Subtract 1 from the number of broken runs of each gang call that a lost library ran."""
    breaks = state.broken_run_counts
    for id in library.withdrawn_calls:
        if id in breaks:
            breaks[id] -= 1
            if not breaks[id]:
                del breaks[id]


def drop_call_records(state: State, ids: Iterable[int]) -> None:
    records: tuple[dict[int, Any], ...] = (
        state.reports, state.printed_progress, state.forecasts, state.streams, state.broken_run_counts,
        state.broken_runs,
    )  # fmt: skip
    for kept in records:
        if kept:
            for id in ids:
                kept.pop(id, None)


# ---- send calls to libraries
# If a gang call is withdrawn and a rank does not end within this many seconds, the library of the rank is killed.
GANG_GRACE_S = 10.0


def create_new_calls(manager: Manager, group: CallGroup, specs: list[CallSpec]) -> list[Call]:
    state, calls, now = manager.state, manager.state.calls, manager.state.now
    fresh: dict[int, Call] = {spec.call: Call(spec.call, spec, group, now) for spec in specs if spec.call not in calls}
    if len(fresh) < len(specs) and group.client.unnamed is None:
        state.count_refusal("repeated call", len(specs) - len(fresh))
    calls.update(fresh)
    return list(fresh.values())


def can_take_call(manager: Manager, library: Library, call: Call) -> bool:
    if not library.is_serving:
        return False
    most = manager.policies.dispatch.window(manager.state, library)
    if library.is_stuck and library.slots < most:
        most = library.slots
    return can_run_group(library, call.group) and library.load < most and library.admits(call)


def assign_call(manager: Manager, library: Library, call: Call) -> None:
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
    batch = manager.calls_to_send.get(library)
    if batch is None:
        manager.calls_to_send[library] = calls
    else:
        batch += calls
    library.context.index.record_burst(library, len(calls), now)


def assign_offered_call(manager: Manager, library: Library, call: Call) -> None:
    assign_call(manager, library, call)
    manager.calls_to_send[library].remove(call)
    call.offered = True


def assign_call_to_gang(manager: Manager, members: tuple[Library, ...], call: Call) -> None:
    """Assign a call to the libraries of a gang. The caller must send the call."""
    call.state = CallState.HELD
    call.holder = Gang(members)
    call.sent_at = manager.state.now
    for library in members:
        library.held[call.id] = call


def can_continue_call(library: Library, call: Call) -> bool:
    suspect = library.call_that_runs_alone is not None or (call.must_run_alone and library.slots > 1)
    return can_run_group(library, call.group) and call.group.options.gang[1] == 1 and not suspect


def can_run_group(library: Library, group: CallGroup) -> bool:
    return library.context is group.context or library.context.recipe.key in group.options.variants


def resume_call(manager: Manager, library: Library, call: Call, *, why: str) -> None:
    library.withdrawn_calls.pop(call.id, None)
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = manager.state.now
    call.note(manager.state.now, f"lib-{library.id} on {library.pilot.id}: {why}")
    library.held[call.id] = call
    queues.update_load_index(manager, library)


# ---- remove calls from libraries
def end_successful_calls(
    manager: Manager, library: Library, ends: Iterator[CallEnd], group: CallGroup | None, seconds: float
) -> tuple[int, Call | None, CallGroup | None, float]:
    """End calls of one group until a result failed or belongs to another group. This function must be fast.

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


def mark_call_ended(manager: Manager, call: Call) -> None:
    call.state = CallState.ENDED
    call.holder = None
    del manager.state.calls[call.id]


def remove_held_call(library: Library, id: int) -> Call | None:
    return library.held.pop(id, None)


def release_ended_call(manager: Manager, call: Call) -> None:
    _detach_call_from_libraries(manager, call)
    mark_call_ended(manager, call)


def _detach_call_from_libraries(manager: Manager, call: Call) -> None:
    if type(call.holder) is Gang:
        withdraw_call(manager, call, stops_running=True)
    call.holder = None
    setbacks = manager.state.setbacks.get(call.id)
    if setbacks is not None:
        free_reserved_pilot(manager, setbacks)


def mark_call_waiting(manager: Manager, call: Call, *, why: str) -> None:
    _detach_call_from_libraries(manager, call)
    manager.state.printed_progress.pop(call.id, None)  # this progress was read from the output of the ended run
    call.offered = False
    call.state = CallState.WAITING
    call.note(manager.state.now, why)
    manager.mark_changed("calls", call.id)


def requeue_calls(manager: Manager, calls: Iterable[Call], *, why: str) -> None:
    for call in calls:
        mark_call_waiting(manager, call, why=why)
        context = call.group.context
        queues.put_call_back_in_queue(manager, call)
        manager.contexts_to_serve[context] = None
        manager.contexts_to_decide[context] = None


def withdraw_call(manager: Manager, call: Call, *, stops_running: bool) -> None:
    """Remove a call from its libraries. The slot of the call stays occupied until the pilot frees it."""
    of_gang = isinstance(call.holder, Gang)
    for library in call.libraries:
        if library.held.pop(call.id, None) is not None:
            batch = manager.calls_to_send.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.ended_at = manager.state.now
                order_call_drop(manager, library, call.id, stops_running=stops_running, of_gang=of_gang)
            queues.update_load_index(manager, library)
    call.holder = None


def move_held_call_to_queue(manager: Manager, call: Call) -> None:
    withdraw_call(manager, call, stops_running=False)
    call.state = CallState.WAITING
    call.group.context.queue.put_back(call)


def requeue_unsent_calls(manager: Manager, library: Library, *, why: str) -> None:
    unsent = manager.calls_to_send.pop(library, None)
    if unsent:
        for call in unsent:
            del library.held[call.id]
        requeue_calls(manager, unsent, why=why)


def release_library_calls(manager: Manager, library: Library) -> list[Call]:
    manager.calls_to_send.pop(library, None)
    held = list(library.held.values())
    library.held.clear()
    library.withdrawn_calls.clear()
    return held


# ---- slots of withdrawn calls
def order_call_drop(
    manager: Manager, library: Library, id: CallId, *, stops_running: bool, of_gang: bool = False
) -> None:
    """Order a library to drop a call. `stops_running`: True to stop the call even if it already runs."""
    library.withdrawn_calls[id] = stops_running
    manager.calls_to_drop.setdefault((library, stops_running, GANG_GRACE_S if of_gang else 0.0), []).append(id)


def occupy_library_slot(library: Library, id: CallId) -> None:
    library.withdrawn_calls[id] = False


def free_withdrawn_slot(library: Library, id: int) -> bool:
    """Free the slot that a withdrawn call occupies in a library. Return False if it occupies no slot."""
    return library.withdrawn_calls.pop(id, None) is not None


def remove_unlisted_calls(library: Library, listed: Container[int]) -> list[Call]:
    missing = [call for id, call in library.held.items() if id not in listed]
    for call in missing:
        del library.held[call.id]
    return missing


def free_unlisted_slots(library: Library, listed: Container[int]) -> None:
    """Free the slots of withdrawn calls that are not in `listed`, the pilot's list of the library's calls."""
    library.withdrawn_calls = {id: running for id, running in library.withdrawn_calls.items() if id in listed}
    library.calls_requested_back = 0


def request_calls_back(manager: Manager, library: Library, count: int) -> None:
    library.calls_requested_back += count
    manager.send_to_pilot(library.pilot, TakeBack(library.id, count))


def schedule_queue_serving(manager: Manager, context: Context) -> None:
    if context.queue.count and context.index:
        manager.contexts_to_serve[context] = None


# ---- the end of an event
def send_pending_calls(manager: Manager) -> None:
    sends, manager.calls_to_send = manager.calls_to_send, {}
    for library, given in sends.items():
        if not given:
            continue
        group = given[0].group
        specs = [call.spec for call in given if call.group is group]  # usually all calls belong to the same group
        if len(specs) == len(given):
            _send_run_order(manager, library, group, specs)
        else:
            for group, some in groupby(given, _GROUP):
                _send_run_order(manager, library, group, [call.spec for call in some])


def _send_run_order(manager: Manager, library: Library, group: CallGroup, specs: list[CallSpec]) -> None:
    manager.send_to_pilot(library.pilot, build_run_order(library, group, specs))
    if blame.OUTPUT_TIMER not in manager.state.timers and library.pilot.folder:
        manager.set_timer(blame.OUTPUT_TIMER, manager.state.now + blame.OUTPUT_QUESTION_INTERVAL_S)


def build_run_order(library: Library, group: CallGroup, specs: list[CallSpec], **more: Any) -> RunCalls:
    """Return an order to run calls. The order contains their function if the library does not have the function yet."""
    function = group.function
    blob = None if function.key in library.functions else function
    library.functions.add(function.key)
    return RunCalls(library.id, function.key, specs, group.options, blob, **more)


def send_call_drop_orders(manager: Manager) -> None:
    for (library, running, grace_s), dropped in manager.calls_to_drop.items():
        manager.send_to_pilot(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
    manager.calls_to_drop.clear()

"""Move calls between queues and libraries when calls are submitted, ended or requeued.

The functions in this module run for every call, so they must be fast. `retries` handles calls that may have killed
their library or pilot.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from stoker.contexts.recipe import NO_LIMITS, ObjectRef
from stoker.manager.core import actions, deadlines, ending, gangs, holding, libraries, pilots, queues, retries
from stoker.manager.core.events import DiscardObject
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallGroup, CallState, Client, Context, Gang, Library, LibraryState
from stoker.manager.core.queues import LONG_RUN_FACTOR, STUCK_AFTER_S, STUCK_TIMER
from stoker.manager.core.seams import PolicyError
from stoker.protocol import pace, to_client
from stoker.protocol.bounds import is_valid_progress
from stoker.protocol.calls import CallEnd, CallProgress, CallSpec
from stoker.protocol.to_manager import CallEvicted, CallsEnded, CallsProgress, CallsReturned, OfferAccepted
from stoker.protocol.to_pilot import EvictCall

RESIDENCY_PAUSE_S = 0.05  # Minimum seconds between two decisions about a context without a library


def send_queued_calls_to_library(manager: Manager, library: Library) -> None:
    state, context = manager.state, library.context
    dispatch, queue = manager.policies.dispatch, library.context.queue
    if not library.is_serving:
        return
    # Updating the load index is slow, so update it only once, after the library has its calls. A policy may return no
    # calls because the library's entry in the index is outdated. Then update the entry and ask the policy again.
    apart = queue.set_aside_calls or (
        context.variant_of and any(other.queue.set_aside_calls for other in context.variant_of.values())
    )
    listed = library.is_stuck or not queue.count or queue.gang_count or apart
    if listed:
        queues.update_load_index(manager, library)
    if queue.deadline_count:
        deadlines.drop_late_calls(manager, context)
    if apart and library.id in context.index.free:
        retries.send_retried_call(manager, library)
    has_room = library.call_that_runs_alone is None and library.pilot.reserved_for is None
    while has_room and queue.count:
        answer = dispatch.pull(state, library)
        if not listed and not (isinstance(answer, int) and answer > 0):
            queues.update_load_index(manager, library)
            listed, answer = True, dispatch.pull(state, library)
        if not isinstance(answer, int):
            actions.carry_out(manager, answer, seam="dispatch")
            break
        head = queue.first_single_call()
        if library.is_stuck:
            answer = min(answer, library.slots - library.load)
        if answer <= 0 or head is None or not _send_calls(manager, library, head, answer):
            break
        listed, has_room = True, queues.update_load_index(manager, library)
    if not listed:
        queues.update_load_index(manager, library)
    queues.record_queue_shrinkage(manager, context)
    if context.variant_of:
        _pull_calls_of_other_contexts(manager, library)
    if library.held or library.withdrawn_calls or queue.first_single_call() is not None:
        return
    library.used_at = state.now
    actions.carry_out(manager, dispatch.on_out_of_calls(state, library), seam="dispatch")
    if context.limits != NO_LIMITS:
        actions.carry_out(manager, manager.policies.residency.on_idle_library(state, library), seam="residency")
    for context in state.waiting_contexts.values():
        if context.starved_since is not None and state.now - context.residency_ran_at >= RESIDENCY_PAUSE_S:
            manager.contexts_to_decide[context] = None


def _pull_calls_of_other_contexts(manager: Manager, library: Library) -> None:
    waiting = any(other.queue.count for other in library.context.variant_of.values())
    if waiting and library.pilot.reserved_for is None and queues.has_room(manager, library):
        actions.carry_out(manager, manager.policies.dispatch.pull_others(manager.state, library), seam="dispatch")


def _send_calls(manager: Manager, library: Library, head: Call, count: int) -> bool:
    group = head.group
    if head.must_run_alone:
        if library.load:
            return False
        count = 1
    taken = library.context.queue.take_calls(group, count)
    barred = [call for call in taken if call.must_run_alone and call is not head]
    if library.withdrawn_calls:
        barred += [call for call in taken if call.id in library.withdrawn_calls and call not in barred]
    for call in barred:
        taken.remove(call)
        library.context.queue.put_back(call)
    if taken:
        holding.assign_calls_to_library(manager, library, taken)
    return bool(taken)


def apply_limits(manager: Manager, context: Context) -> None:
    if context.limits != NO_LIMITS:
        for library in list(context.libraries.values()):
            if library.is_serving and not library.load:
                actions.carry_out(
                    manager, manager.policies.residency.on_idle_library(manager.state, library), seam="residency"
                )
    if context.queue.count:
        manager.contexts_to_decide[context] = None


def serve_queue(manager: Manager, context: Context) -> None:
    """Send waiting calls to libraries with free slots, in the order that the policy chooses."""
    queue, dispatch = context.queue, manager.policies.dispatch
    for library in dispatch.serve_order(manager.state, context):
        if not queue.count:
            return
        if queues.has_room(manager, library):
            send_queued_calls_to_library(manager, library)
    for other in context.variants.values():
        for library in dispatch.serve_order(manager.state, other):
            if not queue.count:
                return
            if library.is_serving:
                _pull_calls_of_other_contexts(manager, library)


# ---- placing
def submit_calls(manager: Manager, group: CallGroup, specs: list[CallSpec]) -> None:
    fresh = holding.create_new_calls(manager, group, specs)
    if not fresh:
        return
    group.open_calls += len(fresh)
    group.client.last_call = max(group.client.last_call, fresh[-1].id)
    for changes in manager.tracked_changes:
        changes.calls.update(call.id for call in fresh)
    context = group.context
    context.submitted_at = manager.state.now
    if manager.state.orphans:
        fresh = pilots.claim_orphans(manager, fresh)
        if not fresh:
            return
    if group.options.objective.deadline_at and manager.policies.dispatch.by_deadline:
        fresh = deadlines.filter_calls_by_deadline(manager, fresh)
        if not fresh:
            return
    queue, dispatch = context.queue, manager.policies.dispatch
    if dispatch.asks_every_call or (len(fresh) <= dispatch.places_one_by_one_up_to and not queue.count):
        for call in fresh:
            place_call(manager, call)
    else:
        queue.extend(fresh)
        if context.index:
            serve_queue(manager, context)
        if queue.count:
            queues.record_queue_growth(manager, context)
    if queue.deadline_count:
        deadlines.schedule_deadline_check(manager, context)


def place_call(manager: Manager, call: Call, *, was_sent_before: bool = False) -> None:
    """Let the policy choose the library for a call. `was_sent_before`: True if an earlier run of the call was sent."""
    context = call.group.context
    answer = manager.policies.dispatch.place(manager.state, call)
    if isinstance(answer, int):
        library = manager.state.libraries.get(answer)
        if library is not None and holding.can_take_call(manager, library, call) and call.group.options.gang[0] <= 1:
            holding.assign_call(manager, library, call)
            return
        manager.report_illegal_action(
            PolicyError(f"call {call.id} cannot be placed in library {answer}"), seam="dispatch"
        )
        answer = None
    if was_sent_before:
        context.queue.put_back(call)
    else:
        context.queue.extend([call])
    if answer is not None:
        actions.carry_out(manager, (answer,) if isinstance(answer, Struct) else answer, seam="dispatch")
    if context.queue.count:
        queues.record_queue_growth(manager, context)


def _retry_call(manager: Manager, call: Call, *, why: str) -> None:
    holding.mark_call_waiting(manager, call, why=why)
    if call.id in manager.state.setbacks:
        queues.put_call_back_in_queue(manager, call)
        manager.contexts_to_serve[call.group.context] = None
    else:
        place_call(manager, call, was_sent_before=True)


# ---- calls that ended
def handle_ended_calls(manager: Manager, library: Library, message: CallsEnded) -> None:
    ends = message.ends
    open_calls = manager.state.calls
    plain = not manager.watch and not manager.tracked_changes
    first = not library.context.runs
    group: CallGroup | None = None
    good: list[CallEnd] = []
    others, seconds, total = 0, 0.0, 0
    rest, place = iter(ends), 0
    while place < len(ends):
        if plain:
            count, call, group, seconds = holding.end_successful_calls(manager, library, rest, group, seconds)
            if count == len(ends):
                good = ends
                break
            good += ends[place : place + count]
            place += count
            if place == len(ends):
                break
        else:
            call = holding.remove_held_call(library, ends[place].call)
        outcome, place = ends[place], place + 1
        if call is None or call.holder is not library:
            total += _handle_unexpected_end(manager, library, call, outcome)
            continue
        if retries.is_infrastructure_fault(outcome):
            retries.requeue_after_fault(manager, library, call, outcome)
            continue
        if call.group is not group:
            if group is not None:
                total += ending.count_runs_and_send_results(
                    manager, library, group, good, others=others, seconds=seconds
                )
            group, good, others, seconds = call.group, [], 0, 0.0
        seconds += outcome.run_s
        if plain and outcome.ok:
            holding.mark_call_ended(manager, call)
            good.append(outcome)
            continue
        others += 1
        if not outcome.ok:
            total += ending.count_runs_and_send_results(
                manager, library, group, good, others=others, seconds=seconds, failed=True
            )
            good, others, seconds = [], 0, 0.0
        ending.end_call(manager, call, outcome)  # count calls in `watch` like others: a replay must give equal results
    if group is not None:
        total += ending.count_runs_and_send_results(manager, library, group, good, others=others, seconds=seconds)
        if first and library.context.queue.count:
            manager.contexts_to_decide[library.context] = None
    state, now = manager.state, manager.state.now
    if state.reports or state.printed_progress or state.forecasts or state.streams or state.setbacks:
        ended = [outcome.call for outcome in ends if outcome.call not in open_calls]
        holding.drop_call_records(state, ended)
        if state.setbacks:
            for id in ended:
                holding.remove_setbacks(manager, id)
    library.is_stuck = False
    library.ended_at = now
    for outcome in reversed(ends):
        if outcome.printed is not None:
            library.log_position = outcome.printed.end
            break
    library.served += total
    library.context.served += total
    library.pilot.ended += total
    if total:
        second = int(now)
        for counts in (state.rate, library.context.rate, library.pilot.rate):
            if counts and counts[-1][0] == second:  # `pace.add_recent_count`, inlined
                counts[-1][1] += total
            else:
                pace.add_recent_count(counts, total, now=now)
    send_queued_calls_to_library(manager, library)


def _handle_unexpected_end(manager: Manager, library: Library, call: Call | None, outcome: CallEnd) -> int:
    if call is not None and type(call.holder) is Gang:
        gangs.record_gang_member_end(manager, call, library, outcome)
        return 1
    if not holding.free_withdrawn_slot(library, outcome.call):
        manager.state.count_refusal("late or repeated end of a call")
        return 0
    still_open = manager.state.calls.get(outcome.call)
    if retries.is_infrastructure_fault(outcome):
        pilots.end_orphan_call(manager.state, outcome)
    elif (
        still_open is not None
        and still_open.group.options.gang[1] == 1
        and not still_open.group.options.stream  # the client may lack pieces of this result
        and not any(device.fault for device in library.devices)
    ):
        still_open.note(manager.state.now, f"{library.pilot.id}, which was counted as lost, finished the call")
        if still_open.state is CallState.HELD:
            holding.move_held_call_to_queue(manager, still_open)
        ending.end_call(manager, still_open, outcome)
    elif pilots.end_orphan_call(manager.state, outcome) or outcome.call in manager.state.calls_with_lost_results:
        pass  # keep it: the client may still read it
    elif isinstance(outcome.payload, ObjectRef):
        manager.commands.append(DiscardObject(outcome.payload.source))
    return 1


# ---- calls that return
def requeue_returned_calls(manager: Manager, library: Library, message: CallsReturned) -> None:
    """Requeue calls that a library returned or refused before the calls started."""
    state = manager.state
    back: list[Call] = []
    for id in message.calls:
        call = holding.remove_held_call(library, id)
        if call is not None:
            back.append(call)
            if message.need_function:
                library.functions.discard(call.group.function.key)
        elif not holding.free_withdrawn_slot(library, id):
            state.count_refusal("return of a call that the library does not hold")
    queues.update_load_index(manager, library)
    if message.refused:
        library.required_bytes, library.over_s = message.required_bytes, message.over_s
        library.refusal = message.refused
        if message.case is not None:
            library.context.refusals[message.case.value] += len(back)
        # a library may refuse only offered calls, unless it is about to exit
        if not all(call.offered for call in back):
            libraries.stop_library(manager, library, reason=message.refused)
        for call in back:
            _retry_call(manager, call, why=f"refused by lib-{library.id} on {library.pilot.id}: {message.refused}")
    else:
        library.calls_requested_back = 0
        holding.requeue_calls(manager, back, why=f"taken back from lib-{library.id}, which had not started it")
    if not library.held and library.state is LibraryState.READY and not message.refused:
        send_queued_calls_to_library(manager, library)


def handle_accepted_offer(manager: Manager, library: Library, message: OfferAccepted) -> None:
    """Stop the libraries that an accepted call preempts, and evict their calls (SLINFER §VIII-A)."""
    call = library.held.get(message.call)
    if call is None or not call.offered:  # the call was cancelled after the offer
        if message.reserve_bytes:
            libraries.change_promised_memory(manager, library, library.promised_bytes)
        return
    for id in message.preempts:
        victim = library.pilot.libraries.get(id)
        if victim is None or victim.state is not LibraryState.READY:
            continue
        unsent = manager.calls_to_send.get(victim, ())
        for held in victim.held.values():
            if held not in unsent and not isinstance(held.holder, Gang):
                manager.send_to_pilot(victim.pilot, EvictCall(victim.id, held.id))
        libraries.stop_library(manager, victim, reason=f"{library.context.recipe.name} grows on the same device")
    if message.reserve_bytes:
        libraries.adopt_pilot_memory_promise(library, message.reserve_bytes)


def handle_call_progress(manager: Manager, library: Library, message: CallsProgress) -> None:
    state = manager.state
    by_client: dict[Client, list[CallProgress]] = {}
    for report in message.reports:
        if not is_valid_progress(report.done, report.total):
            state.count_refusal("impossible progress of a call")
            continue
        call = library.held.get(report.call)
        if call is None:
            if report.call not in library.withdrawn_calls:
                state.count_refusal("progress of a call that the library does not hold")
            continue
        if type(call.holder) is Gang:
            # every rank may report progress, but only the reports of rank 0 count
            if call.holder.members[0] is not library:
                continue
            gangs.record_gang_progress(manager, call, call.holder, report)
        state.reports[report.call] = report
        if report.state:
            call.spec = msgspec.structs.replace(call.spec, progress=report.state)
        client = call.group.client
        if client in by_client:
            by_client[client].append(report)
        else:
            by_client[client] = [report]
    for client, reports in by_client.items():
        if client.connected:
            manager.send_to_client(client, to_client.ProgressReports(reports))


def requeue_evicted_call(manager: Manager, library: Library, message: CallEvicted) -> None:
    progress = message.progress
    call = holding.remove_held_call(library, progress.call)
    if call is None and not holding.free_withdrawn_slot(library, progress.call):
        manager.state.count_refusal("eviction of a call that the library does not hold")
    queues.update_load_index(manager, library)
    if call is not None:
        if progress.state:
            call.spec = msgspec.structs.replace(call.spec, progress=progress.state)
        manager.state.reports[progress.call] = progress
        _retry_call(manager, call, why=f"evicted from lib-{library.id} with its progress kept ({progress.done:g} done)")
    send_queued_calls_to_library(manager, library)


# ---- stuck libraries
def requeue_stuck_backlogs(manager: Manager, _: str) -> None:
    state = manager.state
    looked = False
    for context in state.contexts.values():
        for library in tuple(context.index.libraries_with_backlog_room()):
            looked = True
            full = queues.all_slots_occupied_since(library)
            if full is None or state.now - full < max(STUCK_AFTER_S, LONG_RUN_FACTOR * context.run_s):
                continue
            library.is_stuck = True
            queues.update_load_index(manager, library)
            waiting = library.load - library.calls_requested_back - library.slots
            if waiting > 0:
                holding.request_calls_back(manager, library, waiting)
    if looked and STUCK_TIMER not in state.timers:
        manager.set_timer(STUCK_TIMER, state.now + STUCK_AFTER_S)

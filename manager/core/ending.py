"""End each call exactly once, and record the run time and the failure of the call."""

from __future__ import annotations

import bisect
import operator
import re
from collections.abc import Mapping

from stoker.manager.core import blame, holding, queues
from stoker.manager.core.events import ContextAdvice, RecordRuns, RecordSpeed
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallGroup, CallState, Context, Gang, Library
from stoker.manager.core.per_context import MIN_WEIGHT_OF_NEWEST, FunctionCost, KindRuns, amount_of_work
from stoker.manager.core.state import FailureCount, SlowRun, State, forget_oldest
from stoker.protocol import to_client
from stoker.protocol.calls import CallEnd, Failure, FailureGroup, FailureKind
from stoker.protocol.ids import CallId, format_call_id, format_library_id
from stoker.protocol.status import SlowCall
from stoker.units import first_words, show_signal

MAX_FAILURE_GROUPS = 200  # Maximum number of groups of similar failures. Further failures are counted in one group
KEPT_GROUPS = 1000  # Number of call groups without unfinished calls that are kept for later calls
_OTHER_FAILURES = ("", "other failures", "")
_EXCEPTION_NAME = re.compile(r"(?P<kind>[\w.]{1,100})(?::|$|\s)")


def _count_failure(state: State, call: Call, outcome: CallEnd) -> None:
    groups, key = state.failure_groups, _failure_group_key(call, outcome)
    if key not in groups and len(groups) >= MAX_FAILURE_GROUPS:
        key = _OTHER_FAILURES
    group = groups.setdefault(key, FailureCount(state.now))
    group.count += 1
    group.last_at, group.call = state.now, call.id
    group.message = first_words(outcome.raised if outcome.failure is None else outcome.failure.message)[:300]


def list_failure_groups(state: State) -> tuple[FailureGroup, ...]:
    return tuple(
        FailureGroup(
            function=function, error=error, place=place, count=group.count, example=format_call_id(CallId(group.call)),
            message=group.message, first_s=state.now - group.first_at, last_s=state.now - group.last_at,
        )
        for (function, error, place), group in sorted(state.failure_groups.items(), key=lambda item: -item[1].count)
    )  # fmt: skip


def _failure_group_key(call: Call, outcome: CallEnd) -> tuple[str, str, str]:
    """Return what equal failures have in common: function, exception or kind of failure, and line of the exception."""
    failure, function = outcome.failure, call.group.function.name
    if failure is not None:
        how = show_signal(failure.signal) if failure.signal else f"exit code {failure.exit_code}"
        more = f" ({how})" if failure.signal or failure.exit_code else ""
        return function, f"{failure.kind.value}{more}", ""
    said, *places = outcome.raised.splitlines() or [""]
    found = _EXCEPTION_NAME.match(said)
    place = next((line.strip()[3:] for line in reversed(places) if line.strip().startswith("at ")), "")
    return function, found["kind"] if found is not None else "an exception", place


MAX_SLOW_CALLS = 10
_BY_RUN_TIME = operator.attrgetter("run_s")


def _record_slowest_run(state: State, library: Library, group: CallGroup, ends: list[CallEnd]) -> None:
    outcome = max(ends, key=_BY_RUN_TIME) if len(ends) > 1 else ends[0]
    slowest = state.slowest
    if len(slowest) == MAX_SLOW_CALLS:
        if outcome.run_s <= slowest[0].run_s:
            return
        del slowest[0]
    name, context = group.function.name, group.context.recipe.name
    bisect.insort(slowest, SlowRun(outcome.run_s, outcome.call, name, context, library.pilot.id, state.now))


def list_slowest_calls(state: State) -> tuple[SlowCall, ...]:
    return tuple(
        SlowCall(format_call_id(run.call), run.function, run.context, run.pilot, run.run_s, state.now - run.ended_at)
        for run in reversed(state.slowest)
    )


KEPT_FAILURES = 1000  # Number of failed calls that are kept for `stoker explain`


def end_call(manager: Manager, call: Call, outcome: CallEnd, *, may_be_queued: bool = True) -> None:
    """End a call. Most successful calls end in `dispatch.handle_ended_calls` instead, which is faster.

    `may_be_queued`: False if the call is not in a queue.
    """
    state, group, holder = manager.state, call.group, call.holder
    _close_call(manager, call, may_be_queued=may_be_queued)
    if not outcome.ok:
        if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
            state.cancelled += 1
        else:
            state.failures += 1
            _count_failure(state, call, outcome)
        blame.ask_why_call_failed(manager, holder, call, outcome)
    if not outcome.ok or call.id in manager.watch:
        _keep_ended_call(manager, call, outcome, holder=holder)
    manager.mark_changed("calls", call.id)
    if outcome.ok and (wanted_s := group.options.objective.latency_s):
        for changes in manager.tracked_changes:
            changes.latency_shares.append((state.now - call.submitted_at) / wanted_s)
    manager.pending_results_of(group.client).append(outcome)


def end_call_without_result(manager: Manager, call: Call) -> None:
    if call.state is CallState.HELD:
        holding.withdraw_call(manager, call, stops_running=False)
    _close_call(manager, call)
    manager.mark_changed("calls", call.id)


def uncount_call_failure(state: State, outcome: CallEnd) -> None:
    call, groups = state.failed_calls.pop(outcome.call, None), state.failure_groups
    if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
        state.cancelled -= 1
        return
    state.failures -= 1
    key = _failure_group_key(call, outcome) if call is not None else None
    key = key if key is None or key in groups else _OTHER_FAILURES
    if key in groups:
        groups[key].count -= 1
        if not groups[key].count:
            del groups[key]


def _close_call(manager: Manager, call: Call, *, may_be_queued: bool = True) -> None:
    state, group = manager.state, call.group
    if may_be_queued and call.state is CallState.WAITING:
        queues.remove_call_from_queue(manager, call)
        if group.options.gang[1] > 1:
            holding.schedule_queue_serving(manager, group.context)
    holding.release_ended_call(manager, call)
    holding.drop_call_records(state, (call.id,))
    if state.setbacks:
        holding.remove_setbacks(manager, call.id)
    _count_closed_calls(manager, group, 1)


def _count_closed_calls(manager: Manager, group: CallGroup, count: int) -> None:
    state = manager.state
    group.open_calls -= count
    group.context.ended += count
    state.done += count
    if not group.open_calls and len(state.groups) > KEPT_GROUPS:
        state.groups.pop(group.key, None)


def _keep_ended_call(manager: Manager, call: Call, outcome: CallEnd, *, holder: Library | Gang | None) -> None:
    failure, now = outcome.failure, manager.state.now
    if holder is not None:
        call.note(call.sent_at, f"sent to {describe_place(holder)}")
    printed = outcome.printed or (failure.printed if failure is not None else None)
    if printed is not None and printed.end != printed.start:
        call.note(now, f"printed {printed.path}:{printed.start}-{printed.end or ''} (bytes)")
    if outcome.ok:
        call.note(now, f"ended with a result after {outcome.run_s:.3f} s in its function")
    elif failure is None:
        what = f": {outcome.raised}" if outcome.raised else ""
        call.note(now, f"raised an exception in your code after {outcome.run_s:.3f} s{what}")
    else:
        call.note(now, f"ended without a result ({failure.kind.value}): {failure.message}")
        if failure.log:
            call.note(now, f"its library's log is {failure.log}")
    manager.state.failed_calls[call.id] = call
    if not manager.watch:
        forget_oldest(manager.state.failed_calls, max_records=KEPT_FAILURES)


def describe_place(holder: Library | Gang) -> str:
    members = holder.members if isinstance(holder, Gang) else (holder,)
    places = [
        f"{format_library_id(library.id)} ({', '.join(device.id for device in library.devices)} of {library.pilot.id})"
        for library in members
    ]
    return f"a gang of {', '.join(places)}" if isinstance(holder, Gang) else places[0]


def send_results(manager: Manager) -> None:
    results, manager.results_to_send = manager.results_to_send, {}
    for client, ends in results.items():
        if not ends:
            continue
        first = client.first_unacked + len(client.unacked)
        client.unacked.extend(ends)
        if client.connected and client.unnamed is None:
            manager.send_to_client(client, to_client.Results(first, ends))


def fail_call(manager: Manager, call: Call, failure: Failure) -> None:
    end_call(manager, call, CallEnd(call.id, False, b"", 0.0, failure))


def cancel_call(manager: Manager, call: Call, *, reason: str, running: bool) -> None:
    if call.state is CallState.HELD:
        if call.holder is not None:
            call.note(call.sent_at, f"sent to {describe_place(call.holder)}")
        holding.withdraw_call(manager, call, stops_running=running)
    fail_call(manager, call, Failure(FailureKind.CANCELLED, reason))


_REORDER_FACTOR = 1.5


def count_runs_and_send_results(
    manager: Manager, library: Library, group: CallGroup, good: list[CallEnd], *, others: int, seconds: float,
    failed: bool = False,
) -> int:  # fmt: skip
    """Count runs of a group's calls, send the results in `good` to the client, and return the number of runs.

    `others`: number of runs whose results are not in `good`. `failed`: True to ignore these runs when the speeds of
    device kinds are compared.
    """
    state, count = manager.state, len(good) + others
    if good:
        _count_closed_calls(manager, group, len(good))
        manager.pending_results_of(group.client).extend(good)
        _record_slowest_run(state, library, group, good)
    if not count:
        return 0
    context, cost, mean = library.context, group.cost, seconds / count
    cost.runs += count
    weight = count / cost.runs
    cost.run_s += (mean - cost.run_s) * (weight if weight > MIN_WEIGHT_OF_NEWEST else MIN_WEIGHT_OF_NEWEST)
    if context.queue.is_by_run_time:
        _reorder_queue_if_cost_changed(context, cost)
    if mean < cost.least_s:
        cost.least_s = mean
    context.runs += count
    weight = count / context.runs
    context.run_s += (mean - context.run_s) * (weight if weight > MIN_WEIGHT_OF_NEWEST else MIN_WEIGHT_OF_NEWEST)
    context.run_total_s += seconds
    kind, options = library.kind, group.options
    here = cost.by_kind.get(kind)
    if here is None:
        here = cost.by_kind[kind] = KindRuns()
    here.add_runs(count, seconds, items=count * max(1, options.batch))
    state.unrecorded_costs[cost] = None
    if manager.policies.compares_kinds and (len(context.index.of_kind) > 1 or context.speeds.of):
        _update_device_kind_speeds(library, group, count, seconds, failed=failed)
    return count


def _update_device_kind_speeds(library: Library, group: CallGroup, count: int, seconds: float, *, failed: bool) -> None:
    context, kind, options = library.context, library.kind, group.options
    here = context.by_kind.get(kind)
    if here is None:
        here = context.by_kind[kind] = KindRuns()
    here.add_runs(count, seconds)
    present = context.index.of_kind.keys()
    if len(present) > 1 and not failed and options.gang[1] == 1:
        work = group.function.key, options.batch
        if context.speeds.add_runs(work, kind, calls=count, seconds=seconds, present=present):
            context.index.set_speeds(context.speeds.of)


def record_runs(manager: Manager) -> None:
    state = manager.state
    state.runs_recorded_at = state.now
    unrecorded, state.unrecorded_costs = state.unrecorded_costs, {}
    for cost in unrecorded:
        for kind, runs in cost.by_kind.items():
            if runs.calls:
                record = RecordRuns(cost.recipe, cost.function.timing_key, kind, runs.calls, runs.seconds, runs.items)
                manager.commands.append(record)
                runs.calls, runs.seconds, runs.items = 0, 0.0, 0
        if cost.recipe in state.contexts:
            for (kind, other), ratio in state.contexts[cost.recipe].speeds.take_unrecorded_speed_ratios():
                manager.commands.append(RecordSpeed(cost.recipe, kind, other, ratio))


def apply_cost_advice(context: Context, by_kind: Mapping[str, ContextAdvice]) -> None:
    context.speeds.use_advised_speeds({kind: advice.speed for kind, advice in by_kind.items()})
    context.index.set_speeds(context.speeds.of)
    for advice in by_kind.values():
        if not context.run_s:
            context.run_s = advice.run_s
    sizes = {size for advice in by_kind.values() for size in advice.paces} - set(context.paces.measured)
    if sizes:  # the call may run on any kind of device, so assume the slowest
        slowest = {size: max(advice.paces.get(size, 0.0) for advice in by_kind.values()) for size in sorted(sizes)}
        meet_s = max(advice.meet_s for advice in by_kind.values()) or context.paces.meet_s
        context.paces.use_advised_paces(slowest, meet_s=meet_s)


def apply_run_time_advice(
    manager: Manager, context: Context, cost: FunctionCost, by_kind: Mapping[str, ContextAdvice]
) -> bool:
    """Use the run time that the advisor expects for a function that has never run. Return True if it is used."""
    known = {kind: advice.run_s for kind, advice in by_kind.items() if advice.run_s}
    if cost.runs or not known:
        return False
    wanted = context.recipe.needs.kinds
    here = {device.facts.kind for device in manager.state.devices()}
    meant = [run_s for kind, run_s in known.items() if kind in here and (not wanted or kind in wanted)]
    cost.run_s = max(meant) if meant else min(known.values())
    _reorder_queue_if_cost_changed(context, cost)
    return True


def _reorder_queue_if_cost_changed(context: Context, cost: FunctionCost) -> None:
    if not cost.ordered_s or not 1 / _REORDER_FACTOR < cost.run_s / cost.ordered_s < _REORDER_FACTOR:
        cost.ordered_s = cost.run_s
        context.queue.reorder()


def learn_gang_pace(call: Call, gang: Gang, *, items: float, seconds: float) -> None:
    features = call.spec.features
    work = amount_of_work(features) * items / features.items if features is not None and features.items else items
    call.group.context.paces.add_measurement(len(gang.members), work=work, seconds=max(0.0, seconds))

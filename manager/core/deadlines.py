"""Handle deadlines and forecasts of calls, and find out whether a pilot has enough walltime left for a call or a load.

*Deadlines* are used if the policy sets `Dispatch.by_deadline`. A call *cannot meet* its deadline if it would end too
late even if it started now and took the shortest run time of its function. With `late="drop"` the manager then drops
the call. Otherwise the call waits until the calls that can meet their deadlines have started.

*Walltime*: only this module compares run times with the remaining time of a pilot. A call that probably takes longer
than a pilot remains is sent to this pilot only if no pilot remains longer. A call that was cut off needs a pilot with
more time left than the call had, or with about the longest walltime. After two loads of a context were cut off, the
longer one counts as its load time until a load succeeds.
"""

from __future__ import annotations

import math

from stoker.manager.core import blame, ending
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Device, Library, Pilot
from stoker.manager.core.per_context import expected_seconds_on_kind
from stoker.manager.core.seams import Forecast, PolicyError, View
from stoker.manager.core.state import CallSetbacks, WalltimeCut
from stoker.protocol.blocks import Source
from stoker.protocol.calls import CallForecast, Failure, FailureKind
from stoker.protocol.to_client import Forecasts
from stoker.units import forecast_tolerance_s, show_seconds

RUNS_UNTIL_SHORTEST_IS_USED = 3  # Runs of a function before its shortest run time is used: the first runs may be slow
TIMER_MARGIN_S = 0.001  # Seconds by which rounding may let a timer fire early


def filter_calls_by_deadline(manager: Manager, fresh: list[Call]) -> list[Call]:
    """Drop new calls that can no longer meet their deadlines, or mark them as late. Return the calls that remain."""
    kept = []
    for call in fresh:
        if _cannot_meet_deadline(manager.state.now, call):
            if call.group.options.objective.drop_late:
                call.group.context.queue.extend([call])  # `_drop_late_call` needs a call that is in its queue
                _drop_late_call(manager, call)
                continue
            _mark_call_late(manager, call)
        kept.append(call)
    return kept


def schedule_deadline_check(manager: Manager, context: Context) -> None:
    at = min((_latest_start_time(call) for call in context.queue.calls_with_nearest_deadlines()), default=None)
    key = f"deadline/{context.recipe.key}"
    if at is not None and at < manager.state.timers.get(key, at + 1.0):
        manager.set_timer(key, max(at, manager.state.now) + TIMER_MARGIN_S)


def check_queue_deadlines(manager: Manager, key: str) -> None:
    context = manager.state.contexts.get(key)
    if context is not None:
        drop_late_calls(manager, context)
        schedule_deadline_check(manager, context)


def drop_late_calls(manager: Manager, context: Context) -> None:
    queue = context.queue
    while queue.deadline_count:
        lost = [call for call in queue.calls_with_nearest_deadlines() if _cannot_meet_deadline(manager.state.now, call)]
        if not lost:
            return
        for call in lost:
            if call.group.options.objective.drop_late:
                _drop_late_call(manager, call)
            else:
                context.queue.demote(call)
                _mark_call_late(manager, call)


def _cannot_meet_deadline(now: float, call: Call) -> bool:
    return not call.late and now > _latest_start_time(call)


def _drop_late_call(manager: Manager, call: Call) -> None:
    left_s, least_s = call.group.options.objective.deadline_at - manager.state.now, call.group.cost.least_s
    why = f"dropped: {show_seconds(-left_s)} past its deadline"
    if left_s > 0:
        least = f"no call of its function took less than {show_seconds(least_s)}"
        why = f"dropped: its deadline is in {show_seconds(left_s)}, and {least}"
    ending.fail_call(manager, call, Failure(FailureKind.DROPPED, why))


def _latest_start_time(call: Call) -> float:
    cost = call.group.cost
    return call.group.options.objective.deadline_at - (
        cost.least_s if cost.runs >= RUNS_UNTIL_SHORTEST_IS_USED else 0.0
    )


def _mark_call_late(manager: Manager, call: Call) -> None:
    state = manager.state
    call.late = True
    call.note(state.now, "can no longer meet its deadline; calls that can meet theirs run first")
    before = state.forecasts.get(call.id)
    if before is None or before.in_time:
        _record_forecast(manager, call, state.now + call.group.cost.run_s, in_time=False)


def _record_forecast(manager: Manager, call: Call, ends_at: float, *, in_time: bool) -> None:
    said = manager.state.forecasts[call.id] = CallForecast(call.id, ends_at, in_time)
    manager.forecasts.setdefault(call.group.client, []).append(said)


def apply_forecast_action(manager: Manager, action: Forecast) -> None:
    state = manager.state
    call = state.calls.get(action.call)
    if call is None:
        raise PolicyError(f"there is no call {action.call}")
    context = call.group.context
    # functions without a loader share one context, so its run time says nothing about this function
    of_others = context.recipe.loader and context.run_s
    if not (context.paces.measured or call.group.cost.run_s or of_others):
        return
    due_at = call.group.options.objective.deadline_at
    in_time = action.in_time or bool(due_at and is_in_time(action.ends_at, due_at=due_at, now=state.now))
    if has_forecast_changed(state.forecasts.get(call.id), action.ends_at, in_time=in_time, now=state.now):
        _record_forecast(manager, call, action.ends_at, in_time=in_time)


def is_in_time(ends_at: float, *, due_at: float, now: float) -> bool:
    """Return True if a call meets its deadline, within the tolerance of forecasts. `due_at`: 0 = no deadline."""
    return not due_at or ends_at - due_at < forecast_tolerance_s(ends_at - now)


def has_forecast_changed(before: CallForecast | None, ends_at: float, *, in_time: bool, now: float) -> bool:
    if before is None or before.in_time != in_time:
        return True
    return abs(ends_at - before.ends_at) > forecast_tolerance_s(before.ends_at - now)


def send_forecasts(manager: Manager) -> None:
    fresh, manager.forecasts = manager.forecasts, {}
    for client, said in fresh.items():
        if client.connected:
            manager.send_to_client(client, Forecasts(said, manager.state.now))


MIN_DRAIN_MARGIN_S = 20.0  # A pilot stops taking calls at least this many seconds before its walltime ends
# Maximum share of the walltime in which a pilot takes no calls, so that pilots in short jobs also run calls
MAX_DRAIN_MARGIN_SHARE = 0.25
RUN_TIME_SAFETY_FACTOR = 1.5  # Factor by which a call may take longer than expected
_GRACE_S = 2.0
_LOAD_TIME_SAFETY_FACTOR = 1.2
_MIN_CUT_LOADS = 2
NEAR_WALLTIME_END_S = 60.0  # A pilot lost in these last seconds of its walltime counts as ended by the walltime
_NEAR_WALLTIME_END_SHARE = 0.25
_NEW_PILOT_SHARE = 0.9  # A pilot counts as new while this share of the walltime is left
_COUNTED_CUT_SHARE = 0.6  # A walltime cut counts against a call that ran for at least this share of the walltime


def walltime_left_s(pilot: Pilot, now: float) -> float:
    return pilot.ends_at - now if pilot.ends_at else math.inf


def expected_run_s(library: Library, call: Call) -> float:
    """Return the expected run time of a call in seconds, from its function or else its context; 0 = unknown."""
    cost, context = call.group.cost, library.context
    return expected_seconds_on_kind(context.speeds, cost if cost.run_s else context, library.kind)


def has_time_for_call(view: View, library: Library, call: Call) -> bool:
    pilot = library.pilot
    return not pilot.ends_at or has_time_for_run(view, pilot, expected_run_s(library, call))


def has_time_for_run(view: View, pilot: Pilot, run_s: float) -> bool:
    if not pilot.ends_at:
        return True
    needs_s = RUN_TIME_SAFETY_FACTOR * run_s + _GRACE_S
    left = pilot.ends_at - view.now
    return left >= needs_s or (
        needs_s > pilot.longest_walltime_left_s and left > _NEW_PILOT_SHARE * pilot.longest_walltime_left_s
    )


def has_time_for_retry(view: View, library: Library, call: Call, setbacks: CallSetbacks) -> bool:
    """Return True if the pilot of a library has enough walltime left for a call that was cut off before."""
    pilot = library.pilot
    if not has_time_for_run(view, pilot, max(expected_run_s(library, call), setbacks.longest_cut_run_s)):
        return False
    if not setbacks.cuts or not pilot.ends_at:
        return True
    left = pilot.ends_at - view.now
    walltimes_s = [source.source.walltime_s for source in view.sources.values()]
    walltimes_s += [each.longest_walltime_left_s for each in view.pilots.values()]
    return left > RUN_TIME_SAFETY_FACTOR * setbacks.longest_cut_run_s or left > _NEW_PILOT_SHARE * max(walltimes_s)


def build_walltime_cut(view: View, library: Library, call: Call) -> WalltimeCut:
    pilot = library.pilot
    source = view.sources.get(pilot.source)
    walltime_s = (
        source.source.walltime_s if source is not None and source.source.walltime_s else pilot.longest_walltime_left_s
    )
    ran_s = min(view.now - max(call.sent_at, library.ready_at), pilot.longest_walltime_left_s or math.inf)
    log = blame.library_log_path(pilot, library.id)
    return WalltimeCut(
        ran_s, walltime_s, ran_s >= _COUNTED_CUT_SHARE * pilot.longest_walltime_left_s, pilot.id, library.id, log
    )


def has_time_for_load(view: View, context: Context, device: Device) -> bool:
    pilot = device.pilot
    left = pilot.ends_at - view.now
    return not pilot.ends_at or _can_load_before_drain(
        context, device.facts.kind, left_s=left, lasts_s=pilot.longest_walltime_left_s
    )


def has_source_time_for_load(context: Context, source: Source) -> bool:
    lasts_s = source.walltime_s
    return not lasts_s or _can_load_before_drain(context, source.kind, left_s=lasts_s, lasts_s=lasts_s)


def _can_load_before_drain(context: Context, kind: str, *, left_s: float, lasts_s: float) -> bool:
    advice = context.advice.get(kind)
    load_s = advice.load_s if advice is not None and advice.load_s else context.load_s
    needed_s = _LOAD_TIME_SAFETY_FACTOR * (
        load_s or (context.longest_cut_load_s if context.loads_cut_by_walltime >= _MIN_CUT_LOADS else 0.0)
    )
    if not needed_s:
        return True
    run_s = expected_seconds_on_kind(context.speeds, context, kind)
    return needed_s < left_s - drain_margin_s(lasts_s, run_s=run_s) and needed_s + run_s < left_s


def drain_margin_s(lasts_s: float, *, run_s: float) -> float:
    """Return how many seconds before the end of its walltime a pilot stops taking calls."""
    return min(max(MIN_DRAIN_MARGIN_S, RUN_TIME_SAFETY_FACTOR * run_s + _GRACE_S), MAX_DRAIN_MARGIN_SHARE * lasts_s)


def earliest_drain_time(pilot: Pilot, now: float) -> float:
    return max(now, pilot.ends_at - MAX_DRAIN_MARGIN_SHARE * pilot.longest_walltime_left_s)


def seconds_until_drain(pilot: Pilot, now: float) -> float:
    here = ((library.context, library.kind) for library in pilot.libraries.values())
    run_s = max((expected_seconds_on_kind(context.speeds, context, kind) for context, kind in here), default=0.0)
    return walltime_left_s(pilot, now) - drain_margin_s(pilot.longest_walltime_left_s, run_s=run_s)


def is_near_walltime_end(pilot: Pilot, now: float) -> bool:
    return walltime_left_s(pilot, now) <= min(
        NEAR_WALLTIME_END_S, _NEAR_WALLTIME_END_SHARE * pilot.longest_walltime_left_s
    )

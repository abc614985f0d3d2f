"""Deadlines of calls, forecasts for clients, and what fits before a walltime.

*Deadlines*, under a policy with `Dispatch.by_deadline`. A call is *lost* when it would be late even if it began now and
took as long as the shortest run of its function, once `KNOWN_RUNS` runs were seen. It is dropped if its user wants that
(`late="drop"`); otherwise its client is told, and it goes behind the calls that can still be in time.

*Forecasts*: a client is told of changes only, by more than `forecast_tolerance_s`. An end behind the deadline by less
than that counts as in time.

*Walltime*: only this file compares work with the time that a pilot has left. A pilot is drained `drain_margin_s` before
its end. Until then it gets no call that is expected to run longer, unless no pilot has more time. A call that was cut
off needs more time than it ran, or about as much as any pilot has. Two loads that the walltime cut off bound a load
time that was never measured.
"""

from __future__ import annotations

import math

from stoker.manager.core import ending, holding, queues
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Device, Library, Pilot
from stoker.manager.core.seams import Forecast, PolicyError, View
from stoker.manager.core.state import Cut, Trial
from stoker.protocol.blocks import Source
from stoker.protocol.calls import CallForecast, Failure, FailureKind
from stoker.protocol.to_client import Forecasts
from stoker.units import forecast_tolerance_s, show_seconds

KNOWN_RUNS = 3  # One slow first run must not make every later call look lost
_SOON_S = 0.001  # A timer that fires this much early does not ask for another one in no time


def admit_by_deadline(manager: Manager, fresh: list[Call]) -> list[Call]:
    """Drop or mark late new calls that are lost. Returns the others."""
    kept = []
    for call in fresh:
        if _is_lost(manager.state.now, call):
            if call.group.options.objective.drop_late:
                queues.enqueue(call.group.context, [call])  # whatever waits is in its queue until it ends
                ending.fail_call(manager, call, Failure(FailureKind.DROPPED, _why_lost(manager.state.now, call)))
                continue
            _tell_late(manager, call)
        kept.append(call)
    return kept


def watch_queue(manager: Manager, context: Context) -> None:
    at = min((_latest_start(call) for call in context.queue.nearest()), default=None)
    key = f"deadline/{context.recipe.key}"
    if at is not None and at < manager.state.timers.get(key, at + 1.0):
        manager.set_timer(key, max(at, manager.state.now) + _SOON_S)


def check_queue_deadlines(manager: Manager, key: str) -> None:
    context = manager.state.contexts.get(key)
    if context is not None:
        drop_late_calls(manager, context)
        watch_queue(manager, context)


def drop_late_calls(manager: Manager, context: Context) -> None:
    queue = context.queue
    while queue.timed:
        lost = [call for call in queue.nearest() if _is_lost(manager.state.now, call)]
        if not lost:
            return
        for call in lost:
            if call.group.options.objective.drop_late:
                ending.fail_call(manager, call, Failure(FailureKind.DROPPED, _why_lost(manager.state.now, call)))
            else:
                queues.demote_call(call)
                _tell_late(manager, call)


def _is_lost(now: float, call: Call) -> bool:
    return not call.late and now > _latest_start(call)


def _why_lost(now: float, call: Call) -> str:
    left_s = call.group.options.objective.deadline_at - now
    if left_s <= 0:
        return f"dropped: {show_seconds(-left_s)} past its deadline"
    runs_s = show_seconds(call.group.cost.least_s)
    return f"dropped: its deadline is in {show_seconds(left_s)}, and no call of its function took less than {runs_s}"


def _latest_start(call: Call) -> float:
    cost = call.group.cost
    return call.group.options.objective.deadline_at - (cost.least_s if cost.runs >= KNOWN_RUNS else 0.0)


def _tell_late(manager: Manager, call: Call) -> None:
    state = manager.state
    queues.mark_late(call)
    call.note(state.now, "cannot be in time any more; calls that can be go first")
    before = state.forecasts.get(call.id)
    if before is None or before.in_time:
        holding.record_forecast(manager, call, state.now + call.group.cost.run_s, in_time=False)


def note_forecast(manager: Manager, action: Forecast) -> None:
    state = manager.state
    call = state.calls.get(action.call)
    if call is None:
        raise PolicyError(f"there is no call {action.call}")
    context = call.group.context
    of_others = context.recipe.loader and context.run_s  # all functions without a context share one
    if not (context.paces.measured or call.group.cost.run_s or of_others):
        return
    due_at = call.group.options.objective.deadline_at
    in_time = action.in_time or bool(due_at and is_in_time(action.ends_at, due_at=due_at, now=state.now))
    if not has_changed(state.forecasts.get(call.id), action.ends_at, in_time=in_time, now=state.now):
        return
    holding.record_forecast(manager, call, action.ends_at, in_time=in_time)


def is_in_time(ends_at: float, *, due_at: float, now: float) -> bool:
    """True unless the end is provably late; `due_at` 0 = no deadline."""
    return not due_at or ends_at - due_at < forecast_tolerance_s(ends_at - now)


def has_changed(before: CallForecast | None, ends_at: float, *, in_time: bool, now: float) -> bool:
    if before is None or before.in_time != in_time:
        return True
    return abs(ends_at - before.ends_at) > forecast_tolerance_s(before.ends_at - now)


def send_forecasts(manager: Manager) -> None:
    fresh, manager.forecasts = manager.forecasts, {}
    for client, said in fresh.items():
        if client.connected:
            manager.tell(client, Forecasts(said, manager.state.now))


MARGIN_S = 20.0  # Remaining walltime when a pilot of short calls is drained
MOST_OF_IT = 0.25  # The margin is no more than this part of the whole time, so that short jobs do some work
CAUTION = 1.5  # A call is taken to run this much longer than the mean
_GRACE_S = 2.0
_LOAD_CAUTION = 1.2  # A load is taken to last this much longer than was measured
_CUT_LOADS = 2
SLACK_S = 60.0  # A pilot that leaves this close to its walltime's end (or in its last quarter) leaves because of it
_SLACK_PART = 0.25
_FRESH = 0.9  # A pilot that has this part of its walltime left, or of the longest one, is as good as any
_WHOLE = 0.6  # A cut counts if the call had this part of its pilot's time
_LAST_S = 4.0  # A pilot that hands its objects on keeps this much of its walltime for its own end


def walltime_left_s(pilot: Pilot, now: float) -> float:
    """Seconds until a pilot's walltime ends; infinity without one."""
    return pilot.ends_at - now if pilot.ends_at else math.inf


def call_fits(view: View, library: Library, call: Call) -> bool:
    pilot = library.pilot
    return not pilot.ends_at or run_fits(view, pilot, call.group.cost.run_s or library.context.run_s)


def run_fits(view: View, pilot: Pilot, run_s: float) -> bool:
    if not pilot.ends_at:
        return True
    needs_s = CAUTION * run_s + _GRACE_S
    left = pilot.ends_at - view.now
    return left >= needs_s or (needs_s > pilot.lasts_s and left > _FRESH * pilot.lasts_s)


def trial_fits(view: View, library: Library, call: Call, trial: Trial) -> bool:
    """True if a call that was cut off fits a pilot's remaining time."""
    pilot = library.pilot
    if not run_fits(view, pilot, max(call.group.cost.run_s, trial.longest_s)):
        return False
    if not trial.cuts or not pilot.ends_at:
        return True
    left = pilot.ends_at - view.now
    walltimes_s = [source.source.walltime_s for source in view.sources.values()]
    walltimes_s += [each.lasts_s for each in view.pilots.values()]
    return left > CAUTION * trial.longest_s or left > _FRESH * max(walltimes_s)


def cut_of(view: View, library: Library, call: Call) -> Cut:
    pilot = library.pilot
    source = view.sources.get(pilot.source)
    walltime_s = source.source.walltime_s if source is not None and source.source.walltime_s else pilot.lasts_s
    ran_s = min(view.now - max(call.sent_at, library.ready_at), pilot.lasts_s or math.inf)
    log = f"{pilot.folder}/lib-{library.id}.log" if pilot.folder else ""
    return Cut(ran_s, walltime_s, ran_s >= _WHOLE * pilot.lasts_s, pilot.id, library.id, log)


def load_fits(view: View, context: Context, device: Device) -> bool:
    pilot = device.pilot
    left = pilot.ends_at - view.now
    return not pilot.ends_at or _load_has_time(context, device.facts.kind, left_s=left, lasts_s=pilot.lasts_s)


def load_fits_source(context: Context, source: Source) -> bool:
    lasts_s = source.walltime_s
    return not lasts_s or _load_has_time(context, source.kind, left_s=lasts_s, lasts_s=lasts_s)


def _load_has_time(context: Context, kind: str, *, left_s: float, lasts_s: float) -> bool:
    needed_s = _LOAD_CAUTION * _load_s(context, kind)
    if not needed_s:
        return True
    return needed_s < left_s - drain_margin_s(lasts_s, run_s=context.run_s) and needed_s + context.run_s < left_s


def _load_s(context: Context, kind: str) -> float:
    advice = context.advice.get(kind)
    known = advice.load_s if advice is not None and advice.load_s else context.load_s
    return known or (context.cut_after_s if context.cut_loads >= _CUT_LOADS else 0.0)


def drain_margin_s(lasts_s: float, *, run_s: float) -> float:
    """Seconds before its end at which a pilot is drained."""
    return min(max(MARGIN_S, CAUTION * run_s + _GRACE_S), MOST_OF_IT * lasts_s)


def drain_soonest_at(pilot: Pilot, now: float) -> float:
    return max(now, pilot.ends_at - MOST_OF_IT * pilot.lasts_s)


def drain_in_s(pilot: Pilot, now: float) -> float:
    """Seconds until a pilot is drained; infinity without a walltime."""
    run_s = max((library.context.run_s for library in pilot.libraries.values()), default=0.0)
    return walltime_left_s(pilot, now) - drain_margin_s(pilot.lasts_s, run_s=run_s)


def is_near_its_end(pilot: Pilot, now: float) -> bool:
    return walltime_left_s(pilot, now) <= min(SLACK_S, _SLACK_PART * pilot.lasts_s)


def time_to_hand_on_s(pilot: Pilot, now: float) -> float:
    """Seconds that a leaving pilot may stay; 0 or less: none."""
    return walltime_left_s(pilot, now) - _LAST_S

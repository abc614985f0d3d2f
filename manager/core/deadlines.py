"""Deadlines of calls, forecasts for clients, and what fits before a walltime.

Deadlines under a policy that orders its queues by them (`Dispatch.by_deadline`; the default does).

Within a priority the nearest deadline comes first; calls without one come after those with one. A call is *lost* when
its deadline has passed, or when it would pass before the end of the call even if it began now and took as long as the
shortest run of its function on its context, once `KNOWN_RUNS` runs were seen. A call that is lost is dropped if its
user wants that (`late="drop"`). Else its client is told, and it stands behind the calls that can still be in time: they
would be late as well if it went first.

Calls are looked at when they come, when a library has room, and by a timer when the first one of a queue would be lost.

What policies expect of calls with deadlines, and when their clients are told.

A policy may think anew in every round; a person wants to hear that a job will be late as soon as that is known, and
then only what has changed: whether it is in time, or its end by more than the forecast can be trusted for
(`forecast_tolerance_s`: a tenth of the time until then, a second at least). An end that is behind the deadline by less
is not provably late: such a call counts as one that is in time. While nothing like a call has been measured, nothing is
said of it.

Does it fit before the walltime? This file alone holds work against the time that a pilot has left.

A pilot says how much of its walltime is left. The core and the policies (`View`) ask here what that means:

| question | asked |
|---|---|
| `call_fits`, `run_fits` | before a library gets a call |
| `trial_fits` | before a call that was cut off is tried again |
| `load_fits`, `load_fits_source` | before a context is loaded, before a block is asked for |
| `drain_in_s` | until a pilot is drained |
| `is_near_its_end` | when a pilot goes: the walltime is the reason |
| `cut_of` | when the walltime has ended a call |
| `time_to_hand_on_s` | when a pilot leaves with objects that others need |

A pilot is drained `margin_s` before its end: long enough for a call that it runs to finish, as far as calls of its
contexts have taken until now, and for its objects to be handed on. Until then a call that is expected to run longer
than what is left is kept from it, unless no pilot could ever give it more: then one that has all its time still before
it may try. A call that was cut off needs more time than it ran, or about as much as any pilot has.

A load that nobody has measured may still be known to be long: when the walltime of its pilots was over it was under way
yet. One such load may have been bad luck (a slow file system, a pilot that was nearly over); two are taken for a bound.
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
    """New calls of one group have a deadline. Returns those that are to run; the others are dropped."""
    kept = []
    for call in fresh:
        if is_lost(manager.state.now, call):
            if call.group.options.objective.drop_late:
                queues.enqueue(call.group.context, [call])  # whatever waits is in its queue until it ends
                ending.fail_call(manager, call, Failure(FailureKind.DROPPED, why_lost(manager.state.now, call)))
                continue
            _tell_late(manager, call)
        kept.append(call)
    return kept


def watch_queue(manager: Manager, context: Context) -> None:
    """Have a queue looked at when the first of its calls would be lost."""
    at = min((_latest_start(call) for call in context.queue.nearest()), default=None)
    key = f"deadline/{context.recipe.key}"
    if at is not None and at < manager.state.timers.get(key, at + 1.0):
        manager.set_timer(key, max(at, manager.state.now) + _SOON_S)


def check_queue_deadlines(manager: Manager, key: str) -> None:
    """The first call of a queue may be lost by now."""
    context = manager.state.contexts.get(key)
    if context is not None:
        drop_late_calls(manager, context)
        watch_queue(manager, context)


def drop_late_calls(manager: Manager, context: Context) -> None:
    """Drop what is lost, or let it stand behind the others."""
    queue = context.queue
    while queue.timed:
        lost = [call for call in queue.nearest() if is_lost(manager.state.now, call)]
        if not lost:
            return
        for call in lost:
            if call.group.options.objective.drop_late:
                ending.fail_call(manager, call, Failure(FailureKind.DROPPED, why_lost(manager.state.now, call)))
            else:
                queues.demote_call(call)
                _tell_late(manager, call)


def is_lost(now: float, call: Call) -> bool:
    """True if a call that has not begun cannot be in time any more."""
    return not call.late and now > _latest_start(call)


def why_lost(now: float, call: Call) -> str:
    """Why a call is dropped, in words."""
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


# ---- forecasts
def note_forecast(manager: Manager, action: Forecast) -> None:
    """A policy says what it expects of a call."""
    state = manager.state
    call = state.calls.get(action.call)
    if call is None:
        raise PolicyError(f"there is no call {action.call}")
    if not _is_known(call):
        return
    due_at = call.group.options.objective.deadline_at
    in_time = action.in_time or bool(due_at and is_in_time(action.ends_at, due_at=due_at, now=state.now))
    if not has_changed(state.forecasts.get(call.id), action.ends_at, in_time=in_time, now=state.now):
        return
    holding.record_forecast(manager, call, action.ends_at, in_time=in_time)


def is_in_time(ends_at: float, *, due_at: float, now: float) -> bool:
    """True unless a call that is expected to end then is provably late. `due_at`: 0 = it has no deadline."""
    return not due_at or ends_at - due_at < forecast_tolerance_s(ends_at - now)


def has_changed(before: CallForecast | None, ends_at: float, *, in_time: bool, now: float) -> bool:
    """True if a forecast differs from the one that was told by more than its tolerance."""
    if before is None or before.in_time != in_time:
        return True
    return abs(ends_at - before.ends_at) > forecast_tolerance_s(before.ends_at - now)


def _is_known(call: Call) -> bool:
    """True if something like this call was measured. A policy may name an end without that."""
    context = call.group.context
    of_others = context.recipe.loader and context.run_s  # all functions' that want no context are in one
    return bool(context.paces.measured or call.group.cost.run_s or of_others)


def send_forecasts(manager: Manager) -> None:
    """Tell the clients that are connected, at the end of an event."""
    fresh, manager.forecasts = manager.forecasts, {}
    for client, said in fresh.items():
        if client.connected:
            manager.tell(client, Forecasts(said, manager.state.now))


# ---- walltime
MARGIN_S = 20.0  # What is left of a walltime when a pilot of short calls is drained
MOST_OF_IT = 0.25  # The margin is no more than this part of the whole time, so that short jobs do some work

CAUTION = 1.5  # A call is taken to run this much longer than the mean
_GRACE_S = 2.0
_LOAD_CAUTION = 1.2  # A load is taken to last this much longer than was measured
_CUT_LOADS = 2

SLACK_S = 60.0  # A pilot that leaves this close to its walltime's end (or in its last quarter) leaves because of it
_SLACK_PART = 0.25

_FRESH = 0.9  # A pilot that has this part of its walltime left, or of the longest one, is as good as any
_WHOLE = 0.6  # A cut counts if the call had this part of its pilot's whole time
_LAST_S = 4.0  # A pilot that hands its objects on keeps this much of its walltime for its own end


def walltime_left_s(pilot: Pilot, now: float) -> float:
    """Seconds until the walltime of a pilot is over, below 0 after that; infinity where it has no end."""
    return pilot.ends_at - now if pilot.ends_at else math.inf


# ---- calls
def call_fits(view: View, library: Library, call: Call) -> bool:
    """True if a call is expected to end before the library's pilot does."""
    pilot = library.pilot
    return not pilot.ends_at or run_fits(view, pilot, call.group.cost.run_s or library.context.run_s)


def run_fits(view: View, pilot: Pilot, run_s: float) -> bool:
    """True if a call that usually runs so long is expected to end before a pilot does."""
    if not pilot.ends_at:
        return True
    needs_s = CAUTION * run_s + _GRACE_S
    left = pilot.ends_at - view.now
    return left >= needs_s or (needs_s > pilot.lasts_s and left > _FRESH * pilot.lasts_s)


def trial_fits(view: View, library: Library, call: Call, trial: Trial) -> bool:
    """True if a pilot has more time left than a call ran when it was cut off, or about as much as any pilot has."""
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
    """How long a call ran that the walltime of its pilot has cut off, and whether a longer walltime was to be had."""
    pilot = library.pilot
    source = view.sources.get(pilot.source)
    walltime_s = source.source.walltime_s if source is not None and source.source.walltime_s else pilot.lasts_s
    ran_s = min(view.now - max(call.sent_at, library.ready_at), pilot.lasts_s or math.inf)
    log = f"{pilot.folder}/lib-{library.id}.log" if pilot.folder else ""
    return Cut(ran_s, walltime_s, ran_s >= _WHOLE * pilot.lasts_s, pilot.id, library.id, log)


# ---- loads
def load_fits(view: View, context: Context, device: Device) -> bool:
    """True if a context would be loaded, and a call done, before the walltime of the device's pilot is over."""
    pilot = device.pilot
    left = pilot.ends_at - view.now
    return not pilot.ends_at or _load_has_time(context, device.facts.kind, left_s=left, lasts_s=pilot.lasts_s)


def load_fits_source(context: Context, source: Source) -> bool:
    """True if a context would be loaded, and a call done, on a pilot of this source that has all its time left."""
    lasts_s = source.walltime_s
    return not lasts_s or _load_has_time(context, source.kind, left_s=lasts_s, lasts_s=lasts_s)


def _load_has_time(context: Context, kind: str, *, left_s: float, lasts_s: float) -> bool:
    """True if the load ends before a pilot is drained, and a call after it before the pilot's end: `left_s` of the
    `lasts_s` that it has in all are left."""
    needed_s = _LOAD_CAUTION * _load_s(context, kind)
    if not needed_s:
        return True
    return needed_s < left_s - drain_margin_s(lasts_s, run_s=context.run_s) and needed_s + context.run_s < left_s


def _load_s(context: Context, kind: str) -> float:
    """Seconds that a load takes, at least, on a kind of device (`""`: any); 0 = nobody knows."""
    advice = context.advice.get(kind)
    known = advice.load_s if advice is not None and advice.load_s else context.load_s
    return known or (context.cut_after_s if context.cut_loads >= _CUT_LOADS else 0.0)


# ---- the end of a pilot
def drain_margin_s(lasts_s: float, *, run_s: float) -> float:
    """How long before its end a pilot is drained that lasts so long in all and whose calls run so long."""
    return min(max(MARGIN_S, CAUTION * run_s + _GRACE_S), MOST_OF_IT * lasts_s)


def drain_soonest_at(pilot: Pilot, now: float) -> float:
    """A pilot with an end is not drained before this time, whatever it runs."""
    return max(now, pilot.ends_at - MOST_OF_IT * pilot.lasts_s)


def drain_in_s(pilot: Pilot, now: float) -> float:
    """Seconds until a pilot is to be drained, as long as its calls run as they do now; infinity where it has no end."""
    run_s = max((library.context.run_s for library in pilot.libraries.values()), default=0.0)
    return walltime_left_s(pilot, now) - drain_margin_s(pilot.lasts_s, run_s=run_s)


def is_near_its_end(pilot: Pilot, now: float) -> bool:
    """True if the walltime of a pilot is over, or about to be."""
    return walltime_left_s(pilot, now) <= min(SLACK_S, _SLACK_PART * pilot.lasts_s)


def time_to_hand_on_s(pilot: Pilot, now: float) -> float:
    """How long a pilot that leaves could stay for its objects; 0 or less: not at all."""
    return walltime_left_s(pilot, now) - _LAST_S

"""Decide when a call should wait for a faster device kind.

A call waits if faster libraries would finish the remaining work before a slow library finishes this call, or if only a
faster library meets its deadline. The remaining work is the queue, and the calls that open maps have not submitted yet;
without a map, it is known once no call has arrived for two run times.

The forecast is list scheduling on the faster libraries: these libraries finish their running calls, then share the
remaining calls. A run that is overdue is expected to take as long again as it is overdue, so no call waits long for a
library that hangs. Short calls, calls of libraries with several slots, and calls without measured speeds do not wait.
"""

from __future__ import annotations

from itertools import islice

from stoker.manager.core.deadlines import expected_run_s, has_time_for_call
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.seams import View

LEAST_GAIN_S = 0.05
_MOST_COMPARED = 8
_ROUNDS = 2.0  # Number of run times without a new call after which no more calls are expected


def faster_device_wait_s(view: View, library: Library, call: Call) -> float:
    """Return the seconds until the next check if a call should wait for a faster device kind; else 0."""
    context = library.context
    if library.slots > 1 or call.group.context is not context:
        return 0.0
    here_s = expected_run_s(library, call)
    if here_s <= LEAST_GAIN_S:
        return 0.0
    rest = _remaining_calls(view, context, call)
    faster = _forecast_faster_libraries(view, library, call, rest=rest)
    if faster is None:
        return 0.0
    free_in_s, soonest_s, all_s = faster
    due_at = call.group.options.objective.deadline_at if not call.late else 0.0
    in_time_there = bool(due_at) and view.now + here_s > due_at >= view.now + soonest_s
    if in_time_there or (rest is not None and here_s - all_s > LEAST_GAIN_S):
        return max(LEAST_GAIN_S, free_in_s, here_s / 20)
    return 0.0


def _remaining_calls(view: View, context: Context, call: Call) -> int | None:
    """Return the number of calls to come after this call; None if unknown."""
    waiting = max(0, context.queue.count - 1)
    if context.unsent is None:
        recent = view.now - context.submitted_at < _ROUNDS * call.group.cost.run_s
        return None if recent else waiting
    return waiting + context.unsent if context.unsent >= 0 else None


def _forecast_faster_libraries(
    view: View, library: Library, call: Call, *, rest: int | None
) -> tuple[float, float, float] | None:
    """Return the seconds until a faster library is free, until one has run a call, until all calls have run."""
    context = library.context
    mine = context.speeds.get(library.kind)
    count, some = 0, list[tuple[float, float]]()  # Pairs: seconds until a library is free, seconds of a run
    for kind, libraries in context.index.of_kind.items():
        if context.speeds.get(kind) > mine:
            count += len(libraries)
            for other in islice(libraries.values(), _MOST_COMPARED):
                run_s = expected_run_s(other, call)
                if run_s > 0 and has_time_for_call(view, other, call):
                    some.append((_free_in_s(view, other), run_s))
    if not some:
        return None
    count = max(len(some), count)
    rate = sum(1 / run_s for _, run_s in some)
    begun = sum(free_s / run_s for free_s, run_s in some)
    run_s = len(some) / rate
    usual_s = call.group.cost.run_s
    calls = 1 + (rest or 0) * (context.run_s / usual_s if usual_s else 1.0)
    # Calls are not divisible: on average the last library finishes half a run after an even share of the work.
    all_s = calls * run_s / count + begun / rate + (1 - 1 / count) * run_s / 2
    soonest_s = min(free_s + run_s for free_s, run_s in some)
    return min(free_s for free_s, _ in some), soonest_s, max(all_s, soonest_s)


def _free_in_s(view: View, library: Library) -> float:
    held = library.held.values()
    first = next(iter(held), None)
    if first is None:
        return 0.0
    ran_s = view.now - max(first.sent_at, library.ended_at)
    behind_s = sum(expected_run_s(library, call) for call in islice(held, 1, _MOST_COMPARED))
    return abs(expected_run_s(library, first) - ran_s) + behind_s

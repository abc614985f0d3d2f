"""Default dispatch, as in Pervasive Context Management (§3): send each call to a library that has its context loaded.

The free library that was used last (the hottest) comes first. A library gets up to `prefetch_s` seconds of short calls
beyond its slots, at most its share of the queue, to hide the round trip to the manager. A library without work takes
calls back from another library. Calls of a function that has not run yet, or runs long, are not prefetched.

If device kinds have different measured speeds (`Context.speeds`), the fastest free library comes first. A
slow library gets a smaller backlog. A gang (a call that runs on several libraries) starts when enough libraries are
free. If enough libraries are ready, free libraries are kept for the next gang.

A call waits for a faster device kind in two cases. Faster libraries would finish the remaining work before a slow
library finishes this call. Or only a faster library meets the call's deadline. The remaining work is the queue, and the
calls that open maps have not submitted yet. Without a map, the policy assumes that no more calls come if none has
arrived for twice the run time of a call.

The forecast is list scheduling on the faster libraries: these libraries finish their running calls, then share the
remaining calls. A run that is s seconds overdue is expected to take s more seconds, so that calls do not wait long for
a library that hangs. Short calls, calls of libraries with several slots, and calls without measured speeds do not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, islice

from stoker.manager.core.deadlines import expected_run_s, has_time_for_call
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.per_context import Burst, expected_seconds_on_kind
from stoker.manager.core.seams import Action, Send, SendGang, TakeBack, Timer, View
from stoker.manager.policies.base import MOST_COMPARED, Quiet, free_libraries_fastest_first
from stoker.protocol.ids import LibraryId


class HottestFirst(Quiet):
    """The default dispatch policy.

    `prefetch_s`: seconds of backlog that hide the round trip to the manager. `prefetch_calls`: maximum backlog in
    calls. `frame_s`: minimum seconds of work in a frame. The minimum grows up to `prefetch_s` if more than `busy_per_s`
    calls end per second.
    """

    by_deadline = True
    honours = frozenset({"priority", "deadline"})

    def __init__(
        self, *, prefetch_s: float = 0.02, prefetch_calls: int = 128, frame_s: float = 0.002, busy_per_s: float = 4000.0
    ) -> None:
        self.prefetch_s = prefetch_s
        self.prefetch_calls = prefetch_calls
        self.frame_s = frame_s
        self.busy_per_s = busy_per_s

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        """Return how many calls a library may hold: its slots, and more if calls are short; at most its remaining calls
        if it will retire.
        """
        context = library.context
        most = context.recipe.calls_per_library
        if most:
            return min(library.slots, most - library.served)
        if not context.runs or library.is_stuck:
            return library.slots
        run_s = expected_seconds_on_kind(context.speeds, context, library.kind)
        if run_s > self.prefetch_s:
            return library.slots
        return library.slots * (1 + min(self.prefetch_calls, int(self.prefetch_s / (run_s + 1e-6))))

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        context, group = call.group.context, call.group
        # Waiting calls go first. A waiting gang counts only if enough libraries for it are ready.
        if context.queue.count and (context.queue.first_single_call() is not None or _next_gang(context) is not None):
            return None
        if group.options.gang[1] > 1:
            return self._start_gang_if_ready(context, call)
        burst = context.index.burst
        if burst is not None and group.cost.runs and self._joins_burst(view, burst, call):
            return burst.library.id
        for library in _libraries_with_free_slot(context):
            if (
                library.load < self.window(view, library)
                and library.admits(call)
                and has_time_for_call(view, library, call)
            ):
                again_s = faster_device_wait_s(view, library, call) if context.speeds.of else 0.0
                return Timer(view.now + again_s, context.recipe.key) if again_s else library.id
        if group.cost.runs and group.cost.run_s <= self.prefetch_s:
            for library in islice(context.index.libraries_with_backlog_room(), MOST_COMPARED):
                if not library.is_stuck:  # do not look further: the next libraries have the same load or more
                    has_room = library.load < self.window(view, library) and library.admits(call)
                    return library.id if has_room else None
        return None

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """Return the number of free slots, plus a fair share of the queue if the next calls are short."""
        context = library.context
        load = len(library.held) + len(library.withdrawn_calls)
        free = library.slots - load
        room = self.window(view, library) - load
        head, gang = context.queue.first_single_call(), _next_gang(context)
        if gang is not None and (head is None or context.queue.is_before(gang, head)):
            start = self._start_gang_if_ready(context, gang)
            return (start,) if start is not None else 0
        if head is None:
            return 0
        group = head.group
        if not has_time_for_call(view, library, head):
            return 0
        if context.speeds.of and free > 0 and (again_s := faster_device_wait_s(view, library, head)):
            return self._send_later_call(view, library, again_s)
        if library.slots > 1 and free > 0:
            free = min(free, _call_quota_by_load(library))
            room = min(room, free)
        if room <= free:
            return room
        if not group.cost.runs or group.cost.run_s > self.prefetch_s:
            return free
        frame = int(self._burst_limit_s(view) / (expected_run_s(library, head) + 1e-6))
        share = max(_call_quota_by_speed(library), frame)
        return min(room, max(free, share - max(0, -free)))

    def on_out_of_calls(self, view: View, library: Library) -> Iterable[Action]:
        """Take calls back from the backlog of another library, if this saves time."""
        context = library.context
        most = list(islice(context.index.libraries_by_backlog(), MOST_COMPARED))
        if not most or _next_gang(context) is not None:
            return ()
        victim = max(most, key=lambda other: other.load - other.calls_requested_back)
        waiting = victim.load - victim.calls_requested_back - victim.slots
        if victim is library or waiting <= 0:
            return ()
        run_s, there_s = (expected_seconds_on_kind(context.speeds, context, each.kind) for each in (library, victim))
        if waiting * there_s < max(self.prefetch_s / 4, self._burst_limit_s(view)):  # too little work to move
            return ()
        share = there_s / (run_s + there_s) if context.speeds.of and run_s else 0.5
        return (TakeBack(victim.id, math.ceil(waiting * share)),)

    def on_timer(self, view: View, key: str) -> Iterable[Action]:
        """Check whether a call that waits for a faster device kind must still wait."""
        context = view.contexts.get(key)
        for library in (
            tuple(islice(free_libraries_fastest_first(context), 2 * MOST_COMPARED)) if context is not None else ()
        ):
            answer, head = self.pull(view, library), library.context.queue.first_single_call()
            if not isinstance(answer, int):
                yield from answer
            elif answer > 0 and head is not None and library.admits(head):
                yield Send(head.id, library.id)

    def _send_later_call(self, view: View, library: Library, again_s: float) -> Iterable[Action]:
        context = library.context
        for call in context.queue.first_calls(MOST_COMPARED, max_examined=MOST_COMPARED):
            able = call.group.options.gang[1] == 1 and library.admits(call) and has_time_for_call(view, library, call)
            if able and not faster_device_wait_s(view, library, call):
                return (Send(call.id, library.id),)
        return (Timer(view.now + again_s, context.recipe.key),)

    def _burst_limit_s(self, view: View) -> float:
        return min(self.prefetch_s, self.frame_s * max(1.0, view.ends_per_s / self.busy_per_s))

    def _joins_burst(self, view: View, burst: Burst[Library], call: Call) -> bool:
        library = burst.library
        if burst.at != view.now or burst.calls * call.group.cost.run_s >= self._burst_limit_s(view):
            return False
        room = library.load < self.window(view, library) and library.admits(call)
        return room and has_time_for_call(view, library, call)

    def _start_gang_if_ready(self, context: Context, call: Call) -> SendGang | None:
        smallest, largest = call.group.options.gang
        free = [id for id, library in reversed(context.index.free.items()) if library.admits(call)]
        return SendGang(call.id, tuple(free[:largest])) if len(free) >= smallest else None


def _call_quota_by_speed(library: Library) -> int:
    context, speeds = library.context, library.context.speeds
    if not speeds.of:
        return -(-context.queue.count // len(context.libraries))
    mine = speeds.speed_of_kind(library.kind)
    together = sum(len(some) * speeds.speed_of_kind(kind) for kind, some in context.index.of_kind.items())
    return math.ceil(context.queue.count * mine / max(mine, together))


def _call_quota_by_load(library: Library) -> int:
    """Return how many queued calls a library may take, so that free libraries get about equal loads."""
    context = library.context
    others = [
        each.load for each in islice(context.index.free_libraries_hottest_first(), MOST_COMPARED) if each is not library
    ]
    if not others:
        return library.slots
    return max(0, min(others) + -(-context.queue.count // (len(others) + 1)) - library.load)


def _libraries_with_free_slot(context: Context) -> Iterable[Library]:
    """Yield free libraries: by speed if known, by load if they have several slots, else the last used first."""
    hottest = context.index.free_libraries_hottest_first()
    first = next(hottest, None)
    if first is None or first.slots == 1 or context.speeds.of:
        return free_libraries_fastest_first(context)
    some = [first, *islice(hottest, MOST_COMPARED - 1)]
    some.sort(key=lambda library: library.load / library.slots)
    return chain(some, hottest)


def _next_gang(context: Context) -> Call | None:
    if not context.queue.gang_count:
        return None
    ready = sum(library.is_serving for library in context.libraries.values())
    return context.queue.first_gang_call(max_libraries=ready) if ready else None


class ShortestFirst(HottestFirst):
    """The default policy, except that within a priority the calls with the shortest expected run times come first."""

    by_run_time = True


# ---- waits for a faster device kind

LEAST_TIME_SAVED_S = 0.05
_ROUNDS = 2.0  # If no call arrives for this many run times, the policy expects no more calls


def faster_device_wait_s(view: View, library: Library, call: Call) -> float:
    """Return the seconds until the next check if a call should wait for a faster device kind; else 0."""
    context = library.context
    if library.slots > 1 or call.group.context is not context:
        return 0.0
    here_s = expected_run_s(library, call)
    if here_s <= LEAST_TIME_SAVED_S:
        return 0.0
    rest = _remaining_calls(view, context, call)
    faster = _forecast_faster_libraries(view, library, call, rest=rest)
    if faster is None:
        return 0.0
    free_in_s, soonest_s, all_s = faster
    due_at = call.group.options.objective.deadline_at if not call.late else 0.0
    in_time_there = bool(due_at) and view.now + here_s > due_at >= view.now + soonest_s
    if in_time_there or (rest is not None and here_s - all_s > LEAST_TIME_SAVED_S):
        return max(LEAST_TIME_SAVED_S, free_in_s, here_s / 20)
    return 0.0


def _remaining_calls(view: View, context: Context, call: Call) -> int | None:
    """Return how many calls will run after this call; None if unknown."""
    waiting = max(0, context.queue.count - 1)
    if context.unsent is None:
        recent = view.now - context.submitted_at < _ROUNDS * call.group.cost.run_s
        return None if recent else waiting
    return waiting + context.unsent if context.unsent >= 0 else None


def _forecast_faster_libraries(
    view: View, library: Library, call: Call, *, rest: int | None
) -> tuple[float, float, float] | None:
    """Return the seconds until a faster library is free, until it has run the call, and until all calls have run."""
    context = library.context
    mine = context.speeds.speed_of_kind(library.kind)
    count, some = 0, list[tuple[float, float]]()  # By library: seconds until it is free, seconds of a run on it
    for kind, libraries in context.index.of_kind.items():
        if context.speeds.speed_of_kind(kind) > mine:
            count += len(libraries)
            for other in islice(libraries.values(), MOST_COMPARED):
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
    # A call runs as a whole, so the last library ends on average half a run later than if the work were divided evenly.
    all_s = calls * run_s / count + begun / rate + (1 - 1 / count) * run_s / 2
    soonest_s = min(free_s + run_s for free_s, run_s in some)
    return min(free_s for free_s, _ in some), soonest_s, max(all_s, soonest_s)


def _free_in_s(view: View, library: Library) -> float:
    held = library.held.values()
    first = next(iter(held), None)
    if first is None:
        return 0.0
    ran_s = view.now - max(first.sent_at, library.ended_at)
    behind_s = sum(expected_run_s(library, call) for call in islice(held, 1, MOST_COMPARED))
    return abs(expected_run_s(library, first) - ran_s) + behind_s

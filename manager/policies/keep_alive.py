"""Limit the number of a context's libraries, and unload idle libraries (keep-alive: SLINFER §II-B).

`IdleTimers` unloads each library, or puts it to sleep, after a fixed idle time. `remaining_library_quota` and
`IdleLibraryLimits` apply the limits that programs set (`Context.limits`). `IdleLibraryLimits` unloads nothing while
gang calls, or calls in `Queue.set_aside_calls`, wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.manager.core.deadlines import has_time_for_call, has_time_for_run, walltime_left_s
from stoker.manager.core.nouns import Call, Context, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import Sleep, Timer, Unload, View
from stoker.manager.policies.sleeping import can_sleep_in_host_memory, is_idle
from stoker.protocol.ids import LibraryId

_PREFIX = "keep-alive/"
_ROUNDING_S = 1e-6  # Seconds by which a timer may fire early
_SPARED_CHECK_S = 10.0  # Seconds between two checks of an idle library that stays loaded for its context's minimum


class IdleTimers:
    """Unloads libraries that were idle for `keep_alive_s`. `sleeps`: put GPU libraries to sleep instead."""

    def __init__(self, keep_alive_s: float, *, sleeps: bool = False) -> None:
        if keep_alive_s < 0:
            raise ValueError(f"keep_alive_s = {keep_alive_s}: it must be 0 or more")
        self.keep_alive_s = keep_alive_s
        self.sleeps = sleeps
        self._with_timer: set[LibraryId] = set()

    def handle_idle_library(self, view: View, library: Library) -> tuple[Timer | Unload | Sleep, ...]:
        if library.id in self._with_timer or not is_idle(library):
            return ()
        return self._unload_or_set_timer(view, library)

    def handle_timer(self, view: View, key: str) -> tuple[Timer | Unload | Sleep, ...]:
        if not key.startswith(_PREFIX):
            return ()
        id = LibraryId(int(key.removeprefix(_PREFIX)))
        self._with_timer.discard(id)
        library = view.libraries.get(id)
        if library is None or not is_idle(library):
            return ()  # no new timer, because `handle_idle_library` sets one when the library becomes idle again
        return self._unload_or_set_timer(view, library)

    def _unload_or_set_timer(self, view: View, library: Library) -> tuple[Timer | Unload | Sleep, ...]:
        idle_s = view.now - _idle_since(library)
        left_s, is_needed = self.keep_alive_s - idle_s, is_needed_for_minimum(library)
        if left_s <= _ROUNDING_S and not is_needed:
            if self.sleeps and can_sleep_in_host_memory(library):
                return (Sleep(library.id),)
            return (Unload(library.id, f"it was idle for {idle_s:.3g} s"),)
        left_s = max(left_s, _SPARED_CHECK_S) if is_needed else left_s
        self._with_timer.add(library.id)
        return (Timer(view.now + left_s, f"{_PREFIX}{library.id}"),)


SUPPORTED_LIMITS = frozenset({"min_libraries", "max_libraries", "keep_alive"})  # Limits that this module enforces
_MOST_CHECKS = 20  # Maximum checks of a context within one keep-alive time
_LEAST_CHECK_S = 0.05
_GATHERING_CHECK_S = 1.0  # Minimum seconds between two checks while waiting calls keep idle libraries loaded


def remaining_library_quota(view: View, context: Context, *, cut_s: float) -> int | None:
    """Return how many more libraries a context may have; None = no limit, negative = too many libraries.

    After calls have waited for `cut_s`, libraries of disconnected pilots are not counted.
    """
    most = context.limits.most
    if not most:
        return None
    since = context.starved_since
    is_blip = since is None or view.now - since < cut_s
    return most - sum(x.pilot.state is not PilotState.CUT or is_blip for x in context.libraries.values())


def lacks_library_for_waiting_call(context: Context) -> bool:
    """Return True if a waiting call needs a library and none is loading. One library may then exceed the limit."""
    loads = any(library.state is LibraryState.LOADING for library in context.libraries.values())
    return context.set_aside_call_lacks_library and bool(context.queue.set_aside_calls) and not loads


def new_pilot_library_quota(view: View, context: Context) -> int | None:
    """Return how many libraries of a context new pilots may load; None = no limit."""
    most = context.limits.most
    if not most:
        return None
    room = most - len(context.libraries)
    if room >= 0 and lacks_library_for_waiting_call(context):
        return max(1, room)
    return room if room > 0 else max(0, room + len(libraries_unfit_for_next_call(view, context)))


def libraries_unfit_for_next_call(view: View, context: Context) -> list[Library]:
    call = _next_single(context)
    if call is None:
        return []
    idle = [x for x in context.libraries.values() if x.is_serving and not x.load and x.pilot.reserved_for is None]
    return sorted((x for x in idle if not has_time_for_call(view, x, call)), key=lambda x: (_idle_since(x), x.id))


def pilot_rank_for_next_call(view: View, context: Context, pilot: Pilot) -> tuple[bool, bool, float]:
    lacks = lacks_library_for_waiting_call(context)
    has_one = lacks and any(library.context is context for library in pilot.libraries.values())
    return not can_run_next_call(view, context, pilot), has_one, -walltime_left_s(pilot, view.now) if lacks else 0.0


def can_run_next_call(view: View, context: Context, pilot: Pilot) -> bool:
    call = _next_single(context)
    return call is None or has_time_for_run(view, pilot, call.group.cost.run_s or context.run_s)


def _next_single(context: Context) -> Call | None:
    return None if context.queue.gang_count or context.queue.set_aside_calls else context.queue.first_single_call()


class IdleLibraryLimits:
    """Unloads idle libraries of contexts with limits. `sleeps`: put GPU libraries to sleep if host memory is free."""

    def __init__(self, *, sleeps: bool) -> None:
        self.sleeps = sleeps
        self._timer_at: dict[str, float] = {}  # By recipe key: time at which the timer of the context fires

    def handle_idle_library(self, view: View, library: Library) -> tuple[Timer | Unload | Sleep, ...]:
        context, limits = library.context, library.context.limits
        # One library may exceed the limit while a call waits that needs a library of its own.
        is_extra = context.set_aside_call_lacks_library and context.queue.set_aside_calls
        if limits.most and not is_extra:
            here = (x for x in context.libraries.values() if x.pilot.state is not PilotState.CUT)
            if sum(x.state is not LibraryState.STOPPING for x in here) > limits.most:
                return (Unload(library.id, f"its context may have at most {limits.most} libraries"),)
        if limits.keep_alive_s is None or _spare_libraries(context) <= 0:
            return ()
        due_at = self._timer_at.get(context.recipe.key)
        if due_at is not None and due_at <= _idle_since(library) + limits.keep_alive_s + _ROUNDING_S:
            return ()
        return tuple(self._unload_expired(view, context, limits.keep_alive_s))

    def handle_timer(self, view: View, key: str) -> tuple[Timer | Unload | Sleep, ...]:
        if not key.startswith(_PREFIX):
            return ()
        recipe = key.removeprefix(_PREFIX)
        self._timer_at.pop(recipe, None)
        context = view.contexts.get(recipe)
        if context is None or context.limits.keep_alive_s is None:
            return ()
        return tuple(self._unload_expired(view, context, context.limits.keep_alive_s))

    def _unload_expired(self, view: View, context: Context, keep_alive_s: float) -> Iterator[Timer | Unload | Sleep]:
        if context.queue.gang_count or context.queue.set_aside_calls:
            yield self._schedule_recheck(context, view.now + max(keep_alive_s / _MOST_CHECKS, _GATHERING_CHECK_S))
            return
        spare, again_s = _spare_libraries(context), None
        for library in sorted(context.libraries.values(), key=lambda x: (_idle_since(x), x.id)):
            if spare <= 0 or again_s is not None:
                break
            if library.load or library.state is not LibraryState.READY:
                continue
            idle_s = view.now - _idle_since(library)
            if idle_s < keep_alive_s - _ROUNDING_S:
                again_s = keep_alive_s - idle_s
            elif library.pilot.state is PilotState.HERE:
                spare -= 1
                sleeps = self.sleeps and can_sleep_in_host_memory(library)
                yield Sleep(library.id) if sleeps else Unload(library.id, f"it was idle for {idle_s:.3g} s")
        if spare > 0 and again_s is not None:
            yield self._schedule_recheck(context, view.now + max(again_s, keep_alive_s / _MOST_CHECKS, _LEAST_CHECK_S))

    def _schedule_recheck(self, context: Context, at: float) -> Timer:
        self._timer_at[context.recipe.key] = at
        return Timer(at, f"{_PREFIX}{context.recipe.key}")


def can_spare_libraries_of(pilots: Iterable[Pilot], gone: Counter[Context]) -> bool:
    """Return True if each context keeps its minimum of libraries without the pilots of a block. `gone`: libraries of
    the blocks that this plan already releases.
    """
    theirs = Counter(x.context for pilot in pilots for x in pilot.libraries.values() if x.is_serving)
    least = (context for context in theirs if context.limits.least)
    if any(theirs[context] > _spare_libraries(context) - gone[context] for context in least):
        return False
    gone.update(theirs)
    return True


def is_needed_for_minimum(library: Library) -> bool:
    context = library.context
    return context.limits.least > 0 and library.is_serving and _spare_libraries(context) <= 0


def _spare_libraries(context: Context) -> int:
    return sum(library.is_serving for library in context.libraries.values()) - context.limits.least


def _idle_since(library: Library) -> float:
    return max(library.ready_at, library.ended_at)

"""How many libraries a context has, and how long idle ones stay (keep-alive: SLINFER §II-B).

`IdleTimers` unloads any library after a fixed idle time. The rest implements limits of programs
(`Context.limits`): `room_for_more` bounds loads, `KeepAlive` unloads idle libraries. While gangs wait, or calls
for which the core chooses a library (`Queue.apart`), none is unloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.manager.core.deadlines import call_fits, run_fits, walltime_left_s
from stoker.manager.core.nouns import Call, Context, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import Timer, Unload, View
from stoker.protocol.ids import LibraryId, RecipeKey

_PREFIX = "keep-alive/"
_ROUNDING_S = 1e-6  # A timer may fire this many seconds early


class IdleTimers:
    """Unloads libraries that have served nothing for `keep_alive_s`. Each library has one timer at most."""

    def __init__(self, keep_alive_s: float) -> None:
        if keep_alive_s < 0:
            raise ValueError(f"keep_alive_s = {keep_alive_s}: no time is negative")
        self.keep_alive_s = keep_alive_s
        self._set: set[LibraryId] = set()  # Libraries that have a timer

    def idle(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        if library.id in self._set or not _does_nothing(library):
            return ()
        return self._after_idling(view, library)

    def fired(self, view: View, key: str) -> tuple[Timer | Unload, ...]:
        if not key.startswith(_PREFIX):
            return ()
        id = LibraryId(int(key.removeprefix(_PREFIX)))
        self._set.discard(id)
        library = view.libraries.get(id)
        if library is None or not _does_nothing(library):
            return ()  # `idle` is called again when it falls idle
        return self._after_idling(view, library)

    def _after_idling(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        idle_s = view.now - max(library.ready_at, library.ended_at)
        left_s = self.keep_alive_s - idle_s
        if left_s <= _ROUNDING_S:
            return (Unload(library.id, f"it has served nothing for {idle_s:.3g} s"),)
        self._set.add(library.id)
        return (Timer(view.now + left_s, f"{_PREFIX}{library.id}"),)


def _does_nothing(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.load


HONOURS = frozenset({"min_libraries", "max_libraries", "keep_alive"})  # Limits that a policy with both parts honours
_LOOKS = 20  # The most checks of a context within its keep-alive
_LEAST_LOOK_S = 0.05
_GATHERING_LOOK_S = 1.0  # Least seconds between two checks while libraries gather


def room_for_more(view: View, context: Context, *, cut_s: float) -> int | None:
    """Return how many libraries more a context may have; None = any number, below 0 = too many.

    Stopping libraries count. Libraries of a disconnected pilot stop counting once calls have waited for `cut_s`.
    """
    most = context.limits.most
    if not most:
        return None
    since = context.starved_since
    is_blip = since is None or view.now - since < cut_s
    count = sum(x.pilot.state is not PilotState.CUT or is_blip for x in context.libraries.values())
    return most - count


def lacks_able_one(context: Context) -> bool:
    """True if a waiting call can run in none of the context's libraries and none is loading. One more than the limit
    is loaded for it.
    """
    loads = any(library.state is LibraryState.LOADING for library in context.libraries.values())
    return context.apart_lacks and bool(context.queue.apart) and not loads


def room_for_pilots(view: View, context: Context) -> int | None:
    """Return how many libraries more new pilots may hold of a context; None = any number."""
    most = context.limits.most
    if not most:
        return None
    room = most - len(context.libraries)
    if room >= 0 and lacks_able_one(context):
        return max(1, room)
    return room if room > 0 else max(0, room + len(unable(view, context)))


def unable(view: View, context: Context) -> list[Library]:
    call = _next_single(context)
    if call is None:
        return []
    idle = [x for x in context.libraries.values() if _counts(x) and not x.load and x.pilot.reserved is None]
    return sorted((x for x in idle if not call_fits(view, x, call)), key=lambda x: (_idle_since(x), x.id))


def able_first(view: View, context: Context, pilot: Pilot) -> tuple[bool, bool, float]:
    """Rank a pilot for one of few allowed libraries: first those on which the next call can run."""
    lacks = lacks_able_one(context)
    has_one = lacks and any(library.context is context for library in pilot.libraries.values())
    return not runs_next(view, context, pilot), has_one, -walltime_left_s(pilot, view.now) if lacks else 0.0


def runs_next(view: View, context: Context, pilot: Pilot) -> bool:
    call = _next_single(context)
    return call is None or run_fits(view, pilot, call.group.cost.run_s or context.run_s)


def _next_single(context: Context) -> Call | None:
    return None if context.queue.gangs or context.queue.apart else context.queue.single()


class KeepAlive:
    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # When the timer of a context fires, by recipe key

    def idle(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        context, limits = library.context, library.context.limits
        is_extra = context.apart_lacks and context.queue.apart  # one more was loaded for a call that still waits
        if limits.most and not is_extra:
            here = (x for x in context.libraries.values() if x.pilot.state is not PilotState.CUT)
            if sum(x.state is not LibraryState.STOPPING for x in here) > limits.most:
                return (Unload(library.id, f"its context may have {limits.most} libraries at most"),)
        if limits.keep_alive_s is None or _spare(context) <= 0:
            return ()
        due_at = self._due.get(context.recipe.key)
        if due_at is not None and due_at <= _idle_since(library) + limits.keep_alive_s + _ROUNDING_S:
            return ()
        return tuple(self._unload_expired(view, context, limits.keep_alive_s))

    def fired(self, view: View, key: str) -> tuple[Timer | Unload, ...]:
        if not key.startswith(_PREFIX):
            return ()
        recipe = key.removeprefix(_PREFIX)
        self._due.pop(recipe, None)
        context = view.contexts.get(recipe)
        if context is None or context.limits.keep_alive_s is None:
            return ()
        return tuple(self._unload_expired(view, context, context.limits.keep_alive_s))

    def _unload_expired(self, view: View, context: Context, keep_alive_s: float) -> Iterator[Timer | Unload]:
        if context.queue.gangs or context.queue.apart:
            yield self._look_again(context, view.now + max(keep_alive_s / _LOOKS, _GATHERING_LOOK_S))
            return
        spare, again_s = _spare(context), None
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
                yield Unload(library.id, f"it has served nothing for {idle_s:.3g} s")
        if spare > 0 and again_s is not None:
            yield self._look_again(context, view.now + max(again_s, keep_alive_s / _LOOKS, _LEAST_LOOK_S))

    def _look_again(self, context: Context, at: float) -> Timer:
        self._due[context.recipe.key] = at
        return Timer(at, f"{_PREFIX}{RecipeKey(context.recipe.key)}")


class LeastNumbers:
    """Checks that blocks which are released together leave each context its least number of libraries."""

    def __init__(self) -> None:
        self._gone: Counter[Context] = Counter()

    def let_go(self, pilots: Iterable[Pilot]) -> bool:
        """True if a block of these pilots may be released; its libraries then count as gone."""
        theirs = Counter(x.context for pilot in pilots for x in pilot.libraries.values() if _counts(x))
        least = (context for context in theirs if context.limits.least)
        if any(theirs[context] > _spare(context) - self._gone[context] for context in least):
            return False
        self._gone += theirs
        return True


def is_spared(library: Library) -> bool:
    """True if a library must stay because its context has no more than its least number."""
    return library.context.limits.least > 0 and _counts(library) and _spare(library.context) <= 0


def _spare(context: Context) -> int:
    return sum(map(_counts, context.libraries.values())) - context.limits.least


def _counts(library: Library) -> bool:
    return library.state is LibraryState.READY and library.pilot.state is PilotState.HERE


def _idle_since(library: Library) -> float:
    return max(library.ready_at, library.ended_at)

"""Dispatch, as in Pervasive Context Management (§3): a call goes to a library that already holds its context.

The hottest free library (last used) comes first, so that unused ones cool down and are evicted. A library gets a
backlog of up to `prefetch_s` of work beyond its slots if calls are shorter than a round trip to the manager, but
at most its share of the queue; one that runs dry takes calls back from others. Short calls that arrive together
go to one library in one frame. Calls of a function that has not run yet, or runs long, are not prefetched.

A call that cannot finish within a pilot's walltime is not sent there, and within a priority the nearest deadline
comes first (`stoker.manager.core.deadlines`). A gang starts when enough libraries are free; once enough are
ready, free ones are kept for it when its turn has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from stoker.manager.core.deadlines import call_fits
from stoker.manager.core.nouns import Call, Context, Library, LibraryState
from stoker.manager.core.per_context import Burst
from stoker.manager.core.seams import Action, SendGang, TakeBack, View
from stoker.manager.policies.base import Quiet
from stoker.protocol.ids import LibraryId

# Libraries that are compared at most.
_MOST_COMPARED = 8


class HottestFirst(Quiet):
    """The default dispatch policy.

    `prefetch_s`: backlog in seconds that hides the round trip; `prefetch_calls`: its limit in calls. `frame_s`:
    the least work in seconds for which another library is woken. It grows up to `prefetch_s` when more than
    `busy_per_s` calls end in a second.
    """

    asks_every_call = False
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
        """Return the slots, plus a backlog once calls are known to be short. A library that retires gets what it
        still serves.
        """
        context = library.context
        most = context.recipe.calls_per_library
        if most:
            return min(library.slots, most - library.served)
        run_s = context.run_s
        if not context.runs or run_s > self.prefetch_s or library.stuck:
            return library.slots
        return library.slots * (1 + min(self.prefetch_calls, int(self.prefetch_s / (run_s + 1e-6))))

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        """Return the hottest library with a free slot, else one with room for a backlog."""
        context, group = call.group.context, call.group
        # Gangs that need more libraries than are ready keep nothing yet.
        if context.queue.count and (context.queue.single() is not None or _next_gang(context) is not None):
            return None
        if group.options.gang[1] > 1:
            return self._gang(context, call)
        burst = context.index.burst
        if burst is not None and group.cost.runs and self._joins(view, burst, call):
            return burst.library.id
        for library in _with_free_slot(context):
            if library.load < self.window(view, library) and library.admits(call) and call_fits(view, library, call):
                return library.id
        if group.cost.runs and group.cost.run_s <= self.prefetch_s:
            for library in islice(context.index.least_loaded(), _MOST_COMPARED):
                if not library.stuck:  # later ones have no more room
                    has_room = library.load < self.window(view, library) and library.admits(call)
                    return library.id if has_room else None
        return None

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """Return the free slots, plus a fair share of the queue as backlog if the next calls are short."""
        context = library.context
        load = len(library.held) + len(library.zombies)
        free = library.slots - load
        room = self.window(view, library) - load
        head, gang = context.queue.single(), _next_gang(context)
        if gang is not None and (head is None or context.queue.is_before(gang, head)):
            start = self._gang(context, gang)
            return (start,) if start is not None else 0
        if head is None:
            return 0
        group = head.group
        if not call_fits(view, library, head):
            return 0
        if library.slots > 1 and free > 0:
            free = min(free, _share(library))
            room = min(room, free)
        if room <= free:
            return room
        if not group.cost.runs or group.cost.run_s > self.prefetch_s:
            return free
        frame = int(self._frame_s(view) / (group.cost.run_s + 1e-6))
        share = max(-(-context.queue.count // len(context.libraries)), frame)
        return min(room, max(free, share - max(0, -free)))

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        """Take back half of the calls that another library has not begun, if that saves time."""
        context = library.context
        most = list(islice(context.index.most_backlogged(), _MOST_COMPARED))
        if not most or _next_gang(context) is not None:
            return ()
        victim = max(most, key=lambda other: other.load - other.taking)
        waiting = victim.load - victim.taking - victim.slots
        if victim is library or waiting <= 0:
            return ()
        if waiting * context.run_s < max(self.prefetch_s / 4, self._frame_s(view)):  # less than a frame is worth
            return ()
        return (TakeBack(victim.id, (waiting + 1) // 2),)

    def _frame_s(self, view: View) -> float:
        return min(self.prefetch_s, self.frame_s * max(1.0, view.ends_per_s / self.busy_per_s))

    def _joins(self, view: View, burst: Burst[Library], call: Call) -> bool:
        library = burst.library
        if burst.at != view.now or burst.calls * call.group.cost.run_s >= self._frame_s(view):
            return False
        room = library.load < self.window(view, library) and library.admits(call)
        return room and call_fits(view, library, call)

    def _gang(self, context: Context, call: Call) -> SendGang | None:
        """Start a gang on free libraries, once there are enough. Gangs of one context start one at a time, in order."""
        smallest, largest = call.group.options.gang
        free = [id for id, library in reversed(context.index.free.items()) if library.admits(call)]
        return SendGang(call.id, tuple(free[:largest])) if len(free) >= smallest else None


def _share(library: Library) -> int:
    """Return how many waiting calls a library of several slots takes so that it has no more than the other free
    ones.
    """
    context = library.context
    others = [each.load for each in islice(context.index.hottest(), _MOST_COMPARED) if each is not library]
    if not others:
        return library.slots
    return max(0, min(others) + -(-context.queue.count // (len(others) + 1)) - library.load)


def _with_free_slot(context: Context) -> Iterable[Library]:
    """Yield libraries with a free slot, hottest first; with several slots, the least loaded of the hottest first."""
    hottest = context.index.hottest()
    first = next(hottest, None)
    if first is None or first.slots == 1:
        return context.index.hottest()
    some = [first, *islice(hottest, _MOST_COMPARED - 1)]
    some.sort(key=lambda library: library.load / library.slots)
    return chain(some, hottest)


def _next_gang(context: Context) -> Call | None:
    if not context.queue.gangs:
        return None
    ready = sum(x.state is LibraryState.READY and x.usable for x in context.libraries.values())
    return context.queue.gang(most=ready) if ready else None


class ShortestFirst(HottestFirst):
    """The default policy, but within a priority calls with a short expected run time come first."""

    by_run_time = True

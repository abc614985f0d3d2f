"""Base class of policies, and the default order in which libraries get waiting calls.

A dispatch policy derived from `Quiet` must implement `place`, `pull`, `dry` and `window`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, View

SATED = 4  # The search stops after this number of least loaded libraries in a row that accept no call

_MOST_EXAMINED = 16
_MOST_COMPARED = 8  # Free libraries compared per speed


def free_libraries_fastest_first(context: Context) -> Iterator[Library]:
    """Yield free libraries: fastest first if speeds are known, else last used first. Libraries on shared devices count
    as slower.
    """
    by_speed = context.index.free_libraries_by_speed()
    if not by_speed:
        return context.index.hottest()
    some = [library for free in by_speed for library in islice(free, _MOST_COMPARED)]
    some.sort(key=_load_per_speed)
    return chain(some, context.index.hottest())


def _load_per_speed(library: Library) -> float:
    neighbours = (other for device in library.devices for other in device.libraries.values() if other is not library)
    calls = 1 + library.load / library.slots + sum(bool(other.held) for other in neighbours)
    return calls / library.context.speeds.get(library.kind)


def libraries_hottest_first(view: View, context: Context) -> Iterator[Library]:
    """Yield the library of the current burst, then free libraries, then the least loaded. Each library pulls calls
    before the next library is yielded.
    """
    queue, index, burst = context.queue, context.index, context.index.burst
    if burst is not None and burst.at == view.now:
        yield burst.library
    for some in (_MOST_EXAMINED, len(index.free)) if index.free else ():  # usually the first libraries take all calls
        for library in tuple(islice(free_libraries_fastest_first(context), some)) if queue.count else ():
            yield library
            if queue.single() is None:  # only gangs wait, and gangs need no further library
                return
    before = -1
    # With several slots, the last calls are sent to the least loaded libraries.
    while queue.count != before and index.free and context.slots > 1:
        before = queue.count
        yield from tuple(islice(free_libraries_fastest_first(context), _MOST_EXAMINED))
    while queue.count:
        before = queue.count
        yield from tuple(islice(index.least_loaded(), SATED))  # a copy, because a library that takes calls moves
        if queue.count == before:
            return


class Quiet:
    """Base class of policies. By default, the methods return no actions."""

    period_s: float = 0.0
    by_deadline = False
    by_run_time = False
    asks_every_call = False
    honours: frozenset[str] = frozenset()
    places_one_by_one_up_to = 4

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        return libraries_hottest_first(view, context)

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def rests(self, view: View) -> bool:  # noqa: ARG002
        return False

    def idle(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def timer(self, view: View, key: str) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def advised(self, view: View, context: Context) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

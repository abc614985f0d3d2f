"""Base class of policies, and the default order in which libraries get waiting calls.

A dispatch policy derived from `Quiet` must implement `place`, `pull`, `on_out_of_calls` and `window`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, View

MOST_FULL_LIBRARIES_IN_A_ROW = 4  # After this many libraries that accept no call, the search for a library stops

_MOST_EXAMINED = 16
MOST_COMPARED = 8  # Maximum libraries or calls that a decision compares


def free_libraries_fastest_first(context: Context) -> Iterator[Library]:
    """Yield free libraries, fastest first; last used first if speeds are unknown. Shared devices count as slower."""
    by_speed = context.index.free_libraries_by_speed()
    if not by_speed:
        return context.index.free_libraries_hottest_first()
    some = [library for free in by_speed for library in islice(free, MOST_COMPARED)]
    some.sort(key=_load_per_speed)
    return chain(some, context.index.free_libraries_hottest_first())


def _load_per_speed(library: Library) -> float:
    neighbours = (other for device in library.devices for other in device.libraries.values() if other is not library)
    calls = 1 + library.load / library.slots + sum(bool(other.held) for other in neighbours)
    return calls / library.context.speeds.speed_of_kind(library.kind)


def libraries_hottest_first(view: View, context: Context) -> Iterator[Library]:
    """Yield the library that got calls at the current time `view.now`, then free libraries, then the least loaded. The
    caller sends calls to each library before it takes the next.
    """
    queue, index, burst = context.queue, context.index, context.index.burst
    if burst is not None and burst.at == view.now:
        yield burst.library
    for some in (_MOST_EXAMINED, len(index.free)) if index.free else ():  # try a few first; this usually suffices
        for library in tuple(islice(free_libraries_fastest_first(context), some)) if queue.count else ():
            yield library
            if queue.first_single_call() is None:  # all waiting calls need gangs
                return
    before = -1
    # If libraries have several slots, repeat the search: a free library may take more calls until its slots are full.
    while queue.count != before and index.free and context.slots > 1:
        before = queue.count
        yield from tuple(islice(free_libraries_fastest_first(context), _MOST_EXAMINED))
    while queue.count:
        before = queue.count
        # Copy the libraries from the index, because they change places in it when they take calls.
        yield from tuple(islice(index.libraries_with_backlog_room(), MOST_FULL_LIBRARIES_IN_A_ROW))
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

    def on_round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def may_skip_rounds(self, view: View) -> bool:  # noqa: ARG002
        return False

    def on_idle_library(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def on_timer(self, view: View, key: str) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def on_advice(self, view: View, context: Context) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def on_failure_verdict(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def on_pace_advice(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

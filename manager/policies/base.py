"""Defaults for policies, and the order in which free libraries are offered waiting calls.

A dispatch policy derived from `Quiet` implements `place`, `pull`, `dry` and `window`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, View

SATED = 4  # Least loaded libraries in a row that take nothing before the search stops

_MOST_EXAMINED = 16


def hottest_first(view: View, context: Context) -> Iterator[Library]:
    """Offer waiting calls to the library of the current burst, then to free ones, then to the least loaded.

    The generator is lazy: a library takes what `Dispatch.pull` says before the next one is considered, so a
    few calls never cost a walk over thousands of libraries.
    """
    queue, index, burst = context.queue, context.index, context.index.burst
    if burst is not None and burst.at == view.now:
        yield burst.library
    for some in (_MOST_EXAMINED, len(index.free)) if index.free else ():  # nearly always the first few take it all
        for library in tuple(islice(index.hottest(), some)) if queue.count else ():
            yield library
            if queue.single() is None:  # gangs that still wait need no other library to look at them
                return
    before = -1
    while (
        queue.count != before and index.free and context.slots > 1
    ):  # several slots: the last calls go to the least loaded
        before = queue.count
        yield from tuple(islice(index.hottest(), _MOST_EXAMINED))
    while queue.count:
        before = queue.count
        yield from tuple(islice(index.least_loaded(), SATED))  # libraries that take some move in the index
        if queue.count == before:
            return


class Quiet:
    """Base class of policies: defaults, which do nothing, for everything but the questions of a seam."""

    period_s: float = 0.0
    by_deadline = False
    by_run_time = False
    asks_every_call = False
    honours: frozenset[str] = frozenset()
    places_one_by_one_up_to = 4

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """Offer calls to the hottest free library first, then to the least loaded."""
        return hottest_first(view, context)

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        """Do nothing: this policy refuses calls that list several contexts."""
        return ()

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def rests(self, view: View) -> bool:  # noqa: ARG002
        return False

    def idle(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        """Do nothing: an idle library stays until its room is needed."""
        return ()

    def timer(self, view: View, key: str) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def advised(self, view: View, context: Context) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:  # noqa: ARG002
        return ()

"""Which libraries are offered the calls that wait for a context, and in which order: the default at the dispatch seam.

Asked when calls came to the queue, or came back. The library that was given some just now is first: what it gets goes
in the same frame. Then the hottest that are free, so that those which are not needed cool down. Those that work already
take their share of a backlog, the least loaded first; when some in a row have had it, so have the others.

It answers lazily: a library takes what `Dispatch.pull` says before the next one is asked for, so nobody walks through
thousands of libraries for a few calls.

Defaults for a policy without rounds, timers and advice.

A dispatch policy derived from it has four methods of its own: `place`, `pull`, `dry` and `window`. It places few calls
one by one, keeps calls in the order of their arrival, and offers a queue to the hottest library first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, View

# ---- serve order


SATED = 4
"""Once this many of the least loaded libraries have taken nothing of a backlog, no other is asked."""

_MOST_EXAMINED = 16


def hottest_first(view: View, context: Context) -> Iterator[Library]:
    """The library of the burst, the free ones, then those with the least to do, as long as they take calls."""
    queue, index, burst = context.queue, context.index, context.index.burst
    if burst is not None and burst.at == view.now:
        yield burst.library
    for some in (_MOST_EXAMINED, len(index.free)) if index.free else ():  # nearly always the first few take it all
        for library in tuple(islice(index.hottest(), some)) if queue.count else ():
            yield library
            if queue.single() is None:  # gangs may still wait: what the first library did for them, others would too
                return
    before = -1
    while (
        queue.count != before and index.free and context.slots > 1
    ):  # they share: the last of it goes to the least loaded
        before = queue.count
        yield from tuple(islice(index.hottest(), _MOST_EXAMINED))
    while queue.count:
        before = queue.count
        yield from tuple(islice(index.least_loaded(), SATED))  # those that take some stand elsewhere then
        if queue.count == before:
            return


# ---- base


class Quiet:
    """Base class of policies: a default for everything but the questions of a seam."""

    period_s: float = 0.0
    by_deadline = False
    by_run_time = False
    asks_every_call = False
    honours: frozenset[str] = frozenset()
    places_one_by_one_up_to = 4

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """The hottest free library first, then the least loaded."""
        return hottest_first(view, context)

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        """Nothing: calls that list several contexts are refused by a policy that does not honour that."""
        return ()

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def rests(self, view: View) -> bool:  # noqa: ARG002
        """No: it may think of something by itself."""
        return False

    def idle(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        """Nothing: an idle library stays until its room is wanted."""
        return ()

    def timer(self, view: View, key: str) -> Iterable[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def advised(self, view: View, context: Context) -> Iterable[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

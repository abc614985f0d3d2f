"""Defaults for a policy without rounds, timers and advice.

A dispatch policy derived from it has four methods of its own: `place`, `pull`, `dry` and `window`. It places few calls
one by one, keeps calls in the order of their arrival, and offers a queue to the hottest library first.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, View
from stoker.manager.policies.serve_order import hottest_first


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

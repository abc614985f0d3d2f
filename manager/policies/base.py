"""What a policy that does not think in rounds, sets no timers and takes no advice says to all that."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.manager.core.nouns import Context
from stoker.manager.core.seams import Action, Changes, View


class Quiet:
    """Answers nothing to rounds, timers and advice."""

    period_s: float = 0.0
    by_deadline = False
    honours: frozenset[str] = frozenset()

    def round(self, view: View, changes: Changes) -> Sequence[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def rests(self, view: View) -> bool:  # noqa: ARG002
        """No: it may think of something by itself."""
        return False

    def timer(self, view: View, key: str) -> Sequence[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def advised(self, view: View, context: Context) -> Sequence[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

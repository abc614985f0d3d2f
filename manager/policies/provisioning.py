"""Provisioning for pilots that somebody else brings: Parsl's own block scaling, or a person.

"The application is purely reactive: it has no control over its allocated resources" (Pervasive Context Management §1),
so this policy asks for nothing and takes what comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.contexts.recipe import Needs
from stoker.manager.core.seams import Action, View
from stoker.manager.policies.base import Quiet


class TakeWhatComes(Quiet):
    """The default provisioning policy. `elastic`: pilots of other kinds may join later."""

    def __init__(self, *, elastic: bool = False) -> None:
        self.elastic = elastic

    def demand(self, view: View) -> Sequence[Action]:  # noqa: ARG002
        """Nothing: whoever brings pilots decides how many."""
        return ()

    def may_bring(self, view: View, needs: Needs) -> bool:  # noqa: ARG002
        """Only where pilots of other kinds may still join."""
        return self.elastic

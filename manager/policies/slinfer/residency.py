"""How much an instance keeps: SLINFER at the residency seam (§VII-B).

Instances are loaded where a call finds no other, and go when nobody uses them (`dispatch`). Meanwhile they give memory
back when they have far too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Changes, FailWaiting, Provisioning, View
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.slinfer.memory import CacheSizes
from stoker.manager.policies.slinfer.placement import instances, loading, shares_by_token
from stoker.protocol.ids import RecipeKey

_ROUND_S = 0.1


class ShrinkLate(LoadWhereWanted):
    """Residency: instances that are far too large shrink. Contexts that do not share devices by the token are loaded as
    by default."""

    period_s = _ROUND_S
    honours = frozenset()
    """No limits: dispatch loads and unloads instances by a rule of its own."""

    def __init__(self, sizes: CacheSizes, *, resizes: bool, provisioning: Provisioning | None = None) -> None:
        super().__init__(provisioning=provisioning)
        self._sizes = sizes
        self._resizes = resizes

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """A word that a model can be loaded nowhere; else dispatch loads an instance for the call that needs it."""
        if not shares_by_token(context):
            return super().wanted(view, context)
        nowhere = None if loading(context) or instances(context) else self.why_nowhere(view, context)
        return (FailWaiting(RecipeKey(context.recipe.key), nowhere),) if nowhere is not None else ()

    def measured(self, view: View, library: Library) -> int:
        """What it was promised: its cache is in there."""
        return library.promised_bytes if shares_by_token(library.context) else super().measured(view, library)

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        """Instances shrink whose calls have ended."""
        return self._shrink(view) if self._resizes else ()

    def rests(self, view: View) -> bool:
        """True while there is no instance."""
        return not any(shares_by_token(library.context) for library in view.libraries.values())

    def _shrink(self, view: View) -> Iterator[Action]:
        for library in tuple(view.libraries.values()):
            if library.usable and shares_by_token(library.context):
                yield from self._sizes.shrink(library)

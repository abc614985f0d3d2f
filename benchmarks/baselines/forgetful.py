"""Run each call in a separate library that is unloaded afterwards, as in Parsl's HTEX (Pervasive Context Management
§4.2). The awareness in the recipe decides whether files stay on the node's disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.contexts.recipe import Awareness
from stoker.manager.core.nouns import Context, Library, LibraryState
from stoker.manager.core.seams import Action, Policies, Provisioning, Unload, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted


class OneCallEach(HottestFirst):
    """Dispatch one call to each library, then unload the library unless its recipe retires it."""

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        return 0 if library.served else 1

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        return self._end(library) if library.served else super().pull(view, library)

    def on_out_of_calls(self, view: View, library: Library) -> Iterable[Action]:  # noqa: ARG002
        return self._end(library) if library.served else ()

    def _end(self, library: Library) -> tuple[Action, ...]:
        retires = 0 < library.context.recipe.calls_per_library <= library.served
        return () if retires else (Unload(library.id, "its call has ended, and nothing is kept"),)


class LoadForEachCall(LoadWhereWanted):
    def worth_loading(self, context: Context, alive: list[Library]) -> int:
        head = context.queue.head()
        gang = head.group.options.gang[0] if head is not None else 1
        loading = sum(library.state is LibraryState.LOADING for library in alive)
        fresh = sum(not library.served and not library.load for library in alive) - loading
        more = max(0, context.queue.count + gang - 1 - loading - fresh)
        if context.load_failures:
            return 0 if loading else min(more, 1)
        return more


def disk_only(provisioning: Provisioning | None = None) -> Policies:
    return _forgetful(provisioning, Awareness.DISK)


def no_awareness(provisioning: Provisioning | None = None) -> Policies:
    return _forgetful(provisioning, Awareness.NONE)


def _forgetful(provisioning: Provisioning | None, awareness: Awareness) -> Policies:
    asked = provisioning or KeepBlocks()
    return Policies(OneCallEach(), LoadForEachCall(provisioning=asked), asked, awareness)

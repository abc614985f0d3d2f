"""An object cache that is full of what hot libraries use. Idle ones of them end for a context that calls wait for.

A pilot keeps the objects of each library as long as that lives. It refuses a context whose objects would fit if other
libraries let go of theirs (`LibraryGone.cache_in_use`). The manager then ends libraries that have nothing to do, those
that were used longest ago first. Where the libraries that use the cache are busy, the calls wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker.manager.core import libraries
from stoker.manager.core.phases import LibraryState
from stoker.manager.core.state import Library, Pilot, State

if TYPE_CHECKING:
    from stoker.manager.core.core import Core
    from stoker.manager.core.state import Context


def make(core: Core, pilot: Pilot, context: Context) -> bool:
    """End idle libraries, of all pilots that share the cache of this one, whose objects would make room for those of a
    context. Whether there are libraries, idle or not, that use the cache for other contexts."""
    users: dict[str, list[Library]] = {}
    for library in _users(core.state, pilot):
        if library.context is not context:
            users.setdefault(library.context.recipe.key, []).append(library)
    wanted = {ref.name for ref in context.recipe.objects}
    missing = sum(ref.size_bytes for ref in context.recipe.objects)
    idle = [those for those in users.values() if all(map(_is_idle, those))]
    for those in sorted(idle, key=lambda those: max(library.used_at for library in those)):
        if missing <= 0:
            break
        others = [ref.size_bytes for ref in those[0].context.recipe.objects if ref.name not in wanted]
        missing -= sum(others)
        for library in those if others else ():
            reason = f"its files make room in the object cache for {context.recipe.name}"
            libraries.stop(core, library, reason=reason)
    return bool(users)


def _users(state: State, pilot: Pilot) -> Iterator[Library]:
    """The libraries that have objects in a pilot's cache."""
    peer = state.transfers.peers.get(pilot.id)
    near = state.transfers.caches.get(peer.cache, {}) if peer is not None else {}
    for id in {pilot.id: None, **dict.fromkeys(near)}:
        for library in state.pilots[id].libraries.values():
            if library.context.recipe.objects and library.state is not LibraryState.GONE:
                yield library


def _is_idle(library: Library) -> bool:
    """Whether a library has nothing to do, or ends already."""
    if library.state is LibraryState.STOPPING:
        return True
    is_free = library.state is LibraryState.READY and not library.held and not library.zombies
    return is_free and not library.context.queue.count

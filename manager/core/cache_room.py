"""An object cache that is full of what hot libraries use. Idle ones of them end for a context that calls wait for.

A pilot keeps the objects of each library as long as that lives. It refuses a context whose objects would fit if other
libraries let go of theirs (`LibraryGone.cache_lacks_bytes`). If those of idle libraries come to that, the manager ends
them, those that were used longest ago first. Else the calls wait for busy libraries, and the idle ones stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from stoker.manager.core import libraries
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context, Library, Pilot
from stoker.manager.core.phases import LibraryState
from stoker.manager.core.state import State

ENDING_S = 2.0
"""A library that is told to end has let go of its files after so long, mostly."""
BUSY_S = 10.0
"""So often it is tried whether busy libraries have let go of theirs."""


def make(manager: Manager, pilot: Pilot, context: Context, lacks_bytes: int) -> float:
    """End idle libraries, of all pilots that share the cache of this one, if that makes the room that the objects of a
    context lack. Seconds after which the context should be tried again; 0 = no library of the session is in its way."""
    users: dict[Context, list[Library]] = {}
    for library in _users(manager.state, pilot):
        if library.context is not context:
            users.setdefault(library.context, []).append(library)
    use = _Use(manager.state, context, users)
    if use.frees_bytes(users) < lacks_bytes:
        return 0.0
    idle = [other for other, those in users.items() if all(map(_is_idle, those))]
    idle.sort(key=lambda other: max(library.used_at for library in users[other]))
    ending: list[Context] = []
    while idle and use.frees_bytes(ending) < lacks_bytes:
        ending.append(idle.pop(0))
    if use.frees_bytes(ending) < lacks_bytes:
        return BUSY_S
    for other in tuple(ending):  # a context that is not needed for the room stays
        rest = [each for each in ending if each is not other]
        if use.frees_bytes(rest) >= lacks_bytes:
            ending = rest
    for other in ending:
        for library in users[other]:
            reason = f"its files make room in the object cache for {context.recipe.name}"
            libraries.stop(manager, library, reason=reason)
    return ENDING_S


class _Use:
    """What contexts have in a cache, beside one that is to come."""

    def __init__(self, state: State, coming: Context, others: Iterable[Context]) -> None:
        self._coming = {ref.name for ref in coming.recipe.objects}
        self._of = {other: _objects(state, other) for other in others}

    def frees_bytes(self, ending: Collection[Context]) -> int:
        """What is not used any more when these have ended."""
        used = self._coming.union(*(self._of[other] for other in self._of if other not in ending))
        free = {name: size for other in ending for name, size in self._of[other].items() if name not in used}
        return sum(free.values())


def _objects(state: State, context: Context) -> dict[str, int]:
    """The objects that a library of a context may use, its snapshots too, with their sizes in bytes."""
    found = {ref.name: ref.size_bytes for ref in context.recipe.objects}
    for (key, _), forms in state.transfers.snapshots.items():
        if key == context.recipe.key:
            found |= {snapshot.object.name: snapshot.object.size_bytes for snapshot in forms.values()}
    return found


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

"""A library that has been idle for a while is unloaded: keep-alive, as serverless systems have it.

A part for policies: whichever seam hears that a library is idle asks for a timer (`idle`), and hands it on when it
fires (`fired`). A library has one timer at most. A library that got calls meanwhile has it set again, for the
time that is left; so a call costs nothing here, and a timer is set as often as `keep_alive_s` passes.

    def dry(self, view, library):
        return self._keep_alive.idle(view, library)

    def timer(self, view, key):
        return self._keep_alive.fired(view, key)
"""

from __future__ import annotations

from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.core.seams import Timer, Unload, View
from stoker.protocol.ids import LibraryId

_PREFIX = "keep-alive/"
_ROUNDING_S = 1e-6
"""A timer that fires so much too early is in time."""


class IdleTimers:
    """Unloads libraries that have served nothing for `keep_alive_s`."""

    def __init__(self, keep_alive_s: float) -> None:
        if keep_alive_s < 0:
            raise ValueError(f"keep_alive_s = {keep_alive_s}: no time is negative")
        self.keep_alive_s = keep_alive_s
        self._set: set[LibraryId] = set()
        """Libraries that have a timer."""

    def idle(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        """A ready library has nothing to do: see after `keep_alive_s` whether that is so still."""
        if library.id in self._set or not _is_idle(library):
            return ()
        return self._after_idling(view, library)

    def fired(self, view: View, key: str) -> tuple[Timer | Unload, ...]:
        """What a timer leads to: the end of its library, another timer, or nothing. Timers of others lead to
        nothing."""
        if not key.startswith(_PREFIX):
            return ()
        id = LibraryId(int(key.removeprefix(_PREFIX)))
        self._set.discard(id)
        library = view.libraries.get(id)
        if library is None or not _is_idle(library):
            return ()  # it is asked about again when it falls idle
        return self._after_idling(view, library)

    def _after_idling(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        idle_s = view.now - max(library.ready_at, library.ended_at)
        left_s = self.keep_alive_s - idle_s
        if left_s <= _ROUNDING_S:
            return (Unload(library.id, f"it has served nothing for {idle_s:.3g} s"),)
        self._set.add(library.id)
        return (Timer(view.now + left_s, f"{_PREFIX}{library.id}"),)


def _is_idle(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.load

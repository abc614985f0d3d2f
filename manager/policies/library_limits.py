"""How many libraries a context has, where programs have named limits (`Context.limits`): parts for residency policies.

`room_for_more` bounds the loads of a context. `KeepAlive` unloads libraries that have been idle for the keep-alive of
their context, as long as the least number stays, and idle ones beyond the largest number, which there are when a pilot
that was cut off comes back, or when the limit is lowered.

A context has one timer at most, which is set when a library falls idle; so a call costs nothing here. A library that
has served nothing goes before one that served a call later.

Source: keep-alive as serverless systems have it (SLINFER §II-B); the default is to keep until room is needed
(Pervasive Context Management §3).
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.seams import Timer, Unload, View
from stoker.manager.protocol.ids import RecipeKey

HONOURS = frozenset({"min_libraries", "max_libraries", "keep_alive"})
"""What a policy honours that uses both parts."""
_PREFIX = "keep-alive/"
_ROUNDING_S = 1e-6
"""A timer that fires so much too early is in time."""
_LOOKS = 20
"""A context is looked at so often within its keep-alive at most, however many of its libraries fall idle in turn."""
_LEAST_LOOK_S = 0.05


def room_for_more(view: View, context: Context, *, cut_s: float) -> int | None:
    """How many libraries more a context may have; None = any number. Those that are stopping count until they are gone.
    Those of a pilot that is cut off do not count after its calls have waited for `cut_s`: the pilot may be lost."""
    most = context.limits.most
    if not most:
        return None
    since = context.starved_since
    is_blip = since is None or view.now - since < cut_s
    count = sum(x.pilot.state is not PilotState.CUT or is_blip for x in context.libraries.values())
    return max(0, most - count)


class KeepAlive:
    """Unloads idle libraries as the limits of their contexts say."""

    def __init__(self) -> None:
        self._set: set[str] = set()
        """Keys of the contexts that have a timer."""

    def idle(self, view: View, library: Library) -> tuple[Timer | Unload, ...]:
        """A ready library has nothing to do: it goes now, or is looked at when its keep-alive is over."""
        context, limits = library.context, library.context.limits
        if limits.most and sum(x.state is not LibraryState.STOPPING for x in context.libraries.values()) > limits.most:
            return (Unload(library.id, f"its context may have {limits.most} libraries at most"),)
        if limits.keep_alive_s is None or context.recipe.key in self._set or _spare(context) <= 0:
            return ()
        return tuple(self._unload_expired(view, context, limits.keep_alive_s))

    def fired(self, view: View, key: str) -> tuple[Timer | Unload, ...]:
        """What a timer leads to: the end of libraries, another timer, or nothing. Timers of others lead to nothing."""
        if not key.startswith(_PREFIX):
            return ()
        recipe = key.removeprefix(_PREFIX)
        self._set.discard(recipe)
        context = view.contexts.get(recipe)
        if context is None or context.limits.keep_alive_s is None:
            return ()
        return tuple(self._unload_expired(view, context, context.limits.keep_alive_s))

    def _unload_expired(self, view: View, context: Context, keep_alive_s: float) -> Iterator[Timer | Unload]:
        spare, again_s = _spare(context), None
        for library in sorted(context.libraries.values(), key=lambda x: (_idle_since(x), x.id)):
            if spare <= 0 or again_s is not None:
                break
            if library.load or library.state is not LibraryState.READY:
                continue
            idle_s = view.now - _idle_since(library)
            if idle_s < keep_alive_s - _ROUNDING_S:
                again_s = keep_alive_s - idle_s
            elif library.pilot.state is PilotState.HERE:
                spare -= 1
                yield Unload(library.id, f"it has served nothing for {idle_s:.3g} s")
        if spare > 0 and again_s is not None:
            self._set.add(context.recipe.key)
            at = view.now + max(again_s, keep_alive_s / _LOOKS, _LEAST_LOOK_S)
            yield Timer(at, f"{_PREFIX}{RecipeKey(context.recipe.key)}")


def is_spared(library: Library) -> bool:
    """True for a library that is to stay loaded, because its context has no more than its least number of them."""
    return library.context.limits.least > 0 and _counts(library) and _spare(library.context) <= 0


def _spare(context: Context) -> int:
    """How many of its loaded libraries are more than have to stay."""
    return sum(map(_counts, context.libraries.values())) - context.limits.least


def _counts(library: Library) -> bool:
    return library.state is LibraryState.READY and library.pilot.state is PilotState.HERE


def _idle_since(library: Library) -> float:
    return max(library.ready_at, library.ended_at)

"""Room on occupied devices: which libraries leave so that a context can be loaded.

`idle_to_end` ends just enough idle libraries, least recently used first. `room_by_turns` gives a context that has
waited long a device of the context with the most libraries. The calling policy provides `minimum` (bytes needed)
and `may_leave`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from stoker.manager.core.nouns import Context, Device, Library, LibraryState, PilotState
from stoker.manager.core.seams import Action, Unload, View
from stoker.manager.policies.where_to_load import may_load, suits

Minimum = Callable[[Context, Device], int]  # Free bytes without which a context is not tried on a device

MayLeave = Callable[[View, Library, Context], bool]


class IdleKeeper(Protocol):
    """Keeps idle libraries for contexts that will want them."""

    def may_leave(self, view: View, library: Library, context: Context) -> bool:
        """True if a library may leave to make room for a context."""


_May = Callable[[Library], bool]
_Rank = Callable[[Library], tuple[float, ...]]


def anyone(view: View, library: Library, context: Context) -> bool:  # noqa: ARG001
    return True


def idle_to_end(view: View, context: Context, *, minimum: Minimum, may_leave: MayLeave = anyone) -> list[Library]:
    loading = any(x.state is LibraryState.LOADING for x in context.libraries.values())
    if loading or not any(other.idle for other in view.contexts.values() if other is not context):
        return []

    def may_go(library: Library) -> bool:
        return is_idle(library) and not _saved(library, context) and may_leave(view, library, context)

    return _libraries_to_end(view, context, minimum, may_go=may_go, rank=lambda x: (x.used_at, x.id))


def room_by_turns(
    view: View, context: Context, *, minimum: Minimum, patience_s: float, may_leave: MayLeave = anyone
) -> list[Action]:
    """Give a context that has long lacked libraries a device of the context that holds most, once that has had its
    turn.
    """
    lacking = context.lacking
    waited = view.now - lacking[1] if lacking is not None else 0.0
    if waited < patience_s:
        return []

    def may_go(library: Library) -> bool:
        age = view.now - library.ready_at
        ready = library.state is LibraryState.READY and not _saved(library, context)
        had_its_turn = ready and age > max(patience_s, library.context.load_s)
        return had_its_turn and may_leave(view, library, context)

    chosen = _libraries_to_end(
        view, context, minimum, may_go=may_go, rank=lambda x: (-len(x.context.libraries), x.ready_at)
    )
    return [Unload(x.id, f"{context.recipe.name} has waited {waited:.0f} s for a device") for x in chosen]


def _libraries_to_end(view: View, context: Context, minimum: Minimum, *, may_go: _May, rank: _Rank) -> list[Library]:
    """Return the libraries to end so that the context fits on devices of one pilot, lowest rank first.

    Empty if room is already on its way, or cannot be made.
    """
    best: tuple[tuple[float, ...], list[Library]] | None = None
    for pilot in view.pilots.values():
        if pilot.state is not PilotState.HERE:
            continue
        able = (device for device in pilot.devices.values() if may_load(view, context, device))
        ways = [_way(context, device, minimum, may_go, rank) for device in able]
        open_ways = sorted((way for way in ways if way is not None), key=lambda way: way[0])
        open_ways = open_ways[: context.recipe.needs.devices]
        if len(open_ways) < context.recipe.needs.devices:
            continue
        worst, chosen = open_ways[-1][0], {x.id: x for _, libraries in open_ways for x in libraries}
        if best is None or worst < best[0]:
            best = worst, list(chosen.values())
    return [] if best is None else best[1]


def _way(
    context: Context, device: Device, minimum: Minimum, may_go: _May, rank: _Rank
) -> tuple[tuple[float, ...], list[Library]] | None:
    """Return the libraries to end on this device after the highest rank among them; None if the context cannot fit."""
    if not suits(context, device) or holds(device, context):
        return None
    short = minimum(context, device) - device.free_bytes
    short -= sum(x.promised_bytes for x in device.libraries.values() if x.state is LibraryState.STOPPING)
    candidates = sorted((x for x in device.libraries.values() if may_go(x)), key=rank, reverse=True)
    worst: tuple[float, ...] = (-math.inf,)
    chosen: list[Library] = []
    while short > 0 and candidates:
        chosen.append(candidates.pop())
        worst = rank(chosen[-1])
        short -= chosen[-1].promised_bytes
    return (worst, chosen) if short <= 0 else None


def holds(device: Device, context: Context) -> bool:
    for library in device.libraries.values():  # noqa: SIM110 (a generator costs more than its loop)
        if library.context is context:
            return True
    return False


def is_idle(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.held and not library.zombies


def _saved(library: Library, context: Context) -> bool:
    """True if a free library waits for the rest of a gang that is before this context in line."""
    if not is_idle(library):
        return False
    mine, other = context.lacking, _gathers(library.context)
    return other is not None and (mine is None or other < mine)


def _gathers(context: Context) -> tuple[int, float, int] | None:
    """Return the place in line of a context whose first call is a gang that is not all ready."""
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if head is None or gang == 1 or sum(x.state is LibraryState.READY for x in context.libraries.values()) >= gang:
        return context.lacking
    return -head.group.options.priority, head.submitted_at, head.id

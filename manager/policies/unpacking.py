"""Calls that share a device and slow each other down: the one that came later goes elsewhere (SchedMate §4.1).

A call whose throughput, by what it prints, has fallen by more than `LIMIT` since its best is slowed by what came to its
device meanwhile: after it was seen at its best. The paper evicts the newcomer, whose progress is lost, and never packs
it again. Here it is moved once, to a device where nothing runs, and only if it keeps its progress: such a call ends
soon when it is told to make room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from stoker.manager.core.events import OfPace, PaceAdvice
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Evict, Load, Unload, View
from stoker.protocol.ids import RecipeKey

LIMIT = 0.35
"""§4.1: a call that lost more of its throughput than this is not packed with another one."""
MOST_MOVED = 10_000

Places = Callable[[View, Context], Iterator[tuple[Device, ...]]]
Reservation = Callable[[Context, tuple[Device, ...]], int]


class Unpacking:
    """Remembers which calls were moved."""

    def __init__(self) -> None:
        self._moved: dict[int, None] = {}

    def plan(
        self, view: View, about: OfPace, pace: PaceAdvice, *, places: Places, reservation: Reservation
    ) -> Iterable[Action]:
        """What is done about a call that is known to be slowed. `places`: where a context could be loaded."""
        slowed = view.libraries.get(about.library)
        if slowed is None or pace.slowed <= LIMIT:
            return
        newcomer = _newcomer(slowed, about.call, since=view.now - pace.best_ago_s)
        if newcomer is None:
            return
        library, call = newcomer
        if call.id in self._moved or not call.spec.progress:
            return
        place = next((each for each in places(view, library.context) if not any(map(_is_busy, each))), None)
        if place is None:
            return
        self._moved[call.id] = None
        if len(self._moved) > MOST_MOVED:
            del self._moved[next(iter(self._moved))]
        memory_bytes = reservation(library.context, place)
        yield Load(RecipeKey(library.context.recipe.key), place[0].pilot.id, tuple(d.id for d in place), memory_bytes)
        yield Evict(call.id)
        share = f"{pace.slowed:.0%}"
        yield Unload(library.id, f"it slows lib-{slowed.id} on the same device by {share}; its call goes elsewhere")


def _newcomer(slowed: Library, call: int, *, since: float) -> tuple[Library, Call] | None:
    """The library of a device of this one whose call began last, after `since`, and that call, if it runs it alone."""
    if call not in slowed.held:
        return None
    others = {
        library.id: library
        for device in slowed.devices
        for library in device.libraries.values()
        if library is not slowed and library.state is LibraryState.READY and len(library.held) == 1
    }
    running = [(library, next(iter(library.held.values()))) for library in others.values() if library.slots == 1]
    later = [(library, call) for library, call in running if call.sent_at > since and call.holder is library]
    return max(later, key=lambda pair: pair[1].sent_at, default=None)


def _is_busy(device: Device) -> bool:
    return any(library.held or library.state is LibraryState.LOADING for library in device.libraries.values())

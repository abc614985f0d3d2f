"""The libraries that the manager has started in a pool, and what it is told of them when it asks."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.manager.protocol.calls import CallSpec
from stoker.manager.protocol.ids import CallId, DeviceId, LibraryId, RecipeKey
from stoker.manager.protocol.to_manager import LibraryFacts, LibraryUse
from stoker.manager.protocol.to_pilot import RunCalls, StartLibrary
from stoker.pilot.core.events import Before
from stoker.pilot.core.library import LibraryState, State
from stoker.pilot.taskvine.messages import Order

_GONE_KEPT = 1000


class Library:
    """One library of the manager's."""

    def __init__(self, order: StartLibrary) -> None:
        self.state = LibraryState(order.library, order.recipe, order.devices)
        self.number = order.library
        self.recipe = order.recipe
        self.reserved_bytes = order.device_memory_bytes
        self.queue: deque[tuple[RunCalls, CallSpec]] = deque()
        """Calls that TaskVine has not been given."""
        self.order: Order | None = None
        """What TaskVine works on for it."""
        self.large: tuple[ObjectRef, ...] = ()
        """Large arguments of that order."""
        self.tries = 0
        """How often TaskVine gave that order up before it began."""
        self.ordered_at = time.monotonic()
        self.ready_at = 0.0
        self.memory_bytes = 0

    @property
    def sent(self) -> tuple[CallId, ...]:
        """Its calls that TaskVine has."""
        return tuple(spec.call for spec in self.order.calls) if self.order is not None else ()

    @property
    def is_ready(self) -> bool:
        """Whether its context has been loaded."""
        return self.state.state in (State.READY, State.DRAINING)

    def facts(self) -> LibraryFacts:
        """What the manager is told of it after a reconnect, but for its calls."""
        return LibraryFacts(
            self.number, RecipeKey(self.recipe.key), self.state.devices, ready=self.is_ready,
            reserved_bytes=self.reserved_bytes, memory_bytes=self.memory_bytes,
        )  # fmt: skip


class Books:
    """Libraries that are here, those that were, and which of them has which slot."""

    def __init__(self) -> None:
        self.libraries: dict[LibraryId, Library] = {}
        self.last_library = 0
        """The highest number of a library that was ever ordered."""
        self._gone: dict[LibraryId, LibraryFacts] = {}
        self._holders: dict[DeviceId, LibraryId] = {}

    def enter(self, order: StartLibrary) -> Library | None:
        """A library is told to start; None if it was told before."""
        if order.library in self.libraries or order.library in self._gone:
            return None
        library = self.libraries[order.library] = Library(order)
        self.last_library = max(self.last_library, order.library)
        return library

    def remove(self, library: Library) -> None:
        """A library has ended: its slots are free. Called before its state says so."""
        self.libraries.pop(library.number, None)
        for device in library.state.devices:
            if self._holders.get(device) == library.number:
                del self._holders[device]
        self._gone[library.number] = library.facts()
        if len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def take_slots(self, library: Library) -> None:
        """Its devices are a library's from now on."""
        self._holders.update(dict.fromkeys(library.state.devices, library.number))

    def holders(self, library: Library) -> list[Library]:
        """Other libraries that have its devices."""
        numbers = {self._holders[device] for device in library.state.devices if device in self._holders}
        return [self.libraries[number] for number in sorted(numbers) if number != library.number]

    def facts(self, before: Before) -> tuple[LibraryFacts, ...]:
        """The libraries that are here, as far as the manager's books go (see `stoker.pilot.agent.link`)."""
        here = [
            _as_before(library.facts(), before, calls=tuple(library.state.held)) for library in self.libraries.values()
        ]
        gone = [
            _as_before(facts, before, calls=tuple(map(CallId, before.gone[number])))
            for number, facts in self._gone.items()
            if number in before.gone
        ]
        return (*here, *gone)

    def uses(self) -> tuple[LibraryUse, ...]:
        """What contexts were measured to take."""
        return tuple(LibraryUse(x.number, x.memory_bytes) for x in self.libraries.values() if x.memory_bytes)


def _as_before(facts: LibraryFacts, before: Before, *, calls: tuple[CallId, ...]) -> LibraryFacts:
    left = map(CallId, before.left.get(facts.library, ()))
    return msgspec.structs.replace(
        facts, ready=facts.ready and facts.library not in before.ready, calls=tuple(dict.fromkeys((*left, *calls)))
    )

"""A library as a TaskVine pool sees it: which stage it is in, and which calls it holds.

It is what `holding` and `lifecycle` are to other pilots, until the pool becomes a shell of the same core.

Everything that the manager is ever told of a call comes from here: a call enters with `hold`, and leaves exactly once,
by `ended`, `returned` or `gone`. What arrives for a call that has left already changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.manager.protocol.ids import CallId, DeviceId, LibraryId
from stoker.pilot.core.stages import NEXT, TAKES_CALLS, Stage

State = Stage


class Departure(msgspec.Struct, frozen=True):
    """The calls that a library held when it ended: those it was running, and those it had not begun, in order."""

    running: tuple[CallId, ...]
    unstarted: tuple[CallId, ...]


class LibraryState:
    """One library. Raises ValueError for a transition that is not in the table, and changes nothing then."""

    def __init__(self, library: LibraryId, recipe: Recipe, devices: tuple[DeviceId, ...]) -> None:
        self.library = library
        self.recipe = recipe
        self.devices = devices
        self.state = State.FETCHING
        self.served = 0
        self.held: dict[CallId, float] = {}
        """Calls in it, in the order in which they came, each with its time limit in seconds (0 = none)."""

    def move(self, state: State) -> None:
        """Go to another state."""
        if state not in NEXT[self.state]:
            raise ValueError(f"library {self.library} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def hold(self, calls: Iterable[CallId], *, limit_s: float = 0.0) -> None:
        """Calls have come for it. Raises ValueError when it no longer takes any."""
        if self.state not in TAKES_CALLS:
            raise ValueError(f"library {self.library} is {self.state.value} and takes no calls")
        self.held.update(dict.fromkeys(calls, limit_s))

    def ended(self, calls: Iterable[CallId]) -> list[CallId]:
        """Calls have ended in it; returns those of them that it held until now."""
        here = self._leave(calls)
        self.served += len(here)
        return here

    def returned(self, calls: Iterable[CallId]) -> list[CallId]:
        """It has given calls back; returns those of them that it held until now."""
        return self._leave(calls)

    @property
    def retires(self) -> bool:
        """Whether it has served as many calls as its recipe allows a library."""
        return 0 < self.recipe.calls_per_library <= self.served

    def gone(self, running: Iterable[CallId]) -> Departure:
        """Its process has ended while `running` ran (calls that it does not hold are ignored)."""
        self.state = State.GONE
        begun = tuple(call for call in dict.fromkeys(running) if call in self.held)
        left = Departure(running=begun, unstarted=tuple(call for call in self.held if call not in begun))
        self.held.clear()
        return left

    def _leave(self, calls: Iterable[CallId]) -> list[CallId]:
        held = self.held
        return [call for call in calls if held.pop(call, None) is not None]

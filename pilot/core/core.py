"""A pilot as a pure function: `PilotCore.handle(event, now) -> [Command]`.

The agent, the simulator and the TaskVine pool execute these commands in different ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stoker.pilot.core import reactor
from stoker.pilot.core.commands import Command
from stoker.pilot.core.events import Event
from stoker.pilot.core.state import CoreState, PilotFacts


class PilotCore:
    """The core of one pilot. Callers only read `state`."""

    def __init__(self, facts: PilotFacts) -> None:
        self.state = CoreState(facts)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event and return commands. `now` is in seconds and must not decrease."""
        state = self.state
        state.now = now
        reactor.react(state, event)
        out, state.out = state.out, []
        return out


class EventQueue:
    """Passes events to a core and executes the core's commands."""

    def __init__(self, core: PilotCore, carry_out: Callable[[Command], None], *, clock: Callable[[], float]) -> None:
        self._core = core
        self._carry_out = carry_out
        self._clock = clock
        self._events: deque[Event] = deque()
        self._is_handling = False

    def handle(self, event: Event) -> int:
        """Handle an event and the events that its commands cause. Return their number, or 0 if the event is queued."""
        events = self._events
        if self._is_handling:
            events.append(event)
            return 0
        self._is_handling = True
        if events:  # an earlier command raised and left queued events
            events.append(event)
            event = events.popleft()
        handled = 1
        try:
            for command in self._core.handle(event, self._clock()):
                self._carry_out(command)
            while events:
                handled += 1
                for command in self._core.handle(events.popleft(), self._clock()):
                    self._carry_out(command)
        finally:
            self._is_handling = False
        return handled

"""The events of one pilot, in order: what every shell of a pilot's core has between the world and the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stoker.pilot.core.commands import Command
from stoker.pilot.core.core import PilotCore
from stoker.pilot.core.events import Event


class EventQueue:
    """Tells a core of events at the time of `clock`, and has what it wants carried out.

    An event that carrying out a command leads to is handled after the rest of the commands, so that the core is never
    told of an event while another one is being handled.
    """

    def __init__(self, core: PilotCore, carry_out: Callable[[Command], None], *, clock: Callable[[], float]) -> None:
        self._core = core
        self._carry_out = carry_out
        self._clock = clock
        self._events: deque[Event] = deque()
        self._is_handling = False

    def handle(self, event: Event) -> int:
        """Handle an event and those that it leads to; returns how many. 0: another one is being handled, and this one
        comes after it."""
        events = self._events
        events.append(event)
        if self._is_handling:
            return 0
        self._is_handling = True
        handled = 0
        try:
            while events:
                handled += 1
                for command in self._core.handle(events.popleft(), self._clock()):
                    self._carry_out(command)
        finally:
            self._is_handling = False
        return handled

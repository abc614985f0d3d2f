"""Commands that wait until the events that they rest on are safe in the journal.

Calls that pilots are to run need not wait for a sync: after a crash of this host the pilots say what runs there. But no
message to a pilot overtakes an earlier one to the same pilot, acknowledgements excepted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TypeGuard

from stoker.manager.core.events import Command, ToPilot
from stoker.manager.live.journal import Journal
from stoker.protocol import to_pilot
from stoker.protocol.ids import PilotId

ENDING_S = 2.0
"""A session that is to end waits for its journal for so long; then it ends without the journal's last records."""


class HeldCommands:
    """A queue of decided commands, each batch with the place in the journal that must be safe before they leave."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._batches: deque[tuple[int, list[Command]]] = deque()
        self._ordered: Counter[PilotId] = Counter()
        """How many held messages to each pilot must keep their order."""
        self.ends_by = math.inf
        """When the session ends although its journal cannot be written; infinite while it is not to end."""

    def hold(self, commands: list[Command]) -> None:
        """Hold commands until the journal is safe up to where it is now."""
        if commands:
            self._batches.append((self._journal.position, commands))

    def split(self, commands: list[Command]) -> tuple[list[Command], list[Command]]:
        """Split commands into those that may leave before the journal is synced and those that are to be held."""
        is_written = self._journal.position <= self._journal.written
        now: list[Command] = []
        later: list[Command] = []
        for command in commands:
            if not _keeps_order(command):
                later.append(command)
            elif is_written and type(command.message) is to_pilot.RunCalls and not self._ordered[command.pilot]:
                now.append(command)
            else:
                self._ordered[command.pilot] += 1
                later.append(command)
        return now, later

    def may_leave(self, now: float, *, ending: bool) -> bool:
        """True if the oldest batch is safe, or if the `ending` session has waited long enough for its journal."""
        if not self._batches:
            return False
        if ending:
            self.ends_by = min(self.ends_by, now + ENDING_S)
        return now >= self.ends_by or self._batches[0][0] <= self._journal.safe

    def release(self) -> list[Command]:
        """Remove and return the oldest batch."""
        commands = self._batches.popleft()[1]
        if self._ordered:
            for command in commands:
                if _keeps_order(command):
                    self._ordered[command.pilot] -= 1
            if not self._batches:
                self._ordered.clear()
        return commands


def _keeps_order(command: Command) -> TypeGuard[ToPilot]:
    """True for a message to a pilot that later ones must not overtake."""
    return type(command) is ToPilot and type(command.message) is not to_pilot.Ack

"""Acknowledgements that need not leave at once: nobody waits for them, they only free memory where they arrive.

They go along with the next frame to their peer. One that finds none goes alone after a while, which wakes its peer for
nothing: so that while is long for pilots, of which there may be thousands. A program waits for its last one when it
ends, so for clients it is short. A pilot that has left waits for it, too: that one is never put here.
"""

from __future__ import annotations

import math

from stoker.manager.protocol import to_client, to_pilot

CLIENT_ACK_S = 0.25
PILOT_ACK_S = 4.0

Ack = to_pilot.Ack | to_client.Ack


class Acks:
    """For each peer the last acknowledgement that it has not been sent, for up to `longest_s`, and half of that at
    least."""

    def __init__(self, longest_s: float) -> None:
        self.due_at = math.inf
        """When the next ones are to be sent alone."""
        self._half_s = longest_s / 2
        self._older: dict[str, Ack] = {}
        self._newer: dict[str, Ack] = {}

    def add(self, peer: str, ack: Ack, now: float) -> None:
        """One more: the last one says it all."""
        if peer in self._older:
            self._older[peer] = ack
            return
        if self.due_at == math.inf:
            self.due_at = now + self._half_s
        self._newer[peer] = ack

    def along(self, peer: str) -> tuple[Ack, ...]:
        """What a frame to this peer takes along."""
        ack = self._newer.pop(peer, None) or self._older.pop(peer, None)
        return () if ack is None else (ack,)

    def overdue(self, now: float) -> list[tuple[str, Ack]]:
        """Those that have to leave alone now."""
        if now < self.due_at:
            return []
        out, self._older, self._newer = list(self._older.items()), self._newer, {}
        self.due_at = now + self._half_s if self._older else math.inf
        return out

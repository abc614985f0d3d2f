"""Delays acknowledgements: they only free memory at the peer, so they need not leave at once.

An acknowledgement leaves with the next frame to its peer, or alone after a delay. Alone it wakes the peer for nothing,
so the delay is long for pilots, of which there may be thousands. A program that ends waits for its last
acknowledgement, so the delay is short for clients. A pilot that has left waits too, and its last one is not delayed.
"""

from __future__ import annotations

import math

from stoker.protocol import to_client, to_pilot

CLIENT_ACK_S = 0.25
PILOT_ACK_S = 4.0

Ack = to_pilot.Ack | to_client.Ack


class Acks:
    """The last unsent acknowledgement of each peer. Each leaves between half of `longest_s` and `longest_s` later."""

    def __init__(self, longest_s: float) -> None:
        self.due_at = math.inf
        """When `overdue` is to be called next."""
        self._half_s = longest_s / 2
        self._older: dict[str, Ack] = {}
        self._newer: dict[str, Ack] = {}

    def add(self, peer: str, ack: Ack, now: float) -> None:
        """Delay an acknowledgement. It replaces an earlier one, which it includes."""
        if peer in self._older:
            self._older[peer] = ack
            return
        if self.due_at == math.inf:
            self.due_at = now + self._half_s
        self._newer[peer] = ack

    def along(self, peer: str) -> tuple[Ack, ...]:
        """Remove and return the acknowledgement to send with a frame to this peer."""
        ack = self._newer.pop(peer, None) or self._older.pop(peer, None)
        return () if ack is None else (ack,)

    def overdue(self, now: float) -> list[tuple[str, Ack]]:
        """Remove and return those that have to leave alone now."""
        if now < self.due_at:
            return []
        out, self._older, self._newer = list(self._older.items()), self._newer, {}
        self.due_at = now + self._half_s if self._older else math.inf
        return out

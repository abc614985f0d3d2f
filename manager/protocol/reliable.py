"""Numbered frames: what was sent is kept until the other side has it for good, and nothing is taken twice.

The sender keeps each frame until it is acknowledged and sends the rest again after a reconnect. The receiver takes
frames in order: one that it has had is dropped, one that skips a number is refused (its predecessors were lost with a
connection and come again after the next hello).
"""

from __future__ import annotations

from collections import deque


class Outbox:
    """The sending side."""

    def __init__(self) -> None:
        self.sequence = 0
        self._unacked: deque[tuple[int, bytes]] = deque()

    def next(self) -> int:
        """The number of the next frame."""
        self.sequence += 1
        return self.sequence

    def keep(self, sequence: int, frame: bytes) -> None:
        """Keep a sent frame until it is acknowledged."""
        self._unacked.append((sequence, frame))

    def acked(self, sequence: int) -> None:
        """Forget frames up to this number."""
        unacked = self._unacked
        while unacked and unacked[0][0] <= sequence:
            unacked.popleft()

    def unacked(self) -> list[bytes]:
        """Frames to send again, oldest first."""
        return [frame for _, frame in self._unacked]


class Inbox:
    """The receiving side: which frame is next."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def accept(self, sequence: int) -> bool:
        """Whether to take a frame with this number. Unnumbered frames (0) are always taken."""
        if sequence == 0:
            return True
        if sequence != self.last + 1:
            return False
        self.last = sequence
        return True

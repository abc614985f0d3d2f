"""Numbered frames: what was sent is kept until the other side has it for good, and nothing is taken twice.

The sender keeps each frame until it is acknowledged and sends the rest again after a reconnect. The receiver takes
frames in order: one that it has had is dropped, one that skips a number is refused (its predecessors were lost with a
connection and come again after the next hello).

The receiver may lose what it had acknowledged: a manager that comes back with a shorter journal. So a hello says up to
which number the frames of its sender were acknowledged, because the sender keeps none of those. A receiver that has
taken fewer goes on from that number (`Inbox.skip_to`), and asks its peer to say anew what the lost frames said.
"""

from __future__ import annotations

from collections import deque


class Outbox:
    """The sending side."""

    def __init__(self) -> None:
        self.sequence = 0
        self.acknowledged = 0
        """The highest number that was acknowledged: frames up to it are not kept."""
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
        if sequence > self.sequence:  # an acknowledgement of frames that were never sent
            return
        self.acknowledged = max(self.acknowledged, sequence)
        unacked = self._unacked
        while unacked and unacked[0][0] <= sequence:
            unacked.popleft()

    def unacked(self) -> list[bytes]:
        """Frames to send again, oldest first."""
        return [frame for _, frame in self._unacked]

    def begin_again(self) -> list[bytes]:
        """Forget the frames that were not acknowledged, and number the next one behind the last that was. Returns the
        forgotten frames: what they said has to be said anew."""
        frames = self.unacked()
        self._unacked.clear()
        self.sequence = self.acknowledged
        return frames


class Inbox:
    """The receiving side: which frame is next."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.has_hole = False
        """Whether frames that were taken are lost (see `RecordsLost`): until the next hello any later one is taken."""

    def accept(self, sequence: int) -> bool:
        """Whether to take a frame with this number. Unnumbered frames (0) are always taken."""
        if sequence == 0:
            return True
        if sequence != self.last + 1 and not (self.has_hole and sequence > self.last):
            return False
        self.last = sequence
        return True

    def skip_to(self, sequence: int) -> bool:
        """The sender keeps no frame up to this number. True if frames were lost here that it had been told are safe.

        Frames that were taken behind a hole are taken once more when they come again: they say what has happened since
        the time of which the hello speaks, and what they said before may have meant nothing here."""
        lost = sequence > self.last or self.has_hole
        self.last = sequence if self.has_hole else max(self.last, sequence)
        self.has_hole = False
        return lost

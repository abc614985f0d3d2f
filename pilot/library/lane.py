"""The pieces that a library's calls yield, on their way to the agent.

A call may be a window of pieces ahead of what its client has acknowledged; then its slot waits. It waits once more when
its function has ended, until the client has all pieces: the call's end says how many there were. Whoever waits says so
with its last pieces, because the client acknowledges in its own time otherwise.

How a slot waits is its server's business: with one slot the thread that waits reads the acknowledgements by itself.
Pieces of many calls share frames (`gathering`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from stoker.pilot.library.gathering import PieceGathering
from stoker.protocol.calls import WINDOW_BYTES, WINDOW_PIECES
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import Yielded
from stoker.protocol.to_library import Taken

TURN_S = 0.1
"""A slot that waits looks so often whether its call is to end."""
FIRST_PIECES = 3
"""So many pieces of a call do not wait for company: what a client waits for before it has anything."""
_RUN_BITS = 32


class PieceLane:
    """The lane of one library. `read(seconds)` waits for at most so long until something came from the agent, and takes
    it; None where another thread does so all the time."""

    def __init__(self, library: int, *, send: Callable[[list[Yielded]], None]) -> None:
        self.read: Callable[[float], None] | None = None
        self._gathering = PieceGathering(send)
        self._runs: dict[int, YieldingRun] = {}
        self._next_run = library << _RUN_BITS
        self.changed = threading.Condition()

    def begin(self, call: CallId, *, is_to_end: Callable[[], bool], on_waited: Callable[[float], None]) -> YieldingRun:
        """A call begins to yield. `is_to_end` says whether nobody wants more of it; `on_waited` is told after each wait
        of some time how many seconds it has waited in all."""
        with self.changed:
            number, self._next_run = self._next_run, self._next_run + 1
            run = self._runs[call] = YieldingRun(self, call, number, is_to_end=is_to_end, on_waited=on_waited)
            self._gathering.calls = len(self._runs)
        return run

    def over(self, run: YieldingRun) -> None:
        """A run has ended."""
        with self.changed:
            self._runs.pop(run.call, None)
            self._gathering.calls = len(self._runs)
        self._gathering.drop(run.number)

    def taken(self, message: Taken) -> None:
        """The client has pieces of a call."""
        with self.changed:
            run = self._runs.get(message.call)
            if run is not None and run.number == message.run:
                run.take(message.upto)
                self.changed.notify_all()

    def wake(self) -> None:
        """Something has happened that may end a wait."""
        with self.changed:
            self.changed.notify_all()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until that is true, or a turn is over."""
        if self.read is not None:
            if not is_over():
                self.read(TURN_S)
            return
        with self.changed:
            self.changed.wait_for(is_over, TURN_S)

    def say(self, pieces: Yielded) -> None:
        """Send pieces to the agent, the first ones of a call at once."""
        self._gathering.add(pieces, at_once=pieces.first < FIRST_PIECES)


class YieldingRun:
    """One run of a call that yields."""

    def __init__(
        self,
        lane: PieceLane,
        call: CallId,
        number: int,
        *,
        is_to_end: Callable[[], bool],
        on_waited: Callable[[float], None],
    ) -> None:
        self.call = call
        self.number = number
        self.count = 0
        """Pieces that were yielded."""
        self.waited_s = 0.0
        """How long it has waited for its reader."""
        self._lane = lane
        self._is_to_end = is_to_end
        self._on_waited = on_waited
        self._sizes: deque[int] = deque()
        self._bytes = 0

    def put(self, piece: bytes) -> bool:
        """Send a piece, when there is room for it. False if nobody wants it."""
        if not self._wait(lambda: self._has_room(len(piece))):
            return False
        with self._lane.changed:
            self._sizes.append(len(piece))
            self._bytes += len(piece)
            self.count += 1
        self._lane.say(Yielded(self.call, self.number, self.count - 1, [piece]))
        return True

    def wait_taken(self) -> bool:
        """Wait until the client has every piece. False if nobody wants them."""
        return self._wait(lambda: not self._sizes)

    def take(self, upto: int) -> None:
        """The client has the first `upto` pieces."""
        sizes = self._sizes
        while sizes and self.count - len(sizes) < upto:
            self._bytes -= sizes.popleft()

    def _has_room(self, size: int) -> bool:
        sizes = self._sizes
        return not sizes or (len(sizes) < WINDOW_PIECES and self._bytes + size <= WINDOW_BYTES)

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        if self._is_to_end():
            return False
        if is_over():
            return True
        self._lane.say(Yielded(self.call, self.number, self.count, [], waits=True))
        began, before = time.perf_counter(), self.waited_s
        while not is_over():
            self._lane.wait(lambda: is_over() or self._is_to_end())
            self.waited_s = before + time.perf_counter() - began
            self._on_waited(self.waited_s)
            if self._is_to_end():
                return False
        return True

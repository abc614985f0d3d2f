"""Pieces that gather for a moment, so that those of many calls share a frame.

Each frame costs its agent, the manager and the client a wake-up, which is more than what its pieces cost them. So a
piece that comes soon after the frame before waits for a moment, and leaves with all others that have come by then. The
moment grows with the number of calls that yield: one alone hardly ever waits, and hundreds cost no more frames than
eighty.

The first pieces of a call leave at once, with all that wait: somebody looks at an empty page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stoker.protocol.to_agent import Yielded

GATHER_EACH_S, GATHER_S = 0.000_05, 0.004
"""Frames are so far apart for each call that yields, and at most so far."""
GATHER_BYTES = 250_000
"""Pieces of so many bytes leave at once."""
_now = time.monotonic


class PieceGathering:
    """Hands pieces to `send`, in order, from any thread: one that yields, or one that sends what has waited."""

    def __init__(self, send: Callable[[list[Yielded]], None]) -> None:
        self.calls = 0
        """How many calls yield."""
        self._send = send
        self._waiting: dict[int, Yielded] = {}
        """By the number of their run."""
        self._bytes = 0
        self._due = 0.0
        """Pieces that come before this wait for it."""
        self._came = threading.Condition()
        """Held while pieces are sent: one that came later would overtake them."""
        self._sender: threading.Thread | None = None

    def add(self, pieces: Yielded, *, at_once: bool) -> None:
        """Take pieces that follow those of their run before. `at_once`: they do not wait, nor does what waits."""
        with self._came:
            before = self._waiting.get(pieces.run)
            if before is None:
                self._waiting[pieces.run] = pieces
            else:
                items = before.items + pieces.items
                self._waiting[pieces.run] = Yielded(pieces.call, pieces.run, before.first, items, pieces.waits)
            self._bytes += sum(map(len, pieces.items))
            if at_once or pieces.waits or self._bytes >= GATHER_BYTES or _now() >= self._due:
                self._send_all()
            elif self._sender is None:
                self._sender = threading.Thread(target=self._send_due, name="stoker-pieces", daemon=True)
                self._sender.start()
            elif len(self._waiting) == 1:
                self._came.notify()

    def drop(self, run: int) -> None:
        """Nobody wants what still waits of a run."""
        with self._came:
            self._waiting.pop(run, None)

    def _send_all(self) -> None:
        """The caller holds the lock."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if waiting:
            self._send(list(waiting.values()))
        self._due = _now() + min(GATHER_S, self.calls * GATHER_EACH_S)

    def _send_due(self) -> None:
        while True:
            with self._came:
                while not self._waiting:
                    self._came.wait()
                wait_s = self._due - _now()
            time.sleep(max(0.0, wait_s))
            with self._came:
                if self._waiting and _now() >= self._due:  # else others have sent it meanwhile
                    self._send_all()

"""Slow inputs of a `map`, produced on a thread of their own.

An input that takes its time (a download, a query, futures that are waited for) would hold up results that are there. So
the stream goes on with it on a thread once `SLOW_ITEMS` items took longer than `SLOW_S` while calls were in flight, one
soon after the other. Quick inputs never leave the thread of their consumer: there are things that are bound to one,
such as SQLite's cursors, and a thread between two costs time. The first item may take long without more of the kind (a
query begins), and in hours an item now and then, for which a disk stands still.

The thread takes items while there is room for them. It knows the inputs and the stream's bell, not the stream: a stream
whose loop is left is to vanish. The thread then ends after the item that it is at, and lets go of the inputs.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

SLOW_S = 0.1
"""An item that takes longer is a slow one."""
SLOW_ITEMS = 2
"""An input with this many slow items is a slow one."""
FORGOTTEN_S = 60.0
"""A slow item after which others came quickly for so long does not count any more."""
_JOIN_S = 0.2


class NotYet(Exception):
    """The next item is not there yet. The bell rings when it is."""


class SlowItems:
    """Counts the slow items of one input that came soon after each other."""

    def __init__(self) -> None:
        self._count = 0
        self._last_at = -math.inf

    def took(self, began: float, ended: float) -> bool:
        """A slow item was taken between these times, in seconds. True if its input is a slow one."""
        self._count = self._count + 1 if began - self._last_at < FORGOTTEN_S else 1
        self._last_at = ended
        return self._count >= SLOW_ITEMS


class PulledInputs(Iterator[Any]):
    """The items of a slow input. `next` never waits: it raises NotYet."""

    def __init__(self, inputs: Iterator[Any], *, bell: queue.SimpleQueue[None]) -> None:
        self._inputs: Iterator[Any] | None = inputs
        self._bell = bell
        self._pulled: deque[Any] = deque()
        self._end: BaseException | None = None
        """Why there are no more items than those that were pulled."""
        self._room = 0
        self._closed = False
        self._changed = threading.Condition()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._pull,), name="stoker-map-input", daemon=True)
        self._thread.start()

    def allow(self, count: int) -> None:
        """Let `count` items wait here; each that is taken counts until the next time."""
        with self._changed:
            self._room = count
            self._changed.notify()

    @property
    def is_ready(self) -> bool:
        """True if `next` would not raise NotYet."""
        return bool(self._pulled) or self._end is not None

    def __next__(self) -> Any:
        if not self._pulled:
            if self._end is None:
                raise NotYet
            if not self._pulled:  # none came between the two
                raise self._end
        self._room -= 1
        return self._pulled.popleft()

    def close(self) -> None:
        """Take no more items. An item that is being made is finished first, on the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _pull(self) -> None:
        inputs, self._inputs = self._inputs, None
        assert inputs is not None
        try:
            while self._may_pull():
                self._pulled.append(next(inputs))
                if len(self._pulled) == 1:
                    self._bell.put(None)
        except BaseException as error:  # it is raised where the next result would have come
            if "thread" in str(error):
                error.add_note(
                    "stoker.map: this input is slow, so it is read on a thread of its own; if it cannot be used there,"
                    " make a list of it first, or give window=1"
                )
            self._end = error
            self._bell.put(None)

    def _may_pull(self) -> bool:
        with self._changed:
            while not self._closed and len(self._pulled) >= self._room:
                self._changed.wait()
            return not self._closed

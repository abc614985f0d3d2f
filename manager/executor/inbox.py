"""What the link knows of a `stoker.map`: where its ends go. The stream itself may go whenever its loop is left."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

from stoker.manager.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.manager.protocol.ids import CallId


class Inbox:
    """A waiter for many calls: the link's thread appends to `arrived` and rings `bell`, the consumer reads."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def settle(self, end: CallEnd) -> bool:
        """A call has ended."""
        self.arrived.append(end)
        return True

    def fail(self, call: CallId, error: Exception) -> None:
        """A call will have no end."""
        self.arrived.append((call, error))

    def flush(self) -> None:
        """Ring once for all that came together."""
        self.bell.put(None)

    def report(self, said: CallProgress | CallForecast) -> None:
        """Reports of single calls are not shown."""

"""The thread of one batch system: it executes the factory's orders, and runs the keeper's steps between orders."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from stoker.manager.factory.keeper import BlockKeeper, FactoryUpdate

Order = Callable[[], list[str] | None]
"""An order of the factory. The last order returns the ids of jobs that still exist; other orders return None."""


class BatchThreadEnded(msgspec.Struct, frozen=True):
    """A batch thread has ended. `left`: ids of jobs that still exist."""

    source: str
    left: tuple[str, ...]


class BatchThread(threading.Thread):
    """Runs one keeper's steps on a thread, so that a hanging batch system does not delay other keepers."""

    def __init__(self, keeper: BlockKeeper, *, say: Callable[[FactoryUpdate | BatchThreadEnded], None]) -> None:
        super().__init__(name=f"stoker-source-{keeper.name}", daemon=True)
        self.keeper = keeper
        self._say = say
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def tell(self, order: Order) -> None:
        self._inbox.put(order)

    def run(self) -> None:
        while True:
            try:
                order: Order | None = self._inbox.get(timeout=self.keeper.due_in())
            except queue.Empty:
                order = None
            while order is not None:
                left = order()
                if left is not None:
                    self._say(BatchThreadEnded(self.keeper.name, tuple(left)))
                    return
                order = None if self._inbox.empty() else self._inbox.get()
            self._step()

    def _step(self) -> None:
        for update in self.keeper.step():
            self._say(update)

    def end(self, limit_s: float) -> list[str]:
        return self.keeper.end(until=time.monotonic() + limit_s)

    def cancel_waiting(self, reason: str, limit_s: float) -> list[str]:
        """Cancel the blocks that do not run yet. Wait at most `limit_s` seconds. Return jobs that still exist."""
        until = time.monotonic() + limit_s
        self.keeper.cancel_waiting(reason)
        while waiting := [kept.job for kept in self.keeper.blocks.values() if kept.cancel]:
            if time.monotonic() >= until:
                return waiting
            time.sleep(min(self.keeper.due_in() or 0.0, 1.0))
            self._step()
        return []

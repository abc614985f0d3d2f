"""One thread a site: a batch system that hangs holds up nobody but itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from stoker.manager.factory.keeper import BlockKeeper, FactoryUpdate
from stoker.protocol.blocks import KnownBlock
from stoker.protocol.ids import BlockId


class Sync(msgspec.Struct, frozen=True):
    """What the manager knows of the site's blocks."""

    blocks: tuple[KnownBlock, ...]


class BlockOrders(msgspec.Struct, frozen=True):
    """Submit these blocks."""

    blocks: tuple[BlockId, ...]


class BlockCancels(msgspec.Struct, frozen=True):
    """Cancel these blocks."""

    blocks: tuple[BlockId, ...]
    reason: str


class CancelWaiting(msgspec.Struct, frozen=True):
    """Cancel every block that does not run yet, and stop when that is done, or after `limit_s`."""

    reason: str
    limit_s: float


class CancelAll(msgspec.Struct, frozen=True):
    """Cancel everything, and stop when it is gone, or after `limit_s`."""

    limit_s: float


class BatchThreadEnded(msgspec.Struct, frozen=True):
    """A worker has done what `CancelAll` or `CancelWaiting` wanted; `left` are ids of jobs that are still there."""

    source: str
    left: tuple[str, ...]


Message = Sync | BlockOrders | BlockCancels | CancelWaiting | CancelAll


class BatchThread(threading.Thread):
    """Steps a keeper. `say` is called on this thread with updates for the manager, and at the end with
    `BatchThreadEnded`."""

    def __init__(self, keeper: BlockKeeper, *, say: Callable[[FactoryUpdate | BatchThreadEnded], None]) -> None:
        super().__init__(name=f"stoker-source-{keeper.name}", daemon=True)
        self.keeper = keeper
        self._say = say
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def tell(self, message: Message) -> None:
        """Give an order, from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Until `CancelAll` or `CancelWaiting`."""
        while True:
            try:
                message: Message | None = self._inbox.get(timeout=self.keeper.due_in())
            except queue.Empty:
                message = None
            while message is not None:
                if isinstance(message, CancelAll | CancelWaiting):
                    self._say(BatchThreadEnded(self.keeper.name, tuple(self._finish(message))))
                    return
                self._take(message)
                message = None if self._inbox.empty() else self._inbox.get()
            self._step()

    def _take(self, message: Sync | BlockOrders | BlockCancels) -> None:
        match message:
            case Sync(blocks):
                self.keeper.sync(blocks)
            case BlockOrders(blocks):
                self.keeper.order(blocks)
            case BlockCancels(blocks, reason):
                self.keeper.cancel(blocks, reason)

    def _step(self) -> None:
        for update in self.keeper.step():
            self._say(update)

    def _finish(self, message: CancelAll | CancelWaiting) -> list[str]:
        until = time.monotonic() + message.limit_s
        if isinstance(message, CancelAll):
            return self.keeper.end(until=until)
        self.keeper.cancel_waiting(message.reason)
        while waiting := [kept.job for kept in self.keeper.blocks.values() if kept.cancel]:
            if time.monotonic() >= until:
                return waiting
            time.sleep(min(self.keeper.due_in() or 0.0, 1.0))
            self._step()
        return []

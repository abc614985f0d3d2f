"""fdatasync on a thread of its own: the loop goes on meanwhile, and what it writes then shares the next one.

The kernel's call releases the interpreter's lock. One sync is under way at a time; the loop begins one, goes on with
its turns, is woken through `wake_fd` when it is done, and begins the next one for all that was written since.
"""

from __future__ import annotations

import os
import select
import threading

import msgspec


class Synced(msgspec.Struct, frozen=True):
    """A sync that is over: how far the journal is safe, how many turns that made safe, and what went wrong."""

    position: int
    turns: int
    error: OSError | None = None


class Syncing:
    """The thread, and the sync that is under way. All but the thread's own work is for the loop's thread."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asked = threading.Semaphore(0)
        self._order: tuple[int, int, int] | None = None
        self._result = Synced(0, 0)
        self._under_way = False
        """True from `begin` until `done` has read `wake_fd`, which the thread writes after the result: once a sync."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="stoker-sync", daemon=True)
        self._thread.start()

    def begin(self, fd: int, *, position: int, turns: int) -> None:
        """Have a file synced; `done` tells of it. None may be under way."""
        self._under_way, self._order = True, (fd, position, turns)
        self._asked.release()

    def done(self) -> Synced | None:
        """The last sync that is over, once; one that made nothing safe if there is none; None while one is under
        way."""
        if self._under_way:
            try:
                os.eventfd_read(self.wake_fd)
            except BlockingIOError:
                return None
            self._under_way = False
        result, self._result = self._result, Synced(self._result.position, 0)
        return result

    def wait(self, timeout_s: float) -> None:
        """Wait until the sync that is under way is over."""
        if self._under_way:
            select.select([self.wake_fd], [], [], max(0.0, timeout_s))

    def close(self) -> None:
        """End the thread, after the sync that is under way."""
        self._closed = True
        self._asked.release()
        self._thread.join()
        os.close(self.wake_fd)

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._closed or self._order is None:
                return
            fd, position, turns = self._order
            try:
                os.fdatasync(fd)
                result = Synced(position, turns)
            except OSError as error:
                result = Synced(0, turns, error)
            self._result = result
            os.eventfd_write(self.wake_fd, 1)

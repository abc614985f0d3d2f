"""Threads that settle the futures which may take long, so that other results need not wait for them.

Settling a future can run code that is not ours: the classes of a result rebuild themselves (they may import, read files
or sleep), and the future's callbacks run. The link's I/O thread settles a future by itself only where neither is to be
expected: the result is made of builtin types, and no callback in this program has been slow. The rest goes to a thread
here. One thread is enough while it keeps up; the I/O thread looks, and starts another when results wait and none has
been taken for `STUCK_S`. So a result that needs eight seconds delays no other by more than that. Where no thread can be
started at all, the thread that has a result settles it by itself.

What `stoker.map` streams never comes here: its results are unpickled by the loop that takes them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

STUCK_S = 0.05
"""Results that have waited for this long while no thread took one get another thread."""
SLOW_S = 0.05
"""A future whose callbacks took longer has slow ones."""
MOST_THREADS = 64
"""Then results wait: each of the threads holds a value that takes long to make."""
IDLE_S = 10.0
"""A thread without work ends after this long."""

Work = Callable[[], object]


class Settling:
    """The threads of one link. `add` and `close` may be called from any thread, the others from the I/O thread.

    `has_slow_callbacks` is set by the caller when callbacks took longer than SLOW_S: all futures come here then.
    """

    def __init__(self) -> None:
        self.has_slow_callbacks = False
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._open = 0
        """Pieces of work that were added and are not done."""
        self._taken_at = 0.0
        self._closed = False

    def add(self, work: Work) -> None:
        """Have a thread do it."""
        with self._lock:
            if not self._open:
                self._taken_at = time.monotonic()
            self._open += 1
            begin = not self._threads
            self._threads += begin
            self._work.put(work)  # within the lock: a thread that ends has looked
        if begin:
            self._begin()

    def start_thread_if_behind(self, now: float) -> float | None:
        """Start another thread if results wait too long. Returns the seconds until the next check (None: no need).

        `now` is on `time.monotonic`.
        """
        if self._work.empty():
            return None
        waited_s = now - self._taken_at
        if waited_s < STUCK_S:
            return STUCK_S - waited_s
        with self._lock:
            more = self._threads < MOST_THREADS
            self._threads += more
            self._taken_at = now
        if more:
            self._begin()
        return STUCK_S

    def close(self, *, limit_s: float) -> None:
        """Let the threads end, and wait until all that was added is done, at most this long."""
        until = time.monotonic() + limit_s
        while (
            self._open
            and time.monotonic() < until
            and (wait_s := self.start_thread_if_behind(time.monotonic()) or STUCK_S)
        ):
            time.sleep(min(wait_s, 0.005))
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

    def _begin(self) -> None:
        """Start a thread, which is counted already. If none can be started and none is there, do the work here."""
        try:
            threading.Thread(target=self._run, name="stoker-settling", daemon=True).start()
        except RuntimeError as error:  # the limit of processes is reached, or the interpreter ends
            with self._lock:
                self._threads -= 1
                is_alone = not self._threads
            logger.debug("no thread can be started that opens results: %s", error)
            if is_alone:
                self._work_here()

    def _work_here(self) -> None:
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                self._do(work)
            del work

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                work = None
            self._taken_at = time.monotonic()
            if work is None:
                with self._lock:
                    if self._closed or self._work.empty():
                        self._threads -= 1
                        return
                continue
            self._do(work)
            del work  # its future may go

    def _do(self, work: Work) -> None:
        try:
            work()
        except BaseException:  # a future's callback raised what no callback may raise; others still wait
            logger.exception("a future's callback failed")
        with self._lock:
            self._open -= 1

"""Threads that set the results of slow futures, and that run a program's callbacks.

The link's I/O thread sets results of builtin types until a callback is slow. Threads of this module set all other
results, because unpickling runs user code. Callbacks run on separate threads, because a callback may wait for a call.
The number of threads is unlimited, because callbacks may wait for each other.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)


START_THREAD_AFTER_S = 0.05
"""Seconds that work waits while no thread takes work; then another thread starts."""
SLOW_S = 0.05
WARN_ABOVE_THREADS = 64
IDLE_S = 10.0

Work = Callable[[], object]


class WorkerThreads:
    """Threads for one kind of work. `has_slow_callbacks`: True if these threads must set the results of all futures."""

    def __init__(self, work_name: str) -> None:
        self.work_name = work_name
        self.has_slow_callbacks = False
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0
        self._taken_at = 0.0
        self._is_watched = False
        self._has_warned = False
        self._closed = False

    def add(self, work: Work) -> None:
        with self._lock:
            if not self._unfinished:
                self._taken_at = time.monotonic()
            self._unfinished += 1
            is_first_thread = not self._threads
            self._threads += is_first_thread
            self._work.put(work)  # added under the lock, because an idle thread exits if it finds no work
            watch = self._unfinished > self._threads and not self._is_watched
            self._is_watched |= watch
        if is_first_thread:
            self._start_worker()
        if watch and not self._start_thread(self._watch_queue):
            with self._lock:
                self._is_watched = False  # the next `add` tries to start a watcher again

    def start_thread_if_behind(self, now: float) -> None:
        if self._work.empty() or now - self._taken_at < START_THREAD_AFTER_S:
            return
        with self._lock:
            self._threads += 1
            self._taken_at = now
            warn = self._threads >= WARN_ABOVE_THREADS and not self._has_warned
            self._has_warned |= warn
        if warn:
            text = "%d %s of this program run for a long time, and other callbacks wait; another thread starts every"
            text += " %.0f ms. A callback that does not wait for calls needs no thread of its own"
            logger.warning(text, WARN_ABOVE_THREADS, self.work_name, START_THREAD_AFTER_S * 1000)
        self._start_worker()

    def wait_for_open_work(self, *, limit_s: float) -> None:
        left = self._unfinished
        until = time.monotonic() + limit_s
        while self._unfinished and (now := time.monotonic()) < until:
            if self._unfinished < left:
                left, until = self._unfinished, now + limit_s
            self.start_thread_if_behind(now)
            time.sleep(0.005)

    def close(self, *, limit_s: float) -> None:
        self.wait_for_open_work(limit_s=limit_s)
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

    def reset_after_fork(self) -> None:
        self.__init__(self.work_name)  # type: ignore[misc]

    def _watch_queue(self) -> None:
        while True:
            time.sleep(START_THREAD_AFTER_S)
            with self._lock:
                if self._closed or self._work.empty():
                    self._is_watched = False
                    return
            self.start_thread_if_behind(time.monotonic())

    def _start_worker(self) -> None:
        if self._start_thread(self._run_worker):
            return
        with self._lock:
            self._threads -= 1
            is_alone = not self._threads
        while is_alone:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                self._execute(work)
            del work

    def _start_thread(self, run: Callable[[], None]) -> bool:
        try:
            threading.Thread(target=run, name="stoker-settling", daemon=True).start()
        except RuntimeError as error:
            logger.debug("no thread can be started for %s: %s", self.work_name, error)
            return False
        return True

    def _run_worker(self) -> None:
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
            self._execute(work)
            del work

    def _execute(self, work: Work) -> None:
        try:
            work()
        except BaseException:  # a callback may raise any BaseException; other work must still run
            logger.exception("a future's callback failed")
        with self._lock:
            self._unfinished -= 1


callbacks = WorkerThreads("done-callbacks")
os.register_at_fork(after_in_child=callbacks.reset_after_fork)


Callback = Callable[[Future[Any]], object]

_NONBLOCKING_PACKAGES = ("parsl", "asyncio", "concurrent")
"""Packages whose callbacks never wait."""


def is_user_callback(callback: Callable[..., object]) -> bool:
    module = getattr(getattr(callback, "func", callback), "__module__", None) or ""
    return module.partition(".")[0] not in _NONBLOCKING_PACKAGES


def done_callbacks_of(future: Future[Any]) -> list[Callback]:
    return getattr(future, "_done_callbacks", [])


def add_callback(future: Future[Any], callback: Callback, *, register: Callable[[Callback], None]) -> None:
    """Run a callback after the future has ended. A callback that may wait runs on a callback thread."""
    if future.done() or not is_user_callback(callback):
        register(callback)
        return
    in_order = future.__dict__.setdefault("_users_callbacks", (deque(), threading.Lock()))
    in_order[0].append(callback)
    register(functools.partial(_schedule_next, *in_order))


def _schedule_next(due: deque[Callback], running: threading.Lock, future: Future[Any]) -> None:
    def run() -> None:
        with running:  # the callbacks of a future run one after the other
            callback = due.popleft()
            try:
                callback(future)
            except BaseException:  # later callbacks run even after SystemExit
                logger.exception("a callback of %r failed", future)

    callbacks.add(run)

"""A program's own callbacks on its futures: the threads of `settling.callbacks` run them, in order for each future."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stoker.manager.executor.settling import callbacks

logger = logging.getLogger(__name__)

Callback = Callable[[Future[Any]], object]

_QUICK = ("parsl", "asyncio", "concurrent")
"""Packages whose callbacks wait for nothing: they run on the thread that has the result."""


def is_users(callback: Callable[..., object]) -> bool:
    """True unless the callback is known to wait for nothing. One may wait for the next result."""
    module = getattr(getattr(callback, "func", callback), "__module__", None) or ""
    return module.partition(".")[0] not in _QUICK


def of(future: Future[Any]) -> list[Callback]:
    """The callbacks that wait for a future."""
    return getattr(future, "_done_callbacks", [])


def add_to(future: Future[Any], callback: Callback, *, register: Callable[[Callback], None]) -> None:
    """Have a callback called when the future has ended. `register` is `add_done_callback` of the future's base class.

    A callback that may wait runs on a thread for callbacks, and at once on this thread if the future has ended.
    """
    if future.done() or not is_users(callback):
        register(callback)
    elif future.__dict__.setdefault("_users_callbacks", UsersCallbacks()).add(callback, future):
        register(future.__dict__["_users_callbacks"].hand_over)


class UsersCallbacks:
    """The program's callbacks of one future. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: list[Callback] = []
        self._is_registered = False
        self._is_finished = False
        """The future has ended, and all callbacks that were there have run: the next one needs a new run."""

    def add(self, callback: Callback, future: Future[Any]) -> bool:
        """Have it run after those before it. Returns True for the first: then the future must call `hand_over`.

        The future may end while this runs, and the callbacks before this one may have run already.
        """
        with self._lock:
            self._due.append(callback)
            first, self._is_registered = not self._is_registered, True
            again, self._is_finished = self._is_finished, False
        if again:
            self.hand_over(future)
        return first

    def hand_over(self, future: Future[Any]) -> None:
        """The future is done: a thread runs them."""
        callbacks.add(functools.partial(self._run, future))

    def _run(self, future: Future[Any]) -> None:
        while (callback := self._next()) is not None:
            try:
                callback(future)
            except BaseException:  # SystemExit too: the others still run
                logger.exception("a callback of %r failed", future)

    def _next(self) -> Callback | None:
        with self._lock:
            if self._due:
                return self._due.pop(0)
            self._is_finished = True
            return None

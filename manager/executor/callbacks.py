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


class UsersCallbacks:
    """Those of one future."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: list[Callback] = []
        self._has_begun = False
        self._is_registered = False

    def add(self, callback: Callback) -> bool:
        """Have it run after those before it. Returns True for the first: then the future must call `hand_over`."""
        with self._lock:
            self._due.append(callback)
            first, self._is_registered = not self._is_registered, True
        return first

    def hand_over(self, future: Future[Any]) -> None:
        """The future is done: a thread runs them."""
        callbacks.add(functools.partial(self._run, future))

    def _run(self, future: Future[Any]) -> None:
        while self._due:
            callback = self._due.pop(0)
            try:
                callback(future)
            except Exception:  # as for any future: the others still run
                logger.exception("a callback of %r failed", future)

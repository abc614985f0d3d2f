"""Stops a call that runs too long, or that nobody wants any more, inside of a library that TaskVine runs.

TaskVine cannot stop a function that runs in a library's own process. So one thread looks, twice a second, at the time
and for a file that the pilot makes (`messages.stop_file`), and interrupts the main thread by a signal: the call ends
with an exception, and the context stays loaded. Code that does not come back to Python for `GRACE_S` takes its library
with it; so does memory beyond what the recipe declares.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from stoker.pilot.agent.usage import MemoryLimit
from stoker.pilot.taskvine import messages

GRACE_S = 10.0
EVERY_S = 0.5
_SIGNAL = signal.SIGUSR2


class CallStopped(BaseException):
    """Ends a call at once. No `Exception`, so that a function's own `except Exception` does not swallow it."""


class CallWatch:
    """Made in the main thread. `dying` is told why, just before the process is ended.

    The process may take `memory_bytes` (0 = as much as there is).
    """

    def __init__(self, dying: Callable[[str], None], *, memory_bytes: int = 0) -> None:
        self.reason = ""
        """Why the latest call was stopped; empty if it was not."""
        self._dying = dying
        self._memory_bytes = memory_bytes
        self._memory = MemoryLimit()
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._until = 0.0
        self._stop_file = ""
        self._asked_at = 0.0
        signal.signal(_SIGNAL, self._interrupt)
        threading.Thread(target=self._watch, name="stoker-watch", daemon=True).start()

    def begin(self, *, limit_s: float, stop_file: str) -> None:
        """A call (or a load) begins. `limit_s` = 0: it may take as long as it likes."""
        with self._lock:
            self.reason = ""
            self._asked_at = 0.0
            self._until = time.monotonic() + limit_s if limit_s else float("inf")
            self._stop_file = stop_file

    def end(self) -> None:
        """It has ended."""
        with self._lock:
            self._until = 0.0

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._until and self.reason:
            raise CallStopped(self.reason)

    def _watch(self) -> None:
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                now = time.monotonic()
                if self._memory_bytes and self._memory.excess(os.getpid(), self._memory_bytes, now=now):
                    self._die(messages.OVER_MEMORY)
                if not self._until:
                    continue
                if not self.reason:
                    if now > self._until:
                        self.reason = messages.OVER_LIMIT
                    elif self._stop_file and os.path.exists(self._stop_file):
                        self.reason = messages.CANCELLED
                    else:
                        continue
                    self._asked_at = now
                    signal.pthread_kill(self._main, _SIGNAL)
                elif now > self._asked_at + GRACE_S:
                    self._die(self.reason)

    def _die(self, reason: str) -> None:
        self._dying(reason)
        os._exit(3)

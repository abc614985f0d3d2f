"""Tells the pilot how full the batch of the context's engine is, and what its steps took.

A context that has an engine offers `batch_load()`, and may offer `take_step_times()`. Both are asked for every few
seconds by a thread of its own, since a call may run for hours; a library whose context has no engine has no such
thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepTimes
from stoker.protocol.to_agent import BatchReport

EVERY_S = 10.0
"""A report is sent this often at the most."""
_LOOK_S = 1.0


class BatchReports:
    """The reports of one library. `say` sends a message to the pilot."""

    def __init__(self, context: Any, *, say: Callable[[BatchReport], None], every_s: float = EVERY_S) -> None:
        self._context = context
        self._say = say
        self._every_s = every_s
        self._load = EngineLoad()
        self._said_at = -every_s
        self._over = threading.Event()
        self._turn = threading.Lock()

    def start(self) -> None:
        """Begin to look, if the context has an engine."""
        if callable(getattr(self._context, "batch_load", None)):
            threading.Thread(target=self._run, name="stoker-batch-reports", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def send_if_due(self, now: float) -> None:
        """Send a report if the batch has changed and the last one is long enough ago, or if a profiler has measured."""
        with self._turn:
            times = self._times(urgent=True)
            if not times.samples and now - self._said_at < self._every_s:
                return
            load = self._context.batch_load()
            if not isinstance(load, EngineLoad) or (load == self._load and not times.samples):
                return
            self._said_at, self._load = now, load
            self._say(BatchReport(load, times if times.samples else self._times(urgent=False)))

    def _times(self, *, urgent: bool) -> StepTimes:
        take = getattr(self._context, "take_step_times", None)
        found = take(urgent=urgent) if callable(take) else None
        return found if isinstance(found, StepTimes) else StepTimes()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self.send_if_due(time.monotonic())
            except Exception:  # what a context of the user's says of itself; calls go on
                traceback.print_exc()
                return

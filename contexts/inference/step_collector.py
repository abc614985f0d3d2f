"""Times the steps of an engine as calls run: what `ContinuousEngine(took=...)` is given.

The engine's thread tells of each step; the library's process takes what has come together every few seconds and sends
it on. A step costs some microseconds here.
"""

from __future__ import annotations

import threading

from stoker.contexts.batching import Step
from stoker.contexts.step_times import StepModel, StepSample, StepTimes, attended

COLD_STEPS = 4
"""The first steps of a process find memory and kernels cold; they are left out."""


class StepCollector:
    """What the steps of one engine took. `added` by the engine's thread, `taken` by any."""

    def __init__(self) -> None:
        self.known = StepModel()
        """All that this process has measured."""
        self.paused = False
        """True while a profiler measures: it repeats each step, and adds what it finds."""
        self.urgent = False
        """True once a profiler has measured: send what is here without waiting for more."""
        self._fresh = StepModel()
        self._taken = threading.Event()
        self._steps = 0
        self._lock = threading.Lock()

    def took(self, step: Step, length: int, seconds: float) -> None:
        """The engine has computed a step (`continuous.TookStep`)."""
        sample = self.sample(step, length, seconds)
        self._steps += 1
        if self.paused or self._steps <= COLD_STEPS:
            return
        with self._lock:
            used, deviation = self.known.learn(sample)
            if deviation is not None:
                self._fresh.count_error(deviation, prefill=step.prefill)
            self._fresh.add(used)

    def sample(self, step: Step, length: int, seconds: float) -> StepSample:
        """The step as a sample."""
        if not step.prefill:
            return StepSample(False, len(step.requests), float(length), seconds)
        reads = list(zip(step.starts, step.tokens, strict=True))
        return StepSample(True, sum(step.tokens), attended(reads), seconds)

    def profiled(self, times: StepTimes) -> None:
        """A profiler has measured this engine: it takes the place of what this process knew."""
        with self._lock:
            self.known, self._fresh = StepModel(times), StepModel(self._fresh.times.joined(times))
            self.urgent = True
            self._taken.clear()

    def taken(self, *, timeout_s: float) -> bool:
        """Wait until somebody has taken what a profiler has measured; False if nobody has in time."""
        return self._taken.wait(timeout_s)

    def take(self) -> StepTimes:
        """What has come since the last time."""
        with self._lock:
            times = self._fresh.times
            self._fresh, self.urgent = StepModel(), False
            self._taken.set()
        return times

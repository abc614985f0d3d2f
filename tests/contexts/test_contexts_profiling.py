"""The profiler samples an engine at powers of two; the tests compare the table with other workloads on a test
clock.
"""

from __future__ import annotations

from typing import Any

import pytest
from memoryless_engine import MemorylessEngine

from stoker.contexts.inference.adapter import EngineLoad, Finish, GenerationRequest, NewToken
from stoker.contexts.inference.profiling import EngineProfiler
from stoker.contexts.step_times import StepModel


class SteppedClock:
    """A clock that advances only while an engine computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedEngine(MemorylessEngine):
    """An engine without a model: each step reads a prompt or decodes all rows, in the time of a formula.
    `memory_rows`: number of requests that fit.
    """

    name = "timed"

    def __init__(self, clock: SteppedClock, *, rows: int, memory_rows: int = 1000, noise: bool = False) -> None:
        self._clock, self._rows, self._memory_rows, self._noise = clock, rows, memory_rows, noise
        self._unread: dict[int, GenerationRequest] = {}
        self._lengths: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self._load = EngineLoad()
        self.asked = 0

    def add(self, request: GenerationRequest) -> None:
        self.asked += 1
        self._unread[request.id] = request

    def step(self) -> list[NewToken]:
        load = self._load
        if self._unread and len(self._lengths) < self._memory_rows:
            request = self._unread.pop(next(iter(self._unread)))
            count = len(request.prompt)
            self._takes(0.001 + 0.0001 * count + 1e-8 * count * count / 2)
            self._load = EngineLoad(
                steps=load.steps + 1, decode_steps=load.decode_steps, prompt_tokens=load.prompt_tokens + count
            )
            self._lengths[request.id], self._most[request.id] = count, request.sampling.max_new_tokens
            return [self._token(request.id)]
        rows = len(self._lengths)
        self._takes(0.002 + 0.0003 * rows + 1e-7 * sum(self._lengths.values()))
        self._load = EngineLoad(
            steps=load.steps + 1, decode_steps=load.decode_steps + 1, prompt_tokens=load.prompt_tokens
        )
        return [self._token(id) for id in list(self._lengths)]

    def _takes(self, seconds: float) -> None:
        disturbed = self._noise and self._load.steps % 5 == 0
        self._clock.now += seconds * (20 if disturbed else 1)

    def _token(self, id: int) -> NewToken:
        self._lengths[id] += 1
        self._most[id] -= 1
        if self._most[id]:
            return NewToken(id, 7)
        del self._lengths[id]
        return NewToken(id, 7, finish=Finish.LENGTH)

    def abort(self, request: int) -> None:
        self._unread.pop(request, None)
        self._lengths.pop(request, None)

    def slots(self) -> int:
        return self._rows

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._lengths), waiting=0 if len(self._lengths) < self._memory_rows else len(self._unread),
            steps=self._load.steps, decode_steps=self._load.decode_steps, prompt_tokens=self._load.prompt_tokens,
        )  # fmt: skip

    def stop(self) -> None:
        pass


def profile(**options: Any) -> tuple[TimedEngine, Any, list[float]]:
    clock = SteppedClock()
    engine = TimedEngine(clock, rows=options.pop("rows", 8), **options)
    told: list[float] = []
    profiler = EngineProfiler(
        engine,
        vocabulary=1000,
        longest=600,
        quick=True,
        clock=clock,
        told=lambda done, total: told.append(done / total),
    )
    return engine, profiler.measure(), told


def test_step_time_table_predicts_other_workloads() -> None:
    engine, found, told = profile()
    assert found.engine == "timed"
    assert found.took_s > 0
    assert found.times.prefill_error.count == found.times.decode_error.count == 100
    assert found.times.decode_error.mean < 0.01
    assert found.times.prefill_error.mean < 0.02
    model = StepModel(found.times)
    assert model.step_s(prefill=False, tokens=6, length=200) == pytest.approx(0.002 + 0.0018 + 1.2e-4, rel=0.02)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert engine.load().running == 0
    _, noisy, _ = profile(noise=True)
    assert noisy.times.decode_error.mean < 0.02, "disturbed steps leave the table unchanged"


def test_sample_that_does_not_fit_into_memory_is_left_out() -> None:
    _, found, _ = profile(memory_rows=3)
    assert found.left_out > 0
    assert max(cell.tokens for cell in found.times.decode) <= 3

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from memoryless_engine import MemorylessEngine
from own_driver import PROMPTS, OwnDriver, small_llama

from stoker.contexts.batching import BatchLimits, RunningBatch, Step
from stoker.contexts.inference.adapter import (
    EngineLoad,
    FinishReason,
    GenerationRequest,
    InferenceEngine,
    NewToken,
    Sampling,
)
from stoker.contexts.inference.profiling import COLD_STEPS, EngineProfiler, StepCollector
from stoker.contexts.step_times import StepModel, StepSample, group_samples
from stoker.manager.sim.batch_run import TimedRequest, batch_run


class TimedEngine(MemorylessEngine):
    """An engine without a model: the time `now` advances only in steps, by a formula. Every fifth step may be
    disturbed. `memory_rows`: number of requests that fit.
    """

    name = "timed"

    def __init__(self, *, rows: int, memory_rows: int = 1000, noise: bool = False) -> None:
        self.now = 0.0
        self._rows, self._noise = rows, noise
        self._batch = RunningBatch(BatchLimits(rows=memory_rows, prefill_tokens=1000, prefill_requests=1))
        self._load = EngineLoad()

    def add(self, request: GenerationRequest) -> None:
        self._batch.add(request.id, prompt=len(request.prompt), most=request.sampling.max_new_tokens)

    def step(self) -> list[NewToken]:
        step = self._batch.next_step()
        assert step is not None
        requests, read = [self._batch.running[id] for id in step.requests], step.prompt_tokens
        seconds = 0.002 + 0.0003 * len(requests) + 1e-7 * sum(request.length for request in requests)
        if read:
            seconds = 0.001 + 0.0001 * read + 1e-8 * read * read / 2
        self.now += seconds * (20 if self._noise and self._load.steps % 5 == 0 else 1)
        ended = [request.id for request in requests if request.made + 1 == request.most]
        self._batch.record_step(step, ended=ended)
        self._load = self._load.after_step(
            decoded=step.writing, running=0, prompt_tokens=read, new_tokens=len(requests), busy_s=seconds
        )
        return [NewToken(id, 7, finish=FinishReason.LENGTH if id in ended else None) for id in step.requests]

    def abort(self, request: int) -> None:
        self._batch.abort(request)

    def count_slots(self) -> int:
        return self._rows

    def get_load(self) -> EngineLoad:
        batch = self._batch
        return msgspec.structs.replace(self._load, running=len(batch.running), waiting=len(batch.waiting))

    def stop(self) -> None:
        pass


def profile(**options: Any) -> tuple[TimedEngine, Any, list[float]]:
    engine, told = TimedEngine(rows=8, **options), list[float]()
    profiler = EngineProfiler(
        engine, vocabulary=1000, longest=600, quick=True, clock=lambda: engine.now,
        told=lambda done, total: told.append(done / total),
    )  # fmt: skip
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
    assert engine.get_load().running == 0
    _, noisy, _ = profile(noise=True)
    assert noisy.times.decode_error.mean < 0.02, "disturbed steps leave the table unchanged"


def test_sample_that_does_not_fit_into_memory_is_left_out() -> None:
    _, found, _ = profile(memory_rows=3)
    assert found.left_out > 0
    assert max(cell.tokens for cell in found.times.decode) <= 3


# ---- steps of real engines

LONG = PROMPTS[4] * 6


def make_engine(kind: str = "continuous", **options: Any) -> Any:
    """Return an engine over a random model that writes no end token."""
    return OwnDriver(small_llama(), engine=kind, cache_bytes=8_000_000, ends=(), **options).engine


def ask_all(engine: InferenceEngine, *, most: int) -> None:
    for number, prompt in enumerate([*PROMPTS, LONG]):
        engine.add(GenerationRequest(number, prompt, Sampling(max_new_tokens=most + number)))
    while engine.get_load().running or engine.get_load().waiting:
        engine.step()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_profiler_measures_an_engine_and_leaves_the_engine_idle(kind: str) -> None:
    engine, now = make_engine(kind), [0.0]
    step = engine.step

    def one_second() -> list[NewToken]:
        now[0] += 1.0
        return step()

    engine.step = one_second  # type: ignore[method-assign]
    found = EngineProfiler(engine, vocabulary=120, longest=128, quick=True, clock=lambda: now[0]).measure()
    assert {cell.seconds for cell in (*found.times.prefill, *found.times.decode)} == {1.0}
    assert found.times.prefill_error.mean == found.times.decode_error.mean == 0.0
    assert max(cell.tokens for cell in found.times.decode) > 1
    assert (engine.get_load().running, engine.get_load().waiting) == (0, 0)


@pytest.mark.usefixtures("one_thread")
def test_every_step_of_the_continuous_engine_becomes_a_sample() -> None:
    collector = StepCollector()

    def took(step: Step, length: int, seconds: float) -> None:
        collector.record_step(step, length, seconds)
        collector.add_step(seconds)

    engine = make_engine(step_hook=took)
    ask_all(engine, most=12)
    times, load = collector.take_times(), engine.get_load()
    assert times.sample_count == load.steps - COLD_STEPS
    assert max(cell.tokens for cell in times.decode) <= len(PROMPTS) + 1
    assert all(cell.seconds > 0 for cell in (*times.prefill, *times.decode))


@pytest.mark.usefixtures("one_thread")
def test_simulator_runs_the_same_steps_as_the_engine() -> None:
    real: list[Step] = []
    engine: Any = make_engine(step_hook=lambda step, _length, _seconds: real.append(step))
    ask_all(engine, most=12)
    requests = [TimedRequest(0.0, len(prompt), 12 + number) for number, prompt in enumerate([*PROMPTS, LONG])]
    times = group_samples([StepSample(prefill, 1, 1, 0.1) for prefill in (True, False)])
    simulated: list[Step] = []
    batch_run(times, engine._batch.limits, requests, on_step=lambda step, _: simulated.append(step))
    assert [_in_order(step) for step in simulated] == [_in_order(step) for step in real]
    assert any(step.prefill and step.writing for step in real)


def _in_order(step: Step) -> tuple[bool, int, list[tuple[int, int, int]]]:
    return step.prefill, step.writing, sorted(zip(step.requests, step.tokens, step.starts, strict=True))

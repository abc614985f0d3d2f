from __future__ import annotations

from typing import Any

import pytest
from own_driver import PROMPTS, OwnDriver, small_llama

from stoker.contexts.batching import Step
from stoker.contexts.inference.adapter import GenerationRequest, InferenceEngine, NewToken, Sampling
from stoker.contexts.inference.profiling import COLD_STEPS, EngineProfiler, StepCollector
from stoker.contexts.step_times import StepSample, times_of
from stoker.manager.sim.batch_run import TimedRequest, batch_run

LONG = PROMPTS[4] * 6


pytestmark = pytest.mark.usefixtures("one_thread")


def make_engine(kind: str = "continuous", **options: Any) -> Any:
    """Return an engine over a random model that writes no end token."""
    return OwnDriver(small_llama(), engine=kind, cache_bytes=8_000_000, ends=(), **options).engine


def ask_all(engine: InferenceEngine, *, most: int) -> None:
    for number, prompt in enumerate([*PROMPTS, LONG]):
        engine.add(GenerationRequest(number, prompt, Sampling(max_new_tokens=most + number)))
    while engine.load().running or engine.load().waiting:
        engine.step()


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_profiler_measures_an_engine_and_leaves_it_idle(kind: str) -> None:
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
    assert (engine.load().running, engine.load().waiting) == (0, 0)


def test_every_step_of_the_continuous_engine_becomes_a_sample() -> None:
    collector = StepCollector()
    engine = make_engine(took=collector.took)
    ask_all(engine, most=12)
    times, load = collector.take(), engine.load()
    assert times.samples == load.steps - COLD_STEPS
    assert max(cell.tokens for cell in times.decode) <= len(PROMPTS) + 1
    assert all(cell.seconds > 0 for cell in (*times.prefill, *times.decode))


def test_simulator_runs_the_same_steps_as_the_engine() -> None:
    real: list[Step] = []
    engine: Any = make_engine(took=lambda step, _length, _seconds: real.append(step))
    ask_all(engine, most=12)
    requests = [TimedRequest(0.0, len(prompt), 12 + number) for number, prompt in enumerate([*PROMPTS, LONG])]
    times = times_of([StepSample(prefill, 1, 1, 0.1) for prefill in (True, False)])
    simulated: list[Step] = []
    batch_run(times, engine._batch.limits, requests, took=lambda step, _: simulated.append(step))
    assert [_in_order(step) for step in simulated] == [_in_order(step) for step in real]
    assert any(step.prefill and step.writing for step in real)


def _in_order(step: Step) -> tuple[bool, int, list[tuple[int, int, int]]]:
    return step.prefill, step.writing, sorted(zip(step.requests, step.tokens, step.starts, strict=True))

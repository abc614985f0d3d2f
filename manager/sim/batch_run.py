"""Compute when requests end on one engine that batches them, in virtual time.

The rules are those of the real engine (`stoker.contexts.batching`). Each step is decided separately. Tests compare
`stoker.manager.sim.virtual_engine` to this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from stoker.contexts.batching import BatchLimits, RunningBatch, Step
from stoker.contexts.step_times import StepModel, StepTimes, mean_attended_tokens


class TimedRequest(msgspec.Struct, frozen=True):
    """A request with its arrival time, and its prompt and output in tokens (at least 1 each)."""

    at: float
    prompt: int
    tokens: int
    due_at: float = math.inf
    tpot_s: float = 0.0


class RequestEnd(msgspec.Struct, frozen=True):
    first_at: float
    ended_at: float


def batch_run(
    times: StepTimes,
    limits: BatchLimits,
    requests: Sequence[TimedRequest],
    *,
    margin: float = 0.0,
    took: Callable[[Step, float], None] | None = None,
) -> list[RequestEnd]:
    """Return the end times of the requests, in the order of `requests`.

    Each engine step takes longer than the time in the table by the share `margin`. `took` receives each step and its
    seconds. Raises ValueError for a request that the limits never admit, LookupError for a stage without measurements.
    """
    run = _VirtualBatch(StepModel(times), limits, requests)
    while run.goes_on():
        step = run.batch.next()
        if step is None:
            run.wait()
            continue
        seconds = run.seconds(step) * (1 + margin)
        run.did(step, seconds)
        if took is not None:
            took(step, seconds)
    return [RequestEnd(run.first_at[number], run.ended_at[number]) for number in range(len(requests))]


class _VirtualBatch:
    def __init__(self, model: StepModel, limits: BatchLimits, requests: Sequence[TimedRequest]) -> None:
        self.batch = RunningBatch(limits)
        self.first_at: dict[int, float] = {}
        self.ended_at: dict[int, float] = {}
        self._model = model
        self._requests = requests
        self._coming = sorted(range(len(requests)), key=lambda number: (requests[number].at, number), reverse=True)
        self._now = 0.0
        for request in requests:
            why = self.batch.why_not(prompt=request.prompt, most=request.tokens)
            if why:
                raise ValueError(why)

    def goes_on(self) -> bool:
        while self._coming and self._requests[self._coming[-1]].at <= self._now:
            number = self._coming.pop()
            one = self._requests[number]
            self.batch.add(number, prompt=one.prompt, most=one.tokens, due_at=one.due_at, tpot_s=one.tpot_s)
        return len(self.ended_at) < len(self._requests)

    def wait(self) -> None:
        self._now = self._requests[self._coming[-1]].at

    def seconds(self, step: Step) -> float:
        if not step.prefill:
            return self._model.step_s(
                prefill=False, tokens=len(step.requests), length=self.batch.mean_decode_length(step)
            )
        length = mean_attended_tokens(list(zip(step.starts, step.tokens, strict=True)))
        return self._model.step_s(prefill=True, tokens=sum(step.tokens), length=length)

    def did(self, step: Step, seconds: float) -> None:
        self._now += seconds
        ended = []
        for number, count in zip(step.requests, step.tokens, strict=True):
            state = self.batch.running[number]
            if state.unread == count:
                self.first_at.setdefault(number, self._now)
                if state.made + 1 == state.most:
                    self.ended_at[number] = self._now
                    ended.append(number)
        self.batch.did(step, ended=ended)

"""When requests of one model end, if its engine batches them as it does, in virtual time.

The rules are the engine's own (`stoker.contexts.batching`); the seconds of each step come from a table that was
measured (`stoker.contexts.step_times`). So what is said of a batch here is what the engine would have done, as far
as its steps can be foretold; SLINFER's shadow validation (§VI-C) asks the same question with a margin of 10 %.

Each step is decided by itself. Simulated libraries decide many at once (`stoker.manager.sim.virtual_engine`), and tests
hold them against this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from stoker.contexts.batching import BatchLimits, RunningBatch, Step
from stoker.contexts.step_times import StepModel, StepTimes, attended


class TimedRequest(msgspec.Struct, frozen=True):
    """A request that comes at a time: tokens of its prompt, and those that it will write (each 1 or more)."""

    at: float
    prompt: int
    tokens: int
    due_at: float = math.inf
    tpot_s: float = 0.0


class RequestEnd(msgspec.Struct, frozen=True):
    """When a request's first token was there, and when its last."""

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
    """The ends of requests, in their order, if one engine with these times serves them and nothing else.

    Each step takes longer by `margin` than the table says. `took` is told each step and its seconds. Raises ValueError
    for a request that the limits never let run, LookupError for a stage that was never measured.
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
    """A batch at work: its clock, and who has come."""

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
        """Take in what has come; False once all have ended."""
        while self._coming and self._requests[self._coming[-1]].at <= self._now:
            number = self._coming.pop()
            one = self._requests[number]
            self.batch.add(number, prompt=one.prompt, most=one.tokens, due_at=one.due_at, tpot_s=one.tpot_s)
        return len(self.ended_at) < len(self._requests)

    def wait(self) -> None:
        """Nothing is to be computed until the next request comes."""
        self._now = self._requests[self._coming[-1]].at

    def seconds(self, step: Step) -> float:
        """What the table says of a step."""
        if not step.prefill:
            return self._model.step_s(prefill=False, tokens=len(step.requests), length=self.batch.decode_length(step))
        length = attended(list(zip(step.starts, step.tokens, strict=True)))
        return self._model.step_s(prefill=True, tokens=sum(step.tokens), length=length)

    def did(self, step: Step, seconds: float) -> None:
        """The step has ended so much later."""
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

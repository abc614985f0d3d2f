"""Compute when requests end on one engine that batches them, in virtual time.

The module uses the real engine's rules (`stoker.contexts.batching`). It decides each step separately. Tests compare
`stoker.manager.sim.virtual_engine` to this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from stoker.contexts.batching import BatchLimits, RunningBatch, Step
from stoker.contexts.step_times import StepModel, StepTimes, mean_attended_tokens


class TimedRequest(msgspec.Struct, frozen=True):
    """A request: its arrival time, and the lengths of its prompt and its output in tokens (at least 1 each)."""

    at: float
    prompt: int
    tokens: int
    due_at: float = math.inf
    tpot_s: float = 0.0


class RequestTimes(msgspec.Struct, frozen=True):
    first_at: float
    ended_at: float


def batch_run(
    times: StepTimes, limits: BatchLimits, requests: Sequence[TimedRequest], *, margin: float = 0.0,
    on_step: Callable[[Step, float], None] | None = None,
) -> list[RequestTimes]:  # fmt: skip
    """Return the end times of the requests, in the order of `requests`.

    `margin`: share by which each step takes longer than in the table. `on_step` receives each step and its seconds.
    Raises ValueError for a request that the limits never admit, LookupError for a stage without measurements.
    """
    model, batch, now = StepModel(times), RunningBatch(limits), 0.0
    first_at, ended_at = dict[int, float](), dict[int, float]()
    for request in requests:
        if why := batch.find_refusal_reason(prompt=request.prompt, most=request.tokens):
            raise ValueError(why)
    coming = sorted(range(len(requests)), key=lambda number: (requests[number].at, number), reverse=True)
    while len(ended_at) < len(requests):
        while coming and requests[coming[-1]].at <= now:
            number = coming.pop()
            one = requests[number]
            batch.add(number, prompt=one.prompt, most=one.tokens, due_at=one.due_at, tpot_s=one.tpot_s)
        step = batch.next_step()
        if step is None:
            now = requests[coming[-1]].at
            continue
        if step.prefill:
            tokens, length = sum(step.tokens), mean_attended_tokens(list(zip(step.starts, step.tokens, strict=True)))
        else:
            tokens, length = len(step.requests), batch.mean_decode_length(step)
        seconds = model.step_s(prefill=step.prefill, tokens=tokens, length=length) * (1 + margin)
        now += seconds
        ended = []
        for number, count in zip(step.requests, step.tokens, strict=True):
            state = batch.running[number]
            if state.unread_tokens == count:
                first_at.setdefault(number, now)
                if state.made + 1 == state.most:
                    ended_at[number] = now
                    ended.append(number)
        batch.record_step(step, ended=ended)
        if on_step is not None:
            on_step(step, seconds)
    return [RequestTimes(first_at[number], ended_at[number]) for number in range(len(requests))]

"""Measure an engine's step times, while calls run or in advance (SLINFER §VI-B).

A profiler measures steps and stores medians. Numbers of read and of attended tokens are powers of two. Afterwards, the
profiler compares 100 random workloads with forecasts. To save hours on a CPU, requests share a long prefix.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import TypeVar

import msgspec

from stoker.contexts.batching import Step, rounded_row_tokens
from stoker.contexts.inference.adapter import EngineLoad, GenerationRequest, InferenceEngine, NewToken, Sampling
from stoker.contexts.step_times import (
    StepModel,
    StepProfile,
    StepSample,
    StepTimes,
    group_samples,
    mean_attended_tokens,
    mean_padded_length,
    powers_of_two_up_to,
)

T = TypeVar("T")

COLD_STEPS = 4  # number of first steps to ignore, because they are slower (memory and kernels are cold)


class StepCollector:
    def __init__(self) -> None:
        self.known = StepModel()
        self.paused = False  # true while a profiler measures
        self.urgent = False  # true if measured times should be sent soon
        self._unsent = StepModel()
        self._taken = threading.Event()
        self._steps = 0
        self._last: StepSample | None = None
        self._lock = threading.Lock()

    def record_step(self, step: Step, length: int, seconds: float) -> None:
        """Remember a step for `add_step`. `seconds`: time that the engine needed to compute it."""
        self._steps += 1
        if self.paused or self._steps <= COLD_STEPS:
            return
        tokens: float = len(step.requests)
        mean = float(length)
        if step.prefill:
            tokens, mean = sum(step.tokens), mean_attended_tokens(list(zip(step.starts, step.tokens, strict=True)))
        self._last = StepSample(step.prefill, tokens, mean, seconds)

    def add_step(self, seconds: float) -> None:
        """Add the last recorded step. `seconds`: time from accepting requests before it to sending its tokens."""
        sample, self._last = self._last, None
        if sample is None:
            return
        sample = msgspec.structs.replace(sample, seconds=max(sample.seconds, seconds))
        with self._lock:
            used, deviation = self.known.add_limited_sample(sample)
            if deviation is not None:
                self._unsent.record_error(deviation, prefill=sample.prefill)
            self._unsent.add(used)

    def replace_known_times(self, times: StepTimes) -> None:
        with self._lock:
            self.known, self._unsent = StepModel(times), StepModel(self._unsent.times.joined_with(times))
            self.urgent = True
            self._taken.clear()

    def wait_until_taken(self, *, timeout_s: float) -> bool:
        return self._taken.wait(timeout_s)

    def take_times(self) -> StepTimes:
        with self._lock:
            times = self._unsent.times
            self._unsent, self.urgent = StepModel(), False
            self._taken.set()
        return times


PROFILED_LENGTH = 4096  # maximum tokens of a measured prompt
_QUICK_PROFILED_LENGTH = 1024
_SHORTEST_PROMPT = 16
_WORKLOAD_COUNT = 100
_MEDIAN_WEIGHT = 20  # a profiled median counts as much as this many steps measured during calls
_FIRST_REQUEST_ID = 1 << 60


class _ProfileEffort(msgspec.Struct, frozen=True):
    repeats: int
    longest: int
    stride: int
    samples_s: float
    workloads_s: float


_FULL = _ProfileEffort(repeats=5, longest=PROFILED_LENGTH, stride=1, samples_s=240.0, workloads_s=240.0)
_QUICK = _ProfileEffort(repeats=3, longest=_QUICK_PROFILED_LENGTH, stride=2, samples_s=30.0, workloads_s=30.0)


class EngineProfiler:
    """Profiles one engine. `part`: maximum number of tokens that one step reads, 0 = unlimited."""

    def __init__(
        self, engine: InferenceEngine, *, vocabulary: int, longest: int, quick: bool = False,
        told: Callable[[float, float], None] | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._effort = _QUICK if quick else _FULL
        self._longest = min(longest, self._effort.longest) if longest else self._effort.longest
        self._model_longest = longest
        self._told = told or (lambda *_: None)
        self._clock = clock
        self._random = random.Random(1)
        self._vocabulary = vocabulary
        self._shared_prefix = self._random_tokens(self._longest)
        self._ids = itertools.count(_FIRST_REQUEST_ID)
        self._skipped_samples = 0
        self.part = 0

    def measure(self) -> StepProfile:
        began = self._clock()
        self._warm_up()
        samples = [*self._prefill_samples(), *self._decode_samples()]
        times = self._add_measured_errors(group_samples(samples, weight=_MEDIAN_WEIGHT))
        self._told(1.0, 1.0)
        return StepProfile(times, self._engine.name, "", self._clock() - began, self._skipped_samples)

    # ---- samples

    def _warm_up(self) -> None:
        for _ in range(3):
            self._measure_decode([min(64, self._longest // 2)] * 2)
        steps = self._measure_prefill([self._random_tokens(self._longest - 8)])
        self.part = max(int(step.tokens) for step in steps) if len(steps) > 1 else 0

    def _prefill_samples(self) -> Iterator[StepSample]:
        most = self.part or self._longest
        tokens = [count for count in powers_of_two_up_to(most) if count <= self._longest - 8]
        starts = [0, *powers_of_two_up_to(self._longest - 8, least=64)]
        plans: list[tuple[int, int, int]] = []  # number of prompts, first token to read, tokens to read per prompt
        for at, start in enumerate(starts):
            some = tokens if at % self._effort.stride == 0 else []
            plans += [(1, start, count) for count in some if start + count <= self._longest - 8]
        for rows in powers_of_two_up_to(min(self._engine.count_slots(), 16), least=2):
            plans += [(rows, 0, count) for count in tokens[3 :: self._effort.stride] if rows * count <= most]
        for rows, start, count in self._until_time_limit(
            plans, limit_s=self._effort.samples_s / 2, first=0.0, share=0.25
        ):
            yield from self._prefill_sample(rows, start, count)

    def _prefill_sample(self, rows: int, start: int, count: int) -> Iterator[StepSample]:
        for _ in range(2 if start else 0):  # read the prefix twice, so that the engine keeps the prefix in its cache
            self._measure_prefill([self._shared_prefix[:start] + self._random_tokens(8)], start=start)
        taken = []
        for _ in range(self._effort.repeats):
            steps = self._measure_prefill(
                [self._shared_prefix[:start] + self._random_tokens(count) for _ in range(rows)], start=start
            )
            if len(steps) == 1 and steps[0].tokens == rows * count:
                taken += steps
        if taken:
            yield _median_sample(taken)
        else:  # the engine did not reuse a prefix of this length
            self._skipped_samples += 1

    def _decode_samples(self) -> Iterator[StepSample]:
        rows = powers_of_two_up_to(self._engine.count_slots())[:: self._effort.stride]
        lengths = powers_of_two_up_to(self._longest - 16, least=_SHORTEST_PROMPT)[:: self._effort.stride]
        plans = [(length, count) for length in lengths for count in rows]
        for length, count in self._until_time_limit(plans, limit_s=self._effort.samples_s / 2, first=0.25, share=0.25):
            sample = self._measure_decode([length] * count)
            if sample is None:
                self._skipped_samples += 1
            else:
                yield sample

    def _until_time_limit(self, plans: Sequence[T], *, limit_s: float, first: float, share: float) -> Iterator[T]:
        """Yield plans and report the progress. After the time limit, count the remaining plans as skipped."""
        deadline = self._clock() + limit_s
        for number, plan in enumerate(plans):
            if self._clock() > deadline:
                self._skipped_samples += len(plans) - number
                return
            self._told(first + share * number / len(plans), 1.0)
            yield plan

    # ---- workloads

    def _add_measured_errors(self, times: StepTimes) -> StepTimes:
        model = StepModel(times)
        for _ in self._until_time_limit(range(_WORKLOAD_COUNT), limit_s=self._effort.workloads_s, first=0.5, share=0.5):
            self._measure_prefill_error(model)
            rows = self._random.randint(1, self._engine.count_slots())
            sample = self._measure_decode([self._random_length() for _ in range(rows)])
            if sample is not None and times.decode:
                expected = model.step_s(prefill=False, tokens=sample.tokens, length=sample.length)
                model.record_error(abs(sample.seconds - expected) / sample.seconds, prefill=False)
        return model.times

    def _measure_prefill_error(self, model: StepModel) -> None:
        most = 2 * self.part or self._longest
        lengths = [min(self._random_length(), most) for _ in range(self._random.randint(1, 4))]
        totals, expected = [], []
        for _ in range(self._effort.repeats):
            steps = self._measure_prefill([self._random_tokens(length) for length in lengths])
            totals.append(sum(step.seconds for step in steps))
            expected.append(sum(model.step_s(prefill=True, tokens=s.tokens, length=s.length) for s in steps))
        model.record_error(abs(median(totals) - median(expected)) / median(totals), prefill=True)

    def _random_length(self) -> int:
        low, high = _SHORTEST_PROMPT, self._longest - 16
        return max(low, min(high, int(low * (high / low) ** self._random.random())))

    # ---- requests to the engine

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        low = min(16, self._vocabulary // 4)  # skip the first ids, which are special tokens in most models
        return tuple(self._random.randrange(low, self._vocabulary) for _ in range(count))

    def _add_requests(self, prompts: Sequence[tuple[int, ...]], *, most: int) -> list[int]:
        ids = list(itertools.islice(self._ids, len(prompts)))
        for id, prompt in zip(ids, prompts, strict=True):
            self._engine.add(GenerationRequest(id, prompt, Sampling(max_new_tokens=most)))
        return ids

    def _timed_step(self) -> tuple[EngineLoad, EngineLoad, list[NewToken], float]:
        before, began = self._engine.get_load(), self._clock()
        tokens = self._engine.step()
        seconds = self._clock() - began
        return before, self._engine.get_load(), tokens, seconds

    def _measure_prefill(self, prompts: Sequence[tuple[int, ...]], *, start: int = 0) -> list[StepSample]:
        ids = self._add_requests(prompts, most=1)
        left, place = set(ids), {id: [start, len(prompt)] for id, prompt in zip(ids, prompts, strict=True)}
        steps = []
        while left:
            before, after, tokens, seconds = self._timed_step()
            if read := after.prompt_tokens - before.prompt_tokens:
                steps.append(StepSample(True, read, mean_attended_tokens(_split_read(place, read)), seconds))
            left -= {token.request for token in tokens if token.finish is not None}
        return steps

    def _measure_decode(self, lengths: Sequence[int]) -> StepSample | None:
        lengths = sorted(lengths, reverse=True)  # the longest first: if it does not fit, no other request is open yet
        repeats, rows = self._effort.repeats, len(lengths)
        parts = 1 + lengths[0] // (self.part or self._longest)
        most = repeats + 8 + rows * parts  # so that the first requests still run when the last prompts are read
        if self._model_longest:
            most = min(most, self._model_longest - lengths[0])
        evictions = self._engine.get_load().evictions
        try:
            ids = self._add_requests(
                [self._shared_prefix[: length - 1] + self._random_tokens(1) for length in lengths], most=most
            )
        except ValueError:
            return None
        written, taken = dict(zip(ids, lengths, strict=True)), list[StepSample]()
        unread, fewest = set(ids), rows - rows // 8
        while len(written) >= fewest and len(taken) <= repeats:
            before, after, tokens, seconds = self._timed_step()
            if after.waiting or after.evictions > evictions:
                break
            if after.decode_steps > before.decode_steps and not unread:
                length = _computed_length(self._engine.name, [written[token.request] for token in tokens])
                taken.append(StepSample(False, len(tokens), length, seconds))
            for token in tokens:
                unread.discard(token.request)
                written[token.request] += 1
                if token.finish is not None:  # the request ended, because the model wrote its end token
                    del written[token.request]
        for id in ids:
            self._engine.abort(id)
        return _median_sample(taken[1:]) if len(taken) > 1 else None


def _computed_length(engine: str, lengths: Sequence[int]) -> float:
    match engine:
        case "continuous":
            return mean_padded_length((rounded_row_tokens(length + 1), length) for length in lengths)
        case "static":
            return max(lengths)
        case _:
            return fmean(lengths)


def _split_read(place: dict[int, list[int]], count: int) -> list[tuple[int, int]]:
    found = []
    for part in place.values():
        some = min(count, part[1] - part[0])
        if some > 0:
            found.append((part[0], some))
            part[0] += some
            count -= some
    return found


def _median_sample(samples: Sequence[StepSample]) -> StepSample:
    tokens, length = fmean(sample.tokens for sample in samples), fmean(sample.length for sample in samples)
    return StepSample(samples[0].prefill, tokens, length, median(sample.seconds for sample in samples))

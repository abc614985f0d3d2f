"""An engine in virtual time: the batch of a real engine (`stoker.contexts.batching`) with measured step times.

Most engine steps repeat: the same requests each write one more token. A series of such steps is a *burst*, planned
once. An engine alone on its devices computes a burst as one unit of work. When a request joins or leaves, or another
engine requests the device, the burst ends after the current step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import msgspec

from stoker.contexts.batching import BatchedRequest, BatchLimits, RunningBatch, Step
from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepSeconds, mean_attended_tokens
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.world import TICK_S
from stoker.pilot.core.turns import EngineOutlook, OpenAnswer, UnreadPrompt
from stoker.protocol.ids import LibraryId

_MOST_STEPS_OF_BURST = 512


class StepCounts(msgspec.Struct):
    steps: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    most_running: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    busy_s: float = 0.0
    evictions: int = 0

    def add(self, other: StepCounts) -> None:
        most = max(self.most_running, other.most_running)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_running = most


class VirtualEngine:
    """One engine with one model. `most_output`: output tokens reserved per request (0 = the request's own output)."""

    def __init__(self, seconds: StepSeconds, limits: BatchLimits, *, most_output: int = 0) -> None:
        self.batch = RunningBatch(limits)
        self.counts = StepCounts()
        self._began_at = 0.0
        self._seconds = seconds
        self._most_output = most_output
        self._times: dict[int, TokenTimes] = {}
        self._is_full = False  # True if requests still waited after the last step was planned
        self._step: Step | None = None
        self._coming_durations: list[float] = []  # Durations of the steps of the burst that have not begun yet
        self._computing_ends: list[float] = []  # End times of the steps that the engine is computing
        self._unrecorded_ends: list[float] = []  # End times of computed steps that the batch has not recorded yet
        self._deadlines: list[tuple[float, float]] = []
        """For each TPOT: the earliest deadline of a next token when the burst started, and the TPOT."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def is_in_burst(self) -> bool:
        return len(self._computing_ends) > 1

    @property
    def ends_at(self) -> float:
        return self._computing_ends[-1]

    @property
    def due_at(self) -> float:
        if self._step is None:
            return self.batch.due_at
        done, waiting = len(self._unrecorded_ends), self.batch.waiting
        soonest = waiting[0].due_at if waiting and not self._is_full else math.inf
        for at, tpot_s in self._deadlines:
            due_at = at + done * tpot_s
            if due_at < soonest:
                soonest = due_at
        return soonest

    def measure_load(self, now: float) -> EngineLoad:
        limits, batch = self.batch.limits, self.batch
        is_decoding = self._step is not None and not self._step.prefill
        done = len(self._unrecorded_ends) + bisect_left(self._computing_ends, now) if is_decoding else 0
        return EngineLoad(
            len(batch.running), len(batch.waiting), **msgspec.structs.asdict(self.counts), rows=limits.rows,
            cache_tokens=limits.cache_tokens, peak_tokens=batch.expected_cache_tokens(unrecorded=done),
        )  # fmt: skip

    def next_free_at(self, now: float) -> float:
        at = bisect_left(self._computing_ends, now)
        return self._computing_ends[at] if at < len(self._computing_ends) else now

    def describe_requests(self, library: LibraryId, now: float, *, ready_at: float = 0.0) -> EngineOutlook:
        """Return the state of all open requests, for forecasts. `ready_at`: earliest time of the engine's next step."""
        done = len(self._unrecorded_ends) + bisect_left(self._computing_ends, now)
        writing = set(self._step.requests) if self._step is not None and not self._step.prefill else ()
        rows, length, due_at, tpot_s = 0, 0.0, math.inf, 0.0
        prompts, late_at, answers = list[UnreadPrompt](), math.inf, list[OpenAnswer]()
        for number, request in self.batch.running.items():
            more = done if number in writing else 0
            if not request.is_decoding:
                prompts.append(self._make_unread_prompt(request))
                continue
            rows += 1
            length += request.length + more
            at = request.due_at + more * request.tpot_s
            if most := self._times[number].most:
                answers.append(OpenAnswer(at, request.tpot_s, most - request.made - more))
            if not request.tpot_s:
                continue
            if at < now:
                late_at = min(late_at, at)
            elif at < due_at:
                due_at = at
            tpot_s = min(tpot_s, request.tpot_s) if tpot_s else request.tpot_s
        prompts.sort(key=lambda prompt: prompt.due_at)
        prompts += map(self._make_unread_prompt, self.batch.waiting)
        length = length / rows if rows else 0.0
        return EngineOutlook(
            library, self._seconds, rows, length, due_at, tpot_s, tuple(prompts), late_at, ready_at, tuple(answers)
        )

    def _make_unread_prompt(self, request: BatchedRequest) -> UnreadPrompt:
        most = self._times[request.id].most
        left = max(1, most - request.made) if most else 0
        return UnreadPrompt(request.unread_tokens, request.due_at, request.tpot_s, left)

    def find_refusal_reason(self, times: TokenTimes) -> str:
        return self.batch.find_refusal_reason(prompt=times.prompt, most=times.output)

    def add_request(self, number: int, times: TokenTimes, *, now: float) -> None:
        """Add a request after the current step. Raises ValueError if the batch can never hold the request."""
        self._end_burst(now)
        longest = self.batch.limits.max_tokens_per_row()
        room = longest - times.prompt if longest else self._most_output
        most = max(times.output, min(self._most_output, room))
        self.batch.add(
            number, prompt=times.prompt, most=most, due_at=times.due_at + times.load_grace_s, tpot_s=times.tpot_s
        )  # fmt: skip
        self._times[number] = times

    def remove_request(self, number: int, *, now: float) -> None:
        """Remove a request, if it is present. The current step continues without it."""
        if number not in self._times:
            return
        self._end_burst(now)
        del self._times[number]
        if self._step is not None and number in self._step.requests:
            self._step = self._step.without_request(number, writes=self.batch.running[number].is_decoding)
        self.batch.abort(number)

    def apply_limits(self, limits: BatchLimits, *, now: float) -> str:
        """Apply new limits. Return why an open request does not fit the limits, or an empty text."""
        before, self.batch.limits = self.batch.limits, limits
        for request in self.batch.requests():
            why = self.batch.find_refusal_reason(prompt=request.prompt, most=self._times[request.id].output)
            if why:
                self.batch.limits = before
                return why
        self._end_burst(now)
        return ""

    def begin_steps(self, at: float, *, whole_burst: bool = False) -> bool:
        """Begin the next step, or the whole burst, at time `at`. Return False if the engine has no work."""
        if not self._coming_durations and not self._plan_step():
            return False
        self._began_at, count = at, len(self._coming_durations) if whole_burst else 1
        for seconds in self._coming_durations[:count]:
            at += seconds
            self._computing_ends.append(at)
        del self._coming_durations[:count]
        return True

    def end_burst_early(self, now: float) -> bool:
        """End the burst after the current step. Return True if the burst had more steps."""
        ahead = self._computing_ends
        if len(ahead) < 2:
            return False
        ended = sum(at < now - TICK_S for at in ahead[:-1])
        self._coming_durations[:0] = [after - before for before, after in pairwise(ahead[ended:])]
        self._unrecorded_ends += ahead[:ended]
        self._computing_ends = [ahead[ended]]
        return bool(self._coming_durations)

    def end_steps(self, at: float) -> list[int]:
        """End the current step or burst. Remove the finished requests and return their numbers."""
        self._computing_ends[-1] = at
        self.counts.busy_s += at - self._began_at
        self._unrecorded_ends += self._computing_ends
        self._computing_ends.clear()
        return [] if self._coming_durations else self._record_finished_steps()

    def stop_computing(self, now: float) -> None:
        self._end_burst(now)
        self._computing_ends.clear()
        self._step = None

    def _plan_step(self) -> bool:
        step = self.batch.next_step()
        self._step, self._is_full = step, bool(self.batch.waiting)
        if step is None:
            return False
        running, counts = self.batch.running, self.counts
        counts.evictions += len(step.evicted)
        counts.most_running = max(counts.most_running, len(running))
        states = [running[number] for number in step.requests]
        if step.prefill:
            length = mean_attended_tokens(list(zip(step.starts, step.tokens, strict=True)))
            self._coming_durations = [self._seconds.prefill_s(sum(step.tokens), length)]
        else:
            count = min(self.batch.count_repeats(step), _MOST_STEPS_OF_BURST)
            if count > 1:  # the burst lasts until a request ends
                count = min(count, min(self._times[state.id].output - state.made for state in states))
            self._coming_durations = self._seconds.decode_s(
                len(states), self.batch.mean_decode_length(step), count=count
            )
        dues: dict[float, float] = {}
        for request in running.values():
            due_at = request.due_at
            if due_at < dues.get(request.tpot_s, math.inf):
                dues[request.tpot_s] = due_at
        self._deadlines = [(at, tpot_s) for tpot_s, at in dues.items()]
        return True

    def _end_burst(self, now: float) -> None:
        self.end_burst_early(now)
        self._coming_durations.clear()
        self._is_full = False
        self._record_finished_steps()

    def _record_finished_steps(self) -> list[int]:
        step, ends, ended = self._step, self._unrecorded_ends, list[int]()
        if step is not None and ends:
            count = len(ends)
            for number, tokens in zip(step.requests, step.tokens, strict=True):
                state, times = self.batch.running[number], self._times[number]
                if state.unread_tokens > tokens:
                    continue  # the step read only part of the prompt
                times.record_tokens(ends, made=state.made)
                self.counts.new_tokens += count
                if state.made + count == times.output:
                    ended.append(number)
                    del self._times[number]
            self.batch.record_step(step, ended=ended, times=count)
            self._deadlines = [(at + count * tpot_s, tpot_s) for at, tpot_s in self._deadlines]
            counts = self.counts
            counts.steps += count
            if step.prefill:
                counts.prompt_tokens += step.prompt_tokens
            if step.writing:
                counts.decode_steps += count
                counts.row_steps += count * len(step.requests)
            self._unrecorded_ends = []
        if not self._computing_ends:
            self._step = None
        return ended

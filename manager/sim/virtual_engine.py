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

_LONGEST_BURST = 512


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
        self._takes: list[float] = []  # Durations of the steps of the burst that have not begun yet
        self._ahead: list[float] = []  # End times of the steps that the engine is computing
        self._behind: list[float] = []  # End times of computed steps that the batch has not recorded yet
        self._dues: list[tuple[float, float]] = []
        """For each TPOT: the earliest deadline of a next token when the burst started, and the TPOT."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def is_in_burst(self) -> bool:
        return len(self._ahead) > 1

    @property
    def ends_at(self) -> float:
        return self._ahead[-1]

    @property
    def due_at(self) -> float:
        if self._step is None:
            return self.batch.due_at
        done, waiting = len(self._behind), self.batch.waiting
        soonest = waiting[0].due_at if waiting and not self._is_full else math.inf
        for at, tpot_s in self._dues:
            due_at = at + done * tpot_s
            if due_at < soonest:
                soonest = due_at
        return soonest

    def load(self, now: float) -> EngineLoad:
        limits, batch = self.batch.limits, self.batch
        decodes = self._step is not None and not self._step.prefill
        done = len(self._behind) + bisect_left(self._ahead, now) if decodes else 0
        return EngineLoad(
            len(batch.running), len(batch.waiting), **msgspec.structs.asdict(self.counts), rows=limits.rows,
            cache_tokens=limits.cache_tokens, peak_tokens=batch.expected_cache_tokens(unrecorded=done),
        )  # fmt: skip

    def free_at(self, now: float) -> float:
        at = bisect_left(self._ahead, now)
        return self._ahead[at] if at < len(self._ahead) else now

    def outlook(self, library: LibraryId, now: float, *, ready_at: float = 0.0) -> EngineOutlook:
        """Return the engine's open requests for a shadow validation. `ready_at`: earliest time of its next step."""
        done = len(self._behind) + bisect_left(self._ahead, now)
        writing = set(self._step.requests) if self._step is not None and not self._step.prefill else ()
        rows, length, due_at, tpot_s = 0, 0.0, math.inf, 0.0
        prompts, late_at, answers = list[UnreadPrompt](), math.inf, list[OpenAnswer]()
        for number, request in self.batch.running.items():
            more = done if number in writing else 0
            if not request.decodes:
                prompts.append(self._unread(request))
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
        prompts += map(self._unread, self.batch.waiting)
        length = length / rows if rows else 0.0
        return EngineOutlook(
            library, self._seconds, rows, length, due_at, tpot_s, tuple(prompts), late_at, ready_at, tuple(answers)
        )

    def _unread(self, request: BatchedRequest) -> UnreadPrompt:
        most = self._times[request.id].most
        left = max(1, most - request.made) if most else 0
        return UnreadPrompt(request.unread, request.due_at, request.tpot_s, left)

    def why_not(self, times: TokenTimes) -> str:
        return self.batch.why_not(prompt=times.prompt, most=times.output)

    def add(self, number: int, times: TokenTimes, *, now: float) -> None:
        """Add a request after the current step. Raises ValueError if the batch can never hold the request."""
        self._end_burst(now)
        longest = self.batch.limits.max_tokens_per_row()
        room = longest - times.prompt if longest else self._most_output
        most = max(times.output, min(self._most_output, room))
        self.batch.add(
            number, prompt=times.prompt, most=most, due_at=times.due_at + times.load_grace_s, tpot_s=times.tpot_s
        )  # fmt: skip
        self._times[number] = times

    def remove(self, number: int, *, now: float) -> None:
        """Remove a request, if it is present. The current step continues without it."""
        if number not in self._times:
            return
        self._end_burst(now)
        del self._times[number]
        if self._step is not None and number in self._step.requests:
            self._step = self._step.without(number, writes=self.batch.running[number].decodes)
        self.batch.abort(number)

    def resize(self, limits: BatchLimits, *, now: float) -> str:
        """Apply new limits. Return why an open request does not fit the limits, or an empty text."""
        before, self.batch.limits = self.batch.limits, limits
        for request in self.batch.requests():
            why = self.batch.why_not(prompt=request.prompt, most=self._times[request.id].output)
            if why:
                self.batch.limits = before
                return why
        self._end_burst(now)
        return ""

    def begin(self, at: float, *, leap: bool = False) -> bool:
        """Begin the next step at time `at`. With `leap`, begin the whole burst. Return False if there is no work."""
        if not self._takes and not self._plan_step():
            return False
        self._began_at, count = at, len(self._takes) if leap else 1
        for seconds in self._takes[:count]:
            at += seconds
            self._ahead.append(at)
        del self._takes[:count]
        return True

    def interrupt(self, now: float) -> bool:
        """End the burst after the current step. Return True if the burst had more steps."""
        ahead = self._ahead
        if len(ahead) < 2:
            return False
        ended = sum(at < now - TICK_S for at in ahead[:-1])
        self._takes[:0] = [after - before for before, after in pairwise(ahead[ended:])]
        self._behind += ahead[:ended]
        self._ahead = [ahead[ended]]
        return bool(self._takes)

    def end(self, at: float) -> list[int]:
        """End the current step or burst. Remove the finished requests and return their numbers."""
        self._ahead[-1] = at
        self.counts.busy_s += at - self._began_at
        self._behind += self._ahead
        self._ahead.clear()
        return [] if self._takes else self._settle()

    def halt(self, now: float) -> None:
        self._end_burst(now)
        self._ahead.clear()
        self._step = None

    def _plan_step(self) -> bool:
        step = self.batch.next()
        self._step, self._is_full = step, bool(self.batch.waiting)
        if step is None:
            return False
        running, counts = self.batch.running, self.counts
        counts.evictions += len(step.evicted)
        counts.most_running = max(counts.most_running, len(running))
        states = [running[number] for number in step.requests]
        if step.prefill:
            length = mean_attended_tokens(list(zip(step.starts, step.tokens, strict=True)))
            self._takes = [self._seconds.prefill_s(sum(step.tokens), length)]
        else:
            count = min(self.batch.repeats(step), _LONGEST_BURST)
            if count > 1:  # the burst lasts until a request ends
                count = min(count, min(self._times[state.id].output - state.made for state in states))
            self._takes = self._seconds.decode_s(len(states), self.batch.mean_decode_length(step), count=count)
        dues: dict[float, float] = {}
        for request in running.values():
            due_at = request.due_at
            if due_at < dues.get(request.tpot_s, math.inf):
                dues[request.tpot_s] = due_at
        self._dues = [(at, tpot_s) for tpot_s, at in dues.items()]
        return True

    def _end_burst(self, now: float) -> None:
        self.interrupt(now)
        self._takes.clear()
        self._is_full = False
        self._settle()

    def _settle(self) -> list[int]:
        step, ends, ended = self._step, self._behind, list[int]()
        if step is not None and ends:
            count = len(ends)
            for number, tokens in zip(step.requests, step.tokens, strict=True):
                state, times = self.batch.running[number], self._times[number]
                if state.unread > tokens:
                    continue  # the step read only part of the prompt
                times.add(ends, made=state.made)
                self.counts.new_tokens += count
                if state.made + count == times.output:
                    ended.append(number)
                    del self._times[number]
            self.batch.did(step, ended=ended, times=count)
            self._dues = [(at + count * tpot_s, tpot_s) for at, tpot_s in self._dues]
            counts = self.counts
            counts.steps += count
            if step.prefill:
                counts.prompt_tokens += step.prompt_tokens
            if step.writing:
                counts.decode_steps += count
                counts.row_steps += count * len(step.requests)
            self._behind = []
        if not self._ahead:
            self._step = None
        return ended

"""Choose the next step of a language model's engine.

A *prefill* step reads prompts and writes a request's first token. A *decode* step writes one more token per request
(SLINFER §III-A). Engine, pilot and simulator follow these rules:

- Requests join while the batch has rows and cache memory: the earliest due time first, then the earliest arrival.
- A prefill step reads at most `prefill_tokens` tokens. Several prefill steps of one prompt alternate with decode steps.
With `mixes`, prefill steps include the decoding requests (Sarathi-Serve, arXiv:2403.02310 §4).
- A request reserves cache memory for its prompt and its expected output: the mean output of ended requests (SLINFER eq.
2), at least the written tokens and at most the request's limit.
- If a reservation must grow and memory is short, the request with the latest due token (SLINFER §VII-D) leaves the
batch. A later prefill step reads its tokens again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from stoker.contexts.step_times import mean_padded_length

SMALLEST_ROW_TOKENS = 64


class BatchLimits(msgspec.Struct, frozen=True):
    """Limits of one batch and of one engine step; 0 = unlimited.

    `mixes`: True if decoding requests join prefill steps. `page_tokens`: tokens per cache page (vLLM), or 0 for rows of
    powers of two.
    """

    rows: int = 32
    prefill_tokens: int = 512
    cache_tokens: int = 0
    prefill_requests: int = 0
    mixes: bool = False
    page_tokens: int = 0

    def rounded_row_tokens(self, tokens: int) -> int:
        page = self.page_tokens
        return -(-tokens // page) * page if page else rounded_row_tokens(tokens)

    def max_tokens_per_row(self) -> int:
        cache, page = self.cache_tokens, self.page_tokens
        if not cache:
            return 0
        return cache // page * page if page else 1 << cache.bit_length() - 1


class Step(msgspec.Struct, frozen=True):
    """One forward pass. `tokens`: per request, tokens to read. `starts`: per request, tokens already in the cache.

    `writing`: number of decoding requests. `evicted`: requests that lose their cache before the step.
    """

    prefill: bool
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    writing: int = 0
    evicted: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(self.tokens) - self.writing

    def without_request(self, id: int, *, writes: bool) -> Step:
        at = self.requests.index(id)
        requests, tokens, starts = (each[:at] + each[at + 1 :] for each in (self.requests, self.tokens, self.starts))
        return replace(self, requests=requests, tokens=tokens, starts=starts, writing=self.writing - writes)


class BatchedRequest(msgspec.Struct):
    """A request in the batch. `read`: tokens in the cache. `made`: written tokens, at most `most`.

    After the first token, a token is due every `tpot_s` seconds (0: no due time).
    """

    id: int
    prompt: int
    most: int
    arrival: int
    first_due_at: float = math.inf
    tpot_s: float = 0.0
    read: int = 0
    made: int = 0
    reserved_tokens: int = 0

    @property
    def due_at(self) -> float:
        """Time when the next token is due (SLINFER eq. 1)."""
        if self.made and not self.tpot_s:
            return math.inf
        return self.first_due_at + self.made * self.tpot_s

    @property
    def length(self) -> int:
        return self.prompt + self.made

    @property
    def unread_tokens(self) -> int:
        """Number of tokens that the model must process before it writes the next token; 1 during decoding."""
        return self.length - self.read

    @property
    def is_decoding(self) -> bool:
        return self.read > 0 and self.unread_tokens == 1


def rounded_row_tokens(tokens: int) -> int:
    return max(SMALLEST_ROW_TOKENS, 1 << max(0, tokens - 1).bit_length())


class RunningBatch:
    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.waiting: list[BatchedRequest] = []
        self._waiting: dict[int, BatchedRequest] = {}
        self.running: dict[int, BatchedRequest] = {}
        self.mean_output = 0.0
        self._ended_count = 0
        self._arrival_count = 0
        self._decode_next = False

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def reserved_tokens(self) -> int:
        return sum(request.reserved_tokens for request in self.running.values())

    @property
    def due_at(self) -> float:
        first = self.waiting[:1] if self.waiting and self.has_room_for(self.waiting[0]) else []
        return min((request.due_at for request in (*self.running.values(), *first)), default=math.inf)

    def find_refusal_reason(self, *, prompt: int, most: int) -> str:
        """Return why a request can never fit into the cache, or "" if it can."""
        size = self.limits.rounded_row_tokens(prompt + most)
        if 0 < self.limits.cache_tokens < size:
            return (
                f"{prompt} prompt tokens and {most} new tokens need {size} tokens of the key-value cache,"
                f" which has room for {self.limits.cache_tokens}"
            )
        return ""

    def add(self, id: int, *, prompt: int, most: int, due_at: float = math.inf, tpot_s: float = 0.0) -> None:
        """Queue a request. Raises ValueError if the request can never fit into the cache."""
        if why := self.find_refusal_reason(prompt=prompt, most=most):
            raise ValueError(why)
        self._arrival_count += 1
        self._queue(BatchedRequest(id, prompt, most, self._arrival_count, due_at, tpot_s))

    def next_step(self) -> Step | None:
        """Return the next step, or None. The caller must compute the step and then call `record_step`."""
        evicted = self.evict_until_cache_fits()
        self._admit_waiting_requests()
        unread = [request for request in self.running.values() if not request.is_decoding]
        decoding = [request for request in self.running.values() if request.is_decoding]
        if decoding and (not unread or (self._decode_next and not self.limits.mixes)):
            self._decode_next = False
            return _build_step([(request, 1) for request in decoding], prefill=False, evicted=evicted)
        if not unread:
            return None
        self._decode_next = True
        unread.sort(key=_urgency)
        left, parts = self.limits.prefill_tokens, list[tuple[BatchedRequest, int]]()
        for request in unread[: self.limits.prefill_requests or None]:
            if left <= 0:
                break
            parts.append((request, min(left, request.unread_tokens)))
            left -= parts[-1][1]
        if self.limits.mixes:
            parts += [(request, 1) for request in decoding]
        return _build_step(parts, prefill=True, evicted=evicted)

    def requests(self) -> tuple[BatchedRequest, ...]:
        return (*self.running.values(), *self.waiting)

    def mean_decode_length(self, step: Step) -> float:
        states = [self.running[number] for number in step.requests]
        if self.limits.page_tokens:
            return sum(state.length for state in states) / len(states)
        return mean_padded_length((state.reserved_tokens, state.length) for state in states)

    def count_repeats(self, step: Step) -> int:
        """Return how many times `next_step` would return this step if no request joins or ends."""
        if step.prefill or len(step.requests) < len(self.running):
            return 1
        return 1 + min(request.reserved_tokens - request.length for request in self.running.values())

    def record_step(self, step: Step, *, ended: Iterable[int] = (), times: int = 1) -> None:
        for id, count in zip(step.requests, step.tokens, strict=True):
            request = self.running[id]
            request.read += count + times - 1
            request.made += times - 1
            if request.unread_tokens == 0:
                request.made += 1
        for id in ended:
            request = self.running.pop(id)
            self._ended_count += 1
            self.mean_output += (request.made - self.mean_output) / self._ended_count

    def abort(self, id: int) -> None:
        self.running.pop(id, None)
        if (request := self._waiting.pop(id, None)) is not None:
            del self.waiting[bisect_left(self.waiting, _urgency(request), key=_urgency)]

    def has_room_for(self, request: BatchedRequest) -> bool:
        return (
            len(self.running) < self.limits.rows
            and self.limits.rounded_row_tokens(request.length + 1) <= self._free_cache_tokens()
        )

    def peak_tokens(self, *, prompt: int, output: float) -> int:
        """Return the expected number of cached tokens of all requests, including a new one (SLINFER eq. 2)."""
        output = round(max(output, self.mean_output))
        row = self.limits.rounded_row_tokens
        others = sum(row(one.prompt + min(one.most, max(one.made, output))) for one in self.requests())
        return others + row(prompt + output)

    def expected_cache_tokens(self, *, unrecorded: int = 0) -> int:
        """Return the expected cache tokens of all requests (SLINFER §VII-D).

        A request that has written more than expected is assumed to write `SMALLEST_ROW_TOKENS` more. `unrecorded`:
        tokens per decoding request since the last call of `record_step`.
        """
        mean, row, total = round(self.mean_output), self.limits.rounded_row_tokens, 0
        for one in self.requests():
            made = one.made + unrecorded if one.is_decoding else one.made
            total += row(one.prompt + min(one.most, made + SMALLEST_ROW_TOKENS if made > mean else mean))
        return total

    def _free_cache_tokens(self) -> float:
        return self.limits.cache_tokens - self.reserved_tokens if self.limits.cache_tokens else math.inf

    def _admit_waiting_requests(self) -> None:
        while self.waiting and len(self.running) < self.limits.rows:
            request, room = self.waiting[0], self._free_cache_tokens()
            least = self.limits.rounded_row_tokens(request.length + 1)  # minimum: cache for one more token
            if least > room:
                break
            output = min(request.most, max(request.made, round(self.mean_output)))
            size = max(least, self.limits.rounded_row_tokens(request.prompt + output))
            request.reserved_tokens = size if size <= room else least
            self.running[request.id] = self.waiting.pop(0)
            del self._waiting[request.id]

    def evict_until_cache_fits(self) -> tuple[int, ...]:
        evicted: list[int] = []
        full = [request for request in self.running.values() if request.length > request.reserved_tokens]
        for request in sorted(full, key=_urgency):
            size = self.limits.rounded_row_tokens(request.length)
            while request.id in self.running and size - request.reserved_tokens > self._free_cache_tokens():
                evicted.append(self._evict_latest_due())
            if request.id in self.running:
                request.reserved_tokens = size
        while self.running and self._free_cache_tokens() < 0:  # a resize made the cache smaller than the reservations
            evicted.append(self._evict_latest_due())
        return tuple(evicted)

    def _evict_latest_due(self) -> int:
        last = max(self.running.values(), key=_urgency)
        del self.running[last.id]
        last.read = last.reserved_tokens = 0
        self._queue(last)
        return last.id

    def _queue(self, request: BatchedRequest) -> None:
        insort(self.waiting, request, key=_urgency)
        self._waiting[request.id] = request


def _build_step(parts: list[tuple[BatchedRequest, int]], *, prefill: bool, evicted: tuple[int, ...]) -> Step:
    return Step(
        prefill=prefill, requests=tuple(request.id for request, _ in parts), tokens=tuple(count for _, count in parts),
        starts=tuple(request.read for request, _ in parts), writing=sum(request.is_decoding for request, _ in parts),
        evicted=evicted,
    )  # fmt: skip


def _urgency(request: BatchedRequest) -> tuple[float, int]:
    return request.due_at, request.arrival

"""What a language model computes next: which requests it reads, and which it lets write a token.

A request passes through two stages (SLINFER §III-A). Its prompt is read in *prefill* steps, the last of which writes
its first token. Then it takes part in every *decode* step, which reads that token and writes the next one. Requests
join and leave between steps (continuous batching), so a short request never waits for a long one.

The engine, the pilot and the simulator follow the same rules:

- A request joins as soon as a row and memory for it are free: the one whose next token is due first, then the oldest.
- One prefill step reads `prefill_tokens` at most. A longer prompt is read in parts, and a decode step follows every
  prefill step, so that reading delays those that write by one part at the most.
- A request reserves memory for its prompt and for the tokens that it will probably write: those that it has written, at
  least the mean of the requests that have ended (SLINFER eq. 2), at most those that it may write. A reservation is a
  power of two, as a row of the cache is.
- A request that outgrows its reservation takes a larger one. Where none is free, the request with the longest headroom
  (SLINFER §VII-D) leaves the batch, the youngest of several; it is read again later, with what it has written.

Seconds are of one clock; memory is counted in tokens of the key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

SMALLEST_ROW_TOKENS = 64
"""No row of the cache is shorter."""


class BatchLimits(msgspec.Struct, frozen=True):
    """What one batch may hold: requests, tokens that one step reads, tokens of the cache (0 = without limit)."""

    rows: int = 32
    prefill_tokens: int = 512
    cache_tokens: int = 0


class Step(msgspec.Struct, frozen=True):
    """One pass through the model: how many tokens of each request it reads. `evicted` requests lose their cache
    first."""

    prefill: bool
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    evicted: tuple[int, ...] = ()


class BatchedRequest(msgspec.Struct):
    """A request as the batch sees it.

    `read`: its tokens that the cache holds. `made`: tokens that it has written, `most` of them at the utmost. `due_at`:
    when its next token is due; infinity if nobody waits for it.
    """

    id: int
    prompt: int
    most: int
    arrival: int
    due_at: float = math.inf
    tpot_s: float = 0.0
    read: int = 0
    made: int = 0
    reserved: int = 0

    @property
    def length(self) -> int:
        """Its tokens, read or not."""
        return self.prompt + self.made

    @property
    def unread(self) -> int:
        """Tokens that are read before it can write the next one; exactly 1 while it decodes."""
        return self.length - self.read

    @property
    def decodes(self) -> bool:
        """True if a decode step takes it further."""
        return self.read > 0 and self.unread == 1


def row_tokens(tokens: int) -> int:
    """The length of the row of the cache that holds so many tokens: a power of two."""
    return max(SMALLEST_ROW_TOKENS, 1 << max(0, tokens - 1).bit_length())


class RunningBatch:
    """The requests of one engine, and what it computes next."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.waiting: list[BatchedRequest] = []
        self.running: dict[int, BatchedRequest] = {}
        self.mean_output = 0.0
        """The mean number of tokens that a request writes, of those that have ended."""
        self._ended = 0
        self._arrivals = 0
        self._decode_next = False

    def __len__(self) -> int:
        """How many requests it has."""
        return len(self.waiting) + len(self.running)

    @property
    def reserved(self) -> int:
        """Tokens of the cache that running requests have reserved."""
        return sum(request.reserved for request in self.running.values())

    @property
    def due_at(self) -> float:
        """When the first token of the whole batch is due; infinity if none is."""
        return min((request.due_at for request in (*self.running.values(), *self.waiting)), default=math.inf)

    def wanted_tokens(self, *, least: int = 0) -> int:
        """Tokens of the cache that the running requests will probably need at their peak (SLINFER eq. 2)."""
        return max(least, sum(self._expected(request) for request in self.running.values()))

    def why_not(self, *, prompt: int, most: int) -> str:
        """Why no batch within these limits can ever hold such a request; empty if one can."""
        size = row_tokens(prompt + most)
        if 0 < self.limits.cache_tokens < size:
            return (
                f"{prompt} tokens of prompt and {most} new ones take a row of {size} tokens in the key-value cache,"
                f" which has room for {self.limits.cache_tokens}"
            )
        return ""

    def add(self, id: int, *, prompt: int, most: int, due_at: float = math.inf, tpot_s: float = 0.0) -> None:
        """A request has come: `prompt` tokens (1 or more), `most` new ones (1 or more)."""
        self._arrivals += 1
        request = BatchedRequest(id=id, prompt=prompt, most=most, arrival=self._arrivals, due_at=due_at, tpot_s=tpot_s)
        self._wait(request)

    def next(self) -> Step | None:
        """What to compute now; None if there are no requests. The caller says with `did` that it was computed."""
        evicted = self.make_room()
        self._admit()
        unread = [request for request in self.running.values() if not request.decodes]
        decoding = [request for request in self.running.values() if request.decodes]
        if decoding and (self._decode_next or not unread):
            self._decode_next = False
            ids = tuple(request.id for request in decoding)
            return Step(prefill=False, requests=ids, tokens=(1,) * len(ids), evicted=evicted)
        if not unread:
            return None
        self._decode_next = True
        unread.sort(key=_urgency)
        left, parts = self.limits.prefill_tokens, list[tuple[int, int]]()
        for request in unread:
            if left <= 0:
                break
            parts.append((request.id, min(left, request.unread)))
            left -= parts[-1][1]
        return Step(
            prefill=True, requests=tuple(id for id, _ in parts), tokens=tuple(count for _, count in parts),
            evicted=evicted,
        )  # fmt: skip

    def requests(self) -> tuple[BatchedRequest, ...]:
        """All requests, those in the batch first."""
        return (*self.running.values(), *self.waiting)

    def did(self, step: Step, *, ended: Iterable[int] = ()) -> None:
        """The step was computed: each request whose tokens are all read has written one more. `ended` leave."""
        for id, count in zip(step.requests, step.tokens, strict=True):
            request = self.running[id]
            request.read += count
            if request.unread == 0:
                request.made += 1
                request.due_at += request.tpot_s
        for id in ended:
            request = self.running.pop(id)
            self._ended += 1
            self.mean_output += (request.made - self.mean_output) / self._ended

    def abort(self, id: int) -> None:
        """The request leaves, wherever it is. No-op if absent."""
        self.running.pop(id, None)
        self.waiting = [request for request in self.waiting if request.id != id]

    def _expected(self, request: BatchedRequest) -> int:
        return request.prompt + min(request.most, max(request.made, round(self.mean_output)))

    def _room(self) -> float:
        return self.limits.cache_tokens - self.reserved if self.limits.cache_tokens else math.inf

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.rows:
            request = self.waiting[0]
            size = row_tokens(max(self._expected(request), request.length + 1))
            if size > self._room():
                size = row_tokens(request.length + 1)  # less than it will probably need, and enough for now
                if size > self._room():
                    break
            request.reserved = size
            self.running[request.id] = self.waiting.pop(0)

    def make_room(self) -> tuple[int, ...]:
        """Enlarge the reservations that are full; returns the requests that had to leave for it."""
        evicted: list[int] = []
        for request in sorted(self.running.values(), key=_urgency):
            if request.length <= request.reserved or request.id in evicted:
                continue
            size = row_tokens(request.length)
            while request.id in self.running and size - request.reserved > self._room():
                evicted.append(self._evict())
            if request.id in self.running:
                request.reserved = size
        while self.running and self._room() < 0:  # the limit has come down
            evicted.append(self._evict())
        return tuple(evicted)

    def _evict(self) -> int:
        """The request with the longest headroom leaves the batch and waits."""
        last = max(self.running.values(), key=_urgency)
        del self.running[last.id]
        last.read = last.reserved = 0
        self._wait(last)
        return last.id

    def _wait(self, request: BatchedRequest) -> None:
        """Put a request in its place among those that wait."""
        at = len(self.waiting)
        while at and _urgency(self.waiting[at - 1]) > _urgency(request):
            at -= 1
        self.waiting.insert(at, request)


def _urgency(request: BatchedRequest) -> tuple[float, int]:
    """Smaller is more urgent: the least headroom, then the oldest."""
    return request.due_at, request.arrival

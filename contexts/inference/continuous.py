"""The default engine: continuous batching over a model of Transformers, on a CPU or a GPU.

On a GPU decode steps may run as captured graphs, launched ahead: step n+1 starts with the tokens that step n has left
on the device, and then step n is read. Between two calls of `step` at most one launched step is unread; the batch, the
rows and the texts are those before its tokens. The device works in order, so:

- A step is launched ahead only if no waiting request could join and no request outgrows its row.
- A request that has ended or was aborted still has a row in the unread step. Its token is dropped, and its row is free
  at once: the device writes to it again only after that step.
- Each kept token has used the next random number of its request.
- A resize and an eager step read the unread step before they free or move memory. Sleep and stop wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from stoker.contexts.batching import SMALLEST_ROW_TOKENS, BatchLimits, RunningBatch, Step
from stoker.contexts.forward import Layers, PrefixCache
from stoker.contexts.inference.adapter import (
    OWN_OPTIONS,
    EngineLoad,
    EngineMemory,
    GenerationRequest,
    ModelTexts,
    NewToken,
)
from stoker.contexts.inference.decode_graphs import DecodeGraphs, LaunchedStep, RowInput, StepShape
from stoker.contexts.inference.decoder import DecodePart, KVStore, LeanDecoder, ReadPart
from stoker.contexts.inference.kernels import NOT_FINITE, Writing, take_tokens


class StepsAhead:
    """The captured steps of one engine, over its batch, rows and requests."""

    def __init__(
        self, graphs: DecodeGraphs, batch: RunningBatch, store: KVStore, writing: Mapping[int, Writing]
    ) -> None:
        self.graphs = graphs
        self._batch = batch
        self._store = store
        self._writing = writing
        self._unread: LaunchedStep | None = None

    def begin(self, step: Step) -> bool:
        """Launch a decode step. False if it must run eagerly."""
        if step.prefill or len(step.requests) < len(self._batch.running):
            return False
        shape = self._shape()
        if shape is None or not self.graphs.due(shape):
            return False
        self._unread = self.graphs.launch(shape, lambda id: self._input(id, behind=0))
        return self._unread is not None

    def read(self, *, follow: bool = True) -> tuple[StepShape, list[tuple[int, int]]] | None:
        """Read the unread step; launch the next one before, if it does not depend on these tokens. Return the shape and
        the token of each request that still runs (-1: none can be drawn)."""
        unread, self._unread = self._unread, None
        if unread is None:
            return None
        if follow:
            self._unread = self._follow(unread)
        found = zip(unread.shape.requests, unread.tokens(), strict=True)
        return unread.shape, [(id, token) for id, token in found if id is not None and id in self._batch.running]

    @property
    def launched(self) -> bool:
        return self._unread is not None

    def drop(self) -> None:
        """Wait for launched steps, drop their tokens, and free all graphs."""
        self._unread = None
        self.graphs.drop()

    def _follow(self, unread: LaunchedStep) -> LaunchedStep | None:
        batch, running = self._batch, self._batch.running.values()
        if batch.waiting and batch.has_room_for(batch.waiting[0]):
            return None
        if any(state.length >= state.reserved for state in running) or all(
            state.made + 1 >= state.most for state in running
        ):
            return None
        shape = self._shape()
        if shape is None or not self.graphs.captured(shape):
            return None
        return self.graphs.launch(shape, lambda id: self._input(id, behind=1), after=unread)

    def _shape(self) -> StepShape | None:
        writing = [self._writing[id] for id in self._batch.running]
        if any(each.request.sampling.logprobs for each in writing):
            return None
        return self.graphs.shape_of(list(self._store.arrays.values()), [each.draw for each in writing])

    def _input(self, id: int, *, behind: int) -> RowInput:
        writing = self._writing[id]
        return RowInput(writing.ids[-1], self._batch.running[id].read + behind, writing.draw)


_USUAL_ROW_TOKENS = 512
TookStep = Callable[[Step, int, float], None]
"""Takes a step, the mean length of its requests in tokens, and the seconds that it took."""


class ContinuousEngine:
    """One model, many requests, a token of each at a time (`adapter.InferenceEngine`)."""

    name = "continuous"
    chosen = "every call joins one batch"
    options = OWN_OPTIONS

    def __init__(
        self,
        decoder: LeanDecoder,
        texts: ModelTexts,
        *,
        prefixes: PrefixCache[Layers],
        limits: BatchLimits,
        cache_bytes: int = 0,
        took: TookStep | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._texts = texts
        self._prefixes = prefixes
        self._prefix_limit = prefixes.limit_bytes
        self._took = took
        self._store = decoder.new_store()
        self._batch = RunningBatch(limits)
        self._writing: dict[int, Writing] = {}
        self._load = EngineLoad()
        self._asleep = False
        self._budget = 0
        self._ahead: StepsAhead | None = None
        if graphs is not None:
            self._ahead = StepsAhead(graphs, self._batch, self._store, self._writing)
        self._settled: list[NewToken] = []
        """Tokens that were read between two steps; the next step returns them."""
        self.resize(cache_bytes)

    def add(self, request: GenerationRequest) -> None:
        if self._asleep:
            raise ValueError("the model is asleep; wake it first")
        self._texts.check(request, options=self.options)
        length, most = len(request.prompt), request.sampling.max_new_tokens
        why = self._batch.why_not(prompt=length, most=most)
        if why:
            raise ValueError(f"{why}; give the model more memory, or ask for fewer tokens")
        self._writing[request.id] = Writing(request, self._texts)
        self._batch.add(request.id, prompt=length, most=most, due_at=request.due_at, tpot_s=request.tpot_s)

    def abort(self, request: int) -> None:
        self._batch.abort(request)
        with torch.inference_mode():
            self._store.free(request)
        self._writing.pop(request, None)
        self._settled = [token for token in self._settled if token.request != request]

    def step(self) -> list[NewToken]:
        with torch.inference_mode():
            return self._step()

    def slots(self) -> int:
        """Return how many requests of a usual length run at once."""
        limits = self._batch.limits
        usual = limits.cache_tokens // _USUAL_ROW_TOKENS
        return max(1, min(limits.rows, usual)) if limits.cache_tokens else limits.rows

    def load(self) -> EngineLoad:
        """Return how full the batch is; requests with unreturned last tokens run."""
        running = len(self._batch.running) + sum(token.finish is not None for token in self._settled)
        return msgspec.structs.replace(self._load, running=running, waiting=len(self._batch.waiting))

    def memory(self) -> EngineMemory:
        """Return the memory of weights and cache, kept prefixes and graphs included."""
        graphs = 0 if self._ahead is None else self._ahead.graphs.held_bytes
        return EngineMemory(
            weights_bytes=self._decoder.weights_bytes + self._decoder.packed_bytes,
            held_bytes=self._store.held_bytes + self._prefixes.size_bytes + graphs,
            budget_bytes=self._budget,
        )

    def resize(self, cache_bytes: int) -> None:
        """Change the budget of the cache (`InferenceEngine.resize`); 0 = without one."""
        tokens, for_prefixes = 0, self._prefix_limit
        for_graphs = cache_bytes // 8 if self._ahead is not None else 0
        if cache_bytes:
            for_prefixes = min(for_prefixes, cache_bytes // 8)
            tokens = (cache_bytes - for_prefixes - for_graphs) // self._store.token_bytes
            if tokens < SMALLEST_ROW_TOKENS:
                raise ValueError(
                    f"{cache_bytes} bytes hold {tokens} tokens of this model's key-value cache; no request fits there"
                )
        self._settle()
        before = self._batch.limits
        self._batch.limits = msgspec.structs.replace(before, cache_tokens=tokens)
        for request in self._batch.requests():
            why = self._batch.why_not(prompt=request.prompt, most=request.most)
            if why:
                self._batch.limits = before
                raise ValueError(f"a request that is open would not fit any more: {why}")
        self._prefixes.set_limit(for_prefixes)
        self._budget = cache_bytes
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead.graphs.limit_bytes = for_graphs
        with torch.inference_mode():
            for id in self._batch.make_room():
                self._store.free(id)
            self._store.trim(self._room)

    def sleep(self) -> None:
        """Free the cache; on a GPU the weights move to the host."""
        load = self.load()
        if load.running + load.waiting:
            raise RuntimeError(f"{load.running + load.waiting} requests run; the model cannot sleep")
        if self._ahead is not None:
            self._ahead.drop()
        self._store.clear()
        self._prefixes.clear()
        if self._decoder.device.type == "cuda":
            self._decoder.move("cpu")
            torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        if self._asleep and self._decoder.device.type == "cuda":
            self._decoder.move(self._decoder.device)
        self._asleep = False

    def stop(self) -> None:
        self._writing.clear()
        if self._ahead is not None:
            self._ahead.drop()
        self._store.clear()

    # ---- steps

    def _step(self) -> list[NewToken]:
        if self._ahead is None:
            return self._next_step()
        tokens, self._settled = self._settled, []
        tokens += self._take_launched(self._ahead, follow=True)
        return tokens if self._ahead.launched else tokens + self._next_step()

    def _next_step(self) -> list[NewToken]:
        step = self._batch.next()
        if step is None:
            return []
        began = time.perf_counter()
        for request in step.evicted:
            self._store.free(request)
        for id in step.requests:
            self._store.ensure(id, tokens=self._batch.running[id].reserved, room_tokens=self._room)
        if self._ahead is not None and self._ahead.begin(step):
            return []
        step, length = self._compute(step)
        tokens = self._take(step)
        self._count(step, length, made=len(tokens), began=began)
        return tokens

    def _compute(self, step: Step) -> tuple[Step, int]:
        """Return the step without what a kept prefix holds, and the mean length of a decode step's rows."""
        writing = {id for id in step.requests if self._batch.running[id].decodes}
        reads = [
            self._read_part(id, most) for id, most in zip(step.requests, step.tokens, strict=True) if id not in writing
        ]
        decodes = self._decode_parts(writing)
        # Rows of an array compute all together. One that does not write takes part with a token whose keys and values
        # are overwritten when it is read, so the parts that are read come last.
        parts: list[ReadPart | DecodePart] = [*decodes, *reads]
        tokens: list[int] = []
        positions: list[int] = []
        last: dict[int, int] = {}
        for part in parts:
            for id, start, count in part.spans():
                tokens += self._writing[id].ids[start : start + count]
                positions += range(start, start + count)
                if isinstance(part, ReadPart) or id in writing:
                    last[id] = len(tokens) - 1
        self._logits = self._decoder.forward(tokens, positions, parts, last=list(last.values()))
        counts = {part.request: part.count for part in reads}
        step = msgspec.structs.replace(
            step, requests=tuple(last), tokens=tuple(counts.get(id, 1) for id in last),
            starts=tuple(self._batch.running[id].read for id in last),
        )  # fmt: skip
        rows = sum(part.count for part in decodes)  # a row counts as long as the longest of its array
        return step, 0 if step.prefill else sum(part.width * part.count for part in decodes) // rows

    def _read_part(self, id: int, most: int) -> ReadPart:
        state = self._batch.running[id]
        array, row = self._store.row(id)
        if not state.read:
            state.read = self._begin(self._writing[id], array, row)
        return ReadPart(id, array, start=state.read, count=min(most, state.unread))

    def _decode_parts(self, writing: set[int]) -> list[DecodePart]:
        return [
            self._decoder.decode_part(array, [self._batch.running[id].read for id in array.requests])
            for array in self._store.arrays.values()
            if writing.intersection(array.requests)
        ]

    def _take(self, step: Step) -> list[NewToken]:
        states = [self._batch.running[id] for id in step.requests]
        done = [at for at, (state, count) in enumerate(zip(states, step.tokens, strict=True)) if state.unread == count]
        logits = self._logits if len(done) == len(states) else self._logits[done]
        writings = [self._writing[states[at].id] for at in done]
        tokens = take_tokens([writing.draw for writing in writings], logits) if writings else []
        new = [writing.take(token, row) for writing, token, row in zip(writings, tokens, logits, strict=True)]
        for at in done:
            if not states[at].made:
                self._keep(self._writing[states[at].id])
        self._did(step, new)
        return new

    def _did(self, step: Step, new: list[NewToken]) -> None:
        ended = [token.request for token in new if token.finish is not None]
        self._batch.did(step, ended=ended)
        for id in ended:
            self._store.free(id)
            del self._writing[id]

    # ---- steps that were launched as graphs

    def _settle(self) -> None:
        if self._ahead is not None:
            with torch.inference_mode():
                self._settled += self._take_launched(self._ahead, follow=False)

    def _take_launched(self, ahead: StepsAhead, *, follow: bool) -> list[NewToken]:
        began = time.perf_counter()
        shape, found = ahead.read(follow=follow) or (None, [])
        starts = tuple(self._batch.running[id].read for id, _ in found)
        new = [self._writing[id].take(token if token >= 0 else ValueError(NOT_FINITE), None) for id, token in found]
        if shape is not None and new:
            requests = tuple(token.request for token in new)
            step = Step(False, requests, tokens=(1,) * len(new), starts=starts, writing=len(new))
            self._did(step, new)
            self._count(step, shape.length, made=len(new), began=began)
        return new

    # ---- prefixes

    def _begin(self, writing: Writing, array: Any, row: int) -> int:
        prefix, length = self._prefixes.find([tuple(writing.ids)])
        if prefix is None:
            return 0
        for number, (keys, values) in enumerate(prefix.kv):
            array.keys[number][row, :, :length] = keys[0, :, :length]
            array.values[number][row, :, :length] = values[0, :, :length]
        return length

    def _keep(self, writing: Writing) -> None:
        length = len(writing.request.prompt)
        size = length * self._store.token_bytes
        if size * 2 > self._prefixes.limit_bytes:
            return
        array, row = self._store.row(writing.request.id)
        layers = [
            (keys[row : row + 1, :, :length].clone(), values[row : row + 1, :, :length].clone())
            for keys, values in zip(array.keys, array.values, strict=True)
        ]
        self._prefixes.saw(writing.request.prompt, layers, size)

    @property
    def _room(self) -> float:
        return self._batch.limits.cache_tokens or float("inf")

    def _count(self, step: Step, length: int, *, made: int, began: float) -> None:
        seconds = time.perf_counter() - began
        self._load = self._load.after(
            decoded=step.writing, running=max(len(self._batch.running), len(step.requests)),
            prompt_tokens=step.prompt_tokens, new_tokens=made, busy_s=seconds, evictions=len(step.evicted),
        )  # fmt: skip
        if self._took is not None:
            self._took(step, length, seconds)

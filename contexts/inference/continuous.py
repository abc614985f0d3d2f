"""The default engine: continuous batching over a Transformers model, on a CPU or a GPU.

On a GPU, decode steps may run as captured graphs that are launched ahead (docs/decisions/091). Step n+1 starts with the
tokens that step n left on the device. The host reads the tokens of step n only after step n+1 was launched. Between two
calls of `step`, at most one launched step is unread:

- A step is launched ahead only if no waiting request could join and no request outgrows its row.
- A request that ended or was aborted still has a row in the unread step. This row's token is dropped. The row is
  reusable immediately, because the device writes to it only after that step.
- The unread step is read before a resize or an eager step frees or moves memory. Sleep and stop wait for the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from stoker.contexts.batching import SMALLEST_ROW_TOKENS, BatchLimits, RunningBatch, Step
from stoker.contexts.forward import Layers, PrefixCache
from stoker.contexts.inference.adapter import EngineLoad, EngineMemory, GenerationRequest, ModelTexts, NewToken
from stoker.contexts.inference.decode_graphs import DecodeGraphs, LaunchedStep, RowInput
from stoker.contexts.inference.decoder import DecodePart, KVStore, LeanDecoder, ReadPart
from stoker.contexts.inference.kernels import NOT_FINITE, RequestText, choose_next_tokens, positions_scored_at_once
from stoker.contexts.inference.peft_adapters import AdaptedTokens, Adapter, AdapterBank, AdapterCache


@dataclass(eq=False)
class GraphStepLauncher:
    """Launches decode steps as captured graphs. A step can start before the host reads the previous step's tokens."""

    graphs: DecodeGraphs
    batch: RunningBatch
    store: KVStore
    writing: Mapping[int, RequestText]
    _unread: LaunchedStep | None = None

    def launch_if_capturable(self, step: Step) -> bool:
        """Launch a decode step as a graph. Return False if the step must run without a graph."""
        if step.prefill or len(step.requests) < len(self.batch.running):
            return False
        self._unread = self._launch()
        return self._unread is not None

    def read_tokens(self, *, launch_next: bool) -> tuple[int, list[tuple[int, int]]]:
        """Wait for the launched step, if any. Return its row length, and each running request's token (-1: none drawn).

        With `launch_next`, launch the next step before waiting, unless a request could join or outgrow its row.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return 0, []
        if launch_next:
            self._unread = self._launch_next_step(unread)
        found = zip(unread.shape.requests, unread.tokens(), strict=True)
        running = self.batch.running
        return unread.shape.mean_row_tokens, [(id, token) for id, token in found if id is not None and id in running]

    @property
    def has_launched_step(self) -> bool:
        return self._unread is not None

    def drop_launched_step(self) -> None:
        self._unread = None
        self.graphs.drop_graphs()

    def _launch_next_step(self, unread: LaunchedStep) -> LaunchedStep | None:
        batch, running = self.batch, self.batch.running.values()
        if batch.waiting and batch.has_room_for(batch.waiting[0]):
            return None
        if any(state.length >= state.reserved_tokens for state in running) or all(
            state.made + 1 >= state.most for state in running
        ):
            return None
        return self._launch(after=unread)

    def _launch(self, *, after: LaunchedStep | None = None) -> LaunchedStep | None:
        texts, running = self.writing, self.batch.running
        if not all(texts[id].is_capturable for id in running):
            return None
        shape = self.graphs.capturable_step_shape(list(self.store.arrays.values()), [texts[id].draw for id in running])
        if shape is None:
            return None
        unread = int(after is not None)

        def next_input(id: int) -> RowInput:
            return RowInput(texts[id].ids[-1], running[id].read + unread, texts[id].draw)

        return self.graphs.launch(shape, next_input, after=after)


_USUAL_ROW_TOKENS = 512
StepHook = Callable[[Step, int, float], None]
"""Function that receives a step, the mean length of its requests in tokens, and its duration in seconds."""


class ContinuousEngine:
    """An engine (`adapter.InferenceEngine`) with one batch, which requests can join at each step."""

    name = "continuous"
    chosen = "every call joins one batch"

    def __init__(
        self, decoder: LeanDecoder, texts: ModelTexts, *, prefixes: PrefixCache[Layers], limits: BatchLimits,
        cache_bytes: int, step_hook: StepHook | None = None, graphs: DecodeGraphs | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._decoder = decoder
        shapes = decoder.projection_shapes()
        self._bank = AdapterBank(shapes, [layer.device for layer in decoder.layers])
        self._adapters = AdapterCache(adapters or {}, shapes, dtype=decoder.dtype, share_of=decoder.weights_bytes)
        self._texts = texts
        self._prefixes = prefixes
        self._prefix_limit = prefixes.limit_bytes
        self._step_hook = step_hook
        self._store = decoder.new_store()
        self._batch = RunningBatch(limits)
        self._writing: dict[int, RequestText] = {}
        self._load = EngineLoad()
        self._asleep = False
        self._budget = 0
        self._ahead = GraphStepLauncher(graphs, self._batch, self._store, self._writing) if graphs is not None else None
        # Tokens that were read between two calls of `step`. The next call returns them.
        self._tokens_read_early: list[NewToken] = []
        self.resize(cache_bytes)

    def add(self, request: GenerationRequest) -> None:
        if self._asleep:
            raise ValueError("the model is asleep; wake it first")
        adapter = self._adapters.get(request.sampling.adapter) if request.sampling.adapter else None
        virtual = adapter.virtual_tokens if adapter is not None else 0
        self._texts.check(request, virtual_tokens=virtual)
        length, most = virtual + len(request.prompt), max(1, request.sampling.max_new_tokens)
        if why := self._batch.find_refusal_reason(prompt=length, most=most):
            raise ValueError(f"{why}; give the model more memory, or ask for fewer tokens")
        self._writing[request.id] = RequestText(request, self._texts, adapter=adapter)
        self._batch.add(request.id, prompt=length, most=most, due_at=request.due_at, tpot_s=request.tpot_s)

    def abort(self, request: int) -> None:
        self._batch.abort(request)
        with torch.inference_mode():
            self._store.free_row(request)
        self._writing.pop(request, None)
        self._tokens_read_early = [token for token in self._tokens_read_early if token.request != request]

    def step(self) -> list[NewToken]:
        with torch.inference_mode():
            if self._ahead is None:
                return self._run_next_step()
            tokens, self._tokens_read_early = self._tokens_read_early, []
            tokens += self._collect_launched_tokens(self._ahead, launch_next=True)
            return tokens if self._ahead.has_launched_step else tokens + self._run_next_step()

    def count_slots(self) -> int:
        limits = self._batch.limits
        usual = limits.cache_tokens // _USUAL_ROW_TOKENS
        return max(1, min(limits.rows, usual)) if limits.cache_tokens else limits.rows

    def get_load(self) -> EngineLoad:
        """Count requests and tokens. A request counts as running until its last token is returned."""
        running = len(self._batch.running) + sum(token.finish is not None for token in self._tokens_read_early)
        return msgspec.structs.replace(
            self._load, running=running, waiting=len(self._batch.waiting),
            cache_tokens=self._batch.limits.cache_tokens, peak_tokens=self._batch.expected_cache_tokens(),
            reused_tokens=self._prefixes.reused_tokens,
        )  # fmt: skip

    def get_memory(self) -> EngineMemory:
        """Measure the engine's memory. Adapters count as weights; cached prefixes and CUDA graphs count as cache."""
        graphs = 0 if self._ahead is None else self._ahead.graphs.held_bytes
        adapters = self._bank.size_bytes + (self._adapters.size_bytes if self._decoder.device.type == "cpu" else 0)
        return EngineMemory(
            weights_bytes=self._decoder.weights_bytes + self._decoder.packed_bytes + adapters,
            held_bytes=self._store.held_bytes + self._prefixes.size_bytes + graphs,
            budget_bytes=self._budget,
            token_bytes=self._store.token_bytes,
        )

    def resize(self, cache_bytes: int) -> None:
        tokens, for_prefixes = 0, self._prefix_limit
        for_graphs = cache_bytes // 8 if self._ahead is not None else 0
        if cache_bytes:
            for_prefixes = min(for_prefixes, cache_bytes // 8)
            tokens = (cache_bytes - for_prefixes - for_graphs) // self._store.token_bytes
            if tokens < SMALLEST_ROW_TOKENS:
                raise ValueError(
                    f"{cache_bytes} bytes hold {tokens} tokens of this model's key-value cache, too few for any request"
                )
        self._read_launched_step()
        before = self._batch.limits
        self._batch.limits = msgspec.structs.replace(before, cache_tokens=tokens)
        for request in self._batch.requests():
            if why := self._batch.find_refusal_reason(prompt=request.prompt, most=request.most):
                self._batch.limits = before
                raise ValueError(f"an open request would no longer fit: {why}")
        self._prefixes.set_limit(for_prefixes)
        self._budget = cache_bytes
        if self._ahead is not None:
            self._ahead.drop_launched_step()
            self._ahead.graphs.limit_bytes = for_graphs
        with torch.inference_mode():
            for id in self._batch.evict_until_cache_fits():
                self._store.free_row(id)
            self._store.free_unused_memory(self._cache_room_tokens)

    def sleep(self) -> None:
        """Free the cache. On a GPU, also move the weights to the host."""
        load = self.get_load()
        if open_ones := load.running + load.waiting:
            raise RuntimeError(f"{open_ones} requests are running; the model cannot sleep until they end")
        if self._ahead is not None:
            self._ahead.drop_launched_step()
        self._store.clear()
        self._prefixes.clear()
        self._bank.clear()
        if self._decoder.device.type == "cuda":
            self._decoder.move_weights_to_host()
            torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        if self._asleep and self._decoder.device.type == "cuda":
            self._decoder.move_weights_to_devices()
        self._asleep = False

    def stop(self) -> None:
        self._writing.clear()
        if self._ahead is not None:
            self._ahead.drop_launched_step()
        self._store.clear()

    # ---- steps

    def _run_next_step(self) -> list[NewToken]:
        step = self._batch.next_step()
        if step is None:
            return []
        began = time.perf_counter()
        for request in step.evicted:
            self._store.free_row(request)
        for id in step.requests:
            self._store.ensure_row(
                id, tokens=self._batch.running[id].reserved_tokens, room_tokens=self._cache_room_tokens
            )
        if self._ahead is not None and self._ahead.launch_if_capturable(step):
            return []
        step, length = self._compute_step(step)
        tokens = self._draw_tokens(step)
        self._record_load(step, length, made=len(tokens), began=began)
        return tokens

    def _compute_step(self, step: Step) -> tuple[Step, int]:
        """Compute a step. Return the step without the tokens that were found in cached prefixes, and the mean row
        length of a decode step.
        """
        writing = {id for id in step.requests if self._batch.running[id].is_decoding}
        reads = [
            self._next_prompt_part(id, most)
            for id, most in zip(step.requests, step.tokens, strict=True)
            if id not in writing
        ]
        decode_parts = [
            self._decoder.decode_part(array, [self._batch.running[id].read for id in array.requests])
            for array in self._store.arrays.values()
            if writing.intersection(array.requests)
        ]
        # All rows of an array are computed together, so a row that does not decode gets a dummy token. Prompt parts
        # come last, because they overwrite the keys and values of the dummy tokens.
        parts: list[ReadPart | DecodePart] = [*decode_parts, *reads]
        tokens: list[int] = []
        positions: list[int] = []
        last: dict[int, int] = {}
        for part in parts:
            for id, start, count in part.token_ranges():
                tokens += self._writing[id].ids[start : start + count]
                positions += range(start, start + count)
                if isinstance(part, ReadPart) or id in writing:
                    last[id] = len(tokens) - 1
        adapted = self._adapted_tokens_of_parts(parts)
        device = self._decoder.device
        states = self._decoder.compute_states(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), parts, adapted=adapted
        )
        for part in reads:
            self._score_prompt_part(part, states[last[part.request] + 1 - part.count : last[part.request] + 1])
        self._logits = self._decoder.compute_logits(states, list(last.values()))
        counts = {part.request: part.count for part in reads}
        step = msgspec.structs.replace(
            step, requests=tuple(last), tokens=tuple(counts.get(id, 1) for id in last),
            starts=tuple(self._batch.running[id].read for id in last),
        )  # fmt: skip
        # Attention computes every row of an array up to the length of its longest row.
        rows = sum(part.count for part in decode_parts)
        return step, 0 if step.prefill else sum(part.width * part.count for part in decode_parts) // rows

    def _score_prompt_part(self, part: ReadPart, states: torch.Tensor) -> None:
        if (scores := self._writing[part.request].scores) is None:
            return
        most = positions_scored_at_once(self._decoder.vocabulary)
        for start in range(0, part.count, most):
            some = states[start : start + most]
            scores.score_following_tokens(part.start + start, self._decoder.compute_logits(some, range(len(some))))

    def _adapted_tokens_of_parts(self, parts: Sequence[ReadPart | DecodePart]) -> AdaptedTokens | None:
        running = [self._writing[id].adapter for id in self._batch.running]
        if not any(running):
            return None
        self._bank.ensure_stacked([each for each in running if each is not None])
        adapters: list[Adapter | None] = []
        soft: list[tuple[int, torch.Tensor]] = []
        for part in parts:
            for id, start, count in part.token_ranges():
                adapter = self._writing[id].adapter
                if adapter is not None and adapter.vectors is not None and start < len(adapter.vectors):
                    soft.append((len(adapters), adapter.vectors[start : start + count]))
                adapters += [adapter] * count
        return AdaptedTokens(self._bank, adapters, soft)

    def _next_prompt_part(self, id: int, most: int) -> ReadPart:
        state = self._batch.running[id]
        array, row = self._store.find_row(id)
        if not state.read:
            state.read = self._copy_kept_prefix(self._writing[id], array, row)
        return ReadPart(id, array, start=state.read, count=min(most, state.unread_tokens))

    def _draw_tokens(self, step: Step) -> list[NewToken]:
        states = [self._batch.running[id] for id in step.requests]
        done = [
            at
            for at, (state, count) in enumerate(zip(states, step.tokens, strict=True))
            if state.unread_tokens == count
        ]
        logits = self._logits if len(done) == len(states) else self._logits[done]
        writings = [self._writing[states[at].id] for at in done]
        tokens = choose_next_tokens(writings, logits) if writings else []
        new = [writing.add_token(token, row) for writing, token, row in zip(writings, tokens, logits, strict=True)]
        for at in done:
            if not states[at].made:
                self._keep_prompt_prefix(self._writing[states[at].id])
        self._record_finished_step(step, new)
        return new

    def _record_finished_step(self, step: Step, new: list[NewToken]) -> None:
        ended = [token.request for token in new if token.finish is not None]
        self._batch.record_step(step, ended=ended)
        for id in ended:
            self._store.free_row(id)
            del self._writing[id]

    # ---- steps that were launched as graphs

    def _read_launched_step(self) -> None:
        if self._ahead is not None:
            with torch.inference_mode():
                self._tokens_read_early += self._collect_launched_tokens(self._ahead, launch_next=False)

    def _collect_launched_tokens(self, ahead: GraphStepLauncher, *, launch_next: bool) -> list[NewToken]:
        began = time.perf_counter()
        length, found = ahead.read_tokens(launch_next=launch_next)
        starts = tuple(self._batch.running[id].read for id, _ in found)
        new = [
            self._writing[id].add_token(token if token >= 0 else ValueError(NOT_FINITE), None) for id, token in found
        ]
        if new:
            requests = tuple(token.request for token in new)
            step = Step(False, requests, tokens=(1,) * len(new), starts=starts, writing=len(new))
            self._record_finished_step(step, new)
            self._record_load(step, length, made=len(new), began=began)
        return new

    # ---- prefixes

    def _copy_kept_prefix(self, writing: RequestText, array: Any, row: int) -> int:
        if writing.scores is not None:  # scoring a prompt requires reading all its tokens
            return 0
        prefix, length = self._prefixes.find_shared_prefix([writing.prefix_cache_key()])
        if prefix is None:
            return 0
        for number, (keys, values) in enumerate(prefix.kv):
            array.keys[number][row, :, :length] = keys[0, :, :length]
            array.values[number][row, :, :length] = values[0, :, :length]
        return length

    def _keep_prompt_prefix(self, writing: RequestText) -> None:
        length = writing.prompt_tokens
        size = length * self._store.token_bytes
        if size * 2 > self._prefixes.limit_bytes:
            return
        array, row = self._store.find_row(writing.request.id)
        layers = [
            (keys[row : row + 1, :, :length].clone(), values[row : row + 1, :, :length].clone())
            for keys, values in zip(array.keys, array.values, strict=True)
        ]
        self._prefixes.add_recent_prompt(writing.prefix_cache_key(length), layers, size)

    @property
    def _cache_room_tokens(self) -> float:
        return self._batch.limits.cache_tokens or float("inf")

    def _record_load(self, step: Step, length: int, *, made: int, began: float) -> None:
        seconds = time.perf_counter() - began
        self._load = self._load.after_step(
            decoded=step.writing, running=max(len(self._batch.running), len(step.requests)),
            prompt_tokens=step.prompt_tokens, new_tokens=made, busy_s=seconds, evictions=len(step.evicted),
        )  # fmt: skip
        if self._step_hook is not None:
            self._step_hook(step, length, seconds)

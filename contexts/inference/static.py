"""The static engine, which supports all models of Transformers. This module also chooses an engine.

In the static engine, all waiting prompts are read in one step, and the batch runs until its last text has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psutil
import torch

from stoker.contexts import ambient
from stoker.contexts.batching import BatchLimits
from stoker.contexts.forward import ModelRunner
from stoker.contexts.inference.adapter import (
    EngineLoad,
    EngineMemory,
    GenerationRequest,
    InferenceEngine,
    ModelTexts,
    NewToken,
)
from stoker.contexts.inference.continuous import ContinuousEngine, StepHook
from stoker.contexts.inference.decode_graphs import CudaGraphs, DecodeGraphs, create_cuda_graphs
from stoker.contexts.inference.decoder import LeanDecoder, build_lean_decoder
from stoker.contexts.inference.kernels import RequestText, choose_next_tokens, packed_dtypes, positions_scored_at_once

# ---- static


class StaticEngine:
    """An engine (`adapter.InferenceEngine`) that computes one batch at a time. Requests cannot join a running batch."""

    name = "static"

    def __init__(self, runner: ModelRunner, texts: ModelTexts, *, rows: int, chosen: str = "") -> None:
        self.chosen = chosen
        self._runner = runner
        self._texts = texts
        self._rows = rows
        self._waiting: deque[RequestText] = deque()
        self._batch: list[RequestText] = []
        self._cache: Any = None
        self._positions = self._attended = torch.empty(0)
        self._load = EngineLoad()
        self._asleep = False

    def add(self, request: GenerationRequest) -> None:
        if self._asleep:
            raise ValueError("the model is asleep; wake it first")
        self._texts.check(request)
        self._waiting.append(RequestText(request, self._texts))

    def abort(self, request: int) -> None:
        self._waiting = deque(writing for writing in self._waiting if writing.request.id != request)
        going = [at for at, writing in enumerate(self._batch) if writing.request.id != request]
        with torch.inference_mode():
            self._keep_rows(going)

    def step(self) -> list[NewToken]:
        began, prefill = time.perf_counter(), not self._batch
        with torch.inference_mode():
            if prefill:
                size = min(self._rows if self._runner.can_share_prefixes else 1, len(self._waiting))
                self._batch = [self._waiting.popleft() for _ in range(size)]
                if not self._batch:
                    return []
                self._score_prompts()
            logits = self._compute_prefill_logits() if prefill else self._compute_decode_logits()
            tokens = choose_next_tokens(self._batch, logits)
            new = [writing.add_token(*one) for writing, *one in zip(self._batch, tokens, logits, strict=True)]
            read = sum(len(writing.request.prompt) for writing in self._batch) if prefill else 0
            self._load = self._load.after_step(
                decoded=0 if prefill else len(new), running=len(new), prompt_tokens=read, new_tokens=len(new),
                busy_s=time.perf_counter() - began,
            )  # fmt: skip
            self._keep_rows([at for at, token in enumerate(new) if token.finish is None])
        return new

    def count_slots(self) -> int:
        return self._rows

    def get_load(self) -> EngineLoad:
        return msgspec.structs.replace(
            self._load, running=len(self._batch), waiting=len(self._waiting),
            reused_tokens=self._runner.prefixes.reused_tokens,
        )  # fmt: skip

    def get_memory(self) -> EngineMemory:
        weights = sum(part.nbytes for part in self._runner.model.parameters())
        held, token = self._runner.prefixes.size_bytes, self._runner.token_bytes
        return EngineMemory(weights_bytes=weights, held_bytes=held, budget_bytes=0, token_bytes=token)

    def resize(self, cache_bytes: int) -> None:
        """Do nothing, because this engine has no cache budget."""

    def sleep(self) -> None:
        if self._batch or self._waiting:
            raise RuntimeError(
                f"{len(self._batch) + len(self._waiting)} requests are running; the model cannot sleep until they end"
            )
        self._runner.prefixes.clear()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def stop(self) -> None:
        self._batch, self._cache = [], None

    # ---- steps

    def _score_prompts(self) -> None:
        most = positions_scored_at_once(self._texts.vocabulary)
        for writing in self._batch:
            if writing.scores is not None:
                for start, logits in self._runner.iterate_logits(writing.request.prompt, most=most):
                    writing.scores.score_following_tokens(start, logits)

    def _compute_prefill_logits(self) -> torch.Tensor:
        rows = [tuple(writing.ids) for writing in self._batch]
        if not self._runner.can_share_prefixes:
            return self._runner.compute_all_logits(rows)[:, -1]
        batch, device = self._runner.prefill(rows), self._runner.device
        self._cache, self._positions = batch.cache, torch.tensor(batch.lengths, device=device)
        self._attended = torch.arange(batch.width, device=device)[None, :] < self._positions[:, None]
        return batch.logits

    def _keep_rows(self, going: list[int]) -> None:
        if len(going) == len(self._batch):
            return
        self._batch = [self._batch[at] for at in going]
        if not going:
            self._cache = None
        elif self._cache is not None:
            index = torch.tensor(going, device=self._runner.device)
            for layer in self._cache.layers:
                layer.batch_select_indices(index.to(layer.keys.device))
            self._positions, self._attended = self._positions[index], self._attended[index]

    def _compute_decode_logits(self) -> torch.Tensor:
        if self._cache is None:  # this model's cache cannot be shortened, so each step computes the whole row again
            return self._runner.compute_all_logits([tuple(writing.ids) for writing in self._batch])[:, -1]
        tokens = [writing.ids[-1] for writing in self._batch]
        self._attended = torch.cat([self._attended, self._attended.new_ones(len(tokens), 1)], dim=1)
        output: Any = self._runner.model(
            input_ids=torch.tensor(tokens, device=self._runner.device)[:, None], attention_mask=self._attended.long(),
            position_ids=self._positions[:, None], past_key_values=self._cache, use_cache=True,
        )  # fmt: skip
        self._positions = self._positions + 1
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


# ---- the choice of an engine


log = logging.getLogger(__name__)

PREFIX_LIMIT_BYTES = 512_000_000
_CPU_LIMITS = BatchLimits(rows=64, prefill_tokens=512, mixes=True)
_GPU_LIMITS = BatchLimits(rows=256, prefill_tokens=4096, mixes=True)
_STATIC_ROWS = 32
PROCESS_BYTES = 500_000_000
"""Bytes of a process in addition to weights and cache, for example libraries and activations."""
LEAST_CACHE_BYTES = 64_000_000
_LARGEST_CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 16_000_000_000}


def build_inference_engine(
    runner: ModelRunner, texts: ModelTexts, *, engine: str = "auto", cache_bytes: int = 0,
    step_hook: StepHook | None = None, graphs: bool = False, adapters: Mapping[str, str] | None = None,
    backend: Callable[[torch.device], CudaGraphs | None] = create_cuda_graphs,
) -> InferenceEngine:  # fmt: skip
    """Return the engine `continuous` or `static`; `auto` prefers `continuous`. Raises ValueError if the model does not
    support the named engine. `step_hook` is called after each step. `graphs`: True to capture decode steps.
    """
    why = 'engine="static" was given'
    if engine != "static":
        with torch.inference_mode():
            decoder, why = build_lean_decoder(runner.model, copy_dtype=_weight_copy_dtype(runner.model))
        if decoder is not None:
            limits = _CPU_LIMITS if decoder.device.type == "cpu" else _GPU_LIMITS
            weights = decoder.weights_bytes + decoder.packed_bytes
            size = cache_bytes or default_cache_bytes(decoder.device, weights_bytes=weights)
            captured = _build_checked_graphs(decoder, backend(decoder.device), rows=limits.rows) if graphs else None
            return ContinuousEngine(
                decoder, texts, prefixes=runner.prefixes, limits=limits, cache_bytes=size, step_hook=step_hook,
                graphs=captured, adapters=adapters,
            )  # fmt: skip
        if engine == "continuous":
            raise ValueError(f'this model does not support engine="continuous": {why}; leave out the engine')
        log.warning("this model runs with static batches, whose texts start and end together: %s", why)
    if graphs:
        log.warning("graphs=True has no effect on this model: only the continuous engine captures steps")
    return StaticEngine(runner, texts, rows=_STATIC_ROWS, chosen=why)


def _build_checked_graphs(decoder: LeanDecoder, backend: CudaGraphs | None, *, rows: int) -> DecodeGraphs | None:
    if backend is None:
        return None
    decoder.fuse_weights()
    with torch.inference_mode():
        made = DecodeGraphs(decoder, backend, rows=rows)
        return made if made.check_against_eager_steps() else None


def _weight_copy_dtype(model: Any) -> torch.dtype | None:
    weights: int = sum(part.nbytes for part in model.parameters())
    declared, free = ambient.device_memory_bytes(), int(psutil.virtual_memory().available)
    for dtype in packed_dtypes(model.dtype):
        copy = weights * dtype.itemsize // model.dtype.itemsize
        cache = max(LEAST_CACHE_BYTES, copy if copy > weights else 0)
        if not 0 < declared < weights + copy + PROCESS_BYTES + cache and free > 2 * copy:
            return dtype
    return None


def default_cache_bytes(device: torch.device, *, weights_bytes: int) -> int:
    """Return the declared memory minus the weights and `PROCESS_BYTES`. If undeclared, return a quarter of the free
    memory, up to a limit.
    """
    if declared := ambient.device_memory_bytes():
        return max(declared - weights_bytes - PROCESS_BYTES, LEAST_CACHE_BYTES)
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        free = psutil.virtual_memory().available
    return min(_LARGEST_CACHE_BYTES.get(device.type, free), free // 4)

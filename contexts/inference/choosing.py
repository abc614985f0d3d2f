"""Choose the engine for a model of Transformers: the continuous one if it supports the model, else the static one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch

from stoker.contexts import ambient
from stoker.contexts.batching import BatchLimits
from stoker.contexts.forward import ModelRunner
from stoker.contexts.inference.adapter import InferenceEngine, ModelTexts
from stoker.contexts.inference.continuous import ContinuousEngine, TookStep
from stoker.contexts.inference.decode_graphs import DecodeGraphs, GraphBackend, graphs_for
from stoker.contexts.inference.decoder import LeanDecoder, decoder_of
from stoker.contexts.inference.kernels import packed_dtypes
from stoker.contexts.inference.static import StaticEngine

log = logging.getLogger(__name__)

PREFIX_LIMIT_BYTES = 512_000_000
"""Device memory for kept prefixes."""
_CPU_LIMITS = BatchLimits(rows=64, prefill_tokens=512, mixes=True)
_GPU_LIMITS = BatchLimits(rows=256, prefill_tokens=4096, mixes=True)
_STATIC_ROWS = 32
PROCESS_BYTES = 500_000_000
"""Memory of a computing process in addition to weights and cache: libraries, activations."""
LEAST_CACHE_BYTES = 64_000_000
_LARGEST_CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 16_000_000_000}


def own_engine(
    runner: ModelRunner,
    texts: ModelTexts,
    *,
    engine: str = "auto",
    cache_bytes: int = 0,
    took: TookStep | None = None,
    graphs: bool = False,
    backend: Callable[[torch.device], GraphBackend | None] = graphs_for,
) -> tuple[InferenceEngine, str]:
    """Return the engine `continuous`, `static`, or the one that suits (`auto`), and why, for people. `took` is
    called after each step. `graphs`: capture decode steps where `backend` can. Raises ValueError if the model
    does not support the named engine."""
    why = "it was asked for"
    if engine != "static":
        with torch.inference_mode():
            decoder, why = decoder_of(runner.model, packs=_packs(runner.model))
        if decoder is not None:
            limits = _CPU_LIMITS if decoder.device.type == "cpu" else _GPU_LIMITS
            weights = decoder.weights_bytes + decoder.packed_bytes
            size = cache_bytes or default_cache_bytes(decoder.device, weights_bytes=weights)
            captured = _graphs(decoder, backend, rows=limits.rows) if graphs else None
            made = ContinuousEngine(
                decoder, texts, prefixes=runner.prefixes, limits=limits, cache_bytes=size, took=took, graphs=captured
            )
            return made, "every call joins one batch"
        if engine == "continuous":
            raise ValueError(f'this model cannot have engine="continuous": {why}; leave the engine away')
        log.warning("calls of this model are written in batches that begin and end together: %s", why)
    if graphs:
        log.warning("graphs=True has no effect on this model: only the continuous engine captures steps")
    return StaticEngine(runner, texts, rows=_STATIC_ROWS), why


def _graphs(
    decoder: LeanDecoder, backend: Callable[[torch.device], GraphBackend | None], *, rows: int
) -> DecodeGraphs | None:
    found = backend(decoder.device)
    if found is None:
        return None
    decoder.fuse()
    with torch.inference_mode():
        made = DecodeGraphs(decoder, found, rows=rows)
        return made if made.check() else None


def _packs(model: Any) -> torch.dtype | None:
    """Return the precision of a second copy of the weights: the fastest that fits the library's memory, and twice
    the host's. A copy larger than the weights leaves as much again for the cache."""
    weights: int = sum(part.numel() * part.element_size() for part in model.parameters())
    declared, free = ambient.device_memory_bytes(), int(psutil.virtual_memory().available)
    for dtype in packed_dtypes(model.dtype):
        copy = weights * dtype.itemsize // model.dtype.itemsize
        cache = max(LEAST_CACHE_BYTES, copy if copy > weights else 0)
        if not 0 < declared < weights + copy + PROCESS_BYTES + cache and free > 2 * copy:
            return dtype
    return None


def default_cache_bytes(device: torch.device, *, weights_bytes: int) -> int:
    """Return the memory of a batch's cache: the declared memory without the weights; if undeclared, a quarter of the
    free memory, at most 2 GB on a CPU and 16 GB on a GPU."""
    declared = ambient.device_memory_bytes()
    if declared:
        return max(declared - weights_bytes - PROCESS_BYTES, LEAST_CACHE_BYTES)
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        free = psutil.virtual_memory().available
    return min(_LARGEST_CACHE_BYTES.get(device.type, free), free // 4)

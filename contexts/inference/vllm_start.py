"""Start vLLM in a library's process, and measure the memory that it takes."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from stoker.contexts.inference.choosing import default_cache_bytes
from stoker.errors import StokerError
from stoker.units import show_bytes

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: what it computes next depends on nothing else
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ROWS = 256
"""Requests that run at once: as many as `vllm.LLM` runs on a CPU, and on most GPUs."""
_UNDECLARED_FRACTION = 0.9
"""Share of the free GPU memory, if the recipe declares none."""
_PROCESS_BYTES = 500_000_000
_LEAST_CACHE_BYTES = 64_000_000


class VLLMStart:
    """A started vLLM and its measured memory. `device_memory_bytes`: its limit, 0 if none is declared. Raises
    StokerError with vLLM's message if it cannot start."""

    def __init__(
        self, folder: str, *, dtype: str = "auto", device: str = "cpu", device_memory_bytes: int = 0, why: str = ""
    ) -> None:
        self.device = device
        self.device_memory_bytes = device_memory_bytes
        self.why = why
        self.on_gpu = not device.startswith("cpu")
        self.sleeps = self.on_gpu
        self.rows = _ROWS
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        arguments: dict[str, Any] = {"gpu_memory_utilization": self._fraction()} if self.on_gpu else {}
        if not self.on_gpu:
            arguments |= {
                "kv_cache_memory_bytes": self._cpu_cache_bytes(folder, dtype=dtype),
                "enforce_eager": not _has_compiler(),
            }
        try:
            with _own_thread_setter():
                self.llm: Any = LLMEngine.from_engine_args(
                    EngineArgs(
                        model=folder, dtype=dtype, seed=0, disable_log_stats=True, max_num_seqs=self.rows,
                        max_model_len=-1, max_logprobs=-1, enable_prefix_caching=True, enable_sleep_mode=self.sleeps,
                        **arguments,
                    )
                )  # fmt: skip
        except Exception as error:
            raise StokerError(f"vLLM cannot start with {folder} on {device}: {error}") from error
        config = self.llm.vllm_config
        self.longest = int(config.model_config.max_model_len)
        """Tokens of one request at most: what the model reads, or less if the cache is small."""
        self.model_longest = int(getattr(config.model_config.hf_text_config, "max_position_embeddings", 0) or 0)
        self.end_tokens: int | list[int] | None = config.model_config.try_get_generation_config().get("eos_token_id")
        self.cache_tokens = int(config.cache_config.num_gpu_blocks) * int(config.cache_config.block_size)
        self.weights_bytes = int(self.llm.collective_rpc(_loaded_bytes)[0]) or weights_bytes(
            folder, dtype=config.model_config.dtype
        )
        self.cache_bytes = int(self.llm.collective_rpc(_cache_bytes)[0])
        log.info(
            "vLLM on %s: weights %s, cache %s (%d tokens)",
            device, show_bytes(self.weights_bytes), show_bytes(self.cache_bytes), self.cache_tokens,
        )  # fmt: skip

    def free_device_bytes(self) -> int:
        """Return the free memory of the device; 0 on a CPU, where it is not measured."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.on_gpu else 0

    def end(self) -> None:
        """Free vLLM's memory."""
        with contextlib.suppress(Exception):  # it is being thrown away
            self.llm.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _fraction(self) -> float:
        free, total = torch.cuda.mem_get_info(self.device)
        wanted = self.device_memory_bytes or int(_UNDECLARED_FRACTION * free)
        if wanted > free:
            raise StokerError(
                f"vLLM was to take {show_bytes(wanted)} of {self.device}, where {show_bytes(free)} are free"
            )
        return float(wanted / total)

    def _cpu_cache_bytes(self, folder: str, *, dtype: str) -> int:
        """Return the rest of the budget for the cache; without a budget, as much as other engines use."""
        if not self.device_memory_bytes:
            return default_cache_bytes(torch.device("cpu"), weights_bytes=0)
        weights = weights_bytes(folder, dtype=getattr(torch, dtype, torch.float32))
        return max(self.device_memory_bytes - weights - _PROCESS_BYTES, _LEAST_CACHE_BYTES)


def weights_bytes(folder: str, *, dtype: torch.dtype) -> int:
    """Return the bytes of the weights in a folder in a dtype, by the shapes in their files."""
    numbers = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            numbers += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118  # no mapping
    return numbers * int(dtype.itemsize)


def _has_compiler() -> bool:
    """True if the machine has a compiler for PyTorch. Without one, vLLM runs at about two thirds of the speed on a
    CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


@contextlib.contextmanager
def _own_thread_setter() -> Iterator[None]:
    """Keep `torch.set_num_threads`, which vLLM replaces on CPUs by a function that does nothing."""
    before = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = before


def _loaded_bytes(worker: Any) -> int:
    """Return the device memory of the weights, where vLLM measures it; its CPU build does not."""
    return int(getattr(worker.model_runner, "model_memory_usage", 0) or 0)


def _cache_bytes(worker: Any) -> int:
    """Return the size of the worker's cache; layers may share a tensor."""
    parts = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in _tensors(worker)}
    return sum(parts.values())


def _tensors(worker: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in worker.model_runner.kv_caches:
        found += part if isinstance(part, list | tuple) else [part]
    return found

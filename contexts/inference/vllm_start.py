"""Start vLLM with a model and its adapters in this process, and measure its memory.

vLLM reserves memory for LoRA matrices at its start, so Stoker reads the adapters' files before. If an adapter is
damaged, only requests for this adapter fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import math
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import vllm
from safetensors import safe_open
from vllm import EngineArgs
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from stoker.contexts.adapter_files import GROUPS, AdapterFiles, read_adapter_files, read_base_shapes
from stoker.contexts.engine_settings import EngineSettings, check_vllm_arguments
from stoker.contexts.inference.options import OptionRefused
from stoker.contexts.inference.peft_adapters import Adapter, find_adapter_folder
from stoker.contexts.inference.static import LEAST_CACHE_BYTES, PROCESS_BYTES, default_cache_bytes
from stoker.contexts.model_source import longest_input
from stoker.contexts.prompts import Ids
from stoker.errors import StokerError
from stoker.units import show_bytes

log = logging.getLogger(__name__)

_DEFAULT_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run vLLM in this process, so that Stoker's thread decides when a step runs
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_MAX_REQUESTS = 256  # maximum number of concurrent requests, as in `vllm.LLM` on a CPU and on most GPUs
_UNDECLARED_FRACTION = 0.9
_PART_BYTES = 1_000_000_000
"""Bytes for libraries and code in each process of a model that is split over several processes."""


class VLLMStart:
    """A started vLLM engine and its memory. The constructor raises StokerError. `parts`: number of devices (the first
    is `device`) over which vLLM splits each layer.
    """

    def __init__(
        self, folder: str, *, dtype: str = "auto", device: str = "cpu", parts: int = 1, device_memory_bytes: int = 0,
        why: str = "", settings: EngineSettings, adapters: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.device_memory_bytes = device_memory_bytes
        self.why = why
        self.on_gpu = not device.startswith("cpu")
        check_vllm_arguments(
            settings.vllm, [field.name for field in dataclasses.fields(EngineArgs)], version=vllm.__version__
        )
        settings.max_length(longest_input(folder, writes=True))
        self.rows = int(settings.vllm.get("max_num_seqs", _MAX_REQUESTS))
        for name, value in _DEFAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.adapters = VLLMLoraAdapters(adapters or {}, base=folder, on_gpu=self.on_gpu)
        arguments: dict[str, Any] = {}
        if self.on_gpu:
            arguments["gpu_memory_utilization"] = self._gpu_memory_fraction()
        else:
            weights = self._weights_bytes(folder, dtype=getattr(torch, dtype, torch.float32))
            compilers = shutil.which(os.environ.get("CXX") or "g++"), shutil.which("clang++")
            arguments |= {
                "kv_cache_memory_bytes": self._cpu_cache_bytes(weights, parts=parts),
                "enforce_eager": not any(compilers),
            }
        if parts > 1:  # each part of the model has its own process
            arguments |= {"tensor_parallel_size": parts, "distributed_executor_backend": "mp"}
            if not self.on_gpu:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_cores_of_parts(parts))
        set_num_threads = torch.set_num_threads  # vLLM replaces this PyTorch function, so restore it afterwards
        try:
            self.llm: Any = LLMEngine.from_engine_args(
                EngineArgs(**{
                    "model": folder, "dtype": dtype, "seed": 0, "disable_log_stats": True, "max_num_seqs": self.rows,
                    "max_model_len": settings.max_model_len or -1, "max_logprobs": -1, "enable_prefix_caching": True,
                    "enable_sleep_mode": self.on_gpu, **arguments, **settings.vllm, **self.adapters.engine_arguments(),
                })
            )  # fmt: skip
        except Exception as error:
            given = "".join(f", {name} = {value!r}" for name, value in settings.vllm.items())
            raise StokerError(f"vLLM cannot start with {folder} on {device}{given}: {error}") from error
        finally:
            torch.set_num_threads = set_num_threads
        if parts > 1:
            self.llm.engine_core.engine_core.model_executor.register_failure_callback(_kill_this_process)
        config = self.llm.vllm_config
        self.dtype: torch.dtype = config.model_config.dtype
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.longest = int(config.model_config.max_model_len)
        """Maximum tokens of one request: the model's limit, or less if the cache is small."""
        of_model = getattr(config.model_config.hf_text_config, "max_position_embeddings", 0)
        self.model_longest = int(settings.max_model_len or of_model or 0)
        self.end_tokens: int | list[int] | None = config.model_config.try_get_generation_config().get("eos_token_id")
        self.cache_tokens = int(config.cache_config.num_gpu_blocks) * int(config.cache_config.block_size)
        self.weights_bytes = (
            int(self.llm.collective_rpc(_worker_weights_bytes)[0])
            or self._weights_bytes(folder, dtype=self.dtype) // parts
        )
        """Bytes of weights on each device (one part of the model)."""
        self.cache_bytes = int(self.llm.collective_rpc(_worker_cache_bytes)[0])
        log.info(
            "vLLM on %s: weights %s, cache %s (%d tokens)",
            device, show_bytes(self.weights_bytes), show_bytes(self.cache_bytes), self.cache_tokens,
        )  # fmt: skip

    def free_device_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.on_gpu else 0

    def shut_down(self) -> None:
        with contextlib.suppress(Exception):  # the engine is discarded, so its exceptions are irrelevant
            self.llm.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _gpu_memory_fraction(self) -> float:
        free, total = torch.cuda.mem_get_info(self.device)
        wanted = self.device_memory_bytes or int(_UNDECLARED_FRACTION * free)
        if wanted > free:
            raise StokerError(f"vLLM needs {show_bytes(wanted)} of {self.device}, and {show_bytes(free)} are free")
        return float(wanted / total)

    def _weights_bytes(self, folder: str, *, dtype: torch.dtype) -> int:
        return sum_weights_bytes(folder, dtype=dtype) + self.adapters.reserved_bytes(dtype=dtype)

    def _cpu_cache_bytes(self, weights: int, *, parts: int) -> int:
        """Return the cache bytes of each part of the model. `weights`: bytes of all parts."""
        if not self.device_memory_bytes:
            return default_cache_bytes(torch.device("cpu"), weights_bytes=0) // parts
        processes = PROCESS_BYTES if parts == 1 else (parts + 1) * _PART_BYTES
        return max((self.device_memory_bytes - weights - processes) // parts, LEAST_CACHE_BYTES)


def _cores_of_parts(parts: int) -> list[str]:
    mine = sorted(os.sched_getaffinity(0))
    size = max(1, len(mine) // parts)
    starts = [part * size % len(mine) for part in range(parts)]
    return [",".join(map(str, mine[start : start + size])) for start in starts]


def _kill_this_process() -> None:
    log.error("a process with a part of the model has died, and vLLM cannot restart it; the library ends")
    os.kill(os.getpid(), signal.SIGKILL)


def sum_weights_bytes(folder: str, *, dtype: torch.dtype) -> int:
    numbers = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            numbers += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118  # no mapping
    return numbers * int(dtype.itemsize)


def _worker_weights_bytes(worker: Any) -> int:
    return int(getattr(worker.model_runner, "model_memory_usage", 0) or 0)


def _worker_cache_bytes(worker: Any) -> int:
    sizes: dict[int, int] = {}
    for part in worker.model_runner.kv_caches:
        for tensor in part if isinstance(part, list | tuple) else [part]:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


# ---- PEFT adapters: LoRA requests, and soft prompts as embeddings before the prompt's tokens

_MAX_LORAS_PER_STEP = 8  # maximum LoRA adapters in a step on a GPU, which reserves memory for each


class VLLMAdapter(NamedTuple):
    """An adapter that vLLM serves. `vectors`: soft prompt, `[tokens, width]`."""

    lora: LoRARequest | None = None
    vectors: torch.Tensor | None = None

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.vectors is None else len(self.vectors)

    def build_prompt(self, ids: Ids) -> dict[str, Any]:
        if self.vectors is None:
            return {"prompt_token_ids": list(ids)}
        virtual = self.virtual_tokens
        others = torch.zeros(len(ids), self.vectors.shape[1], dtype=self.vectors.dtype)
        return {
            # vLLM's repetition penalty counts the ids of virtual tokens, so give them the id of a prompt token.
            "prompt_token_ids": [ids[0]] * virtual + list(ids),
            "prompt_is_token_ids": [False] * virtual + [True] * len(ids),
            "prompt_embeds": torch.cat([self.vectors, others]),
        }


NO_ADAPTER = VLLMAdapter()


class VLLMLoraAdapters:
    """The adapters of a vLLM engine, by name. `base`: folder of the base model."""

    def __init__(self, folders: Mapping[str, str], *, base: str, on_gpu: bool) -> None:
        self._folders = folders
        self._base = read_base_shapes(base)
        self._ready: dict[str, VLLMAdapter] = {}
        self._numbers = itertools.count(1)
        files: list[AdapterFiles] = []
        for folder in folders.values():
            with contextlib.suppress(ValueError):  # a damaged adapter must fail only the requests that use it
                found = read_adapter_files(folder)
                found.check_fits_base_model(self._base)
                files.append(found)
        loras = [each for each in files if each.low_rank]
        self._lora_count = len(loras)
        rank, ranks = max((each.max_rank for each in loras), default=0), sorted(get_args(MaxLoRARanks))
        self._rank = int(next((allowed for allowed in ranks if rank <= allowed), ranks[-1]))
        self._projections = {part.projection for each in loras for part in each.low_rank}
        # On a CPU, vLLM 0.32 wrongly applies the LoRA of the last slot to base-model requests, so the last slot stays
        # empty (pull request 48421 of vLLM).
        self._lora_places = min(self._lora_count, _MAX_LORAS_PER_STEP) if on_gpu else self._lora_count + 1
        self._has_soft_prompt = any(each.virtual_tokens for each in files)

    def engine_arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"enable_prompt_embeds": True} if self._has_soft_prompt else {}
        if self._lora_count:
            found |= {
                "enable_lora": True, "max_lora_rank": self._rank, "max_loras": self._lora_places,
                # Keep all adapters in memory, so that no step reads files.
                "max_cpu_loras": max(self._lora_count, self._lora_places),
                # Otherwise vLLM would also adapt the embeddings, which fails together with soft prompts.
                "lora_target_modules": sorted(self._projections),
            }  # fmt: skip
        return found

    def reserved_bytes(self, *, dtype: torch.dtype) -> int:
        if not self._lora_count or self._base is None:
            return 0
        together = [group for group in GROUPS.values() if not self._projections.isdisjoint(group)]
        numbers = self._base.layers * sum(sum(self._base.projections[name]) for group in together for name in group)
        return int(numbers * self._rank * self._lora_places * dtype.itemsize)

    def get(self, name: str, *, llm: Any, dtype: torch.dtype) -> VLLMAdapter:
        """Return an adapter (empty name: the base model). Raises OptionRefused if the adapter is unknown or
        unsupported.
        """
        if not name:
            return NO_ADAPTER
        folder = find_adapter_folder(self._folders, name)
        if name not in self._ready:
            try:
                checked, lora = Adapter(folder, self._base, dtype=dtype), None
                if checked.vectors is None:
                    lora = LoRARequest(name, next(self._numbers), folder)
                    llm.add_lora(lora)
            except Exception as error:  # vLLM raises many kinds of exceptions
                raise OptionRefused("adapter", f"the adapter {name} cannot be served: {error}") from None
            self._ready[name] = VLLMAdapter(lora, checked.vectors)
        return self._ready[name]

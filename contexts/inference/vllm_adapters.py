"""PEFT adapters in vLLM: LoRA requests, and soft prompts as embeddings before the prompt's tokens.

vLLM reserves memory for LoRA matrices when it starts, so the adapters' files are read then. If an adapter is damaged,
only its own requests fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from stoker.contexts.adapter_files import GROUPS, AdapterFiles, BaseShapes, base_shapes, read_adapter_files
from stoker.contexts.inference.options import OptionRefused
from stoker.contexts.inference.peft_adapters import Adapter, find_adapter_folder
from stoker.contexts.prompts import Ids

_AT_ONCE = 8  # LoRA adapters in a step on a GPU, because each needs reserved memory


class VLLMAdapter(NamedTuple):
    """An adapter that vLLM serves. `vectors`: soft prompt, `[tokens, width]`."""

    lora: LoRARequest | None = None
    vectors: torch.Tensor | None = None

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.vectors is None else len(self.vectors)

    def prompt(self, ids: Ids) -> dict[str, Any]:
        if self.vectors is None:
            return {"prompt_token_ids": list(ids)}
        virtual = self.virtual_tokens
        others = torch.zeros(len(ids), self.vectors.shape[1], dtype=self.vectors.dtype)
        return {
            # In a repetition penalty, vLLM counts the ids of virtual tokens. Therefore these ids repeat a prompt token.
            "prompt_token_ids": [ids[0]] * virtual + list(ids),
            "prompt_is_token_ids": [False] * virtual + [True] * len(ids),
            "prompt_embeds": torch.cat([self.vectors, others]),
        }


NO_ADAPTER = VLLMAdapter()


class VLLMAdapters:
    """The adapters of a vLLM engine, by name. `base`: folder of the base model."""

    def __init__(self, folders: Mapping[str, str], *, base: str, on_gpu: bool) -> None:
        self._folders = folders
        self._base = base_shapes(base)
        self._ready: dict[str, VLLMAdapter] = {}
        self._numbers = itertools.count(1)
        files = [
            found for folder in folders.values() if (found := _read_fitting_adapter(folder, self._base)) is not None
        ]
        loras = [each for each in files if each.low_rank]
        self._count = len(loras)
        self._rank = _supported_lora_rank(max((each.rank for each in loras), default=0))
        self._projections = {part.projection for each in loras for part in each.low_rank}
        # On a CPU, vLLM 0.32 applies the LoRA in the last slot to requests of the base model. Therefore the last slot
        # stays empty (pull request 48421 of vLLM).
        self._places = min(self._count, _AT_ONCE) if on_gpu else self._count + 1
        self._has_soft_prompt = any(each.virtual_tokens for each in files)

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"enable_prompt_embeds": True} if self._has_soft_prompt else {}
        if self._count:
            found |= {
                "enable_lora": True, "max_lora_rank": self._rank, "max_loras": self._places,
                "max_cpu_loras": max(self._count, self._places),  # all adapters, so that no step reads files
                # Otherwise vLLM would also adapt the embeddings, which fails together with soft prompts.
                "lora_target_modules": sorted(self._projections),
            }  # fmt: skip
        return found

    def reserved_bytes(self, *, dtype: torch.dtype) -> int:
        if not self._count or self._base is None:
            return 0
        together = [group for group in GROUPS.values() if not self._projections.isdisjoint(group)]
        numbers = self._base.layers * sum(sum(self._base.projections[name]) for group in together for name in group)
        return int(numbers * self._rank * self._places * dtype.itemsize)

    def get(self, name: str, *, llm: Any, dtype: torch.dtype) -> VLLMAdapter:
        """Return an adapter (empty name: the base model). Raises OptionRefused if it is unknown or unsupported."""
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


def _read_fitting_adapter(folder: str, base: BaseShapes | None) -> AdapterFiles | None:
    try:
        files = read_adapter_files(folder)
        files.check_fits_base_model(base)
    except ValueError:
        return None
    return files


def _supported_lora_rank(rank: int) -> int:
    """Return the smallest LoRA rank of vLLM that is at least `rank`, or vLLM's largest rank."""
    ranks = sorted(get_args(MaxLoRARanks))
    return int(next((allowed for allowed in ranks if rank <= allowed), ranks[-1]))

"""PEFT adapters in vLLM: a LoRA by vLLM's own requests, a soft prompt as embeddings before the prompt's tokens.

vLLM reserves room for LoRA matrices when it starts, so the adapters' files are read then. A damaged adapter fails
alone, at its first use.
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
from stoker.contexts.inference.peft_adapters import Adapter, known_adapter
from stoker.contexts.prompts import Ids

_AT_ONCE = 8
"""Most LoRA adapters in a step on a GPU: vLLM reserves memory for each."""


class VLLMAdapter(NamedTuple):
    """An adapter that vLLM serves. `vectors`: of a soft prompt, `[tokens, width]`."""

    lora: LoRARequest | None = None
    vectors: torch.Tensor | None = None

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.vectors is None else len(self.vectors)

    def prompt(self, ids: Ids) -> dict[str, Any]:
        """Return vLLM's input for a prompt."""
        if self.vectors is None:
            return {"prompt_token_ids": list(ids)}
        virtual = self.virtual_tokens
        others = torch.zeros(len(ids), self.vectors.shape[1], dtype=self.vectors.dtype)
        return {
            # vLLM counts the ids of virtual tokens in a repetition penalty, so these repeat one of the prompt.
            "prompt_token_ids": [ids[0]] * virtual + list(ids),
            "prompt_is_token_ids": [False] * virtual + [True] * len(ids),
            "prompt_embeds": torch.cat([self.vectors, others]),
        }


NO_ADAPTER = VLLMAdapter()


class VLLMAdapters:
    def __init__(self, folders: Mapping[str, str], *, base: str, on_gpu: bool) -> None:
        """Read the files of the adapters. `base`: the folder of the base's files."""
        self._folders = folders
        self._base = base_shapes(base)
        self._ready: dict[str, VLLMAdapter] = {}
        self._numbers = itertools.count(1)
        files = [found for folder in folders.values() if (found := _readable(folder, self._base)) is not None]
        loras = [each for each in files if each.low_rank]
        self._count = len(loras)
        self._rank = _allowed_rank(max((each.rank for each in loras), default=0))
        self._projections = {part.projection for each in loras for part in each.low_rank}
        # On a CPU, vLLM 0.32 adds the last place's LoRA to requests of the base; this place stays empty (vLLM's pull
        # request 48421).
        self._places = min(self._count, _AT_ONCE) if on_gpu else self._count + 1
        self._has_soft_prompt = any(each.virtual_tokens for each in files)

    def arguments(self) -> dict[str, Any]:
        """Return the engine arguments that vLLM needs for the adapters."""
        found: dict[str, Any] = {"enable_prompt_embeds": True} if self._has_soft_prompt else {}
        if self._count:
            found |= {
                "enable_lora": True, "max_lora_rank": self._rank, "max_loras": self._places,
                "max_cpu_loras": max(self._count, self._places),  # all, so that no step reads files
                # Without this, vLLM would also adapt the embeddings, which fails next to soft prompts.
                "lora_target_modules": sorted(self._projections),
            }  # fmt: skip
        return found

    def reserved_bytes(self, *, dtype: torch.dtype) -> int:
        """Return the bytes that vLLM reserves for LoRA matrices."""
        if not self._count or self._base is None:
            return 0
        together = [group for group in GROUPS.values() if not self._projections.isdisjoint(group)]
        numbers = self._base.layers * sum(sum(self._base.projections[name]) for group in together for name in group)
        return int(numbers * self._rank * self._places * dtype.itemsize)

    def get(self, name: str, *, llm: Any, dtype: torch.dtype) -> VLLMAdapter:
        """Return an adapter. Raises OptionRefused if it is unknown or cannot be served.

        Args:
            name: The adapter's name; empty: the base.
            llm: vLLM, which loads a LoRA at its first use.
            dtype: Of the base.
        """
        if not name:
            return NO_ADAPTER
        folder = known_adapter(self._folders, name)
        if name not in self._ready:
            try:
                self._ready[name] = self._load(name, folder, llm=llm, dtype=dtype)
            except Exception as error:  # vLLM raises errors of many kinds
                raise OptionRefused("adapter", f"the adapter {name} cannot be served: {error}") from None
        return self._ready[name]

    def _load(self, name: str, folder: str, *, llm: Any, dtype: torch.dtype) -> VLLMAdapter:
        checked = Adapter(folder, self._base, dtype=dtype)
        if checked.vectors is not None:
            return VLLMAdapter(vectors=checked.vectors)
        lora = LoRARequest(name, next(self._numbers), folder)
        llm.add_lora(lora)
        return VLLMAdapter(lora)


def _readable(folder: str, base: BaseShapes | None) -> AdapterFiles | None:
    try:
        files = read_adapter_files(folder)
        files.check_fits(base)
    except ValueError:
        return None
    return files


def _allowed_rank(rank: int) -> int:
    """Return the least rank that vLLM can be started with for this rank, or its largest."""
    ranks = sorted(get_args(MaxLoRARanks))
    return int(next((allowed for allowed in ranks if rank <= allowed), ranks[-1]))

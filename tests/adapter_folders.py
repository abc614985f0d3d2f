"""Write LoRA and soft prompt adapters, with or without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_lora(folder: Path, base: Any, *, seed: int, modules: list[str], rank: int = 4, **options: Any) -> str:
    """Write a random LoRA of a model with PEFT."""
    import peft
    import torch

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=16, task_type="CAUSAL_LM", target_modules=modules, **options)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.normal_(0, 0.3)
    model.save_pretrained(str(folder))
    return str(folder)


def write_tiny_lora(
    folder: Path, *, seed: int, width: int = 64, layers: int = 6, rank: int = 4, scale: float = 0.2
) -> None:
    """Write a random LoRA of `tiny_model` on q_proj and down_proj. `scale`: standard deviation of `lora_B`."""
    chance, weights = np.random.default_rng(seed), dict[str, np.ndarray]()
    for layer in range(layers):
        for name, takes, gives in (("self_attn.q_proj", width, 64), ("mlp.down_proj", 64, width)):
            module = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{module}.lora_A.weight"] = chance.normal(0, 0.2, (rank, takes)).astype(np.float32)
            weights[f"{module}.lora_B.weight"] = (scale * chance.normal(size=(gives, rank))).astype(np.float32)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8}
    _write(folder, {**config, "target_modules": ["q_proj", "down_proj"]}, weights)


def write_tiny_soft_prompt(folder: Path, *, seed: int, width: int = 64, tokens: int = 5) -> None:
    weights = {"prompt_embeddings": np.random.default_rng(seed).normal(0, 1, (tokens, width)).astype(np.float32)}
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": tokens}
    _write(folder, {**config, "token_dim": width, "num_transformer_submodules": 1}, weights)


def _write(folder: Path, config: dict[str, object], weights: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(config))

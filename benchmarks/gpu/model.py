"""Make language models with random weights in usual shapes, and a byte tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int = 49152

    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 2


SMOLLM2 = Shape(layers=24, hidden=2048, inner=8192, heads=32, kv_heads=32)
TINYLLAMA = Shape(layers=22, hidden=2048, inner=5632, heads=32, kv_heads=4, vocabulary=32000)
"""The shape of TinyLlama-1.1B, with tied embeddings."""
LLAMA_3B = Shape(layers=28, hidden=3072, inner=8192, heads=24, kv_heads=8)
"""The shape of Llama-3.2-3B, with a smaller vocabulary."""
TINY = Shape(layers=2, hidden=256, inner=1024, heads=4, kv_heads=4, vocabulary=512)


def tokenizer(vocabulary: int) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġ{number}" for number in range(vocabulary - len(letters)))]
    found = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def build(folder: Path, shape: Shape, *, device: str) -> int:
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, num_hidden_layers=shape.layers,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0.0, 0.02) if weights.dim() > 1 else weights.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizer(shape.vocabulary).save_pretrained(folder)
    return weights_bytes(folder)


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def pickle_of(folder: Path) -> Path:
    from safetensors.torch import load_file

    pickled = folder.with_name(f"{folder.name}-pickled")
    if (pickled / "config.json").exists():
        return pickled
    pickled.mkdir(parents=True, exist_ok=True)
    weights = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    torch.save(weights, pickled / "pytorch_model.bin")
    for file in folder.glob("*.json"):
        os.link(file, pickled / file.name)
    return pickled

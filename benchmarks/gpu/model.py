"""A language model with random weights, of about a wanted size, and a tokenizer of bytes: made where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256


def tokenizer() -> Any:
    """Bytes; no token ends a text, so that as many are generated as were asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def config(size_bytes: int) -> LlamaConfig:
    """Layers of a usual width until the size is reached, at two bytes a weight."""
    hidden, inner = (2048, 8192) if size_bytes >= 200e6 else (256, 1024)
    layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * inner)
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, num_hidden_layers=max(2, round(size_bytes / layer_bytes)),
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def pickled_of(folder: Path) -> Path:
    """Where the pickled copy of a model lies."""
    return folder.with_name(f"{folder.name}-pickled")


def build(folder: Path, *, size_bytes: int, device: str) -> int:
    """Write one into `folder`; returns the bytes of its weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(size_bytes)).to(torch.bfloat16)
    model.to_empty(device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0.0, 0.02) if weights.dim() > 1 else weights.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    # The same once more as a pickle, which takes long to load: what snapshots are for.
    pickled = pickled_of(folder)
    pickled.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(pickled)
    tokenizer().save_pretrained(pickled)
    torch.save({name: weights.cpu() for name, weights in model.state_dict().items()}, pickled / "pytorch_model.bin")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.contexts import ambient, encoder
from stoker.contexts.loading import load_context

WORDS = ("the", "claim", "is", "true", "false", "paris", "lies", "in", "france", "and", "water", "boils")


def write_tiny_encoder(folder: Path, *, head: bool = False, **more: Any) -> Path:
    """Write a reproducible random BERT with words as tokens, 40 input tokens and 32 output numbers."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40, initializer_range=0.5, **more,
    )  # fmt: skip
    (BertForSequenceClassification if head else BertModel)(config).save_pretrained(folder)
    return folder


def load_encoder(folder: Path, **options: Any) -> Any:
    return load_recipe(encoder(folder, **options))


def load_recipe(recipe: Any, *, device: str = "cpu") -> Any:
    try:
        ambient.enter_library(device=device)
        return load_context(recipe, {ref.name: ref.source for ref in recipe.objects})
    finally:
        ambient.leave_library()

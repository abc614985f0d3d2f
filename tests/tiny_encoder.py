"""An encoder as small as one can be, for tests that embed."""

from __future__ import annotations

from pathlib import Path

WORDS = ("paris", "lies", "in", "france", "and", "water", "boils")


def write_tiny_encoder(folder: Path) -> None:
    """A BERT of random weights, always the same, whose tokens are words. It reads 40 tokens and gives 32 numbers."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)

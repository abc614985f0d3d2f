from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SMALL = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def random_model(config: Any, *, spread: float = 0.3) -> Any:
    """Return a reproducible model with weights large enough to reveal a wrong mask or position."""
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.data.normal_(0, spread)
    return model


class Letters:
    bos_token, eos_token_id, chat_template = None, 1, None

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, ids))

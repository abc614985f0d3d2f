"""The continuous engine over a small random model, with decode steps captured at first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from engine_contract import EngineDriver, Ids

from stoker.contexts.forward import ModelRunner
from stoker.contexts.inference.adapter import ModelTexts
from stoker.contexts.inference.static import build_inference_engine

SMALL = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip


class GraphDriver(EngineDriver):
    """`captures`: True to capture steps. `uses`: uses of a shape before its capture. `model`: changes of the model
    configuration.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Ids],
        backend: Any,
        captures: bool = True,
        cache_bytes: int,
        uses: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        **model: int,
    ) -> None:
        torch.manual_seed(7)
        made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SMALL, **model}))
        for weights in made.parameters():
            if weights.dim() > 1:  # large enough to reveal a wrong mask or position
                weights.data.normal_(0, 1.7 * weights.shape[-1] ** -0.5)
        self.model = made.eval().requires_grad_(False).to(device, getattr(torch, dtype))
        self.backend = backend
        texts = ModelTexts(
            decode=lambda ids: "".join(map(chr, ids)),
            ends=frozenset({1}),
            longest=4096,
            vocabulary=made.config.vocab_size,
        )
        runner = ModelRunner(self.model, limit_bytes=10_000_000)
        engine: Any
        engine = build_inference_engine(
            runner, texts, engine="continuous", cache_bytes=cache_bytes, graphs=captures, backend=lambda _: backend
        )
        self.ahead = engine._ahead
        """The graph backend; None if steps run eagerly."""
        if self.ahead is not None:
            self.ahead.graphs._uses_before = uses
        self.at_load = getattr(backend, "captures", 0)
        super().__init__(engine, prompts=prompts, cache_bytes=cache_bytes)

    def own_tokens(self, prompt: Ids, *, most: int) -> list[int]:
        with torch.inference_mode():
            asked = torch.tensor([prompt], device=self.model.device)
            out = self.model.generate(asked, max_new_tokens=most, do_sample=False, pad_token_id=2)
        return [int(token) for token in out[0, len(prompt) :]]

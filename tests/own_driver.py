"""Stoker's engines over small random models. PyTorch is imported on first use, because every test worker reads this
file.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine_contract import EngineDriver, Ids
from random_models import random_model

SMALL = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip
CACHE_BYTES = 1_500_000
CHANCE = random.Random(11)
PROMPTS = [tuple(CHANCE.randrange(40, 115) for _ in range(length)) for length in (9, 3, 41, 1, 130, 9)]


def small_llama(*, spread: float = 0.3, **changes: Any) -> Any:
    import transformers

    return random_model(transformers.LlamaConfig(**{**SMALL, **changes}), spread=spread)


class OwnDriver(EngineDriver):
    """An engine over a Transformers model. `like`: the model whose tokens are expected. `ends`: end tokens."""

    def __init__(
        self, model: Any, *, engine: str = "continuous", cache_bytes: int = CACHE_BYTES, like: Any = None,
        prompts: Sequence[Ids] = PROMPTS, ends: Sequence[int] = (1,), **options: Any,
    ) -> None:  # fmt: skip
        from stoker.contexts.forward import ModelRunner
        from stoker.contexts.inference.adapter import ModelTexts
        from stoker.contexts.inference.static import build_inference_engine

        self.model = model if like is None else like
        texts = ModelTexts(
            decode=lambda ids: "".join(map(chr, ids)), ends=frozenset(ends), longest=4096,
            vocabulary=model.config.vocab_size,
        )  # fmt: skip
        runner = ModelRunner(model, limit_bytes=10_000_000)
        built: Any = build_inference_engine(runner, texts, engine=engine, cache_bytes=cache_bytes, **options)
        super().__init__(built, prompts=prompts, cache_bytes=cache_bytes if built.name == "continuous" else 0)

    def own_tokens(self, prompt: Ids, *, most: int) -> list[int]:
        return generated(self.model, prompt, most=most)


def generated(model: Any, prompt: Ids, *, most: int) -> list[int]:
    """Return the tokens that `generate` of a Transformers model writes."""
    import torch

    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, pad_token_id=2
        )
    return [int(token) for token in out[0, len(prompt) :]]


class GraphDriver(OwnDriver):
    """The continuous engine with decode steps captured at first use. `captures`: True to capture steps. `uses`: uses of
    a shape before its capture. `model`: changes of the model configuration.
    """

    def __init__(
        self, backend: Any, *, captures: bool = True, uses: int = 0, device: str = "cpu", dtype: str = "float32",
        cache_bytes: int, prompts: Sequence[Ids] = PROMPTS, **model: int,
    ) -> None:  # fmt: skip
        import torch

        width = model.get("hidden_size", SMALL["hidden_size"])
        made = small_llama(spread=1.7 * width**-0.5, **{"num_hidden_layers": 2, **model})
        self.backend = backend
        super().__init__(
            made.to(device, getattr(torch, dtype)), cache_bytes=cache_bytes, prompts=prompts, graphs=captures,
            backend=lambda _: backend,
        )  # fmt: skip
        self.ahead = self.engine._ahead
        """The graph backend; None if steps run eagerly."""
        if self.ahead is not None:
            self.ahead.graphs._uses_before = uses
        self.at_load = getattr(backend, "captures", 0)

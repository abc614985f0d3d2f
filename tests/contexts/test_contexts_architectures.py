from __future__ import annotations

import math
from typing import Any

import pytest
from lazily import lazily, without_gradients
from random_models import SMALL, Letters, random_model

torch, transformers, models = lazily("torch", "transformers", "stoker.contexts.language_model")

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**SMALL, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
                                            eos_token_id=1),
    "opt": lambda: transformers.OPTConfig(vocab_size=128, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
                                          num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=256),
    "bloom": lambda: transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4),
    "sliding": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=6,
                                                    layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "recurrent": lambda: transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4),
}  # fmt: skip


PROMPTS = ["one template: abc", "one template: xyz and more", "one template: q", "another", "one template: abd", "o"]
LABELS = [" yes", " no", "!", " yes yes"]


@without_gradients
def bare(model: Any, prompt: str, label: str) -> float:
    ids = torch.tensor([[ord(letter) for letter in prompt + label]])
    steps = torch.log_softmax(model(ids, use_cache=False).logits[0].float(), dim=-1)
    return sum(float(steps[at - 1, ids[0, at]]) for at in range(len(prompt), ids.shape[1]))


@without_gradients
def bare_text(model: Any, prompt: str, most: int) -> str:
    ids = [ord(letter) for letter in prompt]
    while len(ids) < len(prompt) + most:
        token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == 1:
            break
        ids.append(token)
    return "".join(map(chr, ids[len(prompt) :]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_texts_match_transformers(name: str) -> None:
    """Only models with plain attention share prompt prefixes."""
    model = random_model(CONFIGS[name]())
    engine = models.CausalLM(model, Letters())
    expected = [[bare(model, prompt, label) for label in LABELS] for prompt in PROMPTS]
    for batch_size in (1, 4):
        found = engine.label_scores(PROMPTS, LABELS, batch_size=batch_size)
        for f, e in zip(found, expected, strict=True):
            assert all(math.isclose(a, b, abs_tol=2e-3) for a, b in zip(f, e, strict=True)), (batch_size, f, e)
    assert (engine.reused_tokens > 0) == (name not in ("sliding", "gemma3", "recurrent"))
    texts = [bare_text(model, prompt, 5) for prompt in PROMPTS]
    for batch_size in (1, 3):
        assert engine.generate(PROMPTS, max_new_tokens=5, batch_size=batch_size) == texts

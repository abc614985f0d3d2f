from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from lazily import lazily, without_gradients
from random_models import SMALL, Letters, random_model

torch, transformers, models, reading = lazily(
    "torch", "transformers", "stoker.contexts.language_model", "stoker.contexts.reading"
)

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

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_texts_match_transformers(name: str) -> None:
    """Only models with plain attention share prompt prefixes."""
    model = random_model(CONFIGS[name]())
    own = models.CausalLM(model, Letters())
    expected = [[bare(model, prompt, label) for label in LABELS] for prompt in PROMPTS]
    for batch_size in (1, 4):
        found = own.label_scores(PROMPTS, LABELS, batch_size=batch_size)
        for f, e in zip(found, expected, strict=True):
            assert all(math.isclose(a, b, abs_tol=2e-3) for a, b in zip(f, e, strict=True)), (batch_size, f, e)
    assert (own.reused_tokens > 0) == (name not in ("sliding", "gemma3", "recurrent"))
    texts = [bare_text(model, prompt, 5) for prompt in PROMPTS]
    for batch_size in (1, 3):
        assert own.generate(PROMPTS, max_new_tokens=5, batch_size=batch_size) == texts


# ---- losses and hidden states of prompts

TEXTS = ["a prompt", "b", "a prompt that is much longer than the others", "another"]
WRITTEN = [("hot is to ", "cold"), ("", "yes"), ("up:", "d"), ("in a longer question, ", "no")]


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def tokens(samples: Sequence[tuple[str, str]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(ids(one), ids(target)) for one, target in samples]


SAMPLES = tokens(WRITTEN)


def engine(name: str, **changes: int) -> models.CausalLM:
    config = CONFIGS[name]()
    config.update(changes)
    return models.CausalLM(random_model(config), Letters())


@without_gradients
def bare_loss(model: Any, prompt: str, sample: tuple[str, str]) -> float:
    whole = ids(prompt + "".join(sample))
    logits = model(torch.tensor([whole]), use_cache=False).logits[0].float()
    first = len(whole) - len(sample[1])
    return float(torch.nn.functional.cross_entropy(logits[first - 1 : -1], torch.tensor(whole[first:])))


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding"])
def test_loss_counts_only_target_tokens(name: str) -> None:
    model = engine(name)
    expected = [np.mean([bare_loss(model.model, text[:20], sample) for sample in WRITTEN]) for text in TEXTS]
    for batch_size in (1, 3):
        found = reading.compute_mean_losses(model, [ids(text[:20]) for text in TEXTS], SAMPLES, batch_size=batch_size)
        assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding"])
def test_mean_hidden_states_are_returned(name: str) -> None:
    model = engine(name)
    found = reading.compute_mean_hidden_states(model, TEXTS, most_tokens=20)
    assert found.shape == (4, 32)
    with torch.inference_mode():
        for text, one in zip(TEXTS, found, strict=True):
            states = model.model.base_model(torch.tensor([ids(text[:20])]), use_cache=False).last_hidden_state[0]
            assert np.allclose(one, states.mean(dim=0).numpy(), atol=2e-3)
    long = reading.compute_mean_hidden_states(model, [TEXTS[2] * 1_000], most_tokens=20)
    assert np.allclose(long, found[2], atol=2e-3), "a text is truncated before it exceeds the context window"


def test_empty_or_too_long_input_raises_an_error() -> None:
    model = engine("llama", max_position_embeddings=64)
    assert reading.compute_mean_losses(model, [], SAMPLES) == []
    assert reading.compute_mean_hidden_states(model, [], most_tokens=8).shape == (0, 0)
    for prompts, samples, says in (
        (["", "b"], SAMPLES, "prompt 0 is empty"),
        (["a"], [], "at least one sample"),
        (["a"], tokens([("in", "out"), ("in", "")]), "target of sample 1 is empty"),
        (["a" * 30], tokens([("in", "out"), ("x" * 30, "y" * 10)]), "sample 1 has 70 tokens with a prompt of 30"),
    ):
        with pytest.raises(ValueError, match=says):
            reading.compute_mean_losses(model, [ids(prompt) for prompt in prompts], samples)
    with pytest.raises(ValueError, match="text 1 is empty"):
        reading.compute_mean_hidden_states(model, ["a", ""], most_tokens=8)
    with pytest.raises(ValueError, match="list of texts"):
        reading.compute_mean_hidden_states(model, "a text", most_tokens=8)

from __future__ import annotations

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
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "sliding": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=6),
}
TEXTS = ["a prompt", "b", "a prompt that is much longer than the others", "another"]
WRITTEN = [("hot is to ", "cold"), ("", "yes"), ("up:", "d"), ("in a longer question, ", "no")]


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def tokens(samples: Sequence[tuple[str, str]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(ids(one), ids(target)) for one, target in samples]


SAMPLES = tokens(WRITTEN)


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(name: str) -> models.CausalLM:
    return models.CausalLM(random_model(CONFIGS[name]()), Letters())


@without_gradients
def bare_loss(model: Any, prompt: str, sample: tuple[str, str]) -> float:
    whole = ids(prompt + "".join(sample))
    logits = model(torch.tensor([whole]), use_cache=False).logits[0].float()
    first = len(whole) - len(sample[1])
    return float(torch.nn.functional.cross_entropy(logits[first - 1 : -1], torch.tensor(whole[first:])))


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_counts_only_target_tokens(name: str) -> None:
    model = engine(name)
    expected = [np.mean([bare_loss(model.model, text[:20], sample) for sample in WRITTEN]) for text in TEXTS]
    for batch_size in (1, 3):
        found = reading.mean_losses(model, [ids(text[:20]) for text in TEXTS], SAMPLES, batch_size=batch_size)
        assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_mean_hidden_states_are_returned(name: str) -> None:
    model, seen = engine(name), []
    found = reading.mean_hidden_states(model, TEXTS, most_tokens=20, seen=seen.append)
    assert found.shape == (4, 32)
    assert seen[-1] == 4
    with torch.inference_mode():
        for text, one in zip(TEXTS, found, strict=True):
            states = model.model.base_model(torch.tensor([ids(text[:20])]), use_cache=False).last_hidden_state[0]
            assert np.allclose(one, states.mean(dim=0).numpy(), atol=2e-3)
    long = reading.mean_hidden_states(model, [TEXTS[2] * 1_000], most_tokens=20)
    assert np.allclose(long, found[2], atol=2e-3), "a text is truncated before it exceeds the context window"


def test_unreadable_input_raises_an_error() -> None:
    model = engine("llama")
    assert reading.mean_losses(model, [], SAMPLES) == []
    assert reading.mean_hidden_states(model, [], most_tokens=8).shape == (0, 0)
    for prompts, samples, says in (
        (["", "b"], SAMPLES, "prompt 0 is empty"),
        (["a"], [], "no samples"),
        (["a"], tokens([("in", "out"), ("in", "")]), "target of sample 1 is empty"),
        (["a" * 30], tokens([("in", "out"), ("x" * 30, "y" * 10)]), "sample 1 has 70 tokens with a prompt of 30"),
    ):
        with pytest.raises(ValueError, match=says):
            reading.mean_losses(model, [ids(prompt) for prompt in prompts], samples)
    with pytest.raises(ValueError, match="text 1 is empty"):
        reading.mean_hidden_states(model, ["a", ""], most_tokens=8)
    with pytest.raises(ValueError, match="list of texts"):
        reading.mean_hidden_states(model, "a text", most_tokens=8)

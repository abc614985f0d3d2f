"""A causal LM of two layers and 32 dimensions with a byte tokenizer, and tuning jobs that take a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.contexts.language_model import CausalLM
from stoker.site import Duration
from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until

END = "<end>"


def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END)


def context(*, kind: str = "llama") -> CausalLM:
    """Return a model with the same weights every time; keep the global random state. The kind `gpt2` counts positions
    differently and has dropout.
    """
    llama = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(llama) if kind == "llama" else GPT2LMHeadModel(gpt2)
    return CausalLM(model.eval().requires_grad_(False), tokenizer(), name="tiny")


def samples(count: int = 40) -> tuple[Sample, ...]:
    """Return inputs of different lengths; the first letter determines the target."""
    return tuple(
        Sample("ab"[number % 2] * (1 + number % 7) + f" {number}", "yes" if number % 2 else "no", f"line {number + 1}")
        for number in range(count)
    )


def job(
    *, iterations: int = 6, metric: Metric = Metric.LOSS, reach: float | None = None, evaluate_every: int = 2,
    initial: str = "say yes or no", **training: Any,
) -> Job:  # fmt: skip
    return Job(
        data=Data("pairs.jsonl", evaluation_samples=8),
        name="tiny",
        prompt=Prompt(initial=initial),
        until=Until(metric=metric, reach=reach, iterations=iterations, evaluate_every=evaluate_every),
        training=Training(**{"batch": 8, "learning_rate": 0.05, "checkpoint_every_s": Duration(0.0), **training}),
    )


def put_into(folder: Path) -> None:
    engine = context()
    engine.model.save_pretrained(folder / "model")
    engine.tokenizer.save_pretrained(folder / "model")
    rows = [{"input": sample.input, "target": sample.target} for sample in samples(60)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))

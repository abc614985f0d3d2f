"""Features and scores of prompts from a causal language model that is loaded: what runs beside the model.

The feature of a prompt (§4.3.1, "activation features") is the mean over its tokens of the model's last hidden state.
The paper says no more than that it is taken from the model that will be tuned. The last layer, since the score is
computed from it alone; the mean, since the last token of a prompt says what its punctuation is; scaled dimensions
(`features.py`), since otherwise a few decide.

Of a long prompt the first 64 tokens count for its feature: a soft prompt that is made from a text takes as many of its
tokens as it has places, some dozens, and the rest of the text never gets to the model. Features belong to the bank and
are the same for every job.

A score is the loss that the job's tuning would begin with. A prompt becomes tokens by tuning's own function
(`encoding.encode_prompt`): repeated or cut to the job's `virtual_tokens`, or without these its first 64. Samples become
tokens as tuning's do, and the end token is part of a target: to a model that has not learned to stop after one word
that token is half of the task. Eq. 1 takes the mean over samples, where the loss of a batch is one over its target
tokens: of targets as long as each other they are the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stoker.chance import Stream
from stoker.errors import ConfigError
from stoker.tuning.bank.build import Reader
from stoker.tuning.bank.lookup import Score
from stoker.tuning.bank.medoids import Array
from stoker.tuning.encoding import MOST_TOKENS, Ids, encode_prompt, encode_samples
from stoker.tuning.job import PLACE, Prompt
from stoker.tuning.samples import Sample

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

TOKENS = MOST_TOKENS
"""Of each prompt, how many tokens are read; for a score, unless the job has `virtual_tokens`."""
SAMPLES = 16
"""Evaluation samples of a score (§4.3.2)."""


def reading_of(*, tokens: int = TOKENS) -> str:
    """How features are read, for the bank's file: one that was read otherwise is another bank."""
    return f"mean last hidden state, first {tokens} tokens"


def reader(model: CausalLM, *, tokens: int = TOKENS) -> Reader:
    """Features of texts from this model, in batches."""
    from stoker.contexts.reading import mean_hidden

    def read(texts: Sequence[str]) -> Array:
        return mean_hidden(model, texts, most_tokens=tokens)

    return read


def scorer(
    model: CausalLM,
    samples: Sequence[tuple[str, str]],
    *,
    virtual_tokens: int = 0,
    tokens: int = TOKENS,
    batch_size: int = 4,
    seen: Callable[[int], None] | None = None,
) -> Score:
    """Equation 1 over these samples (input, target): the mean loss of the targets with their end tokens, prompt and
    input before them.

    Each prompt is repeated or cut to the job's `virtual_tokens`; where these are 0, its first `tokens` count. One that
    tuning would refuse, as it is empty or longer than the model reads, has the loss nan. `batch_size` prompts are
    computed at a time, each once for all samples. `seen` is told how many prompts were scored. The scorer raises
    ValueError for samples that the model cannot read, naming the sample.
    """
    from stoker.contexts.reading import mean_losses

    rows = encode_samples(model.tokenizer, [Sample(*pair) for pair in samples], template=PLACE)
    encoded = [(row.source, row.target) for row in rows]
    longest = int(getattr(model.model.config, "max_position_embeddings", 0) or 0)

    def begin(text: str) -> Ids:
        try:
            return encode_prompt(model.tokenizer, Prompt(text, virtual_tokens), longest=longest, most=tokens)
        except ConfigError:
            return ()

    def score(prompts: Sequence[str]) -> list[float]:
        begun = [begin(text) for text in prompts]
        losses = iter(mean_losses(model, [ids for ids in begun if ids], encoded, batch_size=batch_size))
        if seen is not None:
            seen(len(prompts))
        return [next(losses) if ids else math.nan for ids in begun]

    return score


def evaluation_samples(
    samples: Sequence[tuple[str, str]], *, count: int = SAMPLES, seed: int = 0
) -> list[tuple[str, str]]:
    """At most `count` of a task's samples, drawn without return, in their own order: the same for the same seed."""
    draw = Stream(seed, "evaluation samples")
    order = sorted(range(len(samples)), key=draw.uniform)[:count]
    return [samples[place] for place in sorted(order)]

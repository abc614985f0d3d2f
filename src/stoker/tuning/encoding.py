"""Encode samples as tokens: `template(input)`, then the target and the end token, all after the soft prompt.

A soft prompt starts as the embeddings of a text's tokens, repeated or cut to `virtual_tokens`. The bank also uses
`encode_prompt`, so tuning starts with the loss that the bank measured (eq. 1). Only the seed and the iteration number
decide the samples of an iteration. Each epoch is shuffled. A batch is sorted by length, and each of n ranks gets every
n-th sample. All ranks therefore have about the same number of tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence, Sized
from typing import Any, TypeVar

import msgspec

from stoker.errors import ConfigError
from stoker.tuning.job import PLACE, Data, Prompt, Sample

Ids = tuple[int, ...]

MOST_TOKENS = 64
"""Maximum virtual tokens if a job does not set the number."""


class EncodedSample(msgspec.Struct, frozen=True):
    """A sample as tokens. `source`: tokens to read. `target`: tokens to generate, with the end token. `text`: the
    target text.
    """

    source: Ids
    target: Ids
    text: str

    def __len__(self) -> int:
        return len(self.source) + len(self.target)


def encode_prompt(tokenizer: Any, prompt: Prompt, *, longest: int, most: int = MOST_TOKENS) -> Ids:
    """Return the tokens of the initial soft prompt. If `virtual_tokens` is set, repeat or cut them to this number
    (PEFT's rule); otherwise cut them to `most`. Raises ConfigError if the prompt is empty or has `longest` or more
    tokens (0: no limit).
    """
    ids = _tokenize(tokenizer, [prompt.initial])[0] if prompt.initial.strip() else ()
    if not ids:
        raise ConfigError(
            "[prompt] initial is empty: tuning starts with a text; write a text, or let the prompt bank find one",
            key="initial",
        )
    key = "virtual_tokens" if prompt.virtual_tokens > len(ids) else "initial"
    if longest and max(len(ids), prompt.virtual_tokens) >= longest:
        raise ConfigError(
            f"[prompt] {key} has {max(len(ids), prompt.virtual_tokens)} tokens, and the model accepts at most"
            f" {longest} tokens of prompt, input and target; shorten it",
            key=key,
        )
    wanted = prompt.virtual_tokens or min(len(ids), most)
    return (ids * -(-wanted // len(ids)))[:wanted]


def encode_samples(tokenizer: Any, samples: Sequence[Sample], *, template: str) -> list[EncodedSample]:
    if not samples:  # a tokenizer refuses an empty list
        return []
    sources = [template.replace(PLACE, sample.input) for sample in samples]
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    of_sources = _tokenize(tokenizer, sources)
    together = _tokenize(tokenizer, [source + sample.target for source, sample in zip(sources, samples, strict=True)])
    alone = _tokenize(tokenizer, [sample.target for sample in samples])
    rows = []
    for sample, source, whole, target in zip(samples, of_sources, together, alone, strict=True):
        # Take the target's tokens from the joined text, unless joining changes the source's tokens.
        tail = whole[len(source) :] if whole[: len(source)] == source else target
        rows.append(EncodedSample(source=source, target=(tail or target) + ends, text=sample.target))
    return rows


def refuse_too_long_samples(
    prompt: Ids, rows: Sequence[EncodedSample], samples: Sequence[Sample], *, data: Data, longest: int
) -> None:
    """Raise ConfigError if the prompt and a sample together exceed `longest` tokens (0: no limit)."""
    if not longest:
        return
    for row, sample in zip(rows, samples, strict=True):
        if len(prompt) + len(row) > longest:
            raise ConfigError(
                f"{data.path}: {sample.place or 'a sample'}: input and target have {len(row)} tokens, which with the"
                f" {len(prompt)} of the prompt are more than the {longest} that the model accepts; shorten it or leave"
                " it out",
                file=data.path, key=data.input,
            )  # fmt: skip


def _tokenize(tokenizer: Any, texts: list[str]) -> list[Ids]:
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


Row = TypeVar("Row", bound=Sized)


def batch_indices(iteration: int, *, batch: int, count: int, seed: int) -> list[int]:
    places = range(iteration * batch, (iteration + 1) * batch)
    epochs = {place // count for place in (places[0], places[-1])}
    orders = {epoch: _shuffled_indices(epoch, count=count, seed=seed) for epoch in range(min(epochs), max(epochs) + 1)}
    return [orders[place // count][place % count] for place in places]


def rows_of_rank(rows: Sequence[Row], *, rank: int, size: int) -> list[Row]:
    """Return every `size`-th row, longest rows first, so that all ranks get about the same number of tokens."""
    return sorted(rows, key=len, reverse=True)[rank::size]


def split_into_chunks(rows: Sequence[Row], *, most: int) -> list[Sequence[Row]]:
    step = most or len(rows) or 1
    return [rows[start : start + step] for start in range(0, len(rows), step)]


@functools.lru_cache(maxsize=4)
def _shuffled_indices(epoch: int, *, count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)

"""Samples as tokens: `template(input)`, then the target and the end token. The soft prompt stands before it all.

A text as a soft prompt is its tokens' embeddings, repeated or cut to the job's `virtual_tokens` (at most 64 without),
and nothing is put before it. The bank scores its candidates as `encode_prompt` makes them, before samples from here: so
tuning begins with the very prompt and loss that were scored (eq. 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.tuning.job import PLACE, Data, Prompt
from stoker.tuning.samples import Sample

Ids = tuple[int, ...]

MOST_TOKENS = 64
"""How many virtual tokens a job has that does not say: its initial prompt's, and no more than these."""


class EncodedSample(msgspec.Struct, frozen=True):
    """A sample's tokens: what is read (`source`), and what is to be written (`target`, with its end token). `text` is
    the target as text."""

    source: Ids
    target: Ids
    text: str

    def __len__(self) -> int:
        return len(self.source) + len(self.target)


def encode_prompt(tokenizer: Any, prompt: Prompt, *, longest: int, most: int = MOST_TOKENS) -> Ids:
    """The tokens that the soft prompt begins as: the initial prompt's, repeated or cut to `virtual_tokens` (PEFT's
    rule), or, where these are 0, its first ones, at most `most`. Raises ConfigError for an empty prompt, and for one
    with more tokens than the model reads (`longest`; 0: no bound)."""
    ids = _encode(tokenizer, [prompt.initial])[0] if prompt.initial.strip() else ()
    if not ids:
        raise ConfigError(
            "[prompt] initial is empty: tuning begins from a text; write one, or let the prompt bank find it",
            key="initial",
        )
    key = "virtual_tokens" if prompt.virtual_tokens > len(ids) else "initial"
    if longest and max(len(ids), prompt.virtual_tokens) >= longest:
        raise ConfigError(
            f"[prompt] {key} comes to {max(len(ids), prompt.virtual_tokens)} tokens, and the model reads {longest} in"
            " all, input and target with it; shorten it",
            key=key,
        )
    wanted = prompt.virtual_tokens or min(len(ids), most)
    return (ids * -(-wanted // len(ids)))[:wanted]


def encode_samples(tokenizer: Any, samples: Sequence[Sample], *, template: str) -> list[EncodedSample]:
    """The samples as tokens, in order."""
    if not samples:
        return []
    sources = [template.replace(PLACE, sample.input) for sample in samples]
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    of_sources = _encode(tokenizer, sources)
    together = _encode(tokenizer, [source + sample.target for source, sample in zip(sources, samples, strict=True)])
    alone = _encode(tokenizer, [sample.target for sample in samples])
    rows = []
    for sample, source, whole, target in zip(samples, of_sources, together, alone, strict=True):
        # As the two are written together, unless the target's first letters would change the source's last token.
        tail = whole[len(source) :] if whole[: len(source)] == source else target
        rows.append(EncodedSample(source=source, target=(tail or target) + ends, text=sample.target))
    return rows


def refuse_too_long(
    prompt: Ids, rows: Sequence[EncodedSample], samples: Sequence[Sample], *, data: Data, longest: int
) -> None:
    """Raises ConfigError when prompt and sample come to more tokens than the model reads (`longest`; 0: no bound)."""
    if not longest:
        return
    for row, sample in zip(rows, samples, strict=True):
        if len(prompt) + len(row) > longest:
            raise ConfigError(
                f"{data.path}: {sample.place or 'a sample'}: input and target have {len(row)} tokens, which with the"
                f" {len(prompt)} of the prompt are more than the {longest} that the model reads; shorten it or leave it"
                " out",
                file=data.path, key=data.input,
            )  # fmt: skip


def _encode(tokenizer: Any, texts: list[str]) -> list[Ids]:
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

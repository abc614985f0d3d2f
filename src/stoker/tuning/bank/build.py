"""Build a bank on first use, and score prompts. To build a bank, compute the features of its prompts and cluster them.

The feature of a prompt (§4.3.1, "activation features") is the mean of the last hidden states over its first 64 tokens.
The paper names no layer; we use the last, which alone decides the score. We average over tokens, because the last
token alone is often punctuation.

The score of a prompt is the loss with which tuning would start, on the same tokens. Equation 1 averages over samples,
and tuning averages over target tokens. For targets of equal length, the averages are equal.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.chance import Stream
from stoker.contexts.prompts import max_positions
from stoker.errors import ConfigError, StokerError
from stoker.tuning.bank.candidates import Candidate, Key
from stoker.tuning.bank.layers import CAPACITY, CLUSTERS, LARGEST_GROUP, Array, Insertion, build_layers
from stoker.tuning.bank.lookup import Score
from stoker.tuning.bank.store import (
    READING,
    BankStore,
    decode_vector,
    encode_vector,
    hold_bank_lock,
    open_bank,
    read_record,
    write_record,
)
from stoker.tuning.encoding import MOST_TOKENS, Ids, encode_prompt, encode_samples
from stoker.tuning.job import PLACE, Prompt, Sample

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM


log = logging.getLogger(__name__)

Reader = Callable[[Sequence[str]], Array]
"""Function from texts to raw features `[texts, width]`."""
ReportProgress = Callable[[int, int], None]
"""Callback that receives the number of prompts whose features are computed, and the number of all prompts."""

PROMPTS_PER_BATCH = 64
"""Prompts per batch of features. Each batch is stored, so a killed build loses at most one batch."""


class _FeatureBatch(msgspec.Struct, frozen=True):
    model: str
    reading: str
    features: list[tuple[Candidate, bytes]]


class StoredFeatures:
    """The stored features of prompts, computed with one model."""

    def __init__(self, folder: Path, *, model: str) -> None:
        self._folder = folder / "readings"
        self._model = model
        self.candidates: dict[Key, Candidate] = {}
        self._features: dict[Key, Array] = {}
        self._folder.mkdir(exist_ok=True)
        for path in sorted(self._folder.glob("[0-9]*")):
            try:
                self._add_batch(path, read_record(path, _FeatureBatch))
            except StokerError as error:
                if not error.facts.get("damaged"):
                    raise
                aside = path.rename(path.with_name(f"damaged-{path.name}"))
                log.warning("%s; the file is kept as %s, and the model reads its prompts again", error, aside.name)

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def features(self, candidates: Sequence[Candidate]) -> Array:
        return np.stack([self._features[candidate.key] for candidate in candidates])

    def add(self, candidates: Sequence[Candidate], features: Array) -> None:
        """Store raw features. Raises ValueError for a wrong number of features, StokerError if the write fails."""
        if features.ndim != 2 or len(features) != len(candidates):
            raise ValueError(f"the reader returned features of shape {features.shape} for {len(candidates)} texts")
        batch = _FeatureBatch(self._model, READING, list(zip(candidates, map(encode_vector, features), strict=True)))
        path = self._folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}"  # named by time: a later file wins
        write_record(path, batch)
        self._add_batch(path, batch)

    def _add_batch(self, path: Path, batch: _FeatureBatch) -> None:
        if (batch.model, batch.reading) != (self._model, READING):
            raise StokerError(
                f"{path}: has features of {batch.model} ({batch.reading}), not of {self._model} ({READING}); build the"
                f" bank of {self._model} in another folder",
                file=str(path),
                model=batch.model,
            )
        for candidate, feature in batch.features:
            self.candidates[candidate.key] = candidate
            self._features[candidate.key] = decode_vector(feature)


def ensure_bank(
    folder: Path,
    candidates: Sequence[Candidate],
    *,
    model: str,
    read: Reader,
    k: int = CLUSTERS,
    capacity: int = CAPACITY,
    largest_group: int = LARGEST_GROUP,
    again: bool = False,
    progress: ReportProgress | None = None,
) -> BankStore:
    """Return the bank in `folder`. If the bank is missing or damaged, or if `again` is True, build it from `candidates`
    and `readings`. Only one process builds at a time. Raises StokerError if the bank belongs to another model, and the
    ValueError of `layers.build_layers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not again and (bank := _open_if_intact(folder, model=model)) is not None:
        return bank
    with hold_bank_lock(folder):
        bank = _open_if_intact(folder, model=model)
        if bank is not None and not again:  # another process built the bank while this one waited for the lock
            return bank
        readings = StoredFeatures(folder, model=model)
        wanted = list({one.key: one for one in (*candidates, *readings.candidates.values())}.values())
        _compute_missing_features(readings, wanted, read, progress)
        layers = build_layers(wanted, readings.features(wanted), k=k, capacity=capacity, largest_group=largest_group)
        made = BankStore(folder, model=model)
        if bank is None and made.path.exists():
            aside = made.path.rename(made.path.with_name(f"bank.damaged-{time.time_ns()}"))
            log.warning("the damaged bank is now %s; a new bank has %d prompts", aside, len(layers))
        made.write(layers)
        return made


def insert(bank: BankStore, candidate: Candidate, *, read: Reader) -> Insertion:
    """Insert a prompt into a bank, and store its feature. Raises the errors of `BankStore.insert`."""
    return bank.insert(candidate, _store_feature(bank.folder, candidate, model=bank.model, read=read))


def insert_or_store_prompt(folder: Path, candidate: Candidate, *, model: str, read: Reader) -> Insertion | None:
    """Insert a prompt into the bank in `folder`. If the bank is missing or damaged, store the prompt for the next build
    and return None. Raises the errors of `insert`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (bank := _open_if_intact(folder, model=model)) is not None:
        return insert(bank, candidate, read=read)
    _store_feature(folder, candidate, model=model, read=read)
    return None


def _store_feature(folder: Path, candidate: Candidate, *, model: str, read: Reader) -> Array:
    """Store a candidate and its raw feature `[width]`. Return the feature."""
    readings = StoredFeatures(folder, model=model)
    feature = readings.features([candidate]) if candidate.key in readings else read([candidate.text])
    if readings.candidates.get(candidate.key) != candidate:
        readings.add([candidate], feature)
    first: Array = feature[0]
    return first


def _open_if_intact(folder: Path, *, model: str) -> BankStore | None:
    try:
        return open_bank(folder, model=model)
    except StokerError as error:
        if error.facts.get("missing") or error.facts.get("damaged"):
            return None
        raise


def _compute_missing_features(
    readings: StoredFeatures, wanted: Sequence[Candidate], read: Reader, progress: ReportProgress | None
) -> None:
    missing = [one for one in wanted if one.key not in readings]
    there = len(wanted) - len(missing)
    missing.sort(key=lambda one: len(one.text))  # texts of similar length in one batch need less padding
    for start in range(0, len(missing), PROMPTS_PER_BATCH):
        some = missing[start : start + PROMPTS_PER_BATCH]
        readings.add(some, read([one.text for one in some]))
        if progress is not None:
            progress(there + start + len(some), len(wanted))


def reader(model: CausalLM) -> Reader:
    from stoker.contexts.reading import compute_mean_hidden_states

    return lambda texts: compute_mean_hidden_states(model, texts, most_tokens=MOST_TOKENS)


def scorer(
    model: CausalLM,
    samples: Sequence[tuple[str, str]],
    *,
    virtual_tokens: int = 0,
    tokens: int = MOST_TOKENS,
    batch_size: int = 4,
) -> Score:
    """Return a function that computes equation 1 for prompts: the mean loss of the targets of `samples` after prompt
    and input. A prompt is cut to `tokens`; with `virtual_tokens`, it is repeated or cut to this number. The loss is NaN
    if tuning would refuse the prompt. `batch_size`: prompts per batch. Raises ValueError for unreadable samples.
    """
    from stoker.contexts.reading import compute_mean_losses

    rows = encode_samples(model.tokenizer, [Sample(*pair) for pair in samples], template=PLACE)
    encoded = [(row.source, row.target) for row in rows]
    longest = max_positions(model.model.config)

    def encode(text: str) -> Ids:
        try:
            return encode_prompt(model.tokenizer, Prompt(text, virtual_tokens), longest=longest, most=tokens)
        except ConfigError:
            return ()

    def score(prompts: Sequence[str]) -> list[float]:
        begun = [encode(text) for text in prompts]
        losses = iter(compute_mean_losses(model, [ids for ids in begun if ids], encoded, batch_size=batch_size))
        return [next(losses) if ids else math.nan for ids in begun]

    return score


def evaluation_samples(samples: Sequence[tuple[str, str]], *, count: int = 16, seed: int = 0) -> list[tuple[str, str]]:
    """Return at most `count` random samples (§4.3.2) in their original order. Equal seeds give equal samples."""
    draw = Stream(seed, "evaluation samples")
    order = sorted(range(len(samples)), key=draw.uniform)[:count]
    return [samples[place] for place in sorted(order)]

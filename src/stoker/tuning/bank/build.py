"""Build a bank on first use, and score prompts. To build a bank, compute the features of its prompts and cluster them.

The file `readings` stores each feature. A build after a killed build, or with other settings, reuses this file.

The feature of a prompt (§4.3.1, "activation features") is the mean of the last hidden states over its first 64 tokens.
The paper names no layer. We use the last layer, because only this layer decides the score. We use the mean, because the
last token of a prompt is often punctuation.

The score of a prompt is the loss with which tuning would start, on the same tokens. Equation 1 is a mean over samples,
but tuning uses a mean over target tokens. The two means are equal for targets of equal length.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.chance import Stream
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, StokerError
from stoker.tuning.bank import store
from stoker.tuning.bank.candidates import Candidate, Key
from stoker.tuning.bank.layers import CAPACITY, CLUSTERS, LARGEST_GROUP, Array, Insertion, build
from stoker.tuning.bank.lookup import Score
from stoker.tuning.bank.store import BankStore, create_bank, hold_bank_lock, open_bank, salvage_candidates
from stoker.tuning.encoding import MOST_TOKENS, Ids, encode_prompt, encode_samples
from stoker.tuning.job import PLACE, Prompt, Sample

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM


log = logging.getLogger(__name__)

Reader = Callable[[Sequence[str]], Array]
"""A function that returns raw features `[texts, width]` of texts from the bank's model."""
Progress = Callable[[int, int], None]
"""A function that receives the number of prompts read so far, and the total."""

AT_ONCE = 64
"""Number of prompts that are read and stored together. A killed build loses at most this number of features."""


class _Origin(msgspec.Struct, frozen=True):
    model: str
    reading: str


class _Reading(msgspec.Struct, frozen=True):
    """A prompt and its raw feature (float32, little-endian)."""

    candidate: Candidate
    feature: bytes


class Readings:
    """The stored features of prompts, computed with one model. A process must lock the folder to add features."""

    def __init__(self, folder: Path, *, model: str, reading: str) -> None:
        self.path = folder / "readings"
        self.candidates: dict[Key, Candidate] = {}
        self._features: dict[Key, Array] = {}
        self._of = _Origin(model, reading)
        self._end = 0
        with contextlib.suppress(FileNotFoundError):
            self._load()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def features(self, candidates: Sequence[Candidate]) -> Array:
        return np.stack([self._features[candidate.key] for candidate in candidates])

    def add(self, candidates: Sequence[Candidate], features: Array) -> None:
        """Store raw features. Raises ValueError for a wrong number of features, StokerError if the write fails."""
        if features.ndim != 2 or len(features) != len(candidates):
            raise ValueError(f"the reader returned features of shape {features.shape} for {len(candidates)} texts")
        records = [
            _Reading(candidate, feature.astype("<f4").tobytes())
            for candidate, feature in zip(candidates, features, strict=True)
        ]
        first = [msgspec.msgpack.encode(self._of)] if self._end == 0 else []
        self._end = store.append_records(
            self.path, [*first, *(msgspec.msgpack.encode(one) for one in records)], at=self._end
        )
        self._take(records)

    def _load(self) -> None:
        found = store.read_records(self.path, skip=True)
        try:
            of = msgspec.msgpack.decode(found.payloads[0], type=_Origin) if found.payloads else self._of
            records = [msgspec.msgpack.decode(payload, type=_Reading) for payload in found.payloads[1:]]
        except UNREADABLE as error:
            raise StokerError(
                f"{self.path}: holds a record that this version cannot read ({error}); move it away, and prompts are"
                " read from the model again",
                file=str(self.path),
            ) from error
        if of != self._of:
            raise StokerError(
                f"{self.path}: was read from {of.model} ({of.reading}), and {self._of.model} ({self._of.reading}) was"
                " asked for: build its bank in another folder",
                file=str(self.path),
                model=of.model,
            )
        if found.damaged:
            aside = back_up_damaged_file(self.path)
            log.warning(
                "%s is damaged; its %d whole records are kept, the file itself is %s", self.path, len(records), aside,
            )  # fmt: skip
            self._end = store.replace_records(self.path, found.payloads)
        else:
            self._end = found.end
        self._take(records)

    def _take(self, records: Sequence[_Reading]) -> None:
        for one in records:
            self.candidates[one.candidate.key] = one.candidate
            self._features[one.candidate.key] = np.frombuffer(one.feature, dtype="<f4").astype(np.float32)


def ensure_bank(
    folder: Path,
    candidates: Sequence[Candidate],
    *,
    model: str,
    reading: str,
    read: Reader,
    k: int = CLUSTERS,
    capacity: int = CAPACITY,
    largest_group: int = LARGEST_GROUP,
    again: bool = False,
    progress: Progress | None = None,
) -> BankStore:
    """Return the bank in `folder`. Build the bank if it is missing or damaged, or if `again` is True.

    A new bank contains `candidates`, the prompts in `readings`, and the old bank's intact prompts. Only one process at
    a time builds the bank. Raises StokerError if the folder is for another model, and the ValueError of `layers.build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not again and (bank := _whole(folder, model=model, reading=reading)) is not None:
        return bank
    with hold_bank_lock(folder):
        bank = _whole(folder, model=model, reading=reading)
        if bank is not None and not again:  # another process has built the bank
            return bank
        readings = Readings(folder, model=model, reading=reading)
        every = {one.key: one for one in (*candidates, *readings.candidates.values(), *salvage_candidates(folder))}
        wanted = list(every.values())
        _compute_missing_features(readings, wanted, read, progress)
        layers = build(wanted, readings.features(wanted), k=k, capacity=capacity, largest_group=largest_group)
        if bank is None and (folder / "bank").exists():
            log.warning(
                "the damaged bank is %s; it was made again with %d prompts",
                back_up_damaged_file(folder / "bank"),
                len(layers),
            )
        return create_bank(folder, layers, model=model, reading=reading)


def insert(bank: BankStore, candidate: Candidate, *, read: Reader) -> Insertion:
    """Insert a prompt into a bank, and store its feature. Raises the errors of `BankStore.insert`."""
    return bank.insert(candidate, _keep(bank.folder, candidate, model=bank.model, reading=bank.reading, read=read))


def insert_or_store_prompt(
    folder: Path, candidate: Candidate, *, model: str, reading: str, read: Reader
) -> Insertion | None:
    """Insert a prompt into the bank in `folder`. Without an intact bank, store the prompt for the next build and return
    None. Raises the errors of `insert`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bank = _whole(folder, model=model, reading=reading)
    if bank is not None:
        return insert(bank, candidate, read=read)
    _keep(folder, candidate, model=model, reading=reading, read=read)
    return None


def _keep(folder: Path, candidate: Candidate, *, model: str, reading: str, read: Reader) -> Array:
    """Store a candidate and its raw feature `[width]` in `readings`. Return the feature."""
    with hold_bank_lock(folder):
        readings = Readings(folder, model=model, reading=reading)
    feature = readings.features([candidate]) if candidate.key in readings else read([candidate.text])
    with hold_bank_lock(folder):
        readings = Readings(folder, model=model, reading=reading)
        if readings.candidates.get(candidate.key) != candidate:
            readings.add([candidate], feature)
    first: Array = feature[0]
    return first


def back_up_damaged_file(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    shutil.copyfile(path, aside)
    return aside


def _whole(folder: Path, *, model: str, reading: str) -> BankStore | None:
    try:
        return open_bank(folder, model=model, reading=reading)
    except StokerError as error:
        if error.facts.get("missing") or error.facts.get("damaged"):
            return None
        raise


def _compute_missing_features(
    readings: Readings, wanted: Sequence[Candidate], read: Reader, progress: Progress | None
) -> None:
    missing = [one for one in wanted if one.key not in readings]
    there = len(wanted) - len(missing)
    # Texts of similar length in one batch need less padding.
    missing.sort(key=lambda one: len(one.text))
    for start in range(0, len(missing), AT_ONCE):
        some = missing[start : start + AT_ONCE]
        readings.add(some, read([one.text for one in some]))
        if progress is not None:
            progress(there + start + len(some), len(wanted))


FEATURE_TOKENS = MOST_TOKENS
"""Number of tokens read per prompt. Scored prompts are cut to this length, unless the job sets `virtual_tokens`."""
SCORED_SAMPLES = 16
"""Number of samples from which the score of a prompt is computed (§4.3.2)."""


def reading_of(*, tokens: int = FEATURE_TOKENS) -> str:
    """Return a description of how features are computed, which is part of a bank's identity."""
    return f"mean last hidden state, first {tokens} tokens"


def reader(model: CausalLM, *, tokens: int = FEATURE_TOKENS) -> Reader:
    from stoker.contexts.reading import mean_hidden_states

    def read(texts: Sequence[str]) -> Array:
        return mean_hidden_states(model, texts, most_tokens=tokens)

    return read


def scorer(
    model: CausalLM,
    samples: Sequence[tuple[str, str]],
    *,
    virtual_tokens: int = 0,
    tokens: int = FEATURE_TOKENS,
    batch_size: int = 4,
    seen: Callable[[int], None] | None = None,
) -> Score:
    """Return a function that computes equation 1: the mean loss of the targets of `samples` after prompt and input.

    The function cuts each prompt to `tokens`. If `virtual_tokens` is given, the function instead repeats or cuts each
    prompt to this length. The loss is NaN if tuning would refuse the prompt. `batch_size`: prompts per batch. `seen`:
    function that receives the number of prompts that were just scored. Raises ValueError for samples that the model
    cannot read.
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
    samples: Sequence[tuple[str, str]], *, count: int = SCORED_SAMPLES, seed: int = 0
) -> list[tuple[str, str]]:
    """Return at most `count` random samples, without repetition and in their order. Equal seeds give equal samples."""
    draw = Stream(seed, "evaluation samples")
    order = sorted(range(len(samples)), key=draw.uniform)[:count]
    return [samples[place] for place in sorted(order)]

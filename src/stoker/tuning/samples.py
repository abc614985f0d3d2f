"""Pairs of input and target from a file, and their parts: to train on, to evaluate while tuning, to measure in the end.

A sample's part is decided by a hash of the seed and its input, not by its place in the file. The same rows thus come to
the same parts in whatever order they are, and equal inputs are never on both sides, so the measure in the end is of
inputs that the tuning has not seen.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.datafile import read_rows, text_field
from stoker.errors import ConfigError
from stoker.tuning.job import Data


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One pair. `place` is where in the file it stands."""

    input: str
    target: str
    place: str = ""


class SplitData(msgspec.Struct, frozen=True):
    """A data set, split."""

    training: tuple[Sample, ...]
    evaluation: tuple[Sample, ...]
    held_out: tuple[Sample, ...]


def read_samples(data: Data) -> tuple[Sample, ...]:
    """Every sample of the data set. Raises ConfigError naming file, line and field for the first row that is none."""
    path = Path(data.path)
    found = tuple(
        Sample(text_field(row, data.input, file=path), text_field(row, data.target, file=path), row.place)
        for row in read_rows(path)
    )
    if not found:
        raise ConfigError(f"{path}: is empty; give rows with the fields {data.input} and {data.target}", file=str(path))
    return found


def split(samples: Sequence[Sample], *, data: Data, seed: int) -> SplitData:
    """The three parts, counted in different inputs: `evaluation_samples` of them (at most a third), the share
    `held_out`, and the rest to train on.

    Raises ConfigError when there are fewer than three different inputs.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.input, []).append(sample)
    count = len(groups)
    if count < 3:
        raise ConfigError(
            f"{data.path}: has {count} different inputs; tuning wants at least 3: to train on, to evaluate, to measure",
            file=data.path,
        )
    ordered = sorted(groups.items(), key=lambda group: _chance(group[0], seed=seed))
    evaluation = min(data.evaluation_samples, count // 3)
    held_out = min(max(1, round(data.held_out * count)), count - evaluation - 1)
    borders = (0, evaluation, evaluation + held_out, count)
    parts = [
        # In one group the file's order would decide which sample comes first; by target it does not.
        tuple(sample for _, group in ordered[start:end] for sample in sorted(group, key=lambda one: one.target))
        for start, end in itertools.pairwise(borders)
    ]
    return SplitData(training=parts[2], evaluation=parts[0], held_out=parts[1])


def digest_samples(samples: Sequence[Sample]) -> str:
    """16 hex digits that stand for these samples in this order, wherever they were read from."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(msgspec.json.encode((sample.input, sample.target)))
    return digest.hexdigest()[:16]


def _chance(text: str, *, seed: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=str(seed).encode()).digest()

"""The learned part of the classifier: logistic regression over facts of a failure, from `scorer.json`.

`python -m benchmarks.papers.schedmate train` makes the file, with NumPy, from the training part of the labelled
corpus. Here it is only applied, in plain Python: a login node needs no NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import exp, log, sqrt

import msgspec

from stoker.manager.advice.logs.fault import FaultKind


class KindScorer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weights`: of each kind, by fact; `bias`: of each kind; `made_of`: what it was trained on, in words."""

    made_of: str
    weights: dict[FaultKind, dict[str, float]]
    bias: dict[FaultKind, float]

    def chances(self, found: Mapping[str, float]) -> dict[FaultKind, float]:
        """How likely each kind is; they sum to one. A failure without any known fact gets what is usual."""
        known = {fact for weights in self.weights.values() for fact in weights}
        values = scaled({fact: count for fact, count in found.items() if fact in known})
        scores = {
            kind: self.bias[kind] + sum(value * self.weights[kind].get(fact, 0.0) for fact, value in values.items())
            for kind in self.bias
        }
        highest = max(scores.values())
        parts = {kind: exp(score - highest) for kind, score in scores.items()}
        total = sum(parts.values())
        return {kind: part / total for kind, part in parts.items()}


def scaled(found: Mapping[str, float]) -> dict[str, float]:
    """The facts with their weights, of length one together; a fact that appears often counts little more."""
    values = {fact: 1.0 + log(1.0 + count) for fact, count in found.items()}
    length = sqrt(sum(value * value for value in values.values()))
    return {fact: value / length for fact, value in values.items()} if length else {}


@cache
def shipped_scorer() -> KindScorer:
    """The scorer that comes with Stoker."""
    data = files("stoker.manager.advice.logs").joinpath("scorer.json").read_bytes()
    return msgspec.json.decode(data, type=KindScorer)

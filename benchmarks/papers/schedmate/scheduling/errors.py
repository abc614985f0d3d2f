"""How wrong predictions of durations are. An error is a distribution of log(prediction / truth), drawn for each job.

- *Ours* is resampled from the estimates for 108 recipes that were measured after the method was fixed
  (`our_errors.json`), whatever the job. A second one is the plain average of the five most similar recipes, which is
  the paper's own method on our recipes.
- *SchedMate's* and *Lucid's* are known from one number each: the share of relative errors under 100 % (§5.4). A
  relative error |prediction - truth| / truth is under 100 % if the prediction is under twice the truth, however low it
  is. One share does not fix a distribution. With a median that is right the share cannot be below a half, so Lucid's
  27.7 % means that its predictions are too high as well. Here both are lognormal, and right in the mean of truth over
  prediction: E[truth / prediction] = 1, as a regression in which over- and underestimates cancel. Then a spread s has
  the shift s^2 / 2, and P(log ratio < log 2) = share gives s: 0.52 for SchedMate, 1.91 for Lucid.
  Another reading, a median that is right and the share taken as that within a factor of two both ways, gives 0.47 and
  1.96: nearly the same. A third one, that all errors have one factor, would change no order at all.
- *Shuffled* gives each job the duration of another one of its window: the right distribution, and no information.

A factor that all predictions share changes no order, so only the spread matters to shortest first.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from benchmarks.papers.schedmate.scheduling import settings
from stoker.chance import Stream

OUR_ERRORS = Path(__file__).with_name("our_errors.json")
Predict = Callable[[Sequence[float], Stream], list[float]]
"""Gives predictions for durations, in seconds."""


def none(durations_s: Sequence[float], chance: Stream) -> list[float]:  # noqa: ARG001
    return list(durations_s)


def shuffled(durations_s: Sequence[float], chance: Stream) -> list[float]:
    order = sorted(range(len(durations_s)), key=chance.uniform)
    return [durations_s[place] for place in order]


def lognormal(spread: float, *, shift: float = 0.0) -> Predict:
    def predict(durations_s: Sequence[float], chance: Stream) -> list[float]:
        return [
            duration_s * math.exp(shift + spread * chance.normal(number))
            for number, duration_s in enumerate(durations_s)
        ]

    return predict


def with_share_under_100(share: float) -> Predict:
    """Lognormal, right in the mean of truth over prediction, with this share of relative errors under 100 %."""
    spread = spread_of(share)
    return lognormal(spread, shift=spread**2 / 2)


def spread_of(share: float) -> float:
    """The spread s with P(z s + s^2 / 2 < log 2) = share for a standard normal z, by the root of a quadratic."""
    place = NormalDist().inv_cdf(share)
    return math.sqrt(place**2 + 2 * math.log(2)) - place


def spread_both_ways(share: float) -> float:
    """The spread with which this share lies within a factor of two both ways, if the median is right."""
    return math.log(2) / NormalDist().inv_cdf((1 + share) / 2)


def resampled(log_ratios: Sequence[float], *, unknown_share: float = 0.0) -> Predict:
    """One of these errors for each job, drawn with replacement. A share of jobs gets no estimate: they count as long as
    the median."""

    def predict(durations_s: Sequence[float], chance: Stream) -> list[float]:
        median_s = statistics.median(durations_s)
        found = []
        for number, duration_s in enumerate(durations_s):
            which, known = chance.uniform(2 * number), chance.uniform(2 * number + 1) >= unknown_share
            ratio = log_ratios[int(which * len(log_ratios))]
            found.append(duration_s * math.exp(ratio) if known else median_s)
        return found

    return predict


@lru_cache(maxsize=1)
def our_log_ratios() -> dict[str, list[float]]:
    return dict(json.loads(OUR_ERRORS.read_text())["log_ratios"])


def ours(*, unknown_share: float = 0.0) -> Predict:
    return resampled(our_log_ratios()["estimates"], unknown_share=unknown_share)


def our_average() -> Predict:
    return resampled(our_log_ratios()["average"])


def share_under_100(durations_s: Sequence[float], predictions_s: Sequence[float]) -> float:
    pairs = list(zip(durations_s, predictions_s, strict=True))
    return sum(abs(said - true) < true for true, said in pairs) / len(pairs)


def share_within_two(durations_s: Sequence[float], predictions_s: Sequence[float]) -> float:
    pairs = list(zip(durations_s, predictions_s, strict=True))
    return sum(true / 2 <= said <= 2 * true for true, said in pairs) / len(pairs)


PAPER, LUCID = with_share_under_100(settings.PAPER_SHARE), with_share_under_100(settings.LUCID_SHARE)

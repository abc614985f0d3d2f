"""What the scores say: answers, accuracy with its interval, confusion matrices, and whether one prompt beats another.

**Answers.** A small model has a favourite word whatever it is asked: uncalibrated, SmolLM2-135M answers nine claims of
ten alike. *Batch calibration* (Zhou et al., "Batch Calibration: Rethinking Calibration for In-Context Learning", 2024)
takes the mean score of each label over all claims of a prompt away before the best one is taken. It needs no labels and
no further inference. The raw answers are kept beside, and both accuracies are shown.

**Interval.** Wilson's score interval: right near 0 and 1 and for few claims, where the usual normal one is not.

**Comparison.** Prompts answer the same claims, so two of them are compared pair by pair (McNemar's exact test): only
claims that one gets right and the other wrong count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def wilson(right: int, total: int, *, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share of `right` in `total`; of nothing it is all of 0 to 1."""
    if total == 0:
        return 0.0, 1.0
    share, square = right / total, z * z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    # At the ends the exact bound is the end itself; rounding must not go past it.
    low = 0.0 if right == 0 else max(0.0, middle - half)
    high = 1.0 if right == total else min(1.0, middle + half)
    return low, high


def raw_answers(scores: Sequence[Sequence[float]]) -> list[int]:
    """The index of the best label of each row; the first of equals."""
    return [_best(row) for row in scores]


def calibrated_answers(scores: Sequence[Sequence[float]]) -> list[int]:
    """The same after each label's mean over all rows is taken away (batch calibration).

    Scores are compared as shares of the labels' joint probability, so that a claim whose words are all unlikely weighs
    no more than another.
    """
    if not scores:
        return []
    shares = [_log_shares(row) for row in scores]
    means = [math.fsum(column) / len(shares) for column in zip(*shares, strict=True)]
    return [_best([score - mean for score, mean in zip(row, means, strict=True)]) for row in shares]


def confusion(truth: Sequence[int], answers: Sequence[int], *, labels: int) -> list[list[int]]:
    """`labels` x `labels` counts: the row is what the claim is, the column what was answered."""
    counts = [[0] * labels for _ in range(labels)]
    for true, answer in zip(truth, answers, strict=True):
        counts[true][answer] += 1
    return counts


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The probability of a difference at least as large if both were equally good (two-sided, exact)."""
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    total, fewer = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    # In logarithms: 2 ** total overflows a float beyond a thousand discordant pairs, and whole numbers are slow there.
    whole = math.lgamma(total + 1) - total * math.log(2)
    tail = math.fsum(
        math.exp(whole - math.lgamma(count + 1) - math.lgamma(total - count + 1)) for count in range(fewer + 1)
    )
    return min(1.0, 2 * tail)


def _best(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda index: row[index])


def _log_shares(row: Sequence[float]) -> list[float]:
    top = max(row)
    whole = top + math.log(math.fsum(math.exp(score - top) for score in row))
    return [score - whole for score in row]

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.apps.fact_verification.results import (
    calibrated_label_indices,
    confusion,
    mcnemar_p_value,
    uncalibrated_label_indices,
    wilson,
)


# Expected intervals from R's prop.test(right, total, correct = FALSE) and from Newcombe (1998), table I.
@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(right, total, low, high):
    assert wilson(right, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_interval_contains_the_share_and_is_symmetric(right, total):
    right = min(right, total)
    low, high = wilson(right, total)
    assert 0.0 <= low <= right / total <= high <= 1.0
    mirrored = wilson(total - right, total)
    assert mirrored == (pytest.approx(1 - high, abs=1e-12), pytest.approx(1 - low, abs=1e-12))


def test_mcnemar_gives_known_values():
    # 1 of 10 discordant pairs favours the second: p = 2 * (1 + 10) / 2**10.
    first = [True] * 9 + [False] + [True] * 30
    second = [False] * 9 + [True] + [True] * 30
    assert mcnemar_p_value(first, second) == pytest.approx(22 / 1024)
    assert mcnemar_p_value(first, first) == 1.0
    assert mcnemar_p_value([True, False], [False, True]) == 1.0
    assert mcnemar_p_value([True] * 3000, [False] * 3000) == 0.0, "no overflow"


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_p_value_is_twice_the_binomial_tail(more, fewer):
    total = more + fewer
    tail = sum(math.comb(total, count) for count in range(min(more, fewer) + 1))
    p = mcnemar_p_value([True] * more + [False] * fewer, [False] * more + [True] * fewer)
    assert p == pytest.approx(min(1.0, 2 * tail / 2**total))


def test_confusion_counts_truth_by_answer():
    assert confusion([0, 0, 1, 2], [0, 1, 1, 0], labels=3) == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_calibration_removes_the_bias_for_a_word():
    chance = random.Random(1)
    truth = [chance.randrange(3) for _ in range(300)]
    # The scores favour the right word, but the second word always has five nats too many.
    scores = [[(2.0 if label == true else 0.0) + (5.0 if label == 1 else 0.0) for label in range(3)] for true in truth]
    assert set(uncalibrated_label_indices(scores)) == {1}
    assert calibrated_label_indices(scores) == truth


def test_calibration_ignores_the_likelihood_common_to_a_row():
    scores = [[-1.0, -2.0, -3.0], [-3.0, -1.0, -2.0], [-2.0, -3.0, -1.0]]
    shifted = [[score - 100.0 * row for score in one] for row, one in enumerate(scores)]
    assert calibrated_label_indices(shifted) == calibrated_label_indices(scores) == [0, 1, 2]
    assert calibrated_label_indices([]) == []

"""Which lengths of a model get a runtime of their own. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from stoker.contexts.length_profiles import LEAST_GAIN, LengthProfile, choose_lengths


def profile(seconds: Callable[[int], float], *, step: int = 16, longest: int = 512) -> list[LengthProfile]:
    return [LengthProfile(tokens, seconds(tokens)) for tokens in range(step, longest + 1, step)]


def test_runtimes_stand_at_the_ends_of_the_steps() -> None:
    """§3.3: BERT's latency rises every 64 tokens, and hardly in between."""
    stairs = profile(lambda tokens: 0.001 * math.ceil(tokens / 64) + 1e-6 * tokens / 64)
    found = choose_lengths(stairs)
    assert set(found.tokens) <= set(range(64, 513, 64))
    assert found.tokens[-1] == 512
    assert len(found.tokens) >= 4
    assert "less time than the longest alone" in found.why


def test_without_a_staircase_one_runtime_is_right() -> None:
    flat = profile(lambda tokens: 0.005 + 1e-7 * tokens)
    found = choose_lengths(flat)
    assert found.tokens == (512,)
    assert found.why == "one runtime of 512 tokens: shorter ones would save less than 5%"


def test_where_latency_rises_steadily_there_are_no_more_than_pay() -> None:
    found = choose_lengths(profile(lambda tokens: 0.001 + 0.0001 * tokens), most=32)
    assert 3 <= len(found.tokens) < 32
    assert len(choose_lengths(profile(lambda tokens: 0.0001 * tokens), most=3).tokens) == 3


def test_texts_that_are_expected_decide() -> None:
    short = [LengthProfile(64, 0.001, 98.0), LengthProfile(128, 0.002, 1.0), LengthProfile(512, 0.008, 1.0)]
    assert choose_lengths(short).tokens[0] == 64
    long = [LengthProfile(64, 0.001, 0.1), LengthProfile(128, 0.002, 0.0), LengthProfile(512, 0.008, 99.9)]
    assert choose_lengths(long).tokens == (512,)


def test_a_shorter_text_that_was_measured_slower_is_served_by_the_longer_runtime() -> None:
    noisy = [LengthProfile(64, 0.009), LengthProfile(128, 0.002), LengthProfile(256, 0.004)]
    assert choose_lengths(noisy).tokens == (128, 256)


def test_no_choice_of_as_many_lengths_is_better() -> None:
    chance = random.Random(3)
    for _ in range(40):
        times = sorted(chance.uniform(0.001, 0.02) for _ in range(7))
        given = [LengthProfile(32 * (n + 1), seconds, chance.random()) for n, seconds in enumerate(times)]
        found = choose_lengths(given)
        texts = sum(each.texts for each in given)

        def mean_s(chosen: tuple[int, ...], given: list[LengthProfile] = given, texts: float = texts) -> float:
            by_length = {each.tokens: each.seconds for each in given}
            padded = (min(length for length in chosen if length >= each.tokens) for each in given)
            return sum(each.texts * by_length[length] for each, length in zip(given, padded, strict=True)) / texts

        def best_of(count: int, given: list[LengthProfile] = given) -> float:
            lengths = [each.tokens for each in given]
            ways = (way for way in itertools.combinations(lengths, count) if way[-1] == lengths[-1])
            return min(map(mean_s, ways))

        assert found.mean_s == pytest.approx(mean_s(found.tokens))
        assert found.mean_s == pytest.approx(best_of(len(found.tokens)))
        if len(found.tokens) < 7:
            assert found.mean_s <= best_of(len(found.tokens) + 1) * (1 + LEAST_GAIN) + 1e-12


def test_a_profile_that_says_nothing_is_refused() -> None:
    for bad in ([], [LengthProfile(64, 1.0), LengthProfile(64, 1.0)], [LengthProfile(64, 1.0, 0.0)]):
        with pytest.raises(ValueError, match=r"rise|expected"):
            choose_lengths(bad)

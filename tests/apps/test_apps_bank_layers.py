from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker.errors import StokerError
from stoker.tuning.bank.build import evaluation_samples
from stoker.tuning.bank.candidates import Candidate, hash_prompt
from stoker.tuning.bank.layers import (
    Array,
    Insertion,
    InsertionOutcome,
    Layers,
    build_layers,
    cosine_distances,
    k_medoids,
)
from stoker.tuning.bank.lookup import default_score_limit, look_up, two_layers

WIDTH = 6


def features(count: int, seed: int = 0) -> Array:
    """Return features with half of the rows in one large cluster, as in real banks."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, WIDTH))
    rows[: count // 2] = 3.0 + rng.normal(scale=0.2, size=(count // 2, WIDTH))
    return rows.astype(np.float32)


def bank(count: int, *, k: int = 8, capacity: int = 3000, seed: int = 0, largest_group: int = 6) -> Layers:
    candidates = [Candidate(text=f"prompt {number}") for number in range(count)]
    return build_layers(candidates, features(count, seed), k=k, capacity=capacity, largest_group=largest_group)


def insert(layers: Layers, text: str, feature: Array) -> Insertion:
    candidate, vector = Candidate(text=text), layers.scale.scale_to_unit(feature[None])[0]
    insertion = layers.plan_insertion(candidate, vector)
    if insertion.did is not InsertionOutcome.REFUSED:
        layers.apply_insertion(candidate, vector, insertion)
    return insertion


def validate(layers: Layers) -> None:
    there = Counter(key for members in layers.clusters for key in members)
    assert set(there) == set(layers.candidates) == set(layers.vectors)
    assert set(there.values()) == {1}
    assert all(layers.clusters)
    for number, group in layers.list_cluster_groups():
        assert group.representative == layers.clusters[number][0]
        waiting = [group]
        while waiting:
            one = waiting.pop()
            parts = layers.split_group(number, one)
            assert bool(parts) == (len(one.members) > layers.largest_group)
            if parts:
                assert Counter(key for part in parts for key in part.members) == Counter(one.members)
                waiting.extend(parts)


class Bank(RuleBasedStateMachine):
    """Add new and known texts to a bank in any order, below and at the bank's capacity."""

    @initialize(count=st.integers(1, 40), k=st.integers(1, 8), room=st.integers(0, 5), seed=st.integers(0, 99))
    def made(self, count, k, room, seed):
        self.layers = bank(count, k=k, capacity=max(1, count - 2 + room), seed=seed)
        self.tops = [members[0] for members in self.layers.clusters]
        self.most = max(len(self.layers), self.layers.capacity)

    @rule(number=st.integers(0, 80), seed=st.integers(0, 99), far=st.floats(0.01, 5))
    def inserted(self, number, seed, far):
        key, before = hash_prompt(f"prompt {number}"), dict(self.layers.candidates)
        feature = far * np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
        did = insert(self.layers, f"prompt {number}", feature).did
        assert (did is InsertionOutcome.UPDATED) == (key in before)
        assert (key in self.layers.candidates) == (did is not InsertionOutcome.REFUSED)
        assert did is InsertionOutcome.ADDED or set(self.layers.candidates) == set(before)

    @invariant()
    def holds(self):
        validate(self.layers)
        assert len(self.layers) <= self.most
        assert [members[0] for members in self.layers.clusters] == self.tops


Bank.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBank = Bank.TestCase


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 90),
    k=st.integers(1, 12),
    limit=st.sampled_from([0, *range(2, 120)]),
    seed=st.integers(0, 99),
    nan=st.booleans(),
)
def test_lookup_scores_each_prompt_once_and_at_most_its_limit(count, k, limit, seed, nan):
    layers = bank(count, k=k, seed=seed)
    losses = {f"prompt {number}": loss for number, loss in enumerate(np.random.default_rng(seed).random(count))}
    if nan and count > 1:
        losses["prompt 0"] = math.nan
    asked: list[str] = []

    def score(texts):
        asked.extend(texts)
        return [losses[text] for text in texts]

    found = look_up(layers, score, limit=limit)
    assert len(asked) == len(set(asked)) == found.scores
    assert found.scores <= max(limit or default_score_limit(layers), len(layers.clusters))
    assert {layers.candidates[members[0]].text for members in layers.clusters} <= set(asked)
    assert found.loss == min(losses[text] for text in asked if not math.isnan(losses[text]))
    assert losses[found.candidate.text] == found.loss
    if limit >= count:
        assert found.scores == count


def test_lookup_in_a_large_cluster_stays_within_its_score_limit():
    layers = bank(600, k=10, largest_group=16)
    largest = max(layers.clusters, key=len)
    assert len(largest) > 200
    target = layers.vectors[largest[150]]

    def score(texts):  # the best prompt is in the large cluster
        return [float(cosine_distances(layers.vectors[hash_prompt(text)][None], target[None])[0, 0]) for text in texts]

    assert two_layers(layers, score).scores == 10 + len(largest) - 1
    found = look_up(layers, score, limit=60)
    assert found.scores == 60
    assert found.loss < 1e-6


def test_lookup_searches_the_second_best_cluster():
    """The representative of the best prompt's cluster is not the best representative. A two-layer search misses the
    best prompt; best-bin-first finds it.
    """
    layers = bank(200, k=8)
    first, second = sorted(range(8), key=lambda number: len(layers.clusters[number]))[-2:]
    losses = dict.fromkeys(layers.candidates, 5.0)
    losses |= {layers.clusters[first][0]: 2.0, layers.clusters[second][0]: 1.9, layers.clusters[first][-1]: 0.5}

    def score(texts):
        return [losses[hash_prompt(text)] for text in texts]

    assert two_layers(layers, score).loss == 1.9
    assert look_up(layers, score, limit=150).loss == 0.5


@pytest.mark.parametrize(
    ("losses", "says"), [(lambda texts: [1.0], "returned 1 losses"), (lambda texts: [math.nan] * len(texts), "none of")]
)
def test_lookup_raises_an_error_if_the_scorer_returns_invalid_losses(losses, says):
    with pytest.raises(StokerError, match=says):
        look_up(bank(30), losses)


def test_full_bank_removes_the_prompt_nearest_its_representative():
    layers = bank(60, k=4, capacity=60)
    top, *others = layers.clusters[1]

    def distance(key):
        return float(cosine_distances(layers.vectors[key][None], layers.vectors[top][None])[0, 0])

    nearest, far = min(others, key=distance), max(others, key=distance)
    newcomer = Candidate(text="new")
    insertion = layers.plan_insertion(newcomer, layers.vectors[far])
    assert insertion == Insertion(did=InsertionOutcome.ADDED, cluster=1, removed=nearest)
    assert layers.plan_insertion(newcomer, layers.vectors[top]).did is InsertionOutcome.REFUSED


def test_features_that_are_not_numbers_are_refused():
    broken = features(4)
    broken[2, 1] = math.inf
    with pytest.raises(ValueError, match="float32"):
        build_layers([Candidate(text=str(number)) for number in range(4)], broken)
    with pytest.raises(ValueError, match="0 candidates"):
        build_layers([], features(0))


def test_features_that_are_all_the_same_make_a_bank():
    layers = build_layers(
        [Candidate(text=str(number)) for number in range(9)], np.ones((9, WIDTH), dtype=np.float32), k=3
    )
    validate(layers)
    assert insert(layers, "another", np.ones(WIDTH, dtype=np.float32)).did is InsertionOutcome.ADDED


def test_evaluation_samples_are_a_small_reproducible_subset():
    samples = [(str(number), "x") for number in range(100)]
    some = evaluation_samples(samples)
    assert len(some) == len(set(some)) == 16
    assert some == evaluation_samples(samples) == sorted(some, key=lambda one: int(one[0]))
    assert some != evaluation_samples(samples, seed=1)
    assert evaluation_samples(samples[:3]) == samples[:3]


# ---- medoids


def points(count: int, seed: int, *, width: int = 5, copies: int = 0) -> Array:
    """Return unit rows; the first `copies` rows are equal."""
    rows = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    rows[:copies] = rows[0]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def medoid_cost(distances: Array, medoids: Array) -> float:
    return float(np.min(distances[:, medoids], axis=1).sum(dtype=np.float64))


def distances_of(count: int, seed: int, *, copies: int = 0) -> Array:
    rows = points(count, seed, copies=copies)
    distances = cosine_distances(rows, rows)
    np.fill_diagonal(distances, 0.0)
    return distances


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 30), k=st.integers(1, 8), seed=st.integers(0, 10**6), copies=st.integers(0, 12))
def test_medoids_cannot_be_improved_by_one_swap(count, k, seed, copies):
    distances = distances_of(count, seed, copies=min(copies, count))
    medoids, owners = k_medoids(distances, k=k)
    assert list(medoids) == sorted(set(medoids))
    assert len(medoids) == min(k, count)
    assert list(owners[medoids]) == list(range(len(medoids)))
    near = distances[:, medoids]
    assert np.allclose(near[np.arange(count), owners], near.min(axis=1))
    found = medoid_cost(distances, medoids)
    for out, point in itertools.product(range(len(medoids)), set(range(count)) - set(medoids)):
        swapped = np.array([*np.delete(medoids, out), point])
        assert medoid_cost(distances, swapped) >= found - 1e-4


@pytest.mark.parametrize("seed", range(8))
def test_medoids_cost_at_most_ten_percent_more_than_the_best(seed):
    distances = distances_of(12, seed)
    best = min(medoid_cost(distances, np.array(some)) for some in itertools.combinations(range(12), 3))
    assert medoid_cost(distances, k_medoids(distances, k=3)[0]) <= 1.1 * best


def test_equal_distances_always_give_the_same_medoids():
    first, again = (k_medoids(distances_of(200, 3), k=12)[0] for _ in range(2))
    assert list(first) == list(again)


@pytest.mark.parametrize(("count", "k"), [(0, 3), (3, 0)])
def test_k_medoids_refuses_zero_points_or_zero_clusters(count, k):
    with pytest.raises(ValueError, match="1 or more"):
        k_medoids(np.zeros((count, count), dtype=np.float32), k=k)

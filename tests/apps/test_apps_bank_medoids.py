from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.tuning.bank.layers import Array, cosine_distances, k_medoids, medoid_cost


def points(count: int, seed: int, *, width: int = 5, copies: int = 0) -> Array:
    """Return unit rows; the first `copies` rows are equal."""
    rows = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    rows[:copies] = rows[0]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


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


def test_same_distances_give_the_same_medoids():
    first, again = (k_medoids(distances_of(200, 3), k=12)[0] for _ in range(2))
    assert list(first) == list(again)


@pytest.mark.parametrize(("count", "k"), [(0, 3), (3, 0)])
def test_empty_inputs_are_refused(count, k):
    with pytest.raises(ValueError, match="1 or more"):
        k_medoids(np.zeros((count, count), dtype=np.float32), k=k)

"""K-medoids: K of the points, such that the sum of every point's distance to the nearest of them is small.

PromptTuner §4.3.1 groups prompts by K-medoids over cosine distances and §5.2 names a library for it that has no such
function, so the algorithm is ours to choose. It is PAM with the accounting of FasterPAM (Schubert and Rousseeuw, "Fast
and eager k-medoids clustering", Information Systems 101, 2021): each point is tried as a medoid in place of each of the
K at once, since what a swap is worth is a part that only the newcomer decides and a part that only the one that leaves
decides; an improving swap is made at once. One point costs O(n), a pass O(n^2), instead of PAM's O(K n^2). The start is
PAM's own (BUILD), which is greedy and draws nothing: the same distances give the same medoids, whatever the machine's
chance. Here a point's work is a few numpy operations over n, so 3,000 points take seconds.

It must end although sums of floats round: a swap is made only when it wins more than `_LEAST` of the whole cost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_LEAST = 1e-6
"""The smallest gain of a swap that is worth making, as a part of the cost."""
_PASSES = 100
"""Passes over all points, at the most; ten are many."""


def cosine_distances(one: Array, other: Array) -> Array:
    """`[n, m]` in 0 to 2, from rows of length one: `[n, width]` and `[m, width]`."""
    distances: Array = np.clip(1.0 - one @ other.T, 0.0, 2.0).astype(np.float32)
    return distances


def k_medoids(distances: Array, *, k: int) -> tuple[Indices, Indices]:
    """The medoids, as ascending indices `[min(k, n)]`, and for each point `[n]` which of them (0 to k - 1) is its own.

    `distances` is `[n, n]`, symmetric, 0 on its diagonal. A medoid is its own. Raises ValueError for k under 1, or no
    points.
    """
    n = len(distances)
    if k < 1 or n == 0:
        raise ValueError(f"{k} medoids of {n} points: both must be 1 or more")
    if k >= n:
        return np.arange(n), np.arange(n)
    medoids = np.sort(_swap(distances, _build(distances, k=k)))
    return medoids, assign(distances, medoids)


def assign(distances: Array, medoids: Indices) -> Indices:
    """For each point which medoid is nearest, the first of equals; a medoid is its own though others lie upon it."""
    owners: Indices = np.argmin(distances[:, medoids], axis=1)
    owners[medoids] = np.arange(len(medoids))
    return owners


def cost(distances: Array, medoids: Indices) -> float:
    """The sum of every point's distance to the nearest medoid."""
    return float(np.min(distances[:, medoids], axis=1).sum(dtype=np.float64))


def _build(distances: Array, *, k: int) -> list[int]:
    """One after the other, each the point that lowers the cost most (PAM's BUILD)."""
    chosen = [int(np.argmin(distances.sum(axis=0, dtype=np.float64)))]
    near = distances[chosen[0]].copy()
    while len(chosen) < k:
        gains = np.maximum(near[:, None] - distances, 0.0).sum(axis=0, dtype=np.float64)
        gains[chosen] = -1.0
        chosen.append(int(np.argmax(gains)))
        near = np.minimum(near, distances[chosen[-1]])
    return chosen


def _swap(distances: Array, medoids: list[int]) -> Indices:
    """Swaps that lower the cost, each made as soon as it is found, until a whole pass finds none."""
    own, k, n = np.array(medoids), len(medoids), len(distances)
    nearest, near, second = _two_nearest(distances, own)
    since, point = 0, 0
    for _ in range(_PASSES * n):
        if since == n:
            break
        since += 1
        if point not in own:
            to = distances[point]
            gained = to < near
            alone = float(np.sum(to - near, where=gained, dtype=np.float64))  # whoever leaves
            # If its own medoid leaves, a point goes to its second, or to the newcomer where that is nearer.
            moves = np.where(gained, 0.0, np.minimum(to, second) - near)
            by_medoid = np.bincount(nearest, weights=moves, minlength=k)
            out = int(np.argmin(by_medoid))
            if by_medoid[out] + alone < -_LEAST * float(near.sum(dtype=np.float64)):
                own[out] = point
                nearest, near, second = _two_nearest(distances, own)
                since = 0
        point = (point + 1) % n
    return own


def _two_nearest(distances: Array, medoids: Indices) -> tuple[Indices, Array, Array]:
    """Of each point: its nearest medoid, the distance to it, and to the next (as far as can be, if there is none)."""
    to = distances[:, medoids]
    nearest = np.argmin(to, axis=1)
    rows = np.arange(len(to))
    near = to[rows, nearest].copy()
    if len(medoids) == 1:
        return nearest, near, np.full_like(near, distances.max())
    to[rows, nearest] = np.inf
    return nearest, near, to.min(axis=1)

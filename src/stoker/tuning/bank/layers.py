"""The structure of a bank: clusters, each with a representative, and groups within large clusters.

**Features.** Some dimensions of a language model's hidden states are hundreds of times larger than others and nearly
constant over texts (PromptTuner §5.2). Timkey and van Schijndel ("All bark and no bite", EMNLP 2021) propose to centre
each dimension and to divide it by its standard deviation. A build does this over the bank's prompts. Each feature is
then scaled to length one.

**K-medoids** with cosine distances (PromptTuner §4.3.1) is PAM with the cost computation of FasterPAM (Schubert and
Rousseeuw, Information Systems 101, 2021). Each point is tried as a replacement for all K medoids at once, and an
improving swap is made immediately. A pass therefore costs O(n^2) instead of O(K n^2). PAM's BUILD chooses the initial
medoids without random numbers, so every machine gets the same result.

**Insertion and replacement** (§4.3.3). A new prompt joins the cluster with the nearest representative (its medoid). A
full bank removes the candidate nearest to this representative. The paper leaves some cases open. We decide:

- If the bank already has the text, the record of this text is replaced.
- A representative is never removed, but the new prompt may be refused.
- If the cluster has only its representative, a candidate of the largest cluster is removed.
- Of equally near candidates the oldest is chosen. This rule also applies to removal.
- Representatives stay until the bank is rebuilt.

**Groups** are our addition, because the largest cluster has over a hundred members. If a lookup reaches a group of more
than `largest_group` members, K-medoids divides the n members into about sqrt(n) subgroups. The paper found three layers
for the whole bank too costly to build (§4.3.4).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.tuning.bank.candidates import Candidate, Key

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_LEAST_COST_REDUCTION = 1e-6
"""Minimum cost reduction of a swap, as a share of the total cost, because rounding errors could cause endless swaps."""
_MOST_PASSES = 100
"""Maximum number of passes over all points."""


def cosine_distances(one: Array, other: Array) -> Array:
    """Return the distances `[n, m]`, from 0 to 2, between unit rows `[n, width]` and `[m, width]`."""
    distances: Array = np.clip(1.0 - one @ other.T, 0.0, 2.0).astype(np.float32)
    return distances


def k_medoids(distances: Array, *, k: int) -> tuple[Indices, Indices]:
    """Return the medoids as ascending indices `[min(k, n)]`, and for each point the position of its medoid in them
    `[n]`. `distances` is symmetric, `[n, n]`. Raises ValueError if k or n is 0.
    """
    n = len(distances)
    if k < 1 or n == 0:
        raise ValueError(f"{k} medoids of {n} points: both must be 1 or more")
    if k >= n:
        return np.arange(n), np.arange(n)
    medoids = np.sort(_improve_medoids_by_swaps(distances, _choose_initial_medoids(distances, k=k)))
    owners = np.argmin(distances[:, medoids], axis=1)  # the first of equally near medoids
    owners[medoids] = np.arange(len(medoids))
    return medoids, owners


def _cluster_vectors(units: Array, *, k: int) -> list[list[int]]:
    """Cluster unit rows `[n, width]`. Return the row indices of each cluster; the first is the medoid."""
    distances = cosine_distances(units, units)
    np.fill_diagonal(distances, 0.0)
    medoids, owners = k_medoids(distances, k=k)
    members = [np.flatnonzero(owners == number).tolist() for number in range(len(medoids))]
    return [[first, *(i for i in some if i != first)] for first, some in zip(medoids.tolist(), members, strict=True)]


def _choose_initial_medoids(distances: Array, *, k: int) -> list[int]:
    """Choose `k` medoids one by one. In each step, choose the point that reduces the cost most (PAM's BUILD)."""
    chosen = [int(np.argmin(distances.sum(axis=0, dtype=np.float64)))]
    near = distances[chosen[0]].copy()
    while len(chosen) < k:
        gains = np.maximum(near[:, None] - distances, 0.0).sum(axis=0, dtype=np.float64)
        gains[chosen] = -1.0
        chosen.append(int(np.argmax(gains)))
        near = np.minimum(near, distances[chosen[-1]])
    return chosen


def _improve_medoids_by_swaps(distances: Array, medoids: list[int]) -> Indices:
    """Swap medoids for other points until no swap reduces the cost."""
    own, k, n = np.array(medoids), len(medoids), len(distances)
    nearest, near, second = _nearest_two_medoids(distances, own)
    since, point = 0, 0
    for _ in range(_MOST_PASSES * n):
        if since == n:
            break
        since += 1
        if point not in own:
            to = distances[point]
            gained = to < near
            # The cost change that is the same for each removed medoid.
            alone = float(np.sum(to - near, where=gained, dtype=np.float64))
            # If the medoid of a point is removed, the point joins the nearer of its second medoid and the new medoid.
            moves = np.where(gained, 0.0, np.minimum(to, second) - near)
            by_medoid = np.bincount(nearest, weights=moves, minlength=k)
            out = int(np.argmin(by_medoid))
            if by_medoid[out] + alone < -_LEAST_COST_REDUCTION * float(near.sum(dtype=np.float64)):
                own[out] = point
                nearest, near, second = _nearest_two_medoids(distances, own)
                since = 0
        point = (point + 1) % n
    return own


def _nearest_two_medoids(distances: Array, medoids: Indices) -> tuple[Indices, Array, Array]:
    """Return for each point its nearest medoid, the distance to it, and the distance to the second nearest medoid."""
    to = distances[:, medoids]
    nearest = np.argmin(to, axis=1)
    rows = np.arange(len(to))
    near = to[rows, nearest].copy()
    if len(medoids) == 1:
        return nearest, near, np.full_like(near, distances.max())
    to[rows, nearest] = np.inf
    return nearest, near, to.min(axis=1)


class FeatureScale(msgspec.Struct, frozen=True):
    """The mean (`centre`) and the standard deviation (`spread`) of each feature dimension, both of shape `[width]`."""

    centre: Array
    spread: Array

    def scale_to_unit(self, features: Array) -> Array:
        """Standardize raw features `[n, width]`, then scale rows to length 1. A row equal to the mean becomes 0."""
        scaled = (features - self.centre) / self.spread
        lengths = np.linalg.norm(scaled, axis=1, keepdims=True)
        units: Array = np.divide(scaled, lengths, out=np.zeros_like(scaled), where=lengths > 1e-12).astype(np.float32)
        return units


def compute_feature_scale(features: Array) -> FeatureScale:
    """Return the scale of raw features `[n, width]`. A constant dimension has `spread` 1."""
    spread = features.std(axis=0)
    spread = np.where(spread > 1e-12, spread, 1.0)
    return FeatureScale(centre=features.mean(axis=0).astype(np.float32), spread=spread.astype(np.float32))


CLUSTERS = 50
"""Number of clusters, K in PromptTuner §5.2 and §6.3."""
CAPACITY = 3000
"""Maximum number of candidates in a bank (§4.3.3)."""
LARGEST_GROUP = 32
"""Maximum members of a group. A lookup divides larger groups."""


class CandidateGroup(msgspec.Struct, frozen=True):
    """A group: its representative, then the other members, nearest to the representative first."""

    members: tuple[Key, ...]

    @property
    def representative(self) -> Key:
        return self.members[0]


class InsertionOutcome(enum.Enum):
    ADDED = "added"
    UPDATED = "updated"
    """The bank has this prompt already. Its record was replaced."""
    REFUSED = "refused"
    """The bank is full, and would have to remove the new prompt itself."""


class Insertion(msgspec.Struct, frozen=True):
    did: InsertionOutcome
    cluster: int
    removed: Key | None = None


class Layers:
    """The candidates of a bank in clusters, each after its representative, and their features scaled to length 1."""

    def __init__(
        self,
        clusters: Sequence[Sequence[tuple[Candidate, Array]]],
        *,
        scale: FeatureScale,
        capacity: int,
        largest_group: int,
    ) -> None:
        self.candidates = {one.key: one for members in clusters for one, _ in members}
        self.vectors = {one.key: vector for members in clusters for one, vector in members}
        self.clusters = [[one.key for one, _ in members] for members in clusters]
        self.scale = scale
        self.capacity = capacity
        self.largest_group = largest_group
        self._cluster_of = {key: number for number, members in enumerate(self.clusters) for key in members}
        self._representative_vectors = np.stack([self.vectors[members[0]] for members in self.clusters])
        self._subgroups: dict[tuple[int, CandidateGroup], tuple[CandidateGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self.candidates)

    # ---- insertion and replacement

    def plan_insertion(self, candidate: Candidate, vector: Array) -> Insertion:
        """Return how to insert a candidate with unit feature `vector`. The bank stays unchanged."""
        key = candidate.key
        if key in self.candidates:
            return Insertion(did=InsertionOutcome.UPDATED, cluster=self._cluster_of[key])
        cluster = int(np.argmin(cosine_distances(vector[None], self._representative_vectors)[0]))
        if len(self) < self.capacity:
            return Insertion(did=InsertionOutcome.ADDED, cluster=cluster)
        if len(self.clusters[cluster]) > 1:
            nearest, at = self._find_nearest_to_representative(cluster)
            if float(cosine_distances(vector[None], self._representative_vectors[cluster][None])[0, 0]) < at:
                return Insertion(did=InsertionOutcome.REFUSED, cluster=cluster)
            return Insertion(did=InsertionOutcome.ADDED, cluster=cluster, removed=nearest)
        largest = self._largest_cluster_index()
        if len(self.clusters[largest]) == 1:  # each cluster has only one prompt
            return Insertion(did=InsertionOutcome.REFUSED, cluster=cluster)
        return Insertion(
            did=InsertionOutcome.ADDED, cluster=cluster, removed=self._find_nearest_to_representative(largest)[0]
        )

    def apply_insertion(self, candidate: Candidate, vector: Array, insertion: Insertion) -> None:
        """Insert a candidate as planned. The plan must not be REFUSED."""
        key = candidate.key
        self.candidates[key] = candidate
        if insertion.did is InsertionOutcome.UPDATED:
            return
        self.vectors[key] = vector
        self.clusters[insertion.cluster].append(key)
        self._cluster_of[key] = insertion.cluster
        self._forget_subgroups(insertion.cluster)
        if insertion.removed is not None:
            self._remove(insertion.removed)

    def remove_from_largest_cluster(self) -> None:
        self._remove(self._find_nearest_to_representative(self._largest_cluster_index())[0])

    def _remove(self, key: Key) -> None:
        cluster = self._cluster_of.pop(key)
        self.clusters[cluster].remove(key)
        self._forget_subgroups(cluster)
        del self.candidates[key], self.vectors[key]

    def _largest_cluster_index(self) -> int:
        return max(range(len(self.clusters)), key=lambda number: len(self.clusters[number]))

    def _find_nearest_to_representative(self, cluster: int) -> tuple[Key, float]:
        others = self.clusters[cluster][1:]
        distances = self._distances_to_key(others, self.clusters[cluster][0])
        at = int(np.argmin(distances))
        return others[at], float(distances[at])

    def _distances_to_key(self, keys: Sequence[Key], to: Key) -> Array:
        return cosine_distances(np.stack([self.vectors[key] for key in keys]), self.vectors[to][None])[:, 0]

    # ---- groups

    def list_cluster_groups(self) -> list[tuple[int, CandidateGroup]]:
        return [
            (number, self._group_sorted_by_distance(members[0], members[1:]))
            for number, members in enumerate(self.clusters)
        ]

    def split_group(self, cluster: int, group: CandidateGroup) -> tuple[CandidateGroup, ...]:
        """Return the subgroups of a large group; empty for a small group."""
        if len(group.members) <= self.largest_group:
            return ()
        if (cluster, group) not in self._subgroups:
            self._subgroups[cluster, group] = self._split_into_clusters(group.members)
        return self._subgroups[cluster, group]

    def _split_into_clusters(self, members: tuple[Key, ...]) -> tuple[CandidateGroup, ...]:
        vectors = np.stack([self.vectors[key] for key in members])
        groups = ([members[i] for i in each] for each in _cluster_vectors(vectors, k=math.isqrt(len(members))))
        return tuple(self._group_sorted_by_distance(first, others) for first, *others in groups)

    def _group_sorted_by_distance(self, first: Key, others: Sequence[Key]) -> CandidateGroup:
        if not others:
            return CandidateGroup((first,))
        order = np.argsort(self._distances_to_key(others, first), kind="stable")
        return CandidateGroup((first, *(others[at] for at in order)))

    def _forget_subgroups(self, cluster: int) -> None:
        self._subgroups = {place: parts for place, parts in self._subgroups.items() if place[0] != cluster}


def build_layers(
    candidates: Sequence[Candidate],
    features: Array,
    *,
    k: int = CLUSTERS,
    capacity: int = CAPACITY,
    largest_group: int = LARGEST_GROUP,
) -> Layers:
    """Cluster candidates by raw features `[n, width]`. Raises ValueError without candidates or finite features."""
    if not candidates or len(candidates) != len(features):
        raise ValueError(f"a bank of {len(candidates)} candidates with {len(features)} features cannot be made")
    if not np.isfinite(features).all():
        raise ValueError("a feature is not a number; the model's hidden states overflow, try it in float32")
    scale = compute_feature_scale(features)
    units = scale.scale_to_unit(features)
    clusters = [[(candidates[i], units[i]) for i in each] for each in _cluster_vectors(units, k=min(k, capacity))]
    layers = Layers(clusters, scale=scale, capacity=capacity, largest_group=largest_group)
    while len(layers) > capacity:
        layers.remove_from_largest_cluster()
    return layers

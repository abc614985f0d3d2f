"""The bank's structure: representatives above, their clusters below, and groups in clusters that are large.

The two layers are PromptTuner's (§4.3.1): K-medoids of the features; each cluster's medoid is its *representative*.
Insertion and replacement (§4.3.3): a new prompt goes to the cluster whose representative is nearest by cosine. Above
the capacity one candidate of that cluster goes: the one nearest to the representative, which stands for it as well.
The paper leaves open, and this is what happens here:

- A text that is there already is not there twice: its record becomes the newer one, and nothing else changes.
- A representative never goes. The newcomer may, when it is nearest itself: then the bank already has what it brings.
- In a cluster of nobody but representative and newcomer the rule would refuse every newcomer for ever, though it may
  be like nothing else in the bank. The candidate that goes is then one of the largest cluster.
- Of equals (distance, size of clusters) the first goes, or is taken: what has been there longest.
- Representatives stay as they were chosen until the bank is built again. Distances to them decide, nothing drifts.

Groups are ours. Clusters are of very different size: of 3,000 prompts in 50 clusters the largest has over a hundred by
scaled features, several hundred by others, and insertions add to it; whoever lands there pays for all of it. A cluster
(or a group) of more than `largest_group` members is divided by K-medoids into about the square root of their number,
and so on down. That is done when a lookup first gets there and forgotten when the cluster changes: a large one takes
tenths of a second, and it is a function of its members alone. The paper tried three layers for the whole bank and gave
up on what they cost to build (§4.3.4); this costs nothing until it is needed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from stoker.tuning.bank.candidate import Candidate, Key
from stoker.tuning.bank.features import Scale, scale_of
from stoker.tuning.bank.medoids import Array, cosine_distances, k_medoids

CLUSTERS = 50
"""K, as PromptTuner §5.2 and §6.3 have it."""
CAPACITY = 3000
"""Candidates of a bank at the most (§4.3.3)."""
LARGEST_GROUP = 32
"""Members that are scored one by one; of more, representatives of groups come first."""


class CandidateGroup(msgspec.Struct, frozen=True):
    """Candidates and the one that stands for them, which is the first; then by their distance to it."""

    members: tuple[Key, ...]

    @property
    def representative(self) -> Key:
        """Who stands for the group."""
        return self.members[0]


class InsertionOutcome(enum.Enum):
    """What came of an insertion."""

    ADDED = "added"
    """It is in the bank now; another may have gone for it."""
    UPDATED = "updated"
    """Its text was there already; the record is the newer one."""
    REFUSED = "refused"
    """The bank is full, and it is nearest to its representative of all: it would have been the one to go."""


class Insertion(msgspec.Struct, frozen=True):
    """What an insertion does: where the prompt belongs, and who goes."""

    did: InsertionOutcome
    cluster: int
    removed: Key | None = None


class Layers:
    """Candidates by key, in clusters. `vectors` are unit features; the first member of a cluster represents it."""

    def __init__(
        self,
        candidates: Mapping[Key, Candidate],
        vectors: Mapping[Key, Array],
        clusters: Sequence[Sequence[Key]],
        *,
        scale: Scale,
        capacity: int = CAPACITY,
        largest_group: int = LARGEST_GROUP,
    ) -> None:
        self.candidates = dict(candidates)
        self.vectors = dict(vectors)
        self.clusters = [list(members) for members in clusters]
        self.scale = scale
        self.capacity = capacity
        self.largest_group = largest_group
        self._home = {key: number for number, members in enumerate(self.clusters) for key in members}
        self._tops = np.stack([self.vectors[members[0]] for members in self.clusters])
        self._parts: dict[tuple[int, CandidateGroup], tuple[CandidateGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self.candidates)

    def __contains__(self, key: object) -> bool:
        return key in self.candidates

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates.values())

    def cluster_of(self, key: Key) -> int:
        """The number of the cluster that it is in."""
        return self._home[key]

    # ---- insertion and replacement

    def plan(self, candidate: Candidate, vector: Array) -> Insertion:
        """What inserting it would do; `vector` is its unit feature. Nothing changes."""
        key = candidate.key
        if key in self.candidates:
            return Insertion(did=InsertionOutcome.UPDATED, cluster=self._home[key])
        cluster = int(np.argmin(cosine_distances(vector[None], self._tops)[0]))
        if len(self) < self.capacity:
            return Insertion(did=InsertionOutcome.ADDED, cluster=cluster)
        others = self.clusters[cluster][1:]
        if others:
            nearest, at = self._nearest(cluster)
            if float(cosine_distances(vector[None], self._tops[cluster][None])[0, 0]) < at:
                return Insertion(did=InsertionOutcome.REFUSED, cluster=cluster)
            return Insertion(did=InsertionOutcome.ADDED, cluster=cluster, removed=nearest)
        largest = self._largest()
        if len(self.clusters[largest]) == 1:  # as many clusters as there may be candidates
            return Insertion(did=InsertionOutcome.REFUSED, cluster=cluster)
        return Insertion(did=InsertionOutcome.ADDED, cluster=cluster, removed=self._nearest(largest)[0])

    def apply(self, candidate: Candidate, vector: Array, insertion: Insertion) -> None:
        """Do what was planned, here or by another process that wrote it down."""
        key = candidate.key
        if insertion.did is InsertionOutcome.REFUSED:
            return
        self.candidates[key] = candidate
        if insertion.did is InsertionOutcome.UPDATED:
            return
        self.vectors[key] = vector
        self.clusters[insertion.cluster].append(key)
        self._home[key] = insertion.cluster
        self._forget(insertion.cluster)
        if insertion.removed is not None:
            self._remove(insertion.removed)

    def trim(self) -> list[Key]:
        """Remove what is above the capacity, from the cluster that is largest each time. Returns who went."""
        gone = []
        while len(self) > self.capacity and len(self.clusters[largest := self._largest()]) > 1:
            gone.append(self._nearest(largest)[0])
            self._remove(gone[-1])
        return gone

    def _remove(self, key: Key) -> None:
        cluster = self._home.pop(key)
        self.clusters[cluster].remove(key)
        self._forget(cluster)
        del self.candidates[key], self.vectors[key]

    def _largest(self) -> int:
        return max(range(len(self.clusters)), key=lambda number: len(self.clusters[number]))

    def _nearest(self, cluster: int) -> tuple[Key, float]:
        """The member nearest to the representative, and how near."""
        others = self.clusters[cluster][1:]
        distances = self._distances(others, self.clusters[cluster][0])
        at = int(np.argmin(distances))
        return others[at], float(distances[at])

    def _distances(self, keys: Sequence[Key], to: Key) -> Array:
        return cosine_distances(np.stack([self.vectors[key] for key in keys]), self.vectors[to][None])[:, 0]

    # ---- groups

    def tops(self) -> list[tuple[int, CandidateGroup]]:
        """Every cluster as a group, with its number."""
        return [(number, self._sorted(members[0], members[1:])) for number, members in enumerate(self.clusters)]

    def parts(self, cluster: int, group: CandidateGroup) -> tuple[CandidateGroup, ...]:
        """The groups that a large group of this cluster is divided into; of a small one none."""
        if len(group.members) <= self.largest_group:
            return ()
        if (cluster, group) not in self._parts:
            self._parts[cluster, group] = self._divide(group.members)
        return self._parts[cluster, group]

    def _divide(self, members: tuple[Key, ...]) -> tuple[CandidateGroup, ...]:
        vectors = np.stack([self.vectors[key] for key in members])
        distances = cosine_distances(vectors, vectors)
        np.fill_diagonal(distances, 0.0)
        medoids, owners = k_medoids(distances, k=math.isqrt(len(members)))
        return tuple(
            self._sorted(members[medoid], [members[i] for i in np.flatnonzero(owners == number) if i != medoid])
            for number, medoid in enumerate(medoids)
        )

    def _sorted(self, first: Key, others: Sequence[Key]) -> CandidateGroup:
        if not others:
            return CandidateGroup((first,))
        order = np.argsort(self._distances(others, first), kind="stable")
        return CandidateGroup((first, *(others[at] for at in order)))

    def _forget(self, cluster: int) -> None:
        self._parts = {place: parts for place, parts in self._parts.items() if place[0] != cluster}


def build(
    candidates: Sequence[Candidate],
    features: Array,
    *,
    k: int = CLUSTERS,
    capacity: int = CAPACITY,
    largest_group: int = LARGEST_GROUP,
) -> Layers:
    """The structure of these candidates, whose texts differ, from their raw features `[n, width]`.

    There are at most as many clusters as the capacity. Raises ValueError for no candidate, and for a feature that is
    not a number.
    """
    if not candidates or len(candidates) != len(features):
        raise ValueError(f"a bank of {len(candidates)} candidates with {len(features)} features cannot be made")
    if not np.isfinite(features).all():
        raise ValueError("a feature is not a number; the model's hidden states overflow, try it in float32")
    scale = scale_of(features)
    units = scale.unit(features)
    distances = cosine_distances(units, units)
    np.fill_diagonal(distances, 0.0)
    medoids, owners = k_medoids(distances, k=min(k, capacity))
    keys = [candidate.key for candidate in candidates]
    clusters = [
        [keys[medoid], *(keys[i] for i in np.flatnonzero(owners == number) if i != medoid)]
        for number, medoid in enumerate(medoids)
    ]
    layers = Layers(
        dict(zip(keys, candidates, strict=True)),
        dict(zip(keys, units, strict=True)),
        clusters,
        scale=scale,
        capacity=capacity,
        largest_group=largest_group,
    )
    layers.trim()
    return layers

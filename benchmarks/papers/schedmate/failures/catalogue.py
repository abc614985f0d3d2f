"""All fault types, and which of them are kept for the test.

The draw is by seed, a third of each kind, made once before anything was tried; `TEST` never occurs in training. The
types that real clusters added later are drawn among themselves, by a seed of their own, before they were recorded for
good and before any verdict on them was seen; so no type of the first draw changes sides.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from benchmarks.papers.schedmate.failures import faults_clusters, faults_framework, faults_infrastructure, faults_user
from benchmarks.papers.schedmate.failures.injections import FRAMEWORK, INFRASTRUCTURE, USER, FaultType

INJECTED: tuple[FaultType, ...] = (*faults_infrastructure.TYPES, *faults_framework.TYPES, *faults_user.TYPES)
TYPES: tuple[FaultType, ...] = (*INJECTED, *faults_clusters.TYPES)
SPLIT_SEED = "schedmate-failures-1"
CLUSTERS_SEED = "schedmate-failures-clusters-1"


def held_out(types: Iterable[FaultType], seed: str) -> frozenset[str]:
    chance = random.Random(seed)
    types = list(types)
    chosen: list[str] = []
    for kind in (INFRASTRUCTURE, FRAMEWORK, USER):
        names = sorted(each.name for each in types if each.kind == kind)
        chosen += chance.sample(names, round(len(names) / 3))
    return frozenset(chosen)


TEST = held_out(INJECTED, SPLIT_SEED) | held_out(faults_clusters.TYPES, CLUSTERS_SEED)

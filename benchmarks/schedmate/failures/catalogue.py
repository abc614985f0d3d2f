"""All fault types, and which of them are kept for the test.

The draw is by seed, a third of each kind, made once before anything was tried; `TEST` never occurs in training.
"""

from __future__ import annotations

import random

from benchmarks.schedmate.failures import faults_framework, faults_infrastructure, faults_user
from benchmarks.schedmate.failures.injections import FRAMEWORK, INFRASTRUCTURE, USER, FaultType

TYPES: tuple[FaultType, ...] = (*faults_infrastructure.TYPES, *faults_framework.TYPES, *faults_user.TYPES)
SPLIT_SEED = "schedmate-failures-1"


def held_out(seed: str = SPLIT_SEED) -> frozenset[str]:
    """The names of the types of the test part."""
    chance = random.Random(seed)
    chosen: list[str] = []
    for kind in (INFRASTRUCTURE, FRAMEWORK, USER):
        names = sorted(each.name for each in TYPES if each.kind == kind)
        chosen += chance.sample(names, round(len(names) / 3))
    return frozenset(chosen)


TEST = held_out()

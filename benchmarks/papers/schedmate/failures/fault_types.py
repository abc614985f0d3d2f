"""Load the fault types (`fault_types.toml`). A third of the types of each kind is the test part; types from real
clusters are divided separately.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec

INFRASTRUCTURE, FRAMEWORK, USER = "infrastructure", "framework", "user"
SPLIT_SEED, CLUSTERS_SEED = "schedmate-failures-1", "schedmate-failures-clusters-1"


class Injection(msgspec.Struct, frozen=True):
    where: str
    code: str = ""
    raises: str = ""
    library: tuple[str, str, str] = ("", "", "")
    prints: tuple[str, ...] = ()
    dies: bool = False
    programs: tuple[str, ...] = ("vision", "language", "plain")


class FaultType(msgspec.Struct, frozen=True):
    name: str
    kind: str
    component: str
    injections: tuple[Injection, ...] = ()


def held_out(types: Iterable[FaultType], seed: str) -> frozenset[str]:
    chance = random.Random(seed)
    types = list(types)
    chosen: list[str] = []
    for kind in (INFRASTRUCTURE, FRAMEWORK, USER):
        names = sorted(each.name for each in types if each.kind == kind)
        chosen += chance.sample(names, round(len(names) / 3))
    return frozenset(chosen)


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[FaultType, ...]])
INJECTED, ON_CLUSTERS = _TABLES["injected"], _TABLES["on_clusters"]
TYPES = (*INJECTED, *ON_CLUSTERS)
TEST = held_out(INJECTED, SPLIT_SEED) | held_out(ON_CLUSTERS, CLUSTERS_SEED)

"""The shipped policies. `default_policies()` follows Pervasive Context Management; `named` finds a policy by name."""

from __future__ import annotations

from stoker.manager.core.seams import Policies
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.named import DEFAULT, SHIPPED, Named, named
from stoker.manager.policies.provisioning import KeepBlocks, TakeWhatComes
from stoker.manager.policies.residency import LoadWhereWanted


def default_policies() -> Policies:
    return SHIPPED[DEFAULT].make()


__all__ = [
    "SHIPPED", "HottestFirst", "KeepBlocks", "LoadWhereWanted", "Named", "Quiet", "TakeWhatComes", "default_policies",
    "named",
]  # fmt: skip

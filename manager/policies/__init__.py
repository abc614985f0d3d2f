"""Policies at the four seams. `default_policies()` are Pervasive Context Management's; `named` has all that ship."""

from __future__ import annotations

from stoker.manager.core.seams import Policies
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.named import DEFAULT, SHIPPED, Named, named
from stoker.manager.policies.provisioning import KeepBlocks, TakeWhatComes
from stoker.manager.policies.residency import LoadWhereWanted


def default_policies() -> Policies:
    """Hottest free library first; load where it is wanted and pays, keep until room is needed; blocks as the site files
    of the session say, and without any whatever comes."""
    return SHIPPED[DEFAULT].make()


__all__ = [
    "SHIPPED", "HottestFirst", "KeepBlocks", "LoadWhereWanted", "Named", "Quiet", "TakeWhatComes", "default_policies",
    "named",
]  # fmt: skip

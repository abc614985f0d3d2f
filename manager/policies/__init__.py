"""Policies at the four seams. `default_policies()` are Pervasive Context Management's."""

from __future__ import annotations

from stoker.manager.core.seams import Policies
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.residency import LoadWhereWanted


def default_policies() -> Policies:
    """Hottest free library first; load where it is wanted and pays, keep until room is needed; take what comes."""
    return Policies(dispatch=HottestFirst(), residency=LoadWhereWanted(), provisioning=TakeWhatComes())


__all__ = ["HottestFirst", "LoadWhereWanted", "TakeWhatComes", "default_policies"]

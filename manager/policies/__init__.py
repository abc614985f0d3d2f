"""The shipped policies, by name. `stoker.manager.live.session_policies` loads custom policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.dispatch import HottestFirst, ShortestFirst
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import ExternalPilots, KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted, WholeDevice
from stoker.manager.policies.slinfer import slinfer
from stoker.site import describe_unknown_policy

__all__ = [
    "SHIPPED", "ExternalPilots", "HottestFirst", "KeepBlocks", "LoadWhereWanted", "Quiet", "ShippedPolicy",
    "default_policies", "find_shipped_policy",
]  # fmt: skip

DEFAULT = "default"


class ShippedPolicy(msgspec.Struct, frozen=True):
    """`about`: one sentence for users. `make`: function that creates policies from `provisioning=` and the settings."""

    name: str
    about: str
    make: Callable[..., Policies]


def _policies(residency: type[LoadWhereWanted], dispatch: type[HottestFirst] = HottestFirst) -> Callable[..., Policies]:
    def make(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
        asked = provisioning or KeepBlocks()
        return Policies(dispatch(), residency(provisioning=asked, **settings), asked)

    return make


SHIPPED: dict[str, ShippedPolicy] = {
    policy.name: policy
    for policy in (
        ShippedPolicy(
            DEFAULT,
            "Keeps contexts loaded: a call runs in the most recently used free library; a context is loaded when this"
            " saves time.",
            _policies(LoadWhereWanted),
        ),
        ShippedPolicy(
            "shortest-first",
            "As default, but the call with the shortest expected run time runs first.",
            _policies(LoadWhereWanted, ShortestFirst),
        ),
        ShippedPolicy(
            "exclusive", "A library gets a whole device, whatever its context needs.", _policies(WholeDevice)
        ),
        ShippedPolicy(
            "prompt-tuner", "Gives calls with deadlines as many devices as they need, in rounds.", prompt_tuner
        ),
        ShippedPolicy(
            "slinfer",
            "Language models share devices step by step; a call whose tokens would be late is dropped.",
            slinfer,
        ),
        ShippedPolicy(
            "arlo",
            "Runs a call in the shortest runtime that fits its length, and divides devices by the lengths of calls.",
            arlo,
        ),
    )
}
"""Shipped policies by name, as listed in `stoker.site`."""


def find_shipped_policy(name: str) -> ShippedPolicy:
    """Return a shipped policy. Raises ConfigError, with the nearest name, if the name is unknown."""
    found = SHIPPED.get(name)
    if found is None:
        raise ConfigError(f"policy {name!r} {describe_unknown_policy(name)}")
    return found


def default_policies() -> Policies:
    return SHIPPED[DEFAULT].make()

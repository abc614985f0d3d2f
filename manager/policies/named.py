"""The shipped policies, by name.

`stoker.manager.live.session_policies` loads custom policies from files or modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.dispatch import HottestFirst, ShortestFirst
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted, WholeDevice
from stoker.manager.policies.slinfer import slinfer
from stoker.site import why_no_policy

DEFAULT = "default"


class Named(msgspec.Struct, frozen=True):
    """A policy with a name.

    `about`: one sentence for users. `make`: function that returns new policies from `provisioning=` and the settings.
    """

    name: str
    about: str
    make: Callable[..., Policies]


def _policies(residency: type[LoadWhereWanted], dispatch: type[HottestFirst] = HottestFirst) -> Callable[..., Policies]:
    def make(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
        asked = provisioning or KeepBlocks()
        return Policies(dispatch(), residency(provisioning=asked, **settings), asked)

    return make


SHIPPED: dict[str, Named] = {
    policy.name: policy
    for policy in (
        Named(
            DEFAULT,
            "Contexts stay hot: a call goes to the hottest free library, a load happens where it pays.",
            _policies(LoadWhereWanted),
        ),
        Named(
            "shortest-first",
            "As default, but of the calls that wait for a context, the shortest expected runs first.",
            _policies(LoadWhereWanted, ShortestFirst),
        ),
        Named("exclusive", "A library gets a whole device, whatever its context needs.", _policies(WholeDevice)),
        Named(
            "prompt-tuner",
            "Calls with deadlines get as many warm devices as they need, in rounds; unused ones are released.",
            prompt_tuner,
        ),
        Named(
            "slinfer",
            "Language models share devices a token at a time; a call whose tokens would be late is dropped.",
            slinfer,
        ),
        Named(
            "arlo",
            "A model in several lengths: a call runs in the shortest that fits; the calls' lengths divide the devices.",
            arlo,
        ),
    )
}
"""Shipped policies by name. `stoker.site` contains the list of names."""


def named(name: str) -> Named:
    """Return a shipped policy. Raises ConfigError, which suggests the nearest name."""
    found = SHIPPED.get(name)
    if found is None:
        raise ConfigError(f"policy {name!r} {why_no_policy(name)}")
    return found

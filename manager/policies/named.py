"""Policies by name: what a scenario compares, and what a site file deploys.

A name stands for an answer at every seam. An entry may also say how much of a context outlives a call under it: that
is a property of recipes, not of a policy, so a simulated run applies it to the contexts of its scenario, and a program
says it where it makes its contexts, `@context(awareness=...)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.manager.core.seams import Dispatch, Policies, Provisioning
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.elastic_flow import ElasticFlow
from stoker.manager.policies.exclusive import WholeDevice
from stoker.manager.policies.forgetful import LoadForEachCall, OneCallEach
from stoker.manager.policies.infless import Infless
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.replicas import ByOrder
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.scattered import AnyDevice, AnyFree

DEFAULT = "default"


class Make(Protocol):
    """Makes fresh policies: some remember things, so no two sessions or runs share them."""

    def __call__(self, *, provisioning: Provisioning | None = None) -> Policies:
        """All of them; `provisioning` instead of their own."""


class Named(msgspec.Struct, frozen=True):
    """A policy that can be asked for by name.

    `about` is a sentence for people. `awareness`: the most that a context may keep between calls under this policy;
    None = what it says.
    """

    name: str
    about: str
    make: Make
    awareness: Awareness | None = None


def _policies(
    dispatch: Callable[[], Dispatch] = HottestFirst, residency: type[LoadWhereWanted] = LoadWhereWanted
) -> Make:
    def make(*, provisioning: Provisioning | None = None) -> Policies:
        asked = provisioning or KeepBlocks()
        return Policies(dispatch=dispatch(), residency=residency(provisioning=asked), provisioning=asked)

    return make


def _by_order(dispatch: Callable[..., Dispatch]) -> Make:
    """Where dispatch orders what residency is to load. Settings are dispatch's."""

    def make(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
        asked = provisioning or KeepBlocks()
        residency = ByOrder(provisioning=asked)
        return Policies(dispatch=dispatch(residency, **settings), residency=residency, provisioning=asked)

    return make


SHIPPED: dict[str, Named] = {
    policy.name: policy
    for policy in (
        Named(
            DEFAULT,
            "Contexts stay hot: a call goes to the hottest free library, a load happens where it pays.",
            _policies(),
        ),
        Named(
            "disk-only",
            "Files stay on the node's disk, nothing else: each call loads the context anew from there.",
            _policies(OneCallEach, LoadForEachCall),
            Awareness.DISK,
        ),
        Named(
            "no-awareness",
            "Nothing stays (what Parsl HTEX does): each call loads the context anew from the shared storage.",
            _policies(OneCallEach, LoadForEachCall),
            Awareness.NONE,
        ),
        Named(
            "random",
            "Chance chooses the library of a call and the device of a context.",
            _policies(AnyFree, AnyDevice),
        ),
        Named(
            "exclusive",
            "A library gets a whole device, whatever its context needs.",
            _policies(residency=WholeDevice),
        ),
        Named(
            "prompt-tuner",
            "Calls with deadlines get as many warm devices as they need, in rounds; what nobody uses is let go.",
            prompt_tuner,
        ),
        Named(
            "infless",
            "Each context scales its own libraries with its calls, at once, and keeps idle ones for a while (INFless).",
            _by_order(Infless),
        ),
        Named(
            "elastic-flow",
            "Deadlines are promised or not as calls come; those that run get more and fewer devices (ElasticFlow).",
            _by_order(ElasticFlow),
        ),
    )
}
"""What ships, by name. `stoker.site` knows the names."""


def named(name: str) -> Named:
    """A shipped policy. Raises ConfigError that names the nearest one."""
    found = SHIPPED.get(name)
    if found is None:
        close = difflib.get_close_matches(name, SHIPPED, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SHIPPED)}"
        raise ConfigError(f'there is no policy {name}; {hint} (one of your own: "module:Class" or "path.py:Class")')
    return found

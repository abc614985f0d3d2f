"""Policies of the user's own, by name: "module:Class", or "path.py:Class".

What is named is called, without arguments or with `provisioning=` where it takes that, and what comes of it answers at
the seams that it has the methods of; the default policies answer at the others. It may as well be a function that makes
such an object, or whole `Policies`. An `awareness` in it says what a context keeps between calls at most, which a
simulated run applies to its contexts.

What would be passed over in silence is refused: an object that is named for a seam and does not answer there, and a
method that nobody asks for where one of nearly that name is asked (`stoker.manager.live.own_policies`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.folders import working_folder
from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.live.own_policies import misspelt
from stoker.manager.live.policy_files import import_policy
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.named import Named, named
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.site import OWN_POLICY

COMMON = ("period_s", "round", "rests", "timer", "advised", "failure_judged", "pace_told")
"""What every policy has; `stoker.manager.policies.Quiet` brings it along."""
SEAMS = {
    "dispatch": (
        "place", "pull", "dry", "window", "asks_every_call", "by_deadline", "by_run_time", "honours",
        "serve_order", "places_one_by_one_up_to", "pull_others",
    ),
    "residency": ("wanted", "measured", "idle", "honours"),
    "provisioning": ("demand", "may_bring"),
}  # fmt: skip
"""What is asked at each seam. Whoever has the first of a seam must have them all."""
SETTINGS = ("dispatch", "residency")
"""Of the seams, those at which a site file puts a policy by itself."""


def find(name: str, *, folder: Path | None = None, seam: str = "") -> Named:
    """The policy of this name: one that ships, or one's own; `folder` is where its path counts from (None: here).

    A policy of one's own is imported, and made once to see that it can be. `seam`: the one of `SEAMS` at which it must
    answer, where it is named for that alone. Raises ConfigError with what is wrong.
    """
    own = OWN_POLICY.fullmatch(name)
    if own is None:
        return named(name)
    module = import_policy(name, folder=folder or working_folder())
    what = getattr(module, own["name"], None)
    if what is None or not callable(what):
        here = ", ".join(_makers(module)) or "none"
        raise ConfigError(f"policy {name}: there is no class or function {own['name']} in it; it has {here}")

    def make(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
        return _policies(name, what, provisioning, settings, seam=seam)

    make()
    about = (inspect.getdoc(what) or "A policy of your own.").partition("\n\n")[0]
    return Named(name, " ".join(about.split()), make)


def _makers(module: ModuleType) -> list[str]:
    """The classes of a module, and its functions that can be called as such a class is."""
    own = {
        each: value
        for each, value in vars(module).items()
        if each[0] != "_" and getattr(value, "__module__", None) == module.__name__
    }
    classes = [each for each, value in own.items() if inspect.isclass(value)]
    return classes + [each for each, value in own.items() if inspect.isfunction(value) and _wants_nothing(value)]


def _wants_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments, or with `provisioning=` alone."""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        each.name == "provisioning" or each.default is not each.empty or each.kind in free
        for each in inspect.signature(function).parameters.values()
    )


def _policies(
    name: str, what: Callable[..., Any], provisioning: Provisioning | None, settings: dict[str, Any], *, seam: str
) -> Policies:
    """What is named, called, and the default policies where it does not answer."""
    asked = provisioning or KeepBlocks()
    try:
        takes = "provisioning" in inspect.signature(what).parameters
        made = what(provisioning=asked, **settings) if takes else what(**settings)
    except Exception as error:
        raise ConfigError(f"policy {name}: it cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(made, Policies):
        return made
    answers = _answers(name, made, seam=seam)
    if "provisioning" in answers and provisioning is None:
        asked = made
    return Policies(
        dispatch=made if "dispatch" in answers else HottestFirst(),
        residency=made if "residency" in answers else LoadWhereWanted(provisioning=asked),
        provisioning=asked,
        awareness=_awareness(name, made),
    )


def _awareness(name: str, made: Any) -> Awareness | None:
    """What it says that a context keeps between calls at most; None where it says nothing. Raises ConfigError."""
    said = getattr(made, "awareness", None)
    try:
        return None if said is None else Awareness(said)
    except ValueError:
        levels = ", ".join(repr(level.value) for level in Awareness)
        raise ConfigError(f"policy {name}: awareness = {said!r} is no level; there are {levels}") from None


def _answers(name: str, made: Any, *, seam: str) -> list[str]:
    """The seams at which it answers. Raises ConfigError where it does so by half, not where it is to, or nowhere."""
    slip = misspelt(made)
    if slip is not None:
        raise ConfigError(
            f"policy {name}: the manager never asks for its {slip.name}; did you mean {slip.near}? (a name of"
            " your own that is near to one of Stoker's begins with an underscore)"
        )
    answers = [each for each, asked in SEAMS.items() if hasattr(made, asked[0])]
    for each in answers:
        lacks = [asked for asked in (*SEAMS[each], *COMMON) if not hasattr(made, asked)]
        if lacks:
            base = {"dispatch": "HottestFirst", "residency": "LoadWhereWanted"}.get(each, "KeepBlocks")
            raise ConfigError(
                f"policy {name}: it answers at {each}, but has no {', '.join(lacks)}; derive it from "
                f"stoker.manager.policies.{base}, or from Quiet"
            )
    if not answers:
        asks = ", ".join(f"{asked[0]} ({each})" for each, asked in SEAMS.items())
        raise ConfigError(f"policy {name}: it answers at no seam; a policy has one of {asks}")
    if seam and seam not in answers:
        lacks = [asked for asked in SEAMS[seam] if not hasattr(made, asked)]
        there = answers[0] if answers[0] in SETTINGS else "name"
        raise ConfigError(
            f"policy {name}: it is named for {seam}, but has no {', '.join(lacks)}; it answers at "
            f"{' and '.join(answers)}: say so in the site file ([policy] {there} = …)"
        )
    return answers

"""Which policies decide in a session: chosen by its site files, kept in its folder.

The choice is written down when the session is made, and a policy in a file of the user's is copied beside it: a manager
that is started again, and whoever replays the journal, decides as the first one did, whatever has become of the file.
(A policy in an installed module is taken as it is installed.)

    <session folder>/
        policies.json            the names, if they are not the default ones
        policies/<setting>/      files of the user's that stand alone
        packages/<root>/         files of the user's packages
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker.contexts.recipe import Awareness
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.manager.core.seams import Policies
from stoker.manager.live.own_policies import find
from stoker.manager.live.policy_files import copy_policy
from stoker.manager.policies import default_policies
from stoker.protocol.session import SessionFolder
from stoker.site import Policy, Site, policy_file

log = logging.getLogger("stoker")

FILE, FOLDER = "policies.json", "policies"
SETTINGS = ("name", "dispatch", "residency")
"""Of a site file's [policy], those that name policies."""


class ChosenPolicies(msgspec.Struct, frozen=True):
    """Policies by name; `dispatch` and `residency` only where they are not those of `name`. `search_path`: folders
    that modules are imported from, beyond the environment's. `honours`: the wishes of calls that they take into account
    (None: only the manager can tell). As a text: the names, for people."""

    name: str = Policy().name
    dispatch: str = ""
    residency: str = ""
    search_path: str = ""
    honours: tuple[str, ...] | None = None

    def __str__(self) -> str:
        at_seams = {"dispatch": self.dispatch, "residency": self.residency}
        return ", ".join([_short(self.name), *(f"{seam} {_short(name)}" for seam, name in at_seams.items() if name)])


def agreed(sites: Iterable[Site]) -> ChosenPolicies:
    """What the sites of a session have chosen. One that leaves all of it out agrees with any other.

    Raises ConfigError where two differ.
    """
    found, by = ChosenPolicies(), ""
    for site in sites:
        policy = site.policy
        mine = ChosenPolicies(policy.name, policy.dispatch, policy.residency)
        if mine == ChosenPolicies():
            continue
        if by and mine != found:
            raise ConfigError(
                f"sites {by} and {site.name} name different policies; a session has one: leave name, dispatch and "
                "residency out of [policy] in one of them",
                key="name",
            )
        found, by = mine, site.name
    return found


def check_policies(sites: Iterable[Site]) -> None:
    """Raise ConfigError if the sites disagree, or a policy that they name cannot be made."""
    policies_for(sites)


def policies_for(sites: Iterable[Site]) -> Policies:
    """Fresh policies, as these sites would have them in a session. Raises ConfigError."""
    return _made(agreed(sites), working_folder())


def keep_policies(folder: SessionFolder, sites: Iterable[Site], *, search_path: str = "") -> None:
    """Write into a new session's folder which policies decide in it.

    Raises ConfigError; SessionError where the folder cannot be written.
    """
    chosen = agreed(sites)
    if chosen == ChosenPolicies():
        return
    try:
        copies = {
            setting: copy_policy(getattr(chosen, setting), folder.path, alone=f"{FOLDER}/{setting}")
            for setting in SETTINGS
        }
        made = _made_here(chosen)
        honours = None if made is None else tuple(sorted(made.honours))
        kept = ChosenPolicies(**copies, search_path=search_path, honours=honours)
        (folder.path / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    except OSError as error:
        raise SessionError(f"the policies of the session cannot be copied into {folder.path}: {error}") from error
    if made is not None:
        _warn_of_awareness(chosen.name, made)


def honoured_in(folder: SessionFolder) -> frozenset[str] | None:
    """The wishes of calls that the policies of a session take into account; None where only its manager can tell.

    Raises SessionError.
    """
    kept = chosen_in(folder)
    if kept == ChosenPolicies():
        return default_policies().honours
    return None if kept.honours is None else frozenset(kept.honours)


def _made_here(chosen: ChosenPolicies) -> Policies | None:
    """The policies; None where one is in a module that only the manager finds."""
    try:
        return _made(chosen, working_folder())
    except ConfigError:
        return None


def _warn_of_awareness(name: str, policies: Policies) -> None:
    """Say so where a policy is for contexts that keep less than they may: a session goes by their recipes."""
    awareness = policies.awareness
    if awareness not in (None, Awareness.FULL):
        log.warning(
            "policy %s is for contexts of awareness %s; a session keeps of each context what its recipe says: write "
            '@context(awareness="%s")',
            _short(name),
            awareness.value,
            awareness.value,
        )


def chosen_in(folder: SessionFolder) -> ChosenPolicies:
    """What was chosen for a session. Raises SessionError."""
    file = folder.path / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChosenPolicies)
    except FileNotFoundError:
        return ChosenPolicies()
    except (OSError, *UNREADABLE) as error:
        raise SessionError(f"{file} cannot be read: {error}; it says which policies decide in the session") from error


def policy_in_words(folder: SessionFolder) -> str:
    """Who decides in a session, by name; empty where the default policies do, or nobody can tell."""
    try:
        kept = chosen_in(folder)
    except SessionError as error:
        log.warning("%s", error)
        return ""
    return "" if kept == ChosenPolicies() else str(kept)


def policies_of(folder: SessionFolder) -> Policies:
    """Fresh policies, as they were chosen for a session. Raises ConfigError, SessionError."""
    kept = chosen_in(folder)
    return default_policies() if kept == ChosenPolicies() else _made(kept, folder.path)


def _made(kept: ChosenPolicies, folder: Path) -> Policies:
    sys.path += [each for each in kept.search_path.split(os.pathsep) if each and each not in sys.path]
    whole = find(kept.name, folder=folder).make()
    provisioning = whole.provisioning
    dispatch, residency = whole.dispatch, whole.residency
    if kept.dispatch:
        dispatch = find(kept.dispatch, folder=folder, seam="dispatch").make(provisioning=provisioning).dispatch
    if kept.residency:
        residency = find(kept.residency, folder=folder, seam="residency").make(provisioning=provisioning).residency
    return Policies(dispatch, residency, provisioning, whole.awareness)


def _short(name: str) -> str:
    """A policy's name without the folder of its file."""
    return f"{Path(file).name}{name[len(file) :]}" if (file := policy_file(name)) else name

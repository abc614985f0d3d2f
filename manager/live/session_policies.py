"""Python files of the user's own policies: how one is imported, and the copy of it that a session keeps.

A file that stands alone is imported by itself. A file in a package (each folder above it that has an `__init__.py`
belongs to it) is imported as a module of that package, so a policy may have several files: `lab/policies/fair.py` is
`lab.policies.fair`, and may import `lab.policies.queues`. Its copy has every file of the package that was imported.

Policies of the user, by name: "module:Class", or "path.py:Class".

The named object is called, without arguments or with `provisioning=` if it takes that. The result answers at the seams
whose methods it has; the default policies answer at the others. It may also be a function that returns such an object,
or whole `Policies`. Its `awareness` limits what a context keeps between calls; a simulated run applies it.

Two mistakes that would have no effect are refused: an object that is named for a seam and has none of its methods, and
a public name that is nearly one of Stoker's, as `worth_lodaing` (Python accepts it, and the default would decide).
Methods are compared with methods and values with values, among the names that the user's classes inherit and do not
override.

Which policies decide in a session: chosen by its site files, kept in its folder.

The choice is written down when the session is made, and a policy in a file of the user's is copied beside it: a manager
that is started again, and whoever replays the journal, decides as the first one did, whatever has become of the file.
(A policy in an installed module is taken as it is installed.)

    <session folder>/
        policies.json            the names, if they are not the default ones
        policies/<setting>/      files of the user's that stand alone
        packages/<root>/         files of the user's packages
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from stoker.contexts.recipe import Awareness
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies import default_policies
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.named import Named, named
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.protocol.session import SessionFolder
from stoker.site import OWN_POLICY, Policy, Site, policy_file

# ---- policy files


PACKAGES = "packages"


def import_policy(name: str, *, folder: Path) -> ModuleType:
    """The module of a policy of the user's own; a path counts from `folder`. Raises ConfigError."""
    own = OWN_POLICY.fullmatch(name)
    try:
        if own is None:
            raise ConfigError(f'policy {name} is neither "module:Class" nor "path.py:Class"')
        if not policy_file(name):
            return importlib.import_module(own["place"])
        path = (folder / Path(own["place"]).expanduser()).absolute()
        if not path.is_file():
            raise ConfigError(f"policy {name}: {path}: no such file", file=str(path))
        root = _root_of(path)
        return _import_alone(path) if root == path.parent else _import_in_package(path, root)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"policy {name}: cannot be imported: {type(error).__name__}: {error}") from error


def name_of_copy(name: str, *, alone: str) -> str:
    """How a policy is called after `copy_policy`; the same where it is in no file.

    `alone`: the folder of the copy of a file that stands alone.
    """
    file = policy_file(name)
    if not file:
        return name
    path = Path(file).expanduser().absolute()
    root = _root_of(path)
    place = Path(alone) if root == path.parent else _package_copy(root)
    return f"{place / path.relative_to(root)}{name[len(file) :]}"


def copy_policy(name: str, into: Path, *, alone: str) -> str:
    """Copy the file of a policy, or what it has imported of its package, into a folder.

    Returns the policy's name, counted from that folder. Raises ConfigError, OSError.
    """
    file = policy_file(name)
    if not file:
        return name
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"policy {name}: {path}: no such file", file=str(path))
    root = _root_of(path)
    if root == path.parent:
        _copy(path, into / alone / path.name)
    else:
        import_policy(name, folder=Path())
        for each in _imported_below(root / path.relative_to(root).parts[0]):
            _copy(each, into / _package_copy(root) / each.relative_to(root))
    return name_of_copy(name, alone=alone)


def _root_of(path: Path) -> Path:
    """The folder that the package of a file is imported from; the file's own where it is in no package."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _package_copy(root: Path) -> Path:
    """Where copies of packages from a folder go: packages of one name from two folders stay apart."""
    return Path(PACKAGES) / blake2b(str(root).encode(), digest_size=4).hexdigest()


def _import_alone(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"stoker_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file", file=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # the types of its annotations are looked up there
    spec.loader.exec_module(module)
    return module


def _import_in_package(path: Path, root: Path) -> ModuleType:
    """Import a file as a module of its package. A package of the same name from elsewhere (the original of a copy) is
    forgotten: what was made with it goes on with it."""
    parts = path.relative_to(root).with_suffix("").parts
    there = sys.modules.get(parts[0])
    if there is not None and (root / parts[0]) not in _folders_of(there):
        for each in [each for each in sys.modules if each.partition(".")[0] == parts[0]]:
            del sys.modules[each]
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(".".join(parts))
    finally:
        sys.path.remove(str(root))


def _folders_of(package: ModuleType) -> list[Path]:
    return [Path(each).absolute() for each in getattr(package, "__path__", ())]


def _imported_below(folder: Path) -> Iterator[Path]:
    """Files of imported modules in a folder, and below it."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and (path := Path(file).absolute()).is_relative_to(folder):
            yield path


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(file, to)


# ---- own policies


# ---- misspelled overrides


_OURS = "stoker."
_NEAR = 0.8
"""The similarity (`difflib`, 0 to 1) from which a name is taken for another one, misspelt."""


class MisspeltName(msgspec.Struct, frozen=True):
    """A name that overrides nothing, and the one that was probably meant."""

    name: str
    near: str


def misspelled_override(made: object) -> MisspeltName | None:
    """The first slip in the classes of a policy, the most derived class first."""
    line = type(made).__mro__
    own = [each for each in line if not _is_given(each)]
    given = _public([each for each in line if _is_given(each)])
    mine = _public(own)
    for name, value in mine.items():
        if name in given:
            continue
        same_sort = [each for each, other in given.items() if each not in mine and callable(other) == callable(value)]
        close = difflib.get_close_matches(name, same_sort, n=1, cutoff=_NEAR)
        if close:
            return MisspeltName(name, close[0])
    return None


def _is_given(kind: type) -> bool:
    return kind is object or kind.__module__.startswith(_OURS)


def _public(classes: Iterable[type]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in classes:
        for name, value in vars(each).items():
            if not name.startswith("_"):
                found.setdefault(name, value)
    return found


# ---- finding a policy


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
SEAM_SETTINGS = ("dispatch", "residency")
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
    slip = misspelled_override(made)
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
        there = answers[0] if answers[0] in SEAM_SETTINGS else "name"
        raise ConfigError(
            f"policy {name}: it is named for {seam}, but has no {', '.join(lacks)}; it answers at "
            f"{' and '.join(answers)}: say so in the site file ([policy] {there} = …)"
        )
    return answers


# ---- chosen


log = logging.getLogger("stoker")

CHOICE_FILE, COPIES_FOLDER = "policies.json", "policies"
POLICY_SETTINGS = ("name", "dispatch", "residency")
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
            setting: copy_policy(getattr(chosen, setting), folder.path, alone=f"{COPIES_FOLDER}/{setting}")
            for setting in POLICY_SETTINGS
        }
        made = _made_here(chosen)
        honours = None if made is None else tuple(sorted(made.honours))
        kept = ChosenPolicies(**copies, search_path=search_path, honours=honours)
        (folder.path / CHOICE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
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
    file = folder.path / CHOICE_FILE
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

"""Load the policies of a session. The session's site files name the policies, and its folder stores them.

A custom policy is named "module:Class" or "path.py:Class". Stoker calls the named object without arguments or with
`provisioning=`. The result becomes the policy at each seam (dispatch, residency or provisioning) whose methods it has;
default policies serve the other seams. Restarted managers and replays use copies of the user's files.

    <session folder>/
        policies.json            the names, if not the defaults
        policies/<setting>/      the user's files outside packages
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
from stoker.manager.core import seams
from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies import ShippedPolicy, default_policies, find_shipped_policy
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.protocol.session import SessionFolder
from stoker.site import OWN_POLICY, Policy, Site, policy_file

log = logging.getLogger("stoker")

CHOICE_FILE, COPIES_FOLDER = "policies.json", "policies"
PACKAGES = "packages"
POLICY_SETTINGS = ("name", "dispatch", "residency")


def _public_names(protocol: type) -> tuple[str, ...]:
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


COMMON_MEMBERS = _public_names(seams.Rounds)
"""Members of every policy (`stoker.manager.policies.Quiet`)."""
SEAM_MEMBERS = {
    "dispatch": _public_names(seams.Dispatch),
    "residency": _public_names(seams.Residency),
    "provisioning": _public_names(seams.Provisioning),
}
"""Member names by seam (policy interface). A policy with a seam's first member must have all of its members."""
_STOKER_PACKAGE = "stoker."
_MIN_SIMILARITY = 0.8
"""A name with this similarity (`difflib`) to a known name counts as misspelled."""

# ---- files


def import_policy(name: str, *, folder: Path) -> ModuleType:
    """Import the module of a policy, whose path is relative to `folder`. Raises ConfigError."""
    own = OWN_POLICY.fullmatch(name)
    try:
        if own is None:
            raise ConfigError(f'policy {name} is neither "module:Class" nor "path.py:Class"')
        if not policy_file(name):
            return importlib.import_module(own["place"])
        path = (folder / Path(own["place"]).expanduser()).absolute()
        if not path.is_file():
            raise ConfigError(f"policy {name}: {path}: no such file", file=str(path))
        root = _import_root(path)
        return _import_single_file(path) if root == path.parent else _import_in_package(path, root)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"policy {name}: cannot be imported: {type(error).__name__}: {error}") from error


def name_of_policy_copy(name: str, *, single_file_folder: str) -> str:
    """Return the name of the copy that `copy_policy` makes. `single_file_folder`: for a file outside packages."""
    file = policy_file(name)
    if not file:
        return name
    path = Path(file).expanduser().absolute()
    root = _import_root(path)
    place = Path(single_file_folder) if root == path.parent else _package_copy_folder(root)
    return f"{place / path.relative_to(root)}{name[len(file) :]}"


def copy_policy(name: str, into: Path, *, single_file_folder: str) -> str:
    """Copy the file of a policy, or the imported files of its package. Return the policy's new name."""
    file = policy_file(name)
    if not file:
        return name
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"policy {name}: {path}: no such file", file=str(path))
    root = _import_root(path)
    copies = {path: into / single_file_folder / path.name}
    if root != path.parent:
        import_policy(name, folder=Path())
        package, there = root / path.relative_to(root).parts[0], into / _package_copy_folder(root)
        copies = {each: there / each.relative_to(root) for each in _imported_files_in_folder(package)}
    for each, copy in copies.items():
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(each, copy)
    return name_of_policy_copy(name, single_file_folder=single_file_folder)


def _import_root(path: Path) -> Path:
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _package_copy_folder(root: Path) -> Path:
    """Return the folder of a package's copy. The folder's name is a digest, because package names may repeat."""
    return Path(PACKAGES) / blake2b(str(root).encode(), digest_size=4).hexdigest()


def _import_single_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"stoker_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file", file=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # type annotations of the policy are resolved in this module
    spec.loader.exec_module(module)
    return module


def _import_in_package(path: Path, root: Path) -> ModuleType:
    """Import a module. Forget modules of a different package with the same name."""
    parts = path.relative_to(root).with_suffix("").parts
    paths = getattr(sys.modules.get(parts[0]), "__path__", ())
    if parts[0] in sys.modules and (root / parts[0]) not in [Path(each).absolute() for each in paths]:
        for each in [each for each in sys.modules if each.partition(".")[0] == parts[0]]:
            del sys.modules[each]
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(".".join(parts))
    finally:
        sys.path.remove(str(root))


def _imported_files_in_folder(folder: Path) -> Iterator[Path]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and (path := Path(file).absolute()).is_relative_to(folder):
            yield path


# ---- find a policy


def find_policy(name: str, *, folder: Path | None = None, seam: str = "") -> ShippedPolicy:
    """Return a shipped policy, or import a custom policy and create it once as a check. `folder`: base of a custom
    policy's path. Raises ConfigError.
    """
    own = OWN_POLICY.fullmatch(name)
    if own is None:
        return find_shipped_policy(name)
    module = import_policy(name, folder=folder or working_folder())
    what = getattr(module, own["name"], None)
    if what is None or not callable(what):
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        here = ", ".join(name for name in names if not name.startswith("_")) or "none"
        raise ConfigError(f"policy {name}: the module has no class or function {own['name']}; it has {here}")

    def create_policies(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
        return _call_policy_factory(name, what, provisioning, settings, seam=seam)

    create_policies()
    about = (inspect.getdoc(what) or "A custom policy.").partition("\n\n")[0]
    return ShippedPolicy(name, " ".join(about.split()), create_policies)


def _call_policy_factory(
    name: str, what: Callable[..., Any], provisioning: Provisioning | None, settings: dict[str, Any], *, seam: str
) -> Policies:
    """Call `what` to create policies. Default policies serve the seams for which the result has no policy."""
    asked = provisioning or KeepBlocks()
    try:
        takes = "provisioning" in inspect.signature(what).parameters
        made = what(provisioning=asked, **settings) if takes else what(**settings)
    except Exception as error:
        text = f"policy {name}: the policy object cannot be created: {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    if isinstance(made, Policies):
        return made
    answers = _implemented_seams(name, made, seam=seam)
    if "provisioning" in answers and provisioning is None:
        asked = made
    return Policies(
        dispatch=made if "dispatch" in answers else HottestFirst(),
        residency=made if "residency" in answers else LoadWhereWanted(provisioning=asked),
        provisioning=asked,
        awareness=_policy_awareness(name, made),
    )


def _policy_awareness(name: str, made: Any) -> Awareness | None:
    said = getattr(made, "awareness", None)
    try:
        return None if said is None else Awareness(said)
    except ValueError:
        levels = ", ".join(repr(level.value) for level in Awareness)
        raise ConfigError(f"policy {name}: awareness = {said!r} is not a level; the levels are {levels}") from None


def _implemented_seams(name: str, made: Any, *, seam: str) -> list[str]:
    if (slip := misspelled_override(made)) is not None:
        raise ConfigError(
            f"policy {name}: the manager never calls its {slip[0]}; did you mean {slip[1]}? (start a name of"
            " your own that is similar to one of Stoker's with an underscore)"
        )
    answers = [each for each, asked in SEAM_MEMBERS.items() if hasattr(made, asked[0])]
    for each in answers:
        lacks = [asked for asked in (*SEAM_MEMBERS[each], *COMMON_MEMBERS) if not hasattr(made, asked)]
        if lacks:
            base = {"dispatch": "HottestFirst", "residency": "LoadWhereWanted"}.get(each, "KeepBlocks")
            raise ConfigError(
                f"policy {name}: it implements the {each} seam, but lacks {', '.join(lacks)}; derive it from "
                f"stoker.manager.policies.{base}, or from Quiet"
            )
    if not answers:
        asks = ", ".join(f"{asked[0]} ({each})" for each, asked in SEAM_MEMBERS.items())
        raise ConfigError(f"policy {name}: it has no method of a seam; a policy has at least one of {asks}")
    if seam and seam not in answers:
        lacks = [asked for asked in SEAM_MEMBERS[seam] if not hasattr(made, asked)]
        there = answers[0] if answers[0] in POLICY_SETTINGS else "name"
        raise ConfigError(
            f"policy {name}: it is the {seam} policy, but lacks {', '.join(lacks)}; it implements "
            f"{' and '.join(answers)}: set it there in the site file ([policy] {there} = …)"
        )
    return answers


def misspelled_override(made: object) -> tuple[str, str] | None:
    """Return the first misspelled member name in a policy's classes, and the probable name."""
    given: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    for kind in reversed(type(made).__mro__[:-1]):
        attributes = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        (given if kind.__module__.startswith(_STOKER_PACKAGE) else mine).update(attributes)
    for name, value in mine.items():
        if name not in given:
            same_sort = [each for each in given if each not in mine and callable(given[each]) == callable(value)]
            if close := difflib.get_close_matches(name, same_sort, n=1, cutoff=_MIN_SIMILARITY):
                return name, close[0]
    return None


# ---- the choice of a session


class ChosenPolicies(msgspec.Struct, frozen=True):
    """Names of the policies of a session. `dispatch`, `residency`: if they differ from `name`. `search_path`: folders
    in which modules are found. `honours`: call options that the policies honour (None: unknown outside the manager)."""

    name: str = Policy().name
    dispatch: str = ""
    residency: str = ""
    search_path: str = ""
    honours: tuple[str, ...] | None = None

    def __str__(self) -> str:
        parts = [_short_name(self.name)]
        parts += [f"dispatch {_short_name(self.dispatch)}"] if self.dispatch else []
        parts += [f"residency {_short_name(self.residency)}"] if self.residency else []
        return ", ".join(parts)


def policies_named_by_all_sites(sites: Iterable[Site]) -> ChosenPolicies:
    """Return the policies that all sites name. Raises ConfigError if two sites differ."""
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


def create_policies_for_sites(sites: Iterable[Site]) -> Policies:
    return _create_policies(policies_named_by_all_sites(sites), working_folder())


def copy_policies_into_session(folder: SessionFolder, sites: Iterable[Site], *, search_path: str = "") -> None:
    chosen = policies_named_by_all_sites(sites)
    if chosen == ChosenPolicies():
        return
    try:
        copies = {
            setting: copy_policy(getattr(chosen, setting), folder.path, single_file_folder=f"{COPIES_FOLDER}/{setting}")
            for setting in POLICY_SETTINGS
        }
        try:
            made = _create_policies(chosen, working_folder())
        except ConfigError:  # the policy's module may be importable only by the manager, which checks it again
            made = None
        honours = None if made is None else tuple(sorted(made.honours))
        kept = ChosenPolicies(**copies, search_path=search_path, honours=honours)
        (folder.path / CHOICE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    except OSError as error:
        raise SessionError(f"the policies of the session cannot be copied into {folder.path}: {error}") from error
    if made is not None and made.awareness not in (None, Awareness.FULL):
        text = 'policy %s is for contexts of awareness %s; write @context(awareness="%s") in each recipe'
        log.warning(text, _short_name(chosen.name), made.awareness.value, made.awareness.value)


def honoured_call_options(folder: SessionFolder) -> frozenset[str] | None:
    """Return the call options that a session's policies honour; None if only the manager knows."""
    kept = read_chosen_policies(folder)
    if kept == ChosenPolicies():
        return default_policies().honours
    return None if kept.honours is None else frozenset(kept.honours)


def read_chosen_policies(folder: SessionFolder) -> ChosenPolicies:
    file = folder.path / CHOICE_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChosenPolicies)
    except FileNotFoundError:
        return ChosenPolicies()
    except (OSError, *UNREADABLE) as error:
        raise SessionError(f"{file} cannot be read: {error}; it names the policies of the session") from error


def describe_policies(folder: SessionFolder) -> str:
    """Return the names of a session's policies; empty for the defaults, or if unreadable."""
    try:
        kept = read_chosen_policies(folder)
    except SessionError as error:
        log.warning("%s", error)
        return ""
    return "" if kept == ChosenPolicies() else str(kept)


def create_policies_of_session(folder: SessionFolder) -> Policies:
    kept = read_chosen_policies(folder)
    return default_policies() if kept == ChosenPolicies() else _create_policies(kept, folder.path)


def _create_policies(kept: ChosenPolicies, folder: Path) -> Policies:
    sys.path += [each for each in kept.search_path.split(os.pathsep) if each and each not in sys.path]
    made = find_policy(kept.name, folder=folder).make()
    for seam in ("dispatch", "residency"):
        if name := getattr(kept, seam):
            other = find_policy(name, folder=folder, seam=seam).make(provisioning=made.provisioning)
            made = msgspec.structs.replace(made, **{seam: getattr(other, seam)})
    return made


def _short_name(name: str) -> str:
    return f"{Path(file).name}{name[len(file) :]}" if (file := policy_file(name)) else name

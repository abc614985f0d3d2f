"""Python files of the user's own policies: how one is imported, and the copy of it that a session keeps.

A file that stands alone is imported by itself. A file in a package (each folder above it that has an `__init__.py`
belongs to it) is imported as a module of that package, so a policy may have several files: `lab/policies/fair.py` is
`lab.policies.fair`, and may import `lab.policies.queues`. Its copy has every file of the package that was imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from stoker.errors import ConfigError
from stoker.site import OWN_POLICY, policy_file

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

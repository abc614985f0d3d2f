"""Distinguish the user's own code from installed code.

Installed code (standard library, site-packages, `pip install --target`, editable installs, Stoker) is pickled by name,
and digests cover its version. The user's own modules are pickled by value, and digests cover their content.
"""

from __future__ import annotations

import csv
import functools
import glob
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from stoker.startup import RELEASE

_STDLIB = frozenset(sys.stdlib_module_names)
_MAIN_MODULES = ("__main__", "__mp_main__")

_installed_modules: dict[str, bool] = {}


def is_installed(name: str) -> bool:
    """True if a module is part of the Python environment; False for `__main__` and unknown modules."""
    known = _installed_modules.get(name)
    if known is None:
        known = _is_installed(name)
        if name in sys.modules:  # do not cache answers for other modules, which may become importable later
            _installed_modules[name] = known
    return known


def _is_installed(name: str) -> bool:
    top = name.partition(".")[0]
    module = sys.modules.get(name) or sys.modules.get(top)
    if top == "stoker" or top in _STDLIB:
        return True
    if top in _MAIN_MODULES or module is None:
        return False
    file = _module_file(module)
    if file is None:
        return getattr(module, "__spec__", None) is not None
    return _is_in_environment(file) or top in editable_modules()


def _is_in_environment(file: str) -> bool:
    return file.startswith((*_site_roots(), *_linked_roots())) or _is_recorded_by_pip(file)


def _is_recorded_by_pip(path: str) -> bool:
    return any(path in recorded for _, recorded in folders_installed_by_pip())


class ModuleSource(NamedTuple):
    """The file of a module, or the folder of a package without `__init__.py`."""

    file: str
    is_package: bool


_INSTALLED_S = 1.0
"""Seconds for which `find_module_source` remembers that a module is installed."""
_installed_until: dict[str, tuple[list[str], float]] = {}


def find_module_source(name: str) -> ModuleSource | None:
    """Return the source of a user's module, or None, without importing a module."""
    if not name or name.partition(".")[0] in _MAIN_MODULES or is_installed(name):
        return None
    if (module := sys.modules.get(name)) is not None:
        file = _module_file(module)
        return ModuleSource(file, is_package=hasattr(module, "__path__")) if file else None
    known = _installed_until.get(name)
    if known is not None and time.monotonic() < known[1] and known[0] == sys.path:
        return None
    spec = _find_module_spec(name)
    if spec is None:
        return None
    places = spec.submodule_search_locations
    file = spec.origin if spec.has_location else next(iter(places or ()), None)
    if file is None or _is_in_environment(os.path.abspath(file)) or name.partition(".")[0] in editable_modules():
        _installed_until[name] = list(sys.path), time.monotonic() + _INSTALLED_S
        return None
    return ModuleSource(os.path.abspath(file), is_package=places is not None)


def _find_module_spec(name: str) -> ModuleSpec | None:
    parent, _, child = name.rpartition(".")
    try:
        if not parent:
            return importlib.util.find_spec(name)
        module = sys.modules.get(parent)
        above = None if module is not None else _find_module_spec(parent)
        places = getattr(module, "__path__", None) if above is None else above.submodule_search_locations
        return PathFinder.find_spec(name, list(places)) if places is not None else None
    except KeyError:  # the package is not imported, and the folder lacks `__init__.py`
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [os.path.join(place, child) for place in places or ()]
        return spec
    except (ImportError, ValueError):
        return None


_linked_packages: dict[str, bool] = {}


def is_linked_package(top: str) -> bool:
    """True for an editable install (`pip install -e`) or a module in a `.pth` folder, unless pip copied the module
    there.
    """
    if top == "stoker" or top in _MAIN_MODULES or top in _STDLIB:
        return False
    known = _linked_packages.get(top)
    if known is None:
        place = find_package_path(top) or ""
        is_below = not place.startswith(_site_roots()) and (place + os.sep).startswith(_linked_roots())
        known = top in editable_modules() or (is_below and not _is_recorded_by_pip(place))
        if top in sys.modules:
            _linked_packages[top] = known
    return known


def find_package_path(top: str) -> str | None:
    module = sys.modules.get(top)
    spec = getattr(module, "__spec__", None) if module is not None else _find_module_spec(top)
    places = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    file = next(iter(places or ()), None) or getattr(module, "__file__", None) or (spec.origin if spec else None)
    return os.path.abspath(file) if isinstance(file, str) and os.path.exists(file) else None


def find_by_qualified_name(home: str, name: str) -> Any:
    found: Any = sys.modules.get(home)
    try:
        for part in name.split("."):
            found = getattr(found, part, None)
    except Exception:  # a module's own `__getattr__` may raise anything
        return None
    return found


def qualified_class_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def version_of_package(top: str) -> str:
    if top in _STDLIB or top == "stoker":
        return RELEASE if top == "stoker" else ""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(top), "__version__", ""))


def _module_file(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return os.path.abspath(file) if file else None


@functools.cache
def _site_roots() -> tuple[str, ...]:
    folders = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    return tuple(sorted(os.path.abspath(folder) + os.sep for folder in folders))


@functools.cache
def _linked_roots() -> tuple[str, ...]:
    found = {os.path.abspath(place) + os.sep for folder in _site_roots() for place in folders_in_pth_files(folder)}
    return tuple(sorted(found.difference(_site_roots())))


def folders_installed_by_pip() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield folders outside the Python environment into which pip installed files, each with these files."""
    for entry in sys.path:
        try:
            folder = os.path.abspath(entry)
            changed_ns = os.stat(folder).st_mtime_ns
        except OSError:  # the folder does not exist, or the working folder was removed
            continue
        if not (folder + os.sep).startswith(_site_roots()) and (found := _files_recorded_by_pip(folder, changed_ns)):
            yield folder, found


@functools.lru_cache(maxsize=64)
def _files_recorded_by_pip(folder: str, _changed_ns: int) -> frozenset[str]:
    found: set[str] = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with suppress(OSError, csv.Error), open(record, encoding="utf-8", errors="replace", newline="") as lines:
            for path, *_ in filter(None, csv.reader(lines)):
                parts = path.split("/")
                if parts[0] not in ("", "..", "bin", "__pycache__"):
                    found.update(os.path.join(folder, *parts[: count + 1]) for count in range(len(parts)))
    return frozenset(found)


def folders_in_pth_files(folder: str) -> Iterator[str]:
    """Yield the existing folders listed in `.pth` files of a `site-packages` folder."""
    for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth"))):
        with suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
            places = [os.path.join(folder, line.strip()) for line in lines if line.strip()[:1] not in ("", "#")]
            yield from filter(os.path.isdir, places)


def editable_modules() -> dict[str, str]:
    """Return the modules of editable installs, with their paths, from the import hooks of these installs."""
    found: dict[str, str] = {}
    for finder in sys.meta_path:
        home = sys.modules.get(getattr(finder, "__module__", "") or "")
        if home is not None and home.__name__.startswith("__editable__"):
            found |= getattr(home, "MAPPING", {})
    return found

"""Which code is the user's own, and which is installed.

Installed code (standard library, site-packages, editable installs, Stoker) is the same wherever the environment is:
it travels by name, and a digest names its version. The user's own modules (beside the script, in the working folder,
in a test) may not be importable on a pilot: they travel by value, and a digest covers their content.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from types import ModuleType

_STDLIB = frozenset(sys.stdlib_module_names)


_known: dict[str, bool] = {}


def is_installed(name: str) -> bool:
    """Whether the module `name` (dotted) belongs to the environment. `__main__` and unknown modules do not."""
    known = _known.get(name)
    if known is None:
        known = _is_installed(name)
        if name in sys.modules:  # what is not imported yet may be found out later
            _known[name] = known
    return known


def _is_installed(name: str) -> bool:
    top = name.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    if top == "stoker" or top in _STDLIB or top in sys.builtin_module_names:
        return True
    module = sys.modules.get(name) or sys.modules.get(top)
    if module is None:
        return False
    file = _file_of(module)
    if file is None:
        return getattr(module, "__spec__", None) is not None
    return _lies_in_environment(file) or top in _editable_names()


def _lies_in_environment(file: str) -> bool:
    return any(file.startswith(root) for root in _installed_roots())


def users_source(name: str) -> str | None:
    """The source file of the user's own module `name`, imported or not; None for any other module."""
    if is_installed(name):
        return None
    module = sys.modules.get(name)
    if module is not None:
        return _file_of(module)
    if "." in name:  # looking for it would import what it lies in
        return users_source(name.partition(".")[0])
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    file = spec.origin if spec is not None and spec.has_location else None
    if file is None or _lies_in_environment(os.path.abspath(file)) or name in _editable_names():
        return None
    return os.path.abspath(file)


def version_of(name: str) -> str:
    """The version of the distribution that the top-level module of `name` comes from, or empty."""
    return _version(name.partition(".")[0])


@functools.cache
def _version(top: str) -> str:
    if top in _STDLIB or top in sys.builtin_module_names:
        return ""
    if top == "stoker":
        import stoker

        return stoker.__version__
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(top), "__version__", ""))


def _file_of(module: ModuleType) -> str | None:
    file: str | None = getattr(module, "__file__", None)
    if file:
        return os.path.abspath(file)
    places: list[str] = list(getattr(module, "__path__", ()))
    return os.path.abspath(places[0]) if places else None


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    folders = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    # An editable install of the simple kind is a line in a .pth file that puts its source folder on sys.path.
    for folder in list(folders):
        if os.path.isdir(folder):
            for entry in os.listdir(folder):
                if entry.endswith(".pth"):
                    folders.update(_folders_in_pth(os.path.join(folder, entry), base=folder))
    return tuple(sorted(os.path.abspath(folder) + os.sep for folder in folders))


def _folders_in_pth(file: str, *, base: str) -> list[str]:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            found = [os.path.join(base, line.strip()) for line in lines if line.strip()[:1] not in ("", "#")]
    except OSError:
        return []
    return [folder for folder in found if os.path.isdir(folder)]


def _editable_names() -> frozenset[str]:
    """Names that the import hooks of editable installs (setuptools) serve."""
    names: set[str] = set()
    for finder in sys.meta_path:
        home = sys.modules.get(getattr(finder, "__module__", "") or "")
        if home is not None and home.__name__.startswith("__editable__"):
            names.update(getattr(home, "MAPPING", {}))
    return frozenset(names)

"""Where TaskVine is on this machine. It comes from conda-forge, and is imported by the pilot's process alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError

INSTALL = "conda install -c conda-forge ndcctools"


class Programs(msgspec.Struct, frozen=True):
    """TaskVine's programs: what runs on a node, and what starts those through a batch system."""

    worker: str
    factory: str


def find() -> Programs:
    """TaskVine's programs, if its Python packages are here too; nothing heavy is imported. Raises ConfigError."""
    missing = ""
    for module in ("ndcctools.taskvine", "ndcctools.poncho.package_serverize", "threadpoolctl"):
        if not _is_there(module):
            missing = f"Python has no module {module}"
            break
    places = os.pathsep.join([os.environ.get("PATH", ""), *_beside()])
    programs = {name: shutil.which(name, path=places) or "" for name in ("vine_worker", "vine_factory")}
    for name, place in programs.items():
        if not place and not missing:
            missing = f"there is no program {name} on PATH or beside its Python package"
    if missing:
        raise ConfigError(f'engine = "taskvine" needs TaskVine, which is not installed here ({missing}): {INSTALL}')
    return Programs(worker=programs["vine_worker"], factory=programs["vine_factory"])


def taskvine() -> Any:
    """The module `ndcctools.taskvine`. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module("ndcctools.taskvine")
    except ImportError as error:
        raise ConfigError(f'engine = "taskvine": ndcctools cannot be imported: {error}; {INSTALL}') from error


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _beside() -> list[str]:
    """`bin` folders of the prefix that the package was installed into."""
    spec = importlib.util.find_spec("ndcctools")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(parent / "bin") for place in places for parent in list(Path(place).parents)[:4]]

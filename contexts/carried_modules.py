"""Modules that travelled with a function: imported from what travelled, in the library that runs the function.

An import statement finds them before the search path is looked at. A module that the library has imported already stays
if it is the same version (`user_modules`); else it is dropped, and the next import statement imports it anew. So a
library that outlives programs never runs one program's function with another's module, nor with what a file held an
hour ago.

The modules of a context's loader stay known as long as the library lives; on top come those of the function that runs.
With several slots the functions of one library run side by side, each with its own. Where two of them bring two
versions of one module, an import statement finds that of the call that began last.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.readers import FileReader
from types import ModuleType
from typing import Any

from stoker.contexts.editable import stamps_of
from stoker.contexts.user_modules import Table


class CarriedModules:
    """The modules of one function or loader, and the `stamps` of linked packages (`editable`) that it was made with;
    `enter()` before it runs."""

    def __init__(self, table: Table, stamps: Mapping[str, str]) -> None:
        self._stamps = stamps
        self.found = {
            name: _Carried(file, version, data, is_package=is_package)
            for name, (file, is_package, version, data) in table.items()
        }

    def enter(self) -> None:
        """Have import statements find these modules, and drop other versions of them that the library has imported."""
        if _finder.top is not self or _finder.thread.__dict__.get("top") is not self:
            with _lock:
                self._forget_others()
                _finder.install()
                _finder.top = _finder.thread.top = self

    def over(self, other: CarriedModules) -> CarriedModules:
        """These, and below them those of another."""
        both = CarriedModules({}, {**other._stamps, **self._stamps})
        both.found = {**other.found, **self.found}
        return both

    def enter_for_good(self) -> None:
        """The same, for as long as the process lives: these are a context's."""
        self.enter()
        _finder.base = self

    def _forget_others(self) -> None:
        for name, carried in self.found.items():
            here = sys.modules.get(name)
            if here is not None and not carried.is_that_of(here):
                if before_replacing is not None and has_travelled(name):
                    before_replacing()
                _forget_package(name)
        for top, stamp in self._stamps.items():
            if top in sys.modules and _imported_at.get(top) != stamp:
                _forget_package(top)
                importlib.invalidate_caches()
            _imported_at[top] = stamp


NO_MODULES = CarriedModules({}, {})
before_replacing: Callable[[], None] | None = None
"""Called before a module that came with one function goes for that of another. A module may have registered something
in the process, which it could not do again: a library that holds no context ends itself here."""
_imported_at: dict[str, str] = {}
"""The stamps of linked packages when this process imported them, as far as known."""


def has_travelled(name: str) -> bool:
    """Whether this module is here because it came with a function."""
    return isinstance(getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None), _Carried)


def note_linked_packages() -> None:
    """Remember at which stamps the linked packages are that this process has imported just now."""
    for top, stamp in stamps_of().items():
        _imported_at.setdefault(top, stamp)


class _Carried(importlib.abc.ExecutionLoader):
    """The loader of one module that travelled."""

    def __init__(self, file: str, version: str, data: bytes, *, is_package: bool) -> None:
        self.path = file
        self.version = version
        self.data = data
        self._is_package = is_package

    def spec(self, name: str) -> ModuleSpec:
        """How `name` is imported."""
        places = None
        if self._is_package:
            is_folder = not self.path.endswith(".py")
            places = [self.path if is_folder else os.path.dirname(self.path)]
        return importlib.util.spec_from_file_location(  # type: ignore[return-value]  # never None with a loader
            name, self.path, loader=self, submodule_search_locations=places
        )

    def is_that_of(self, module: ModuleType) -> bool:
        """Whether a module that was imported is this very one, or the same version of it."""
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        return isinstance(loader, _Carried) and loader.version == self.version

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        return self.path

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return importlib.util.decode_source(self.data)

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002
        return self._is_package

    def get_resource_reader(self, fullname: str) -> FileReader | None:  # noqa: ARG002
        """Data files beside the module, where this machine sees them (`importlib.resources`)."""
        return FileReader(self) if self._is_package and self.path.endswith(".py") else None  # type: ignore[arg-type]

    def get_data(self, path: str) -> bytes:
        """A data file beside the module, where this machine sees it (`pkgutil.get_data`)."""
        with open(path, "rb") as file:
            return file.read()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what travelled, before the search path is looked at."""

    def __init__(self) -> None:
        self.base = NO_MODULES
        self.top = NO_MODULES
        """Those of the call that began last, which the threads that calls start find."""
        self.thread = threading.local()
        """Those of the call that a slot runs."""

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        top: CarriedModules = getattr(self.thread, "top", self.top)
        carried = top.found.get(fullname) or self.base.found.get(fullname)
        return carried.spec(fullname) if carried is not None else None


_finder = _Finder()
_lock = threading.Lock()


def _forget_package(name: str) -> None:
    for child in [other for other in list(sys.modules) if other.startswith(f"{name}.")]:
        _forget(child)
    _forget(name)


def _forget(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    around: Any = vars(sys.modules[parent]) if parent in sys.modules else {}
    if module is not None and around.get(child) is module:
        del around[child]

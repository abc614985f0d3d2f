"""Modules that travelled with a function: imported from what travelled, in the library that runs the function.

An import statement finds them before the search path is looked at. A call finds its own modules and those of its
library's context, and none that another program's function brought: what no running call wants in its version is set
aside when a call begins (`set_aside`), and comes back as it was, not imported again, with a call that wants it. A
module of such a name that the library found on its search path is dropped. So a library that outlives programs never
runs one program's function with another's module, nor with what a file held an hour ago.

The modules of a context's loader stay known as long as the library lives; on top come those of the function that runs.
With several slots the functions of one library run side by side, and all their modules are there. Two functions that
bring two versions of one module must not run at the same time (`pilot.library.side_by_side`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.readers import FileReader
from types import ModuleType
from typing import Any

from stoker.contexts.editable import stamps_of
from stoker.contexts.set_aside import ModulesSetAside, forget
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
        """Have the import statements of this thread find these modules, until it enters others or leaves them.

        Modules that no running call wants are set aside, and other versions of these that were found elsewhere drop.
        """
        place = _finder.thread.__dict__.get("place")
        if place is None or place.top is not self or place.arrangement != _finder.arrangement:
            with _lock:
                self._enter()

    def over(self, other: CarriedModules) -> CarriedModules:
        """These, and below them those of another."""
        both = CarriedModules({}, {**other._stamps, **self._stamps})
        both.found = {**other.found, **self.found}
        return both

    def enter_for_good(self) -> None:
        """The same, for as long as the process lives: these are a context's."""
        self.enter()
        _finder.base = self
        NO_MODULES.enter()

    def _enter(self) -> None:
        if before_replacing is not None and self._replaces_others():
            before_replacing()
        _finder.install()
        place = _finder.place()
        place.top = self
        running = _finder.who_runs()
        has_changed = running != _finder.running
        _finder.running = running
        self._forget_what_was_found_elsewhere()
        if _arrange(self):
            has_changed = True
        if has_changed:
            _finder.arrangement = next(_arrangements)
        place.arrangement = _finder.arrangement

    def _replaces_others(self) -> bool:
        """Whether a module comes in a version that this process has not imported, although it has imported another."""
        aside = _set_aside.names()
        for name, carried in self.found.items():
            here = version_of(name, sys.modules.get(name))
            if (here or name in aside) and here != carried.version and (name, carried.version) not in _set_aside:
                return True
        return False

    def _forget_what_was_found_elsewhere(self) -> None:
        for name in self.found:
            here = sys.modules.get(name)
            if here is not None and version_of(name, here) is None:
                _forget_package(name)
        for top, stamp in self._stamps.items():
            if top in sys.modules and _imported_at.get(top) != stamp:
                _forget_package(top)
                importlib.invalidate_caches()
            _imported_at[top] = stamp


NO_MODULES = CarriedModules({}, {})
before_replacing: Callable[[], None] | None = None
"""Called before a module comes in another version than this process has imported. The module may have registered
something in the process, which it could not do again: a library that holds no context ends itself here."""
_imported_at: dict[str, str] = {}
"""The stamps of linked packages when this process imported them, as far as known."""
_here: dict[str, tuple[Any, str]] = {}
"""The modules that travelled and that this process has imported and not set aside, with their versions."""
_set_aside = ModulesSetAside()


def leave(*, keep: CarriedModules = NO_MODULES) -> None:
    """The call that this thread has run is over. Its modules stay where they are until another call begins. The next
    call of this thread wants those of `keep`: if they are the same, there is nothing to leave."""
    place = _finder.thread.__dict__.get("place")
    if place is not None and place.top.found and place.top is not keep:
        with _lock:
            place.top = NO_MODULES
            _finder.running = _finder.who_runs()
            _finder.arrangement = next(_arrangements)


def count_forgotten() -> int:
    """How many modules that were set aside are forgotten by now."""
    return _set_aside.count_forgotten


def has_forgotten(modules: CarriedModules, *, since: int) -> bool:
    """Whether one of these was forgotten when more than `since` had been."""
    return any(_set_aside.has_forgotten(name, each.version, since=since) for name, each in modules.found.items())


def versions_of_context() -> Mapping[str, str]:
    """The versions of the modules that the context's loader brought, by name."""
    return {name: carried.version for name, carried in _finder.base.found.items()}


def has_travelled(name: str) -> bool:
    """Whether this module is here because it came with a function."""
    return version_of(name, sys.modules.get(name)) is not None


def version_of(name: str, module: Any) -> str | None:
    """The version of a module in `sys.modules` that travelled; None for any other."""
    known = _here.get(name)
    if known is not None and known[0] is module:  # it may have put something else into its place
        return known[1]
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader.version if isinstance(loader, _Carried) else None


def note_linked_packages() -> None:
    """Remember at which stamps the linked packages are that this process has imported just now."""
    for top, stamp in stamps_of().items():
        _imported_at.setdefault(top, stamp)


def _arrange(first: CarriedModules) -> bool:
    """Set aside what no running call wants, and put back what one wants. The versions of `first` count before those of
    other calls. Returns whether anything had to move."""
    layers = (first.found, *(modules.found for modules in _finder.running), _finder.base.found)

    def wanted(name: str) -> str | None:
        for layer in layers:
            carried = layer.get(name)
            if carried is not None:
                return carried.version
        return None

    leaving: dict[str, str] = {}
    for name in list(_here):
        version = version_of(name, sys.modules.get(name))
        if version is None:  # user code has taken it out
            del _here[name]
        elif version != wanted(name):
            leaving[name] = version
    if leaving:
        _set_aside.set_aside(leaving, travelled=_here)
        for name in leaving:
            del _here[name]
    back = _set_aside.put_back(wanted) if _set_aside else ()
    _here.update((name, (module, version)) for name, version, module in back)
    return bool(leaving or back)


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

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        name = module.__name__
        _here[name] = module, self.version
        _finder.arrangement = next(_arrangements)
        super().exec_module(module)
        _here[name] = sys.modules.get(name, module), self.version

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


class _Place:
    """Where a thread stands: the modules of its call, and the arrangement of `sys.modules` that it has seen."""

    def __init__(self) -> None:
        self.top = NO_MODULES
        self.arrangement = -1


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what travelled, before the search path is looked at."""

    def __init__(self) -> None:
        self.base = NO_MODULES
        self.running: frozenset[CarriedModules] = frozenset()
        """Those of all calls that run, which the threads that calls start find."""
        self.arrangement = 0
        """Which modules are in place: another number whenever that changes."""
        self.thread = threading.local()
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def place(self) -> _Place:
        """That of this thread, as long as the thread lives."""
        place: _Place | None = self.thread.__dict__.get("place")
        if place is None:
            place = self.thread.place = _Place()
            self._places.add(place)
        return place

    def who_runs(self) -> frozenset[CarriedModules]:
        return frozenset(place.top for place in self._places if place.top.found)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        place = self.thread.__dict__.get("place")
        for modules in (*(self.running if place is None else (place.top,)), self.base):
            carried: _Carried | None = modules.found.get(fullname)
            if carried is not None:
                return carried.spec(fullname)
        return None


_arrangements = itertools.count(1)
_finder = _Finder()
_lock = threading.Lock()


def _forget_package(name: str) -> None:
    for child in [other for other in list(sys.modules) if other.startswith(f"{name}.")]:
        forget(child)
    forget(name)

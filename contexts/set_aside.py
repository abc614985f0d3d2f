"""Modules that are out of `sys.modules` for a time, so that a call does not find them, and come back as they were.

A module is kept with its version and with those modules below it that did not travel. What the module holds, the
identity of its classes and what it has registered somewhere stay, so it need not be imported again.

Modules that left together are kept as one set, and the number of sets is bounded: the oldest is forgotten first. So a
module never comes back without the modules that it imports.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

_MOST = 64
_MOST_OF_A_NAME = 16
"""A module that is edited again and again may hold a large table in each of its versions."""


class ModuleVersion(NamedTuple):
    """A module by its name and version."""

    name: str
    version: str
    module: Any


class _Aside(NamedTuple):
    module: Any
    turn: int
    is_bound: bool
    """Whether its package had it as an attribute."""
    below: Mapping[str, Any]


class ModulesSetAside:
    """Keeps what was set aside the last `most` times, and at most `most_of_a_name` versions of a module."""

    def __init__(self, *, most: int = _MOST, most_of_a_name: int = _MOST_OF_A_NAME) -> None:
        self._most = most
        self._most_of_a_name = most_of_a_name
        self._turn = 0
        self._aside: OrderedDict[tuple[str, str], _Aside] = OrderedDict()
        self._forgotten: dict[tuple[str, str], int] = {}
        """When each module was forgotten last, counted in modules that were."""
        self.count_forgotten = 0

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether the module of this name and version is set aside."""
        return key in self._aside

    def has_forgotten(self, name: str, version: str, *, since: int) -> bool:
        """Whether a module was forgotten when more than `since` had been: what refers to it has another than the one
        that is imported from now on."""
        return self._forgotten.get((name, version), 0) > since

    def names(self) -> set[str]:
        """The names of all modules that are set aside."""
        return {name for name, _ in self._aside}

    def set_aside(self, leaving: Mapping[str, str], *, travelled: Collection[str]) -> None:
        """Take modules out of `sys.modules` and off their packages. `leaving`: the versions by name; `travelled`: the
        names of all modules that travelled, which a module above them does not take along."""
        self._turn += 1
        for name in sorted(leaving, reverse=True):  # a module before its package
            below = {child: sys.modules.pop(child, None) for child in _below(name, travelled)}
            is_bound = is_in_package(name, sys.modules.get(name))
            module = forget(name)
            if module is not None:  # a thread of the user's may have taken it out meanwhile
                self._aside[name, leaving[name]] = _Aside(module, self._turn, is_bound, below)
        self._forget_oldest()

    def put_back(self, version_wanted: Callable[[str], str | None]) -> Iterable[ModuleVersion]:
        """Put the modules back that are wanted in their version; returns them."""
        back: list[ModuleVersion] = []
        for name, version in sorted(key for key in self._aside if version_wanted(key[0]) == key[1]):
            if name in sys.modules:
                continue
            module, _, is_bound, below = self._aside.pop((name, version))
            sys.modules[name] = module
            for child, one in below.items():
                sys.modules.setdefault(child, one)
            package, _, last = name.rpartition(".")
            if is_bound:
                _names_in(package)[last] = module
            back.append(ModuleVersion(name, version, module))
        return back

    def __len__(self) -> int:
        """How many are set aside."""
        return len(self._aside)

    def clear(self) -> None:
        """Forget all."""
        self._aside.clear()

    def _forget_oldest(self) -> None:
        turns = len({aside.turn for aside in self._aside.values()})
        while turns > 1 and (turns > self._most or self._has_too_many_of_a_name()):
            oldest = next(iter(self._aside.values())).turn
            for key in [key for key, aside in self._aside.items() if aside.turn == oldest]:
                del self._aside[key]
                self.count_forgotten += 1
                self._forgotten[key] = self.count_forgotten
            turns -= 1

    def _has_too_many_of_a_name(self) -> bool:
        if len(self._aside) <= self._most_of_a_name:
            return False
        return max(Counter(name for name, _ in self._aside).values()) > self._most_of_a_name


def forget(name: str) -> Any:
    """Take a module out of `sys.modules` and off its package; returns it."""
    module = sys.modules.pop(name, None)
    if is_in_package(name, module):
        package, _, last = name.rpartition(".")
        del _names_in(package)[last]
    return module


def _below(name: str, travelled: Collection[str]) -> list[str]:
    """The modules below this one that did not travel: Python has made them attributes of their packages."""
    found: list[str] = []
    for last in list(_names_in(name)) if hasattr(sys.modules.get(name), "__path__") else ():
        child = f"{name}.{last}"
        if child in sys.modules and child not in travelled:
            found += [child, *_below(child, travelled)]
    return found


def is_in_package(name: str, module: Any) -> bool:
    """Whether the package of this module has it as an attribute."""
    package, _, last = name.rpartition(".")
    return module is not None and _names_in(package).get(last) is module


def _names_in(package: str) -> dict[str, Any]:
    found = getattr(sys.modules.get(package), "__dict__", None)
    return found if isinstance(found, dict) else {}

"""The user's own functions among the values that a function uses. They travel with it, and rest on values themselves.

They are found wherever the walk of a fingerprint goes: in containers, defaults, attributes, classes and descriptors,
under bound methods, partials and decorators. No code of the user's runs for it.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Any

from stoker.contexts.array_facts import Meter
from stoker.contexts.fingerprint import Fingerprint
from stoker.contexts.own_attributes import bases_of, cell_content, is_users_class, members_of, own_attribute
from stoker.contexts.user_code import is_installed

Place = tuple[int, str]
"""Where a variable is kept: the id of its globals and its name, or the id of its cell."""

_WRAPPERS = 8
"""More wrappers around a function than this are not looked under."""


class HelperSearch:
    """The helpers that are found while the values of a function and of its helpers are looked at for the first time."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._beside = Meter()
        """For what is looked into here alone, and not compared at each call."""
        self.met: list[Any] = []
        """What counts by identity, in the order in which it is met. Held so that no id is used twice meanwhile."""
        self._places: set[Place] = set()

    def meet(self, value: Any) -> None:
        """Take a value that may be a helper, or hold one."""
        self.met.append(value)

    def is_new(self, place: Place) -> bool:
        """True at the first question about a place."""
        before = len(self._places)
        self._places.add(place)
        return len(self._places) > before

    def helpers(self) -> Iterator[types.FunctionType]:
        """Each helper once, with the helpers of helpers as they are met."""
        seen: set[int] = set()
        for value in self.met:  # it grows meanwhile
            if id(value) not in seen:
                seen.add(id(value))
                helper = own_function(value)
                if helper is None:
                    self._look_into(value)
                elif helper is value:
                    yield helper
                else:
                    self.met.append(helper)

    def _look_into(self, value: Any) -> None:
        """Enums and functions of installed modules count by identity, and what they hold may be helpers."""
        kind = type(value)
        if kind is types.FunctionType:
            Fingerprint([cell_content(cell) for cell in value.__closure__ or ()], meter=self._beside, met=self.met)
        elif issubclass(kind, enum.Enum):
            self.met.append(kind)
            Fingerprint(own_attribute(value, "_value_"), meter=self._beside, met=self.met)
        elif issubclass(kind, type) and issubclass(value, enum.Enum) and is_users_class(value):
            own = [dict(members_of(base)) for base in bases_of(value) if is_users_class(base)]
            Fingerprint(own, meter=self._beside, met=self.met)


def own_function(value: Any) -> types.FunctionType | None:
    """The user's own function in a value, under the wrappers of decorators; None if there is none."""
    for _ in range(_WRAPPERS):
        if type(value) is types.FunctionType and not (has_installed_globals(value) and _is_at_home(value)):
            return value
        value = own_attribute(value, "__wrapped__")
        if value is None:
            break
    return None


def has_installed_globals(function: types.FunctionType) -> bool:
    """True for a function that was defined in an installed module, whatever `functools.wraps` has made of its name."""
    home = function.__globals__.get("__name__")
    return type(home) is str and is_installed(home)


def _is_at_home(function: types.FunctionType) -> bool:
    """False for a function of an installed module that has the name of one of the user's, which it wraps."""
    home = function.__module__
    return type(home) is not str or is_installed(home)

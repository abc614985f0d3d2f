"""Names in a policy of the user's own that were meant to override one of Stoker's, and do not.

A policy is asked by name, and Python lets a class have any other name beside those: `worth_lodaing` would be a method
that nobody calls, and the default would go on deciding. So a public name of the user's that overrides nothing is held
against those that his classes inherit and leave as they are: methods against methods, values against values. Where one
is nearly the same it is taken for a slip; other names are his own business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

_OURS = "stoker."
_NEAR = 0.8
"""The similarity (`difflib`, 0 to 1) from which a name is taken for another one, misspelt."""


class MisspeltName(msgspec.Struct, frozen=True):
    """A name that overrides nothing, and the one that was probably meant."""

    name: str
    near: str


def misspelt(made: object) -> MisspeltName | None:
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

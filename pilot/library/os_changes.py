"""Counts the calls that change the working folder, the umask or the environment of this process.

To compare all of these with what they were takes two microseconds after each call; to compare a number takes none. Only
functions of `os` are counted. C code that changes them is found by the looks that `soundness` takes every 5 ms.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

_FUNCTIONS = ("chdir", "fchdir", "umask", "putenv", "unsetenv")
"""`os.environ` calls the last two by these names."""


class OsChanges:
    """`count` is another number after each change, in every thread."""

    __slots__ = ("_numbers", "count")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.count = 0

    def note(self) -> None:
        """Something has changed."""
        self.count = next(self._numbers)


CHANGES = OsChanges()


def watch() -> None:
    """Count from now on."""
    for name in _FUNCTIONS:
        function = getattr(os, name)
        if not hasattr(function, "__wrapped__"):
            setattr(os, name, _counted(function))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        finally:
            CHANGES.note()

    return counted

"""What kind of callable a user's function is, looked at through `functools.partial`, methods and `__call__`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any


def plain(function: Callable[..., Any]) -> Any:
    """The function that runs in the end: under partials, and the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return type(function).__call__


def is_async(function: Callable[..., Any]) -> bool:
    """True for a function that gives a coroutine."""
    return inspect.iscoroutinefunction(plain(function))


def how_it_yields(function: Callable[..., Any]) -> str:
    """How a function gives a generator or a context manager instead of a value, in words; empty if it does not."""
    found = plain(function)
    if _yields(found):
        return "a generator function (it contains `yield`)"
    code, inner = getattr(found, "__code__", None), getattr(found, "__wrapped__", None)
    if code is not None and code.co_filename == contextlib.__file__ and _yields(inner):
        return "a context manager (of contextlib)"
    return ""


def gives_pieces(function: Callable[..., Any]) -> bool:
    """True for a generator function, plain or async."""
    return _yields(plain(function))


def _yields(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)

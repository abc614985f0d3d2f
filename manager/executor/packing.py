"""Names of functions, and the bytes of a call's arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from types import CellType
from typing import Any

import parsl
from parsl.app.bash import remote_side_bash_executor
from parsl.app.errors import wrap_error
from parsl.app.python import timeout

from stoker.contexts.payloads import dumps_arguments
from stoker.contexts.user_code import is_installed
from stoker.errors import SerializationError
from stoker.manager.executor.session_files import LargeArguments
from stoker.protocol.calls import INLINE_LIMIT_BYTES, Payload
from stoker.units import show_bytes

logger = logging.getLogger("stoker.captured")

# ---- names of functions


_WRAPPER_CODE = wrap_error(lambda: None).__code__
_PARSL = os.path.dirname(parsl.__file__) + os.sep
_MOST_WRAPPERS = 16
_TIMEOUT_CODE = timeout(lambda: None, 1).__code__


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without `python_app`'s wrapper, which hides failures from the manager."""
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and getattr(function, "__code__", None) is _WRAPPER_CODE else function


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without any of Parsl's wrappers."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(function, functools.partial) and function.func is remote_side_bash_executor and function.args:
            function = function.args[0]
            continue
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_PARSL):
            break
        cells = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False))
        inner = getattr(function, "__wrapped__", None) or cells.get("func") or cells.get("f")
        if isinstance(inner, CellType):
            inner = inner.cell_contents
        if not callable(inner):
            break
        function = inner
    return function


def is_same_function(made_of: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return True for the same function, perhaps in two walltime wrappers of Parsl."""
    if made_of is function:
        return True
    codes = {getattr(made_of, "__code__", None), getattr(function, "__code__", None)}
    return codes == {_TIMEOUT_CODE} and made_of.__wrapped__ is function.__wrapped__  # type: ignore[union-attr,attr-defined]


def name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function) if not hasattr(function, "__name__") else function
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(function).__name__
    return str(name).replace("<locals>.", "").encode("utf-8", "replace").decode()


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined: a module's name or a file; empty if unknown."""
    with suppress(Exception):  # errors in the object's attributes must not stop the call
        inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        module = str(getattr(inner, "__module__", None) or type(inner).__module__)
        code = getattr(inner, "__code__", None)
        if is_installed(module) or code is None or not os.path.isfile(code.co_filename):
            return module
        return os.path.realpath(code.co_filename).encode("utf-8", "replace").decode()
    return ""


# ---- bytes of arguments


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, large: LargeArguments,
    by_name: frozenset[str] = frozenset(), brought: set[str] | None = None,
) -> Payload:  # fmt: skip
    """Pickle a call's arguments; write large ones to a file of `large`. See `dumps_arguments`."""
    try:
        data = dumps_arguments((args, kwargs), by_name=by_name, brought=brought)
    except SerializationError as error:
        raise SerializationError(f"{name}: {error}", **error.facts) from error
    return inline_or_store_arguments(data, name=name, large=large)


def inline_or_store_arguments(data: bytes, *, name: str, large: LargeArguments) -> Payload:
    if len(data) <= INLINE_LIMIT_BYTES:
        return data
    try:
        return large.put(data)
    except OSError as error:
        raise SerializationError(
            f"{name}: its arguments of {show_bytes(len(data))} cannot be written to {large.folder}: {error}; make room "
            "there, or keep sessions elsewhere with stoker.load(run_dir=...)",
            what="argument",
        ) from error

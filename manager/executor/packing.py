"""From a function and its arguments to what travels: a function's bytes once a function, a call's bytes once a call.

A function is pickled the first time it is called and kept with the function object itself (weakly), so a program that
calls it a hundred thousand times pays once. What it closes over is therefore taken at its first call, not at every one.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

from parsl.app.errors import wrap_error

from stoker.contexts import payloads
from stoker.errors import SerializationError
from stoker.manager.executor.large import LargeArguments
from stoker.manager.protocol.calls import INLINE_LIMIT_BYTES, Payload
from stoker.manager.protocol.ids import FunctionKey
from stoker.manager.protocol.to_pilot import FunctionBlob
from stoker.units import show_bytes

_WRAPPER_CODE = wrap_error(lambda: None).__code__


class FunctionCache:
    """Pickled functions by function object, one entry with and one without the context as first argument."""

    def __init__(self) -> None:
        self._blobs: weakref.WeakKeyDictionary[Any, dict[bool, FunctionBlob]] = weakref.WeakKeyDictionary()

    def blob(self, function: Callable[..., Any], *, takes_context: bool) -> FunctionBlob:
        """The function's bytes under their digest. Raises SerializationError, naming the function."""
        try:
            known = self._blobs.setdefault(function, {})
        except TypeError:  # neither hashable nor weakly referable: pickled every time
            known = {}
        found = known.get(takes_context)
        if found is None:
            found = known[takes_context] = _pickle_function(function, takes_context=takes_context)
        return found


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function under the wrapper that Parsl's `python_app` puts around it.

    The wrapper turns exceptions into values. A library reports an exception as an exception, with its traceback, so
    the wrapper would only hide failures from the manager and make libraries import Parsl.
    """
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and getattr(function, "__code__", None) is _WRAPPER_CODE else function


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, large: LargeArguments) -> Payload:
    """The bytes of a call's arguments; in a file of `large` if they are many. Raises SerializationError."""
    try:
        data = payloads.dumps((args, kwargs))
    except SerializationError as error:
        raise SerializationError(f"{name}: {error}", **error.facts) from error
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


def name_of(function: Callable[..., Any]) -> str:
    """What people call a function: `verify`, `Checker.check`, `<lambda>`."""
    inner = getattr(function, "func", function) if not hasattr(function, "__name__") else function
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(function).__name__
    return str(name).replace("<locals>.", "")


def _pickle_function(function: Callable[..., Any], *, takes_context: bool) -> FunctionBlob:
    name = name_of(function)
    try:
        data = payloads.dumps((function, takes_context), what="function")
    except SerializationError as error:
        raise SerializationError(f"function {name}: {error}", what="function", function=name) from error
    key = FunctionKey(hashlib.blake2b(data, digest_size=16).hexdigest())
    return FunctionBlob(key=key, name=name, blob=data)

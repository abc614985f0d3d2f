"""Pickle functions and arguments for sending.

A function is pickled once per map, or once per call of an app. The bytes are reused if all captured objects are
immutable and unchanged (`contexts.function_code`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import CellType
from typing import Any, NamedTuple

import parsl
from parsl.app.bash import remote_side_bash_executor
from parsl.app.errors import wrap_error
from parsl.app.python import timeout

from stoker.contexts.function_code import Captured, SourceLines
from stoker.contexts.payloads import carried_module_names, dump_parts, dumps_arguments, dumps_code
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import is_installed
from stoker.errors import SerializationError
from stoker.manager.executor.session_files import LargeArguments
from stoker.protocol.calls import INLINE_LIMIT_BYTES, Payload
from stoker.protocol.ids import FunctionKey
from stoker.protocol.to_pilot import FunctionBlob
from stoker.units import show_bytes

logger = logging.getLogger("stoker.captured")

# ---- names of functions


_WRAPPER_CODE = wrap_error(lambda: None).__code__
_PARSL = os.path.dirname(parsl.__file__) + os.sep
_MOST_WRAPPERS = 16
_TIMEOUT_CODE = timeout(lambda: None, 1).__code__


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without the wrapper of Parsl's `python_app`, which hides failures from the manager."""
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and getattr(function, "__code__", None) is _WRAPPER_CODE else function


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without any of Parsl's wrappers."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(function, partial) and function.func is remote_side_bash_executor and function.args:
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
    """Return True if both arguments are the same function, perhaps in two separate walltime wrappers of Parsl."""
    if made_of is function:
        return True
    codes = {getattr(made_of, "__code__", None), getattr(function, "__code__", None)}
    return codes == {_TIMEOUT_CODE} and made_of.__wrapped__ is function.__wrapped__  # type: ignore[union-attr,attr-defined]


def name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function) if not hasattr(function, "__name__") else function
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(function).__name__
    return str(name).replace("<locals>.", "").encode("utf-8", "replace").decode()


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined: an installed or notebook module's name, or a file; empty if unknown."""
    with suppress(Exception):  # errors in the object's attributes must not stop the call
        inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        module = str(getattr(inner, "__module__", None) or type(inner).__module__)
        code = getattr(inner, "__code__", None)
        if is_installed(module) or code is None or not os.path.isfile(code.co_filename):
            return module
        file: str = code.co_filename
        return os.path.realpath(file).encode("utf-8", "replace").decode()
    return ""


# ---- bytes of functions


_NONE: frozenset[str] = frozenset()
_LARGE_BYTES = 1_000_000


class _PicklingOptions(NamedTuple):
    takes_context: bool
    by_name: frozenset[str]
    also: frozenset[str]


class _Pickled:
    """A function's current and earlier bytes. `captured` is None if a captured object may change; the function is then
    pickled at each use."""

    def __init__(self, function: Callable[..., Any], before: Mapping[_PicklingOptions, FunctionBlob]) -> None:
        self.blobs: dict[_PicklingOptions, FunctionBlob] = {}
        self.before = dict(before)
        captured = Captured(function)
        self.captured = None if captured.mutable else captured


class FunctionCache:
    """Cache of pickled functions. When a function's bytes change, the cache calls `on_replaced(old, new)`
    with the keys of the bytes."""

    def __init__(self, *, on_replaced: Callable[[FunctionKey, FunctionKey], None] = lambda _key, _by: None) -> None:
        self._on_replaced = on_replaced
        self._lock = threading.RLock()
        self._known: weakref.WeakKeyDictionary[Any, _Pickled] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()

    def blob(
        self, function: Callable[..., Any], *, takes_context: bool, by_name: frozenset[str] = _NONE,
        also: frozenset[str] = _NONE,
    ) -> FunctionBlob:  # fmt: skip
        """Return the function's current bytes. For `by_name` and `also`, see `dumps_code`. Raises
        SerializationError."""
        how = _PicklingOptions(takes_context, by_name, also)
        with self._lock:
            try:
                known = self._known.get(function)
            except TypeError:  # pickle an unhashable function, or one without weak references, every time
                known = None
            if known is None or known.captured is None or known.captured.changed():
                known = _Pickled(function, {**known.before, **known.blobs} if known is not None else {})
                with suppress(TypeError):
                    self._known[function] = known
            found = known.blobs.get(how)
            if found is None:
                before = known.before.pop(how, None)
                found = known.blobs[how] = _pickle_function(function, how, before=before)
                if before is not None:
                    if found is not before:
                        self._on_replaced(before.key, found.key)
                    if known.captured is None and len(found.blob) > _LARGE_BYTES:
                        self._warn_of_repeated_pickling(function, found)
            return found

    def _warn_of_repeated_pickling(self, function: Callable[..., Any], blob: FunctionBlob) -> None:
        if function in self._told:
            return
        self._told.add(function)
        name = max(captured := Captured(function).mutable, key=lambda name: _size_of(captured[name]))
        logger.warning(
            "%s uses %s, which may change: its %s are pickled with every call, and sent if they changed; load it in a"
            " context, or pass it as an argument",
            blob.name,
            name,
            show_bytes(len(blob.blob)),
        )


def _size_of(value: Any) -> int:
    try:
        return sum(memoryview(part).nbytes for part in dump_parts(value))
    except Exception:
        return 0


def _pickle_function(
    function: Callable[..., Any], how: _PicklingOptions, *, before: FunctionBlob | None = None
) -> FunctionBlob:
    name = name_of(own(function))
    try:
        value = (function, how.takes_context, SourceLines())
        data = dumps_code(value, what="function", by_name=how.by_name, also=how.also)
    except SerializationError as error:
        raise SerializationError(f"function {name}: {error}", what="function", function=name) from error
    if before is not None and before.blob == data:
        return before
    key = FunctionKey(hashlib.blake2b(data, digest_size=16).hexdigest())
    return FunctionBlob(key=key, name=name, blob=data, place=before.place if before is not None else place_of(function))


def modules_pickled_with(blob: FunctionBlob, recipe: Recipe) -> frozenset[str]:
    return carried_module_names(blob.blob) | carried_module_names(recipe.loader)


# ---- bytes of arguments


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, large: LargeArguments,
    by_name: frozenset[str] = _NONE, brought: set[str] | None = None,
) -> Payload:  # fmt: skip
    """Pickle a call's arguments; write large arguments to a file of `large`. For `by_name` and `brought`, see
    `dumps_arguments`. Raises SerializationError."""
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

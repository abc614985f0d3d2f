"""Facts about a function: names in its bytecode, whether it yields, its source lines, and its captured objects.

Only a notebook's process has the source lines of its functions, so pickles include these lines (`SourceLines`).
`CapturedObjects` compares captured objects by identity. If all are immutable, the function's pickle stays valid until
a name is bound to another object.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import inspect
import linecache
import logging
import operator
import os
import pathlib
import re
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from stoker.contexts.user_code import find_by_qualified_name, is_installed

_LOCATION_NAMES = frozenset({"__file__", "__path__", "__spec__"})
_GLOBAL_OPCODES = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})


def _iterate_nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _iterate_nested_code(const)


@functools.lru_cache(maxsize=1024)
def find_global_names(code: types.CodeType) -> frozenset[str]:
    steps = (step for one in _iterate_nested_code(code) for step in dis.get_instructions(one))
    return frozenset(str(step.argval) for step in steps if step.opname in _GLOBAL_OPCODES)


@functools.lru_cache(maxsize=1024)
def find_attribute_names(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for one in _iterate_nested_code(code) for name in one.co_names)


@functools.lru_cache(maxsize=1024)
def names_in_class_bodies(code: types.CodeType) -> frozenset[str]:
    found = set[str]()
    for one in _iterate_nested_code(code):
        steps = list(dis.get_instructions(one))
        stored = {step.argval for step in steps if step.opname == "STORE_NAME"}
        found |= {str(step.argval) for step in steps if step.opname == "LOAD_NAME"} - stored
    return frozenset(found)


class ImportStatement(NamedTuple):
    """An import statement. `import module` has level 0 and no names."""

    level: int
    module: str
    names: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def find_imports(code: types.CodeType) -> frozenset[ImportStatement]:
    found = set[ImportStatement]()
    for one in _iterate_nested_code(code):
        steps = [step for step in dis.get_instructions(one) if step.opname != "EXTENDED_ARG"]
        found.update(
            ImportStatement(int(level.argval or 0), str(step.argval or ""), tuple(names.argval or ()))
            for level, names, step in zip(steps, steps[1:], steps[2:], strict=False)
            if step.opname == "IMPORT_NAME"
        )
    return frozenset(found)


def may_read_own_files(code: types.CodeType) -> bool:
    return not _LOCATION_NAMES.isdisjoint(find_global_names(code)) or any(
        f"{one.module}.{name}".startswith(("importlib.resources", "pkgutil"))
        for one in find_imports(code)
        for name in one.names or ("",)
    )


def unwrap_partial(function: Any) -> Any:
    """Return the function inside nested `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def underlying_function(function: Callable[..., Any]) -> Any:
    function = unwrap_partial(function)
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return type(function).__call__


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(underlying_function(function))


def describe_generator(function: Callable[..., Any]) -> str:
    """Describe a generator function or a contextlib context manager; return an empty text for other functions."""
    if is_generator_function(function):
        return "a generator function (it contains `yield`)"
    found: Any = underlying_function(function)
    code, inner = getattr(found, "__code__", None), getattr(found, "__wrapped__", None)
    is_contextlib = code is not None and code.co_filename == contextlib.__file__
    return "a context manager (of contextlib)" if is_contextlib and is_generator_function(inner) else ""


def is_generator_function(function: Any) -> bool:
    found = underlying_function(function)
    return inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found)


MAX_SOURCE_CHARACTERS = 65_536


class SourceLines:
    """Marker object at the end of a pickle. It adds the source lines of all functions pickled before it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return register_source_files, ({},)


def collect_source_lines(codes: Iterable[types.CodeType]) -> dict[str, dict[int, list[str]]]:
    found: dict[str, dict[int, list[str]]] = {}
    room = MAX_SOURCE_CHARACTERS
    for code in codes:
        block = _source_block(code)
        size = sum(map(len, block))
        if block and size <= room:
            room -= size
            found.setdefault(code.co_filename, {})[code.co_firstlineno] = block
    return found


@functools.lru_cache(maxsize=1024)
def _source_block(code: types.CodeType) -> list[str]:
    lines, first = linecache.getlines(code.co_filename), code.co_firstlineno
    return inspect.getblock(lines[first - 1 :]) if 1 <= first <= len(lines) else []


def register_source_files(files: Mapping[str, Mapping[int, list[str]]]) -> None:
    for name, blocks in files.items():
        if os.path.exists(name):
            continue
        known = linecache.cache.get(name)
        lines = list(known[2]) if known is not None and len(known) == 4 else []
        for first, block in blocks.items():
            last = first - 1 + len(block)
            lines += ["\n"] * (last - len(lines))
            lines[first - 1 : last] = block
        # With None as the file's time, `linecache.checkcache` does not drop this entry.
        linecache.cache[name] = sum(map(len, lines)), None, lines, name


_MISSING = object()
_IMMUTABLE_CLASS_IDS = frozenset(map(id, (
    int, str, float, bool, bytes, complex, type(None), type(...), type(NotImplemented), range, re.Pattern,
    datetime.date, datetime.datetime, datetime.timedelta, pathlib.PosixPath, pathlib.PurePosixPath, logging.Logger,
    types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, type(typing.ClassVar),
    type(typing.Literal), type(_MISSING),
)))  # fmt: skip
"""Ids of classes whose instances are immutable. (A set of classes would call the `__hash__` of their metaclasses.)"""
_GENERIC_ALIAS_IDS = frozenset(map(id, (
    types.GenericAlias, types.UnionType, *map(type, (
        typing.Optional[int], typing.List[int], typing.Literal[1], typing.Callable[[int], int],  # noqa: UP006, UP045
        Callable[[int], int],
    )),
)))  # fmt: skip

_class_attributes: Callable[[type], Any] = type.__dict__["__dict__"].__get__
_class_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_class_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_HEAP_TYPE_FLAG = 1 << 9
_module_globals: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
_bound_object: Callable[[Any], Any] = vars(types.BuiltinFunctionType)["__self__"].__get__


class CapturedObjects:
    """The objects that a function's names refer to. `mutable_objects`: by name, objects that may change in place."""

    def __init__(self, function: Any) -> None:
        self.mutable_objects: dict[str, Any] = {}
        self._functions: list[_FunctionNames] = []
        if type(function) is not types.FunctionType:
            if not _is_immutable(function):
                self.mutable_objects["the object that is called"] = function
            return
        waiting, seen = [function], {id(function)}
        for one in waiting:  # the loop appends to this list
            if _is_found_by_name(one, one.__module__, one.__qualname__):
                continue
            names = _FunctionNames(one)
            self._functions.append(names)
            for name, value in zip(_reference_names(one), _referenced_objects(one, names.used), strict=False):
                if type(value) is types.FunctionType:
                    if id(value) not in seen:
                        seen.add(id(value))
                        waiting.append(value)
                elif not _is_immutable(value):
                    self.mutable_objects.setdefault(name, value)
            if not all(map(_is_immutable, names.annotations.values())):
                self.mutable_objects.setdefault(f"the annotations of {one.__name__}", names.annotations)

    def find_rebound_name(self) -> str:
        """Return the first name that the program has bound to another object in the meantime, or ""."""
        for names in self._functions:
            if name := names.find_rebound_name():
                return name
        return ""


class _FunctionNames:
    """The objects that one function's names refer to, held weakly where possible."""

    __slots__ = ("_code", "_function", "_strong", "_weak", "annotations", "name", "used")

    def __init__(self, function: types.FunctionType) -> None:
        self.name = function.__name__
        self.used = tuple(sorted(find_global_names(function.__code__)))
        self.annotations = dict(_get_annotations(function))
        # A weak reference, because this object is the value of a cache whose weak key is the function.
        self._function = weakref.ref(function)
        self._code = function.__code__
        self._strong = _referenced_objects(function, self.used)
        self._weak: list[tuple[int, weakref.ref[Any]]] = []
        for place, value in enumerate(self._strong):
            if id(type(value)) not in _IMMUTABLE_CLASS_IDS:
                with contextlib.suppress(TypeError):
                    self._weak.append((place, weakref.ref(value)))
                    self._strong[place] = None

    def find_rebound_name(self) -> str:
        function, known = self._function(), self._strong
        if function is None or function.__code__ is not self._code:
            return self.name
        now = _referenced_objects(function, self.used)
        if len(now) != len(known):
            return self.name
        for place, held in self._weak:
            value = held()
            if value is None or value is not now[place]:
                return _reference_names(function)[place]
            now[place] = None
        if all(map(operator.is_, now, known)):
            return "" if _get_annotations(function) == self.annotations else self.name
        # The lengths may differ, because another thread may have changed the function.
        names = zip(_reference_names(function), now, known, strict=False)
        return next((name for name, a, b in names if a is not b), self.name)


def _referenced_objects(function: types.FunctionType, used: Iterable[str]) -> list[Any]:
    namespace = function.__globals__
    found = [namespace.get(name, _MISSING) for name in used]
    if function.__closure__:
        for cell in function.__closure__:
            try:
                found.append(cell.cell_contents)
            except ValueError:  # empty closure cell
                found.append(_MISSING)
    if function.__defaults__:
        found += function.__defaults__
    for held in (function.__kwdefaults__, function.__dict__):
        if held:
            found += held
            found += held.values()
    return found


def _reference_names(function: types.FunctionType) -> list[str]:
    names = [*sorted(find_global_names(function.__code__)), *function.__code__.co_freevars]
    names += [f"a default of {function.__name__}"] * len(function.__defaults__ or ())
    for held in (function.__kwdefaults__, function.__dict__):
        names += [*(held or ())] * 2
    return names


def _get_annotations(function: types.FunctionType) -> dict[str, Any]:
    try:
        return function.__annotations__
    except Exception:  # Python 3.14 computes annotations on access, which may fail
        return {}


def _is_immutable(value: Any) -> bool:
    kind = type(value)
    if id(kind) in _IMMUTABLE_CLASS_IDS:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(_is_immutable, value))
    if issubclass(kind, types.ModuleType):
        name = _module_globals(value).get("__name__")
        return type(name) is str and is_installed(name)
    if issubclass(kind, type):
        is_static = not _class_flags(value) & _HEAP_TYPE_FLAG  # a class written in C, like NoneType
        home = _class_attributes(value).get("__module__", "builtins")
        return is_static or _is_found_by_name(value, home, _class_qualname(value))
    if kind is types.FunctionType:
        return _is_found_by_name(value, value.__module__, value.__qualname__)
    if kind is types.BuiltinFunctionType:
        return _bound_object(value) is None or _is_immutable(_bound_object(value))
    if id(kind) in _GENERIC_ALIAS_IDS:
        parts = (typing.get_origin(value), *typing.get_args(value))
        return all(_is_immutable(tuple(part) if type(part) is list else part) for part in parts)
    return False


def _is_found_by_name(value: Any, home: Any, name: str) -> bool:
    return type(home) is str and is_installed(home) and find_by_qualified_name(home, name) is value

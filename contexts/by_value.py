"""Pickle the user's own functions, classes and modules by value, with cloudpickle.

Programs compare type variables and sentinels with `is`. Therefore these objects are pickled with an id, and a process
has one copy per id. Classes of sent modules are pickled by name, with the simple attributes that the program has set.
Open files are refused, because a copy in a library would write to another place, or delete the original temporary file.
"""

from __future__ import annotations

import _io
import contextlib
import enum
import functools
import importlib
import inspect
import io
import logging
import mmap
import operator
import pickle
import sys
import tarfile
import tempfile
import types
import typing
import uuid
import weakref
import zipfile
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from stoker.contexts.function_code import (
    SourceLines,
    collect_source_lines,
    names_in_class_bodies,
    register_source_files,
)
from stoker.contexts.user_code import find_by_qualified_name, is_installed
from stoker.contexts.user_modules import is_imported_from_sent_source

_FILE_TYPES = (
    io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper, mmap.mmap,
)  # fmt: skip
_TEMPORARY_FILE_TYPES = (
    tempfile._TemporaryFileWrapper,
    tempfile._TemporaryFileCloser,  # type: ignore[attr-defined]  # the closer removes the temporary file
    tempfile.SpooledTemporaryFile,
    tempfile.TemporaryDirectory,
)
_ARCHIVE_TYPES = (zipfile.ZipFile, tarfile.TarFile)
_POSSIBLE_HANDLE_TYPES: tuple[type, ...] = (_io._IOBase, mmap.mmap, *_TEMPORARY_FILE_TYPES, *_ARCHIVE_TYPES)
_HANDLE_DESCRIPTIONS: tuple[tuple[Any, str, str], ...] = (
    (tempfile.TemporaryDirectory, "a temporary folder", "pass its path (.name)"),
    (_ARCHIVE_TYPES, "an open archive", "pass its path, and open it in the function"),
    (mmap.mmap, "a mapped file", "pass its path, and map it in the function"),
    (_TEMPORARY_FILE_TYPES, "a temporary file", "pass its path (.name), and open it in the function"),
    (object, "an open file", "pass its path, and open it in the function"),
)
_STREAM_NAMES = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")

logger = logging.getLogger("stoker.captured")


class OpenHandleError(pickle.PicklingError):
    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice


def is_open_handle(value: Any) -> bool:
    """True if the value is an open file, archive, or temporary file or folder, which cannot be sent."""
    if (
        not isinstance(value, _POSSIBLE_HANDLE_TYPES)
        or _stream_name(value)
        or isinstance(value, io.BytesIO | io.StringIO)
    ):
        return False
    is_own = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return is_own or isinstance(value, (*_FILE_TYPES, *_TEMPORARY_FILE_TYPES, *_ARCHIVE_TYPES))


def _stream_name(value: Any) -> str | None:
    return next((name for name in _STREAM_NAMES if value is getattr(sys, name, None)), None)


def _describe_open_handle(value: Any) -> OpenHandleError:
    what, advice = next((what, advice) for kinds, what, advice in _HANDLE_DESCRIPTIONS if isinstance(value, kinds))
    name, mode = _getattr_or_none(value, "name"), _getattr_or_none(value, "mode")
    if what == "an open file" and isinstance(name, int):
        advice = "open the file in the function"
    if name is None:  # a bz2 or lzma file wraps the file that has the name
        name = _getattr_or_none(value, "filename") or _getattr_or_none(_getattr_or_none(value, "_fp"), "name")
    if isinstance(name, str | bytes) and name:
        what += f" {name!r:.200}"
    return OpenHandleError(what + (f" (mode {mode!r:.20})" if isinstance(mode, str) else ""), advice)


@functools.cache
def warn_about_finalizer(name: str) -> None:
    logger.warning(
        "%s has a __del__ method, which also runs when the library deletes its copy. The method must not remove files"
        " that the program still needs. Pass the path instead (logged once)",
        name,
    )


def _getattr_or_none(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # the file is detached or closed, or a property of the user's class failed
        return None


_ATOMIC_TYPES = frozenset({int, str, float, bool, bytes, type(None), complex})
_MAX_ITEMS = 64


def is_small_builtin(value: Any, depth: int) -> bool:
    """True if the value has builtin types only, in small containers that are nested at most `depth` deep."""
    kind = type(value)
    if kind in _ATOMIC_TYPES:
        return True
    if depth == 0:
        return False
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        if len(value) > _MAX_ITEMS:
            return False
        for item in value:  # noqa: SIM110  # `all()` with a generator is much slower
            if type(item) not in _ATOMIC_TYPES and not is_small_builtin(item, depth - 1):
                return False
        return True
    if kind is dict:
        if len(value) > _MAX_ITEMS:
            return False
        for key, item in value.items():
            if type(key) not in _ATOMIC_TYPES or (
                type(item) not in _ATOMIC_TYPES and not is_small_builtin(item, depth - 1)
            ):
                return False
        return True
    return False


def class_by_name(module: str, name: str, attributes: dict[str, Any]) -> Any:
    kind = operator.attrgetter(name)(importlib.import_module(module))
    for attribute, value in attributes.items():
        here = vars(kind).get(attribute)
        if type(here) is not type(value) or here != value:
            setattr(kind, attribute, value)
    return kind


LRU_CACHE_TYPE = type(functools.lru_cache(len))
_DISPATCHER = functools.singledispatch(len).__code__  # type: ignore[attr-defined]  # the object is a function


def is_singledispatch_function(function: types.FunctionType) -> bool:
    return function.__code__ is _DISPATCHER and hasattr(function, "registry")


def _attributes_except(value: Any, *names: str) -> dict[str, Any]:
    return {name: part for name, part in vars(value).items() if name not in names}


def _reduce_lru_cache(value: Any) -> Any:
    if not hasattr(value, "cache_parameters"):  # not made by `functools.lru_cache`, so its options are unknown
        return None
    options = value.cache_parameters()
    attributes = _attributes_except(value, "__wrapped__", "cache_parameters")
    return make_lru_cache, (value.__wrapped__, options["maxsize"], options["typed"]), attributes


def make_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def reduce_singledispatch(function: Any) -> Any:
    attributes = _attributes_except(function, "__wrapped__", "register", "dispatch", "registry", "_clear_cache")
    state = attributes, list(function.registry.items())
    return functools.singledispatch, (function.__wrapped__,), state, None, None, register_implementations


def register_implementations(function: Any, state: tuple[dict[str, Any], list[tuple[type, Any]]]) -> None:
    vars(function).update(state[0])
    for kind, implementation in state[1]:
        function.register(kind, implementation)


def _reduce_cell(cell: types.CellType) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # empty closure cell
        return types.CellType, ()
    return types.CellType, (), (content,), None, None, set_cell_content


def set_cell_content(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


def reduce_class(kind: type) -> Any:
    advice = ""
    if getattr(kind, "__struct_fields__", None):
        advice = "is a msgspec.Struct, which is sent by its name: {}, or make it a dataclass"
    elif wanted := _required_subclass_argument(kind):
        advice = f"needs {wanted!r} for __init_subclass__, and Python does not store its value: {{}}, or add a default"
    if advice:
        instead = "define it in a module that the function imports in its body"
        raise pickle.PicklingError(f"{kind.__qualname__} {advice.format(instead)}")
    reduced = _cloudpickle._dynamic_class_reduce(kind)
    bases = vars(kind).get("__orig_bases__", ())
    if reduced[0] is _cloudpickle._make_skeleton_class and "__slots__" in vars(kind) and typing.NamedTuple not in bases:
        reduced[1][3]["__slots__"] = vars(kind)["__slots__"]
    return reduced


def _required_subclass_argument(kind: type) -> str:
    hook: Any = getattr(super(kind, kind), "__init_subclass__", None)
    if not isinstance(hook, types.MethodType):
        return ""
    with contextlib.suppress(TypeError, ValueError):
        for one in inspect.signature(hook).parameters.values():
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                return one.name
    return ""


def _reduce_type_variable(value: Any) -> Any:
    kind = type(value)
    constraints = value.__constraints__ if kind is typing.TypeVar else ()
    names = () if kind is typing.TypeVarTuple else ("bound", "covariant", "contravariant")
    options = {name: getattr(value, f"__{name}__") for name in names}
    identity = _cloudpickle._get_or_create_tracker_id(value)
    return make_tracked_type, (
        kind,
        (value.__name__, *constraints),
        options,
        {"__module__": value.__module__},
        identity,
    )


def _reduce_new_type(value: Any) -> Any:
    attributes, identity = _attributes_except(value, "__supertype__"), _cloudpickle._get_or_create_tracker_id(value)
    return make_tracked_type, (typing.NewType, (value.__name__, value.__supertype__), {}, attributes, identity)


def make_tracked_type(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], attributes: dict[str, Any], identity: str
) -> Any:
    made = kind(*arguments, **options)
    for name, value in attributes.items():
        with contextlib.suppress(AttributeError):
            setattr(made, name, value)
    return _cloudpickle._lookup_class_or_track(identity, made)


_MAX_SENTINELS = 10_000
_sentinels: dict[str, object] = {}
_sentinel_ids: dict[int, str] = {}


def _reduce_sentinel(value: object) -> Any:
    identity = _sentinel_ids.get(id(value))
    if identity is None:
        if len(_sentinels) >= _MAX_SENTINELS:  # with so many objects, they are surely not sentinels
            return None
        identity = uuid.uuid4().hex
        _sentinels[identity] = value
        _sentinel_ids[id(value)] = identity
    return get_sentinel, (identity,)


def get_sentinel(identity: str) -> object:
    if len(_sentinels) >= _MAX_SENTINELS:
        return _sentinels.get(identity) or object()
    value = _sentinels.setdefault(identity, object())
    _sentinel_ids[id(value)] = identity
    return value


REDUCERS: dict[Any, Callable[[Any], Any]] = {
    LRU_CACHE_TYPE: _reduce_lru_cache,
    functools.cached_property: lambda value: (type(value), (value.func,), _attributes_except(value, "func", "lock")),
    types.CellType: _reduce_cell,
    typing.TypeVar: _reduce_type_variable,
    typing.ParamSpec: _reduce_type_variable,
    typing.TypeVarTuple: _reduce_type_variable,
    typing.NewType: _reduce_new_type,
    weakref.WeakKeyDictionary: lambda value: (type(value), (dict(value),)),
    weakref.WeakValueDictionary: lambda value: (type(value), (dict(value),)),
    object: _reduce_sentinel,
}


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles the user's own code by value.

    Classes of the modules `by_name` are pickled by name. With `prefers_names`, all importable code is pickled by name.
    """

    def __init__(
        self, *args: Any, by_name: frozenset[str] = frozenset(), prefers_names: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.functions: list[types.FunctionType] = []
        self.modules_by_name: set[str] = set()
        """Names of modules whose code was pickled by name (only with `prefers_names`)."""
        self.modules: list[types.ModuleType] = []
        self._by_name = by_name
        self._prefers_names = prefers_names

    def share_module_globals(self, modules: list[types.ModuleType]) -> None:
        self.globals_ref.update((id(vars(module)), _ModuleGlobals(module)) for module in modules)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            return self._reduce_function(obj)
        if isinstance(obj, type):
            return self._reduce_class_by_module(obj)
        if isinstance(obj, types.ModuleType):
            if self._is_module_pickled_by_value(obj.__name__):
                state = {name: part for name, part in vars(obj).items() if name not in _MODULE_ATTRIBUTES_TO_SKIP}
                self.modules.append(obj)
                return _cloudpickle.dynamic_subimport, (obj.__name__, {}), state, None, None, _fill_module
        elif isinstance(obj, SourceLines):
            return register_source_files, (collect_source_lines(function.__code__ for function in self.functions),)
        elif isinstance(obj, _POSSIBLE_HANDLE_TYPES):
            if stream := _stream_name(obj):
                return getattr, (sys, stream)
            if is_open_handle(obj):
                raise _describe_open_handle(obj)
        else:
            kind = type(obj)
            if hasattr(kind, "__del__") and not is_installed(kind.__module__):
                warn_about_finalizer(kind.__qualname__)
            reduce = REDUCERS.get(kind)
            if reduce is not None and not self._is_importable_by_name(obj) and (reduced := reduce(obj)) is not None:
                return reduced
        return super().reducer_override(obj)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if is_singledispatch_function(function) and not self._is_importable_by_name(function):
            return reduce_singledispatch(function)
        if not is_installed(function.__module__ or ""):
            self.functions.append(function)
        if self._is_module_pickled_by_value(function.__module__):
            return self._dynamic_function_reduce(function)
        return super().reducer_override(function)

    def _reduce_class_by_module(self, kind: type) -> Any:
        if self._is_module_pickled_by_value(kind.__module__):
            home, name = kind.__module__, kind.__qualname__
            if (home not in self._by_name and not is_imported_from_sent_source(home)) or find_by_qualified_name(
                home, name
            ) is not kind:
                return reduce_class(kind)
            own = () if isinstance(kind, enum.EnumMeta) else vars(kind).items()
            simple = {name: part for name, part in own if not name.startswith("__") and is_small_builtin(part, 1)}
            return class_by_name, (home, name, simple)
        reduced = super().reducer_override(kind)
        is_dynamic = reduced is not NotImplemented and reduced[-1] is _cloudpickle._class_setstate
        return reduce_class(kind) if is_dynamic else reduced

    def _is_module_pickled_by_value(self, home: Any) -> bool:
        if not isinstance(home, str) or home == "__main__" or home not in sys.modules or is_installed(home):
            return False
        if self._prefers_names:
            self.modules_by_name.add(home)
        return not self._prefers_names

    def _is_importable_by_name(self, obj: Any) -> bool:
        home = getattr(obj, "__module__", None)
        name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
        if not isinstance(home, str) or not isinstance(name, str) or home == "__main__":
            return False
        return not self._is_module_pickled_by_value(home) and find_by_qualified_name(home, name) is obj

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        make, arguments, (attributes, state), *rest = super()._dynamic_function_reduce(func)
        known = func.__globals__
        for name in names_in_class_bodies(func.__code__):
            if name in known:
                state["__globals__"].setdefault(name, known[name])
        return make, (*arguments[:-1], func.__closure__), (attributes, state), *rest


class _ModuleGlobals:
    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self.module,)


def _fill_module(module: types.ModuleType, values: dict[str, Any]) -> None:
    vars(module).update(values)


_MODULE_ATTRIBUTES_TO_SKIP = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__"})

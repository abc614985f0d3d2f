"""cloudpickle, with what is the user's own by value: functions, classes, modules, and what `reducers` knows."""

from __future__ import annotations

import sys
import types
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _inside

from stoker.contexts.bytecode import names_in_class_bodies
from stoker.contexts.carried_modules import has_travelled
from stoker.contexts.classes_by_name import class_by_name, is_found_by_name, simple_attributes
from stoker.contexts.open_handles import SUSPECTS, reduce_handle, tell_of_finalizer
from stoker.contexts.reducers import REDUCERS, class_reduction, is_dispatcher, reduce_dispatcher
from stoker.contexts.source_lines import SourceLines, know, lines_of
from stoker.contexts.user_code import is_installed

NONE: frozenset[str] = frozenset()


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles what is the user's own by value, and its source lines where a `SourceLines` asks for them.

    `by_name`: modules whose classes go by name. With `prefers_names` all goes by name that its module has.
    """

    def __init__(self, *args: Any, by_name: frozenset[str] = NONE, prefers_names: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: list[types.FunctionType] = []
        """The user's own that were pickled."""
        self.named: set[str] = set()
        """The user's own modules that something was pickled by name of, with `prefers_names`."""
        self.modules: list[types.ModuleType] = []
        """The user's own modules that were pickled."""
        self._by_name = by_name
        self._prefers_names = prefers_names

    def join_functions_to(self, modules: list[types.ModuleType]) -> None:
        """Give the functions of these modules, which are in the value, the modules' own globals when they are rebuilt.

        Otherwise each would have a copy: what a function sets as a global, its module would not show.
        """
        self.globals_ref.update((id(vars(module)), _Globals(module)) for module in modules)

    def reducer_override(self, obj: Any) -> Any:
        """What to rebuild an object from; NotImplemented for what plain pickle does well."""
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, types.ModuleType):
            if self._by_value(obj.__name__):
                state = {name: part for name, part in vars(obj).items() if name not in _MODULE_MACHINERY}
                self.modules.append(obj)
                return _inside.dynamic_subimport, (obj.__name__, {}), state, None, None, _fill
        elif isinstance(obj, SourceLines):
            return know, (lines_of(function.__code__ for function in self.functions),)
        elif isinstance(obj, SUSPECTS):
            reduced = reduce_handle(obj)
            if reduced is not NotImplemented:
                return reduced
        else:
            kind = type(obj)
            if hasattr(kind, "__del__") and not is_installed(kind.__module__):
                tell_of_finalizer(kind)
            reduce = REDUCERS.get(kind)
            if reduce is not None and not self._is_found(obj) and (reduced := reduce(obj)) is not None:
                return reduced
        return super().reducer_override(obj)

    def _function(self, function: types.FunctionType) -> Any:
        if is_dispatcher(function) and not self._is_found(function):
            return reduce_dispatcher(function)
        if not is_installed(function.__module__ or ""):
            self.functions.append(function)
        if self._by_value(function.__module__):
            return self._dynamic_function_reduce(function)
        return super().reducer_override(function)

    def _class(self, kind: type) -> Any:
        if self._by_value(kind.__module__):
            if (kind.__module__ in self._by_name or has_travelled(kind.__module__)) and is_found_by_name(kind):
                return class_by_name, (kind.__module__, kind.__qualname__, simple_attributes(kind))
            return class_reduction(kind)
        reduced = super().reducer_override(kind)
        return class_reduction(kind) if reduced is not NotImplemented and reduced[-1] is _FILLS_A_CLASS else reduced

    def _by_value(self, home: Any) -> bool:
        """True for a module of the user's own from which things go by value."""
        if not isinstance(home, str) or home == "__main__" or home not in sys.modules or is_installed(home):
            return False
        if self._prefers_names:
            self.named.add(home)
        return not self._prefers_names

    def _is_found(self, obj: Any) -> bool:
        """True for what goes by name, and what its module has under its name."""
        home, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        name = name or getattr(obj, "__name__", None)
        if not isinstance(home, str) or not isinstance(name, str) or home == "__main__" or self._by_value(home):
            return False
        found: Any = sys.modules.get(home)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is obj

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """cloudpickle's, with the variables that functions share, and the globals that bodies of classes in it use."""
        make, arguments, (attributes, state), *rest = super()._dynamic_function_reduce(func)
        known = func.__globals__
        for name in names_in_class_bodies(func.__code__):
            if name in known:
                state["__globals__"].setdefault(name, known[name])
        return make, (*arguments[:-1], func.__closure__), (attributes, state), *rest


class _Globals:
    """Stands in a pickle for the globals of a module."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self.module,)


def _fill(module: types.ModuleType, values: dict[str, Any]) -> None:
    vars(module).update(values)


_FILLS_A_CLASS = _inside._class_setstate
_MODULE_MACHINERY = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__"})

"""Values of a library, rebuilt in a process whose classes stay as they are.

A class that travels by value takes its attributes along. In a library this is wanted: a program that sets `Config.lr`
between two calls sets it there too. In the program it is not: a result that holds a `Config` would set `Config.lr` back
to what it was when the call began, and replace each method by a copy with globals of its own.

cloudpickle finds a class again by its own id for it, and then sets its attributes (`_class_setstate`). Here such a
class stays as it is, and so does a class that is found by name. A new class counts as found once its attributes are
set, not before: another thread may need it at that moment, and the thread that made it may fail half-way.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from cloudpickle import cloudpickle as _inside

from stoker.contexts.classes_by_name import class_by_name

_NAMES_A_CLASS = re.compile(rb"class_(?:setstate|by_name)")
_unfilled: weakref.WeakSet[type] = weakref.WeakSet()
"""The classes that were made here, and whose attributes are not set yet."""
_filling = threading.RLock()
"""Held while attributes are set, never while a value is rebuilt."""


def loads_keeping_classes(data: bytes | bytearray | memoryview, *, buffers: Iterable[Any] | None = None) -> Any:
    """The value of a pickle. Classes that are in this process already keep their attributes."""
    if _NAMES_A_CLASS.search(data) is None:  # it brings no class
        return pickle.loads(data, buffers=buffers)
    return _ClassUnpickler(io.BytesIO(data), buffers=buffers).load()


class _ClassUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        instead = _INSTEAD.get((module.partition(".")[0], name))
        return instead if instead is not None else super().find_class(module, name)


def _class(*parts: Any) -> Any:
    """A class without its attributes. `parts` are those of cloudpickle: the last but one is the id of the class."""
    return _found_or_made(parts[-2], _inside._make_skeleton_class, parts)


def _enumeration(*parts: Any) -> Any:
    return _found_or_made(parts[-2], _inside._make_skeleton_enum, parts)


def _found_or_made(identity: str | None, make: Callable[..., Any], parts: tuple[Any, ...]) -> Any:
    """The class that has this id here, or a new one. Its bases hear of a new one alone (`__init_subclass__`)."""
    if identity is None:
        found = None
    else:
        with _inside._DYNAMIC_CLASS_TRACKER_LOCK:
            found = _inside._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if found is not None:
        return found
    made = make(*parts[:-2], None, parts[-1])
    _unfilled.add(made)  # before other threads can find it
    return _inside._lookup_class_or_track(identity, made)


def _set_attributes(kind: Any, state: Any) -> Any:
    with _filling:
        if kind in _unfilled:
            _inside._class_setstate(kind, state)
            _unfilled.discard(kind)
    return kind


def _named(module: str, name: str, _attributes: dict[str, Any]) -> Any:
    return class_by_name(module, name, {})


_INSTEAD: dict[tuple[str, str], Callable[..., Any]] = {
    ("cloudpickle", "_make_skeleton_class"): _class,
    ("cloudpickle", "_make_skeleton_enum"): _enumeration,
    ("cloudpickle", "_class_setstate"): _set_attributes,
    ("stoker", "class_by_name"): _named,
}

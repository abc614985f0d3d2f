"""A core as bytes and back: the pickles of a session's own snapshots, which load nothing but nouns and messages.

The state is a graph with cycles and shared identity. Its nouns (plain objects, and Structs that change) are written one
after the other, each as the values of its fields, in which other nouns are references: so the depth of a pickle does
not grow with the graph. Dicts keep their order. A set may come back in another order: no decision may rest on one,
since a replay in another process orders sets of strings otherwise as well.

Only classes of the core, of policies (a user's own included), messages and a few containers are written or loaded; no
function is. What else a policy holds cannot be saved: `Unsaveable`.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, BinaryIO

import msgspec

from stoker.errors import StokerError

_PACKAGES = ("stoker.manager.core.", "stoker.manager.policies", "stoker.protocol.", "stoker.pilot.core")
_MODULES = frozenset(
    {
        "stoker.contexts.inference.adapter", "stoker.contexts.recipe", "stoker.contexts.step_times",
        "stoker.chance",
    }
)  # fmt: skip
_CONTAINERS = frozenset({OrderedDict, deque, defaultdict, Counter, set, frozenset, bytearray, complex, range})
_LOADED = {(each.__module__, each.__qualname__): each for each in _CONTAINERS}
_ABSENT = "stoker: this field was never set"
_AT_ONCE = 500
"""So many nouns are written with one `dump`."""

Layout = dict[str, list[str]]
"""The fields of each class, in the order in which they are written; "*" stands for those that it has besides."""


class Unsaveable(StokerError):
    """The state holds something that a snapshot cannot keep."""


class Unreadable(StokerError):
    """A snapshot is damaged, or holds what this version of Stoker does not know."""


def dump(root: object, file: BinaryIO, *, modules: Iterable[str] = ()) -> Layout:
    """Write everything that hangs on an object. `modules`: those of a user's own policies. Raises Unsaveable,
    OSError."""
    pickler = _Pickler(file, _Allowed(modules))
    try:
        pickler.dump(root)
        written = 0
        while written < len(pickler.nouns):
            some = pickler.nouns[written : written + _AT_ONCE]
            written += len(some)
            pickler.dump([pickler.state_of(each) for each in some])
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise Unsaveable(f"it cannot be written: {error}") from error
    return pickler.layout


def load(data: bytes | memoryview, layout: Layout, *, modules: Iterable[str] = ()) -> Any:
    """What `dump` wrote. Raises Unreadable."""
    loader = _NounUnpickler(io.BytesIO(data), _Allowed(modules))
    try:
        loader.compare(layout)
        root = loader.load()
        filled = 0
        while filled < len(loader.nouns):
            states = loader.load()
            for noun, state in zip(loader.nouns[filled : filled + len(states)], states, strict=True):
                loader.fill(noun, state)
            filled += len(states)
    except Unreadable:
        raise
    except Exception as error:  # a pickle of another version may fail in any way
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    return root


class _Allowed:
    """Which classes may be written and loaded."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = _MODULES | frozenset(modules)

    def __call__(self, module: str) -> bool:
        return module in self.modules or module.startswith(_PACKAGES)


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, allowed: _Allowed) -> None:
        super().__init__(file, protocol=5)
        self._allowed = allowed
        self.nouns: list[object] = []
        self.layout: Layout = {}
        self._kinds: dict[type, bool] = {}
        """Whether instances of a class are nouns."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        noun = self._kinds.get(kind)
        if noun is None:
            noun = self._kind(kind, obj)
        if not noun:
            return NotImplemented
        self.nouns.append(obj)
        return new_noun, (kind,)

    def _kind(self, kind: type, obj: object) -> bool:
        if obj is new_noun or kind in _CONTAINERS:
            return False
        if issubclass(kind, type):
            if not self._allowed(obj.__module__) and obj not in _CONTAINERS:
                raise Unsaveable(f"it holds the class {obj.__module__}.{getattr(obj, '__qualname__', obj)}")
            return False
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not self._allowed(kind.__module__) or "<locals>" in name:
            raise Unsaveable(f"it holds {name}: {obj!r:.80}")
        noun = not issubclass(kind, enum.Enum) and not _is_value(kind)
        if noun and not issubclass(kind, msgspec.Struct) and kind.__eq__ is not object.__eq__:
            raise Unsaveable(f"it holds {name}, which compares by value and may change")
        if not issubclass(kind, enum.Enum):
            self.layout[_name(kind)] = fields_of(kind)
        self._kinds[kind] = noun
        return noun

    def state_of(self, noun: object) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
        names = [name for name in self.layout[_name(type(noun))] if name != "*"]
        return tuple([getattr(noun, name, _ABSENT) for name in names]), getattr(noun, "__dict__", None)


class _NounUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: _Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed
        self.nouns: list[Any] = []
        self._fields: dict[type, list[str]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (new_noun.__module__, new_noun.__qualname__):
            return self._new_noun
        if container := _LOADED.get((module, name)):
            return container
        if self._allowed(module):
            found = _class(module, name)
            if found is not None:
                return found
        raise Unreadable(f"{module}.{name} is nothing that a snapshot may hold")

    def compare(self, layout: Layout) -> None:
        """Raise Unreadable where a class has other fields now."""
        for name, fields in layout.items():
            module, _, inner = name.partition(":")
            found = _class(module, inner) if self._allowed(module) else None
            if found is None:
                raise Unreadable(f"there is no class {inner} in {module}")
            if fields_of(found) != fields:
                raise Unreadable(f"{inner} has other fields now")

    def _new_noun(self, kind: type) -> Any:
        if issubclass(kind, msgspec.Struct):
            noun: Any = kind(**dict.fromkeys(kind.__struct_fields__))
        else:
            noun = kind.__new__(kind)
        self.nouns.append(noun)
        return noun

    def fill(self, noun: Any, state: tuple[tuple[Any, ...], dict[str, Any] | None]) -> None:
        kind = type(noun)
        names = self._fields.get(kind)
        if names is None:
            names = self._fields[kind] = [name for name in fields_of(kind) if name != "*"]
        values, more = state
        put = setattr if isinstance(noun, msgspec.Struct) else object.__setattr__
        for name, value in zip(names, values, strict=True):
            if type(value) is not str or value != _ABSENT:
                put(noun, name, value)
        if more is not None:
            noun.__dict__.update(more)


def new_noun(kind: type) -> object:
    """Stands in a pickle for "a new object of this class"; the reader puts its own in its place."""
    raise Unreadable(f"a {kind} outside of a snapshot")


def fields_of(kind: type) -> list[str]:
    """What of an instance is written, by name."""
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    slots: list[str] = []
    bare = True
    for each in reversed(kind.__mro__[:-1]):
        own = each.__dict__.get("__slots__")
        if own is None:
            bare = False
        slots += [own] if isinstance(own, str) else own or ()
    return [name for name in slots if name not in ("__weakref__", "__dict__")] + ([] if bare else ["*"])


def _is_value(kind: type) -> bool:
    """Whether instances never change: frozen Structs, and tuples with names."""
    return issubclass(kind, tuple) or (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    if found is None and module.startswith("stoker."):
        __import__(module)
        found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and found.__module__ == module else None

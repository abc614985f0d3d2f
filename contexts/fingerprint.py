"""The content of a captured value at one time, so that a change in place is seen later.

A walk over the value writes a flat list of tokens: atoms as they are, containers as their elements, instances as their
attributes, user classes as their members, arrays as `array_facts` reads them. What has no content that the walk
understands (functions, installed classes, recipes, locks) counts by identity; the first walk tells which of these it
met, since a function rests on values of its own (`captured`). Two walks that write the same tokens met the same
content. The walk goes breadth first, meets each object once, so cycles end, and ends after a bounded number of
values: a change beyond it is not seen.

No code of the user's runs: no property, `__getattr__`, `__eq__`, `__hash__`, nor a metaclass's. Tokens are exact
builtin atoms alone, and nothing of the value is held strongly except what Python cannot hold weakly.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from stoker.contexts.array_facts import Meter
from stoker.contexts.own_attributes import Layout, bases_of, globals_of, is_users_class, members_of, slot
from stoker.contexts.walk_plans import ATOMS, ReadingWay, counts_by_identity, owner_of, plan_of

MOST_VALUES = 1024
"""A walk visits this many values at most. One container may take half of the rest, which leaves some for the next."""

_PART = object()
_METHODS = frozenset(map(id, (types.FunctionType, staticmethod, classmethod, property, functools.partialmethod)))
_SEQUENCES = (list, tuple, set, frozenset, deque)
_DICT_VIEWS: tuple[type, ...] = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_arguments_of: Callable[[Any], tuple[Any, ...]] = vars(BaseException)["args"].__get__


class Fingerprint:
    """What a value held when this was made.

    The looks of one function at all its values share a meter, and take them in the same order each time. `met` gets
    what is found in the value that counts by identity.
    """

    __slots__ = ("_pins", "_strong", "_tokens")

    def __init__(self, value: Any, *, meter: Meter | None = None, met: list[Any] | None = None) -> None:
        walk = _FingerprintWalk(meter or Meter(), met)
        self._tokens = walk.over(value)
        self._pins: list[weakref.ref[Any]] = []
        self._strong: list[Any] = []
        for one in walk.identified:
            try:
                self._pins.append(weakref.ref(one))
            except TypeError:
                self._strong.append(one)

    def matches(self, value: Any, meter: Meter | None = None) -> bool:
        """True if the value holds the same now. An object that is gone matches nothing: its id may be used again."""
        if _FingerprintWalk(meter or Meter(), None).over(value) != self._tokens:
            return False
        for pin in self._pins:  # noqa: SIM110  # a generator costs more than the rest
            if pin() is None:
                return False
        return True


class _FingerprintWalk:
    """One walk. `identified` are the objects whose id is among the tokens."""

    def __init__(self, meter: Meter, met: list[Any] | None) -> None:
        self.identified: list[Any] = []
        self._tokens: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._queue: list[Any] = []
        self._left = min(MOST_VALUES, meter.values)
        self._meter = meter
        self._met = met

    def over(self, value: Any) -> list[Any]:
        """The tokens of a value."""
        left = self._left
        self._put(value)
        for one in self._queue:  # it grows meanwhile
            length = len(self._tokens)
            try:
                self._visit(one)
            except Exception:  # whatever an odd object raises: then it counts by identity
                del self._tokens[length:]
                self._identify(one)
        self._meter.values -= left - self._left
        return self._tokens

    def _put(self, value: Any) -> None:
        """Write an atom; write the number of anything else, to be visited later if it is new."""
        kind = type(value)
        if id(kind) in ATOMS:
            self._tokens += (kind, value if value or kind is not float else str(value))  # -0.0 is not 0.0
            return
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._queue.append(value)
        self._tokens += (_PART, number)

    def _identify(self, value: Any) -> None:
        self._tokens.append(id(value))
        self.identified.append(value)

    def _meet(self, value: Any) -> None:
        if self._met is not None:
            self._met.append(value)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        self._tokens.append(id(kind))
        if kind is dict:
            self._pairs(value, dict.items(value), len(value))
            return
        if kind is list or kind is tuple or kind is set or kind is frozenset:
            self._elements(value, value, len(value))
            return
        plan = plan_of(kind)
        self.identified.append(kind)
        if plan.users_class:
            self._put(kind)
        way = plan.way
        if way is ReadingWay.READER and plan.reader is not None:
            facts, parts = plan.reader(value, self._meter)
            self._tokens += facts
            self._elements(value, parts, len(parts))
            self._attributes(value, plan.layout)
        elif way is ReadingWay.TORCH_MODULE and plan.layout.dictionary is not None:
            self._torch_module(value, plan.layout.dictionary(value))
        elif way is ReadingWay.OBJECT:
            self._object(value, kind, plan.layout)
        elif way is ReadingWay.FUNCTION:
            self._identify(value)
            self._identify(value.__code__)
            self._meet(value)
        elif counts_by_identity(value):
            self._identify(value)
            self._meet(value)
        elif way is ReadingWay.CLASS:
            self._class(value)
        elif way is ReadingWay.BUILTIN:
            self._tokens.append(value.__name__)
            self._put(owner_of(value))
        else:
            self._identify(value)
            names = dict.items(globals_of(value))
            self._named(value, [(name, part) for name, part in names if not _is_dunder(name)])

    # ---- containers

    def _share(self, owner: Any, size: int, *, each: int = 1) -> int:
        """How many elements of a container are visited. One that is cut counts by its identity too."""
        share = self._left // (2 * each)
        self._tokens.append(size)
        if share < size:
            self._identify(owner)
        else:
            share = size
        self._left -= share * each
        return share

    def _elements(self, owner: Any, values: Iterable[Any], size: int) -> None:
        for value in itertools.islice(values, self._share(owner, size)):
            self._put(value)

    def _pairs(self, owner: Any, pairs: Iterable[tuple[Any, Any]], size: int) -> None:
        for key, value in itertools.islice(pairs, self._share(owner, size, each=2)):
            self._put(key)
            self._put(value)

    def _named(self, owner: Any, names: list[tuple[str, Any]]) -> None:
        """The attributes of an instance or a module, or the members of a class."""
        tokens, put = self._tokens, self._put
        for name, value in names[: self._share(owner, len(names))]:
            if type(name) is str:
                tokens.append(name)
            put(value)

    # ---- classes and instances

    def _class(self, kind: type) -> None:
        if is_users_class(type(kind)):
            self._put(type(kind))  # its metaclass
        for base in bases_of(kind):
            self._identify(base)
            if is_users_class(base):
                members = members_of(base).items()
                self._named(base, [(name, part) for name, part in members if not _is_machinery(name, part)])

    def _torch_module(self, value: Any, attributes: dict[str, Any]) -> None:
        """A network or a layer: its parameters, buffers, layers and settings, without the empty tables of its hooks."""
        self._identify(value)
        self._named(value, [(name, part) for name, part in dict.items(attributes) if not _is_empty_table(part)])

    def _object(self, value: Any, kind: type, layout: Layout) -> None:
        before = len(self._tokens)
        walked = self._builtin_part(value, kind)
        self._attributes(value, layout)
        if len(self._tokens) == before or _takes_weak_references(value):  # a hidden state shows in its identity
            self._identify(value)
        elif layout.has_hidden_state and not walked:
            self._tokens.append(id(value))
            if not gc.is_tracked(value):  # one that refers to others is not kept alive: an exception holds its frames
                self.identified.append(value)

    def _attributes(self, value: Any, layout: Layout) -> None:
        if layout.dictionary is not None:
            self._named(value, list(dict.items(layout.dictionary(value))))
        if layout.slots:
            self._named(value, [(name, slot(read, value)) for name, read in layout.slots])

    def _builtin_part(self, value: Any, kind: type) -> bool:
        """The elements of a deque, of a view of a dict, and of instances of a container's subclass.

        False where hidden state may remain: for an exception, whose arguments are written, and for any other kind.
        """
        if issubclass(kind, dict):
            self._pairs(value, dict.items(value), dict.__len__(value))
            if issubclass(kind, OrderedDict) and all(id(type(key)) in ATOMS for key in dict.keys(value)):
                for key in itertools.islice(OrderedDict.keys(value), MOST_VALUES):
                    self._put(key)
            return True
        if kind is types.MappingProxyType or issubclass(kind, _DICT_VIEWS):
            self._elements(value, gc.get_referents(value), 1)  # the mapping, of which no method is called
            return True
        for base in _SEQUENCES:
            if issubclass(kind, base):
                self._elements(value, base.__iter__(value), base.__len__(value))
                return True
        if issubclass(kind, BaseException):
            arguments = _arguments_of(value)
            self._elements(value, arguments, len(arguments))
        return False


def _takes_weak_references(value: Any) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return False
    return True


def _is_dunder(name: str) -> bool:
    return name[:2] == "__" == name[-2:]


def _is_machinery(name: str, part: Any) -> bool:
    """True for what Python and its decorators keep in a class; operators and `__new__` are methods, and count."""
    return name[:2] == "__" == name[-2:] and id(type(part)) not in _METHODS and not is_users_class(type(part))


def _is_empty_table(part: Any) -> bool:
    kind = type(part)
    return part is None or ((kind is OrderedDict or kind is dict or kind is set) and not part)

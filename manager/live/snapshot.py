"""Snapshots of the manager's core. With a snapshot, a manager restarts without all events of the session.

A snapshot file has two parts: facts that any version of Stoker can read (unconfirmed results, and the fields of each
class), and the pickled core. A manager loads the core only if its own classes have the same fields. Otherwise the
manager uses the results, and peers report their state.

The core's state is a graph with cycles and shared objects. Plain objects and mutable Structs (*nouns*) are written as
lists of field values, with references in place of other nouns. So the depth of a pickle does not grow with the graph.
Only classes of the core, policies, messages and a few containers are written or loaded.
"""

from __future__ import annotations

import enum
import importlib
import io
import pickle
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import StokerError
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live.records import SegmentHead
from stoker.protocol.calls import CallEnd
from stoker.whole_files import draft_file

_PACKAGES = ("stoker.manager.core.", "stoker.manager.policies", "stoker.protocol.", "stoker.pilot.core")
_MODULES = frozenset(
    {
        "stoker.contexts.folders", "stoker.contexts.inference.adapter", "stoker.contexts.recipe",
        "stoker.contexts.step_times", "stoker.chance",
    }
)  # fmt: skip
_CONTAINERS = frozenset({OrderedDict, deque, defaultdict, Counter, set, frozenset, bytearray, complex, range})
_LOADABLE_CONTAINERS = {(each.__module__, each.__qualname__): each for each in _CONTAINERS}
_UNSET = "stoker: this field was never set"
_NOUNS_PER_PICKLE = 500

FieldLayout = dict[str, list[str]]
"""The fields of each class, in their order. "*" means `__dict__`."""

# ---- pickles


class UnsaveableStateError(StokerError):
    """The state contains an object that a snapshot cannot store."""


class UnreadableSnapshotError(StokerError):
    """A snapshot is damaged, or of another version."""


def write_object_graph(root: object, file: BinaryIO, *, modules: Iterable[str] = ()) -> FieldLayout:
    """Write an object graph. `modules`: modules of custom policies. Raises UnsaveableStateError, OSError."""
    pickler = _GraphPickler(file, modules)
    try:
        pickler.dump(root)
        written = 0
        while written < len(pickler.nouns):
            some = pickler.nouns[written : written + _NOUNS_PER_PICKLE]
            written += len(some)
            pickler.dump([pickler.field_values(each) for each in some])
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UnsaveableStateError(f"the state cannot be written: {error}") from error
    return pickler.layout


def read_object_graph(data: bytes | memoryview, layout: FieldLayout, *, modules: Iterable[str] = ()) -> Any:
    loader = _NounUnpickler(io.BytesIO(data), modules)
    try:
        loader.check_layout(layout)
        root = loader.load()
        filled = 0
        while filled < len(loader.nouns):
            states = loader.load()
            for noun, state in zip(loader.nouns[filled : filled + len(states)], states, strict=True):
                loader.set_fields(noun, state)
            filled += len(states)
    except UnreadableSnapshotError:
        raise
    except Exception as error:  # a pickle from another version may fail in any way
        raise UnreadableSnapshotError(f"{type(error).__name__}: {error}") from error
    return root


class _GraphPickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, modules: Iterable[str]) -> None:
        super().__init__(file, protocol=5)
        self._modules = _MODULES | frozenset(modules)
        self.nouns: list[object] = []
        self.layout: FieldLayout = {}
        self._kinds: dict[type, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        noun = self._kinds.get(kind)
        if noun is None:
            noun = self._is_noun_class(kind, obj)
        if not noun:
            return NotImplemented
        self.nouns.append(obj)
        return new_noun, (kind,)

    def _is_noun_class(self, kind: type, obj: object) -> bool:
        if obj is new_noun or kind in _CONTAINERS:
            return False
        if issubclass(kind, type):
            if not _is_module_allowed(obj.__module__, self._modules) and obj not in _CONTAINERS:
                raise UnsaveableStateError(
                    f"a snapshot cannot store the class {obj.__module__}.{getattr(obj, '__qualname__', obj)}"
                )
            return False
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not _is_module_allowed(kind.__module__, self._modules) or "<locals>" in name:
            raise UnsaveableStateError(f"a snapshot cannot store objects of {name}: {obj!r:.80}")
        is_enum, is_struct = issubclass(kind, enum.Enum), issubclass(kind, msgspec.Struct)
        is_value = issubclass(kind, tuple) or (is_struct and kind.__struct_config__.frozen)  # type: ignore[attr-defined]
        noun = not is_enum and not is_value
        if noun and not is_struct and kind.__eq__ is not object.__eq__:
            raise UnsaveableStateError(f"a snapshot cannot store {name}, because it is mutable and compares by value")
        if not is_enum:
            self.layout[_class_name(kind)] = list_fields(kind)
        self._kinds[kind] = noun
        return noun

    def field_values(self, noun: object) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
        names = [name for name in self.layout[_class_name(type(noun))] if name != "*"]
        return tuple([getattr(noun, name, _UNSET) for name in names]), getattr(noun, "__dict__", None)


class _NounUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, modules: Iterable[str]) -> None:
        super().__init__(file)
        self._modules = _MODULES | frozenset(modules)
        self.nouns: list[Any] = []
        self._fields: dict[type, list[str]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (new_noun.__module__, new_noun.__qualname__):
            return self._create_empty_object
        return _LOADABLE_CONTAINERS.get((module, name)) or self._find_class(module, name)

    def check_layout(self, layout: FieldLayout) -> None:
        for name, fields in layout.items():
            module, _, inner = name.partition(":")
            if list_fields(self._find_class(module, inner)) != fields:
                raise UnreadableSnapshotError(f"the fields of {inner} have changed")

    def _find_class(self, module: str, name: str) -> type:
        found: Any = None
        if _is_module_allowed(module, self._modules):
            found = sys.modules.get(module)
            if found is None and module.startswith("stoker."):
                found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part, None)
        if not isinstance(found, type) or found.__module__ != module:
            raise UnreadableSnapshotError(f"there is no class {name} in {module}, or it is not allowed in a snapshot")
        return found

    def _create_empty_object(self, kind: type) -> Any:
        if issubclass(kind, msgspec.Struct):
            noun: Any = kind(**dict.fromkeys(kind.__struct_fields__))
        else:
            noun = kind.__new__(kind)
        self.nouns.append(noun)
        return noun

    def set_fields(self, noun: Any, state: tuple[tuple[Any, ...], dict[str, Any] | None]) -> None:
        kind = type(noun)
        names = self._fields.get(kind)
        if names is None:
            names = self._fields[kind] = [name for name in list_fields(kind) if name != "*"]
        values, more = state
        put = setattr if isinstance(noun, msgspec.Struct) else object.__setattr__
        for name, value in zip(names, values, strict=True):
            if type(value) is not str or value != _UNSET:
                put(noun, name, value)
        if more is not None:
            noun.__dict__.update(more)


def new_noun(kind: type) -> object:
    """Represent an empty object of this class in a pickle. Raises UnreadableSnapshotError if it is called."""
    raise UnreadableSnapshotError(f"{kind} can be created only from a snapshot")


def list_fields(kind: type) -> list[str]:
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


def _is_module_allowed(module: str, modules: frozenset[str]) -> bool:
    return module in modules or module.startswith(_PACKAGES)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def list_policy_modules(policies: Policies | None) -> frozenset[str]:
    if policies is None:
        return frozenset()
    own = {type(seam).__module__ for seam in (policies.dispatch, policies.residency, policies.provisioning)}
    packages = {name.partition(".")[0] for name in own} - {"stoker"}
    return frozenset(own | {name for name in list(sys.modules) if name.partition(".")[0] in packages})


# ---- files

_MAGIC = b"stoker snapshot 1\n"


class CoreSnapshot(msgspec.Struct, frozen=True):
    """`segment`: journal segment after the snapshot. `ends`: results that clients have not confirmed. `core`: pickle
    (empty: damaged)."""

    segment: SegmentHead
    ends: list[CallEnd]
    layout: FieldLayout
    core: bytes = b""


class _SnapshotFile(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot file after its first line. `facts`: encoded snapshot without the core. `sums`: CRC-32 of each part."""

    facts: bytes
    core: bytes
    sums: tuple[int, int]


def write_snapshot(path: Path, core: Core, segment: SegmentHead, *, modules: Iterable[str] = ()) -> int:
    """Write and sync a snapshot. Return the size in bytes. Raises UnsaveableStateError, OSError."""
    file = io.BytesIO()
    layout = write_object_graph(core, file, modules=modules)
    ends = [end for client in core.state.clients.values() if not client.observer for end in client.unacked]
    facts, body = msgspec.msgpack.encode(CoreSnapshot(segment, ends, layout)), file.getvalue()
    data = _MAGIC + msgspec.msgpack.encode(_SnapshotFile(facts, body, (zlib.crc32(facts), zlib.crc32(body))))
    with draft_file(path, draft=path.with_name(f"{path.name}.draft"), sync=True) as draft:
        draft.touch(mode=0o600)
        draft.write_bytes(data)
    return len(data)


def read_snapshot(path: Path) -> CoreSnapshot:
    """Read a snapshot, without its core if only that is damaged. Raises UnreadableSnapshotError for other damage."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableSnapshotError(f"{path}: {error.strerror}") from error
    if not data.startswith(_MAGIC):
        raise UnreadableSnapshotError(f"{path} is not a snapshot of this version")
    try:
        file = msgspec.msgpack.decode(memoryview(data)[len(_MAGIC) :], type=_SnapshotFile)
        if zlib.crc32(file.facts) != file.sums[0]:
            raise UnreadableSnapshotError(f"{path} is damaged")
        found = msgspec.msgpack.decode(file.facts, type=CoreSnapshot)
    except UNREADABLE as error:
        raise UnreadableSnapshotError(f"{path} is damaged, or of another version: {error}") from error
    return msgspec.structs.replace(found, core=file.core) if zlib.crc32(file.core) == file.sums[1] else found


def load_core(snapshot: CoreSnapshot, *, modules: Iterable[str] = ()) -> Core:
    if not snapshot.core:
        raise UnreadableSnapshotError("the core in the snapshot is damaged")
    core = read_object_graph(snapshot.core, snapshot.layout, modules=modules)
    if not isinstance(core, Core):
        raise UnreadableSnapshotError("the snapshot contains no core")
    return core

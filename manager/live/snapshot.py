"""A core as bytes and back: the pickles of a session's own snapshots, which load nothing but nouns and messages.

The state is a graph with cycles and shared identity. Its nouns (plain objects, and Structs that change) are written one
after the other, each as the values of its fields, in which other nouns are references: so the depth of a pickle does
not grow with the graph. Dicts keep their order. A set may come back in another order: no decision may rest on one,
since a replay in another process orders sets of strings otherwise as well.

Only classes of the core, of policies (a user's own included), messages and a few containers are written or loaded; no
function is. What else a policy holds cannot be saved: `Unsaveable`.

Snapshots of a core: what a manager comes back from, instead of all events since the session began.

A file has a line that says what it is, lengths and checksums, and three parts: a head (which Stoker wrote it, before
which segment of the journal it belongs, and the fields of every class in it), what is certain (see `CertainFacts`), and
the core itself (`pickled`). A manager reads the core only if it would write the same fields. Otherwise, as after an
upgrade, it does not guess: what is certain is in messages that every version reads, and the rest is asked of the peers.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import struct
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stoker.errors import StokerError
from stoker.manager.core.reactor import Core
from stoker.manager.core.state import State
from stoker.manager.live.records import SegmentHead
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import ClientId
from stoker.startup import RELEASE
from stoker.whole_files import draft_of

# ---- pickled


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


# ---- snapshot


_MAGIC = b"stoker snapshot 1\n"
_PARTS = struct.Struct("<QIQIQI")
"""Length and CRC-32 of the head, of what is certain, and of the core."""


class SnapshotHead(msgspec.Struct, frozen=True):
    """What a snapshot says of itself. `segment` is the one that follows; `at`: the time of the last event before it."""

    session: str
    stoker: str
    segment: SegmentHead
    at: float
    layout: Layout


class Unconfirmed(msgspec.Struct, frozen=True, array_like=True):
    """Ends of a client's calls that it has not confirmed. `first`: how many results it had confirmed before."""

    client: ClientId
    number: int
    first: int
    ends: list[CallEnd]


class CertainFacts(msgspec.Struct, frozen=True):
    """What holds whatever another version thinks of the rest."""

    clients: list[Unconfirmed] = []


class CoreSnapshot(msgspec.Struct, frozen=True):
    """A snapshot's parts. `core` is still bytes, with a checksum that fits or not: `restored` makes one of it."""

    head: SnapshotHead
    certain: CertainFacts
    core: bytes
    is_whole: bool


def certain_of(state: State) -> CertainFacts:
    """What is certain of a state."""
    return CertainFacts(
        [
            Unconfirmed(client.id, client.number, client.first_unacked, list(client.unacked))
            for client in state.clients.values()
            if not client.observer
        ]
    )


def write(path: Path, core: Core, segment: SegmentHead, *, modules: Iterable[str] = ()) -> int:
    """Write a snapshot to a draft, make it last, and give it its name. Returns its size in bytes.

    Raises Unsaveable (see `pickled`), OSError.
    """
    state = core.state
    with (
        draft_of(path, draft=path.with_name(f"{path.name}.draft")) as draft,
        os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file,
    ):
        file.write(_MAGIC)
        file.write(bytes(_PARTS.size))
        certain = msgspec.msgpack.encode(certain_of(state))
        file.write(certain)
        body = _Counted(file)
        layout = dump(core, body, modules=modules)  # type: ignore[arg-type]
        head = msgspec.msgpack.encode(SnapshotHead(state.session, RELEASE, segment, state.now, layout))
        file.write(head)
        size = file.tell()
        file.seek(len(_MAGIC))
        file.write(
            _PARTS.pack(len(head), zlib.crc32(head), len(certain), zlib.crc32(certain), body.length, body.checksum)
        )
        file.flush()
        os.fsync(file.fileno())
    return size


class _Counted:
    """A file that counts what is written, for a pickler."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        self.length += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def read(path: Path) -> CoreSnapshot:
    """A snapshot's parts. Raises Unreadable where the head is damaged, or what is certain."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    start = len(_MAGIC) + _PARTS.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise Unreadable(f"{path} is no snapshot of this version")
    head_size, head_crc, certain_size, certain_crc, size, crc = _PARTS.unpack_from(data, len(_MAGIC))
    certain = data[start : start + certain_size]
    core = data[start + certain_size : start + certain_size + size]
    head = data[start + certain_size + size : start + certain_size + size + head_size]
    if len(head) != head_size or zlib.crc32(head) != head_crc or zlib.crc32(certain) != certain_crc:
        raise Unreadable(f"{path} is damaged")
    try:
        return CoreSnapshot(
            msgspec.msgpack.decode(head, type=SnapshotHead),
            msgspec.msgpack.decode(certain, type=CertainFacts),
            core,
            is_whole=zlib.crc32(core) == crc,
        )
    except ValueError as error:
        raise Unreadable(f"{path} is of another version: {error}") from error


def restored(snapshot: CoreSnapshot, *, modules: Iterable[str] = ()) -> Core:
    """The core of a snapshot. Raises Unreadable."""
    if not snapshot.is_whole:
        raise Unreadable("the core in it is damaged")
    core = load(snapshot.core, snapshot.head.layout, modules=modules)
    if not isinstance(core, Core):
        raise Unreadable("the snapshot holds no core")
    return core

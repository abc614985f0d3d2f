"""The bytes of a function or a loader: a table of the modules that it imports, then the value.

    M, version, length of the table | the pickled table of modules | gap to 64 bytes | the value, as payloads.dumps

Without such modules it is the value alone. The table comes first, because the value is rebuilt with its modules.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping
from typing import Any

from stoker.contexts import payloads
from stoker.contexts.carried_modules import NO_MODULES, CarriedModules
from stoker.contexts.digest import digest_of_code
from stoker.contexts.payload_layout import Buffer
from stoker.contexts.user_modules import Table, modules_for, stamps_of
from stoker.errors import SerializationError

_HEAD = struct.Struct("<cBHI")  # magic, version, unused, length of the table
_ALIGN = 64
_NONE: frozenset[str] = frozenset()


def dumps_code(value: Any, *, what: str, by_name: frozenset[str] = _NONE, also: frozenset[str] = _NONE) -> bytes:
    """Return the bytes of a value with functions of the user's own in it. Classes of modules that travel with it go by
    name; so do classes of the modules `by_name`, which are there already. The modules `also` travel with it too. Raises
    SerializationError, naming `what`."""
    names = set[str]()
    parts = payloads.dump_parts(value, what=what, modules=names, by_name=by_name)
    names |= also
    table, stamps = modules_for(names, digest_of_code), stamps_of(names)
    if table:
        parts = payloads.dump_parts(value, what=what, by_name=by_name.union(table))
    return _joined(parts, table, stamps)


def dumps_arguments(value: Any, *, by_name: frozenset[str] = _NONE, brought: set[str] | None = None) -> bytes:
    """The bytes of a call's arguments, with the modules that methods and functions among them import when they run.

    The modules `by_name` have travelled with the function or with its context. This function adds
    to `brought` the names of the modules that it packs; the caller has the function bring them from then on. Raises
    SerializationError.
    """
    plain = payloads.plain_bytes(value)
    if plain is not None:
        return plain
    names = set[str]()
    parts = payloads.dump_parts(value, modules=names, by_name=by_name)
    names -= by_name
    table = modules_for(names, digest_of_code) if names else {}
    if table:
        parts = payloads.dump_parts(value, by_name=by_name.union(table))
        if brought is not None:
            brought.update(table)
    return _joined(parts, table, {})


def _joined(parts: list[Buffer], table: Table, stamps: Mapping[str, str]) -> bytes:
    if table or stamps:
        packed = pickle.dumps((table, stamps), 5)
        head = _HEAD.pack(b"M", 1, 0, len(packed)) + packed
        parts = [head, bytes(-len(head) % _ALIGN), *parts]
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


_names: dict[str, frozenset[str]] = {}
_MOST_NAMES = 1000


def names_carried(key: str, data: bytes) -> frozenset[str]:
    """Return the names of modules in `dumps_code`'s bytes. `key` identifies the bytes."""
    if data[:1] != b"M":
        return _NONE
    known = _names.get(key)
    if known is None:
        if len(_names) >= _MOST_NAMES:
            _names.clear()
        known = _names[key] = frozenset(_table(data))
    return known


def versions_carried(data: Buffer | str) -> Mapping[str, str]:
    """The versions of the modules that travel in these bytes, or in the file of this path, by name.

    It rebuilds no value. Empty where the bytes or the file are damaged: that comes out when the value is rebuilt.
    """
    try:
        head = _head_of_file(data) if isinstance(data, str) else data
        if head[:1] != b"M":
            return {}
        return {str(name): str(version) for name, (_, _, version, _) in _table(head).items()}
    except BaseException:  # bytes that are no table may be a pickle of anything
        return {}


def _table(data: Buffer) -> Table:
    length = _HEAD.unpack_from(data)[3]
    table: Table = pickle.loads(memoryview(data)[_HEAD.size : _HEAD.size + length])[0]
    return table


def _head_of_file(path: str) -> bytes:
    """Return the first bytes of a file, with the table if it has one."""
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        if head[:1] != b"M":
            return head
        most = os.fstat(file.fileno()).st_size
        return head + file.read(min(_HEAD.unpack(head)[3], most))


def loads_code(data: Buffer, *, under: CarriedModules = NO_MODULES) -> tuple[Any, CarriedModules]:
    """Return the value of `dumps_code`'s bytes, and its modules over those of `under`; they are entered. Raises
    SerializationError for other bytes, and whatever unpickling raises."""
    if data[:1] != b"M":
        under.enter()
        return payloads.loads(data), under
    try:
        _, version, _, length = _HEAD.unpack_from(data)
    except struct.error:
        version = length = 0
    end = _HEAD.size + length
    if version != 1 or len(data) <= end:
        raise SerializationError(f"a function of {len(data)} bytes is damaged or cut short", what="function")
    modules = CarriedModules(*pickle.loads(memoryview(data)[_HEAD.size : end]))
    if under is not NO_MODULES:
        modules = modules.over(under)
    modules.enter()
    return payloads.loads(memoryview(data)[end + -end % _ALIGN :]), modules

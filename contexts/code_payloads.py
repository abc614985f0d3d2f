"""A function or a loader as bytes that travel: what `payloads` makes of it, behind the modules that it imports.

    M, version, length of the table | the pickled table of modules | gap to 64 bytes | the value, as payloads.dumps

Without such modules it is the value alone. The table comes first, so that what is rebuilt already finds its modules.
"""

from __future__ import annotations

import pickle
import struct
import types
from typing import Any

from stoker.contexts import payloads
from stoker.contexts.carried_modules import NO_MODULES, CarriedModules
from stoker.contexts.digest import digest_of_code
from stoker.contexts.editable import stamps_of
from stoker.contexts.user_modules import imported_when_run, modules_for
from stoker.errors import SerializationError

_HEAD = struct.Struct("<cBHI")  # magic, version, unused, length of the table
_ALIGN = 64


def dumps_code(value: Any, *, what: str) -> bytes:
    """The bytes of a value with functions of the user's own in it. Raises SerializationError, naming `what`."""
    functions: list[types.FunctionType] = []
    parts = payloads.dump_parts(value, what=what, functions=functions)
    names = imported_when_run(functions)
    table, stamps = modules_for(names, digest_of_code), stamps_of(names)
    if table or stamps:
        packed = pickle.dumps((table, stamps), 5)
        head = _HEAD.pack(b"M", 1, 0, len(packed)) + packed
        parts = [head, bytes(-len(head) % _ALIGN), *parts]
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def loads_code(data: bytes) -> tuple[Any, CarriedModules]:
    """The value of `dumps_code`'s bytes, and the modules that it imports, which are entered.

    Raises SerializationError for other bytes, and whatever unpickling raises.
    """
    if data[:1] != b"M":
        NO_MODULES.enter()
        return payloads.loads(data), NO_MODULES
    try:
        _, version, _, length = _HEAD.unpack_from(data)
    except struct.error:
        version = length = 0
    end = _HEAD.size + length
    if version != 1 or len(data) <= end:
        raise SerializationError(f"a function of {len(data)} bytes is damaged or cut short", what="function")
    modules = CarriedModules(*pickle.loads(memoryview(data)[_HEAD.size : end]))
    modules.enter()
    return payloads.loads(memoryview(data)[end + -end % _ALIGN :]), modules

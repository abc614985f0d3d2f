"""What to evict from an object cache to make room: least recently used first, never what is pinned.

A pin is a count of libraries that use an entry. The plan is made before anything is touched, so an object that can
never fit evicts nothing. "Recently" is the order of use, not a time: the clock of whoever drives this is enough.
"""

from __future__ import annotations

import enum
import string
from collections.abc import Iterable

import msgspec

_SAFE = frozenset(string.ascii_lowercase + string.digits + "-_.")


class CachedObject(msgspec.Struct, frozen=True):
    """One cached object: its cache name, length, when it was last used (any clock), and whether it may not go."""

    name: str
    size_bytes: int
    used_at: float
    pinned: bool = False


class Shortage(enum.Enum):
    """Why no plan makes room."""

    TOO_LARGE = "too large"
    """It is larger than the whole cache."""
    PINNED = "pinned"
    """What is in use leaves too little, even if all the rest went."""


def make_room(entries: Iterable[CachedObject], *, size_bytes: int, bound_bytes: int) -> list[str] | Shortage:
    """Names to evict, in order, so that `size_bytes` more fit under `bound_bytes`; or why there is no such plan."""
    if size_bytes > bound_bytes:
        return Shortage.TOO_LARGE
    here = sorted(entries, key=lambda entry: (entry.used_at, entry.name))
    excess = sum(entry.size_bytes for entry in here) + size_bytes - bound_bytes
    plan: list[str] = []
    for entry in here:
        if excess <= 0:
            break
        if not entry.pinned:
            plan.append(entry.name)
            excess -= entry.size_bytes
    return plan if excess <= 0 else Shortage.PINNED


def file_name(name: str) -> str:
    """An object's cache name as one path component that every file system takes; different names stay different.

    Lower-case letters, digits, `-`, `_` and inner dots stand for themselves, every other byte is `~` and two hex digits
    (so that file systems that fold case keep names apart, and no name climbs out of its folder).
    """
    out = []
    for place, byte in enumerate(name.encode()):
        char = chr(byte)
        out.append(char if char in _SAFE and not (char == "." and place == 0) else f"~{byte:02x}")
    return "".join(out) or "~"


def plain_name(file: str) -> str:
    """The inverse of `file_name`. Raises ValueError for what it never makes."""
    raw, place = bytearray(), 0
    while place < len(file) and file != "~":
        if file[place] == "~":
            raw += bytes.fromhex(file[place + 1 : place + 3])
            place += 3
        else:
            raw += file[place].encode()
            place += 1
    name = raw.decode()
    if file_name(name) != file:
        raise ValueError(f"{file!r} is not the file name of a cached object")
    return name

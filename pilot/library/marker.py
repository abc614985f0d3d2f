"""Which call runs just now, in a small mapped file that outlives the process.

The library writes the call and its start before it begins one: two stores into memory, no system call. When the
process has died the agent reads it and knows the culprit; while it lives the agent reads how long the call has run.
One record a slot: the call's id, then its start on CLOCK_MONOTONIC in nanoseconds (0 = the slot is idle). A process
that ends before it could tell that calls have ended adds records of these calls.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_RECORD = struct.Struct("<Qq")


class Marker:
    """The library's side."""

    def __init__(self, path: str | os.PathLike[str], *, slots: int) -> None:
        self._path = os.path.abspath(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, slots * _RECORD.size)  # a full disk is an error now, not a signal later
            self._map = mmap.mmap(descriptor, slots * _RECORD.size)
        finally:
            os.close(descriptor)
        self._pack = _RECORD.pack_into

    def begin(self, slot: int, call: int, start_ns: int) -> None:
        """A slot begins a call."""
        self._pack(self._map, slot * 16, call, start_ns)

    def idle(self, slot: int) -> None:
        """A slot has nothing to run."""
        self._pack(self._map, slot * 16, 0, 0)

    def suspect(self, calls: Iterable[int]) -> None:
        """These calls have ended, and one of them may be why this process ends before it could tell that. They stand
        behind the slots as calls that run. A disk that is full keeps none."""
        with suppress(OSError), open(self._path, "ab") as file:
            file.write(b"".join(_RECORD.pack(call, time.monotonic_ns()) for call in calls))


def running(path: Path) -> list[tuple[int, int]]:
    """Calls that run, each with its start in nanoseconds. None where the library never came to write the file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return [(call, start) for call, start in _RECORD.iter_unpack(data[: len(data) // 16 * 16]) if start]

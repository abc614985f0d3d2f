"""Which call runs just now, in a small mapped file that outlives the process.

The library writes a record before it begins a call: three stores into memory, no system call. When the process has
died the agent reads it and knows the culprit; while it lives the agent reads how long the call has run. One record a
slot: the call's id, its start on CLOCK_MONOTONIC in nanoseconds (0 = the slot is idle), and where in the library's log
its output begins. The first record is no slot's: it says how long the log was when a call ended last, because what
stands before that may be output of another call. A process that ends before it could tell that calls have ended adds
records of these calls.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<Qqq")
_SIZE = _RECORD.size
NOWHERE = -1
"""Stands for the place in the log of a call whose output is not known."""


class Running(NamedTuple):
    """A call that runs, its start in nanoseconds, and where in the library's log its output begins, in bytes. `slot`:
    which slot runs it; beyond the library's slots: it has ended."""

    call: int
    start_ns: int
    log_from: int = NOWHERE
    slot: int = 0


class Marker:
    """The library's side."""

    def __init__(self, path: str | os.PathLike[str], *, slots: int) -> None:
        self._path = os.path.abspath(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (1 + slots) * _SIZE
            os.posix_fallocate(descriptor, 0, size)  # a full disk is an error now, not a signal later
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._pack = _RECORD.pack_into

    def begin(self, slot: int, call: int, start_ns: int, log_from: int = NOWHERE) -> None:
        """A slot begins a call, whose output begins at this byte of the log."""
        self._pack(self._map, (1 + slot) * _SIZE, call, start_ns, log_from)

    def idle(self, slot: int) -> None:
        """A slot has nothing to run."""
        self._pack(self._map, (1 + slot) * _SIZE, 0, 0, NOWHERE)

    def ended(self, log_bytes: int) -> None:
        """A call has ended, and the log has this length now."""
        self._pack(self._map, 0, 0, 0, log_bytes)

    def suspect(self, calls: Iterable[int]) -> None:
        """These calls have ended, and one of them may be why this process ends before it could tell that. They stand
        behind the slots as calls that run. A disk that is full keeps none."""
        with suppress(OSError), open(self._path, "ab") as file:
            file.write(b"".join(_RECORD.pack(call, time.monotonic_ns(), NOWHERE) for call in calls))


def running(path: Path) -> list[Running]:
    """Calls that run. None where the library never came to write the file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = list(_RECORD.iter_unpack(data[: len(data) // _SIZE * _SIZE]))
    others_to = records[0][2] if records else 0
    return [
        Running(call, start_ns, log_from if log_from == NOWHERE else max(log_from, others_to), slot)
        for slot, (call, start_ns, log_from) in enumerate(records[1:])
        if start_ns
    ]

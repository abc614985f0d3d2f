"""A board in shared memory on which the libraries of one pilot say whether they want a turn on their devices.

One row a library, in a file of the pilot's private folder that each of them maps. A row is written by its library, and
under the board's lock also by a library that hands a turn over. The lock is held for microseconds and ends with the
process that holds it. It protects an order of work and no memory: if its holder is stopped meanwhile, others go on
without it, and at the worst two libraries compute side by side for one step.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stoker.manager.protocol.ids import DeviceId, LibraryId

ROWS = 64
"""More libraries than a pilot holds. One that finds no row computes without turns."""
_HEADER = struct.Struct("<Q")
_ROW = struct.Struct("<QIIdddd64s")
_LOCK_S = 0.05
_LOCK_TRY_S = 0.0002


class TurnState(enum.IntEnum):
    """What a library wants of its devices."""

    IDLE = 0
    """Nothing."""
    WAITS = 1
    """It wants to compute an iteration."""
    HOLDS = 2
    """It computes one."""


class TurnRow(msgspec.Struct):
    """An engine on the board, and its library.

    `due_at`: when its most urgent token is due; `since`: when it has asked for its turn; `step_s`: how long its
    iteration probably takes, 0 if nobody knows; `held_at`: when it has begun. Seconds of the machine's monotonic clock.
    """

    number: int
    library: LibraryId
    pid: int
    state: TurnState
    due_at: float
    since: float
    step_s: float
    held_at: float
    devices: tuple[DeviceId, ...]


class TurnBoard:
    """The board of one pilot, as one process sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _HEADER.size + ROWS * _ROW.size
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)

    @property
    def changes(self) -> int:
        """How often a library has come or gone. Costs no system call."""
        found: int = _HEADER.unpack_from(self._memory, 0)[0]
        return found

    def rows(self) -> list[TurnRow]:
        """The libraries on the board."""
        return [row for number in range(ROWS) if (row := self.row(number)) is not None]

    def row(self, number: int) -> TurnRow | None:
        """The row with this number; None if it is free, or damaged."""
        library, pid, state, due_at, since, step_s, held_at, names = _ROW.unpack_from(self._memory, _place(number))
        if not library or state > TurnState.HOLDS:
            return None
        devices = tuple(DeviceId(name.decode(errors="replace")) for name in names.rstrip(b"\0").split(b"\0"))
        return TurnRow(number, library, pid, TurnState(state), due_at, since, step_s, held_at, devices)

    def write(self, row: TurnRow) -> None:
        """Put a row in its place."""
        _ROW.pack_into(
            self._memory, _place(row.number), row.library, row.pid, row.state, row.due_at, row.since, row.step_s,
            row.held_at, _packed(row.devices),
        )  # fmt: skip

    def join(self, library: LibraryId, devices: Sequence[DeviceId]) -> TurnRow | None:
        """Take a free row for an engine of this process; None if there is none, or its devices have too long names."""
        if len(_packed(devices)) > 64:
            return None
        with self.lock():
            for number in range(ROWS):
                if self.row(number) is None:
                    row = TurnRow(number, library, os.getpid(), TurnState.IDLE, 0.0, 0.0, 0.0, 0.0, tuple(devices))
                    self.write(row)
                    self._changed()
                    return row
        return None

    def clear(self, number: int) -> None:
        """Free a row; under the lock."""
        self._memory[_place(number) : _place(number + 1)] = bytes(_ROW.size)
        self._changed()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """The board for the caller alone, or after a while without that (see the module's text)."""
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another holds it, or the file system has no locks
                if time.monotonic() > until:
                    break
                time.sleep(_LOCK_TRY_S)
            else:
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Forget the board; the file stays."""
        self._memory.close()
        os.close(self._file)

    def _changed(self) -> None:
        _HEADER.pack_into(self._memory, 0, (self.changes + 1) % 2**64)


def _place(number: int) -> int:
    return _HEADER.size + number * _ROW.size


def _packed(devices: Sequence[DeviceId]) -> bytes:
    return b"\0".join(device.encode() for device in devices)

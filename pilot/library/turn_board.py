"""The board in shared memory on which the libraries of one pilot ask for turns on their devices.

There is one row per engine, in a file of the pilot's private folder that each library maps. A library writes its row,
and, under the board's lock, the row of a library that gets the turn. The lock is held for microseconds and ends with
its process. It protects an order of work, not memory: if its holder is stopped, others continue without it, and at
worst two libraries compute at the same time for one step. Library, process and devices of a row are written once, when
the library joins.

Next to each row is what its engine has to do (`packed`). The engine's library writes it before each step without a
lock, and the agent reads it when it weighs an offer. A checksum detects a half-written value.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.contexts.inference.adapter import EngineWork
from stoker.protocol.ids import DeviceId, LibraryId

# ---- what an engine has to do


MOST_PROMPTS = 32
"""Unread prompts that stand there, the most urgent. All further ones are the last of them together: as many tokens, due
when the last is."""
_SUM = struct.Struct("<I")
_HEAD = struct.Struct("<QIIddddQQ")
_PROMPT = struct.Struct("<Idd")
WORK_BYTES = _SUM.size + _HEAD.size + MOST_PROMPTS * _PROMPT.size
_MOST = 2**32 - 1


def packed(library: LibraryId, work: EngineWork) -> bytes:
    """Encode the work of a library's engine."""
    prompts = list(work.prompts)
    if len(prompts) > MOST_PROMPTS:
        rest = prompts[MOST_PROMPTS - 1 :]
        prompts[MOST_PROMPTS - 1 :] = [(sum(tokens for tokens, _, _ in rest), rest[-1][1], rest[-1][2])]
    rows, length, due_at, tpot_s, late_at, _, taken_up, peak = work
    parts = [_HEAD.pack(library, rows, len(prompts), length, due_at, tpot_s, late_at, taken_up, peak)]
    parts += [_PROMPT.pack(min(tokens, _MOST), at, each_s) for tokens, at, each_s in prompts]
    data = b"".join(parts)
    return _SUM.pack(zlib.crc32(data)) + data


def unpacked(data: bytes) -> tuple[LibraryId, EngineWork] | None:
    """Decode a library and the work of its engine; None for other bytes, and for half-written ones."""
    library, rows, count, length, due_at, tpot_s, late_at, taken_up, peak = _HEAD.unpack_from(data, _SUM.size)
    if count > MOST_PROMPTS:
        return None
    end = _SUM.size + _HEAD.size + count * _PROMPT.size
    if zlib.crc32(data[_SUM.size : end]) != _SUM.unpack_from(data)[0]:
        return None
    prompts = [_PROMPT.unpack_from(data, end - left * _PROMPT.size) for left in range(count, 0, -1)]
    lengths = (length, tpot_s, *(each_s for _, _, each_s in prompts))
    if not all(0 <= number < math.inf for number in lengths) or any(map(math.isnan, (due_at, late_at))):
        return None
    if any(math.isnan(at) for _, at, _ in prompts):
        return None
    return library, EngineWork(rows, length, due_at, tpot_s, late_at, prompts, taken_up, peak)


# ---- the board


ROWS = 64
"""More libraries than a pilot holds. One that finds no row computes without turns."""
_HEADER = struct.Struct("<Q")
_ROW = struct.Struct("<QIIdddd64s")
_WANTS = struct.Struct("<Idddd")
"""Of a row what changes from turn to turn."""
_WANTS_AT = 12
_ROWS_END = _HEADER.size + ROWS * _ROW.size
_SIZE = _ROWS_END + ROWS * WORK_BYTES
_LOCK_S = 0.05
_LOCK_TRY_S = 0.0001


class TurnState(enum.IntEnum):
    """The state of an engine's request for its devices."""

    IDLE = 0
    """Nothing."""
    WAITS = 1
    """It wants to compute an iteration."""
    HOLDS = 2
    """It computes one."""


_STATES = tuple(TurnState)


class TurnRow(msgspec.Struct):
    """An engine on the board, and its library.

    `due_at`: due time of its most urgent token; `since`: when it asked for its turn; `step_s`: expected length of its
    iteration, 0 if unknown; `held_at`: when its turn began. Seconds on the machine's monotonic clock.
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

    def is_of(self, other: TurnRow) -> bool:
        """True if both are of one library and one process of it."""
        return self.library == other.library and self.pid == other.pid


class TurnBoard:
    """The board of one pilot, as one process sees it. Raises OSError if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Even if the file is as long: a write into a hole of it kills the process when the disk is full.
            os.posix_fallocate(self._file, 0, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
        except BaseException:
            os.close(self._file)
            raise
        self._lock = _BoardLock(self._file)
        self._devices: dict[bytes, tuple[DeviceId, ...]] = {}
        """By the bytes that stand for them."""
        self._taken, self._taken_at = list[int](), -1
        """The rows that were taken when the board was read last, and after how many changes that was."""

    @property
    def changes(self) -> int:
        """How often a library has come or gone. Costs no system call."""
        found: int = _HEADER.unpack_from(self._memory, 0)[0]
        return found

    def snapshot(self) -> bytes:
        """The count of changes and all rows, as they are now."""
        # The count is read first: with rows that are older than it, a library that has joined would not be seen again.
        changes = self._memory[: _HEADER.size]
        return changes + self._memory[_HEADER.size : _ROWS_END]

    def rows(self, read: bytes = b"") -> list[TurnRow]:
        """Return the rows on the board, or in one of its snapshots. Reads all rows after a library joined or left,
        otherwise the taken ones."""
        data = read or self.snapshot()
        changes = _HEADER.unpack_from(data, 0)[0]
        among = self._taken if changes == self._taken_at else range(ROWS)
        found = [row for number in among if (row := self._row(number, data, _place(number))) is not None]
        if among is not self._taken:
            self._taken, self._taken_at = [row.number for row in found], changes
        return found

    def row(self, number: int) -> TurnRow | None:
        """The row with this number; None if it is free, or damaged."""
        return self._row(number, self._memory, _place(number))

    def _row(self, number: int, data: bytes | mmap.mmap, at: int) -> TurnRow | None:
        library, pid, state, due_at, since, step_s, held_at, names = _ROW.unpack_from(data, at)
        if not library or state >= len(_STATES):
            return None
        devices = self._devices.get(names)
        if devices is None:
            devices = _devices_of(names)
            if len(self._devices) < ROWS:  # more are wrong bytes
                self._devices[names] = devices
        return TurnRow(number, library, pid, _STATES[state], due_at, since, step_s, held_at, devices)

    def write(self, row: TurnRow) -> None:
        """Write what a row wants. Who it is stands there since it joined."""
        _WANTS.pack_into(
            self._memory, _place(row.number) + _WANTS_AT, row.state, row.due_at, row.since, row.step_s, row.held_at
        )

    def write_work(self, number: int, data: bytes) -> None:
        """Write an engine's work next to its row."""
        at = _ROWS_END + number * WORK_BYTES
        self._memory[at : at + len(data)] = data

    def join(self, library: LibraryId, devices: Sequence[DeviceId]) -> TurnRow | None:
        """Take a free row for an engine of this process; None if the board is full, or the names of its devices are too
        long."""
        names = b"\0".join(device.encode() for device in devices)
        if len(names) > 64:
            return None
        with self.lock():
            for number in range(ROWS):
                if self.row(number) is None:
                    row = TurnRow(number, library, os.getpid(), TurnState.IDLE, 0.0, 0.0, 0.0, 0.0, tuple(devices))
                    _ROW.pack_into(self._memory, _place(number), library, row.pid, 0, 0.0, 0.0, 0.0, 0.0, names)
                    self._changed()
                    return row
        return None

    def has(self, row: TurnRow) -> bool:
        """True unless this row was freed, or is another library's or another process's by now."""
        here = self.row(row.number)
        return here is not None and here.is_of(row)

    def clear(self, row: TurnRow) -> None:
        """Free a row; under the lock. No-op if it is another's by now."""
        if self.has(row):
            self._memory[_place(row.number) : _place(row.number + 1)] = bytes(_ROW.size)
            self._changed()

    def lock(self) -> _BoardLock:
        """The board for the caller alone, or after a while without that (see the module's text)."""
        return self._lock

    def close(self) -> None:
        """Forget the board; the file stays."""
        self._memory.close()
        os.close(self._file)

    def _changed(self) -> None:
        _HEADER.pack_into(self._memory, 0, (self.changes + 1) % 2**64)


def rows_in(data: bytes) -> list[tuple[TurnRow, bytes]]:
    """Return the rows of a board from the bytes of its file, each with the bytes next to it.

    For the agent, which must not map the file: a process dies if a file that it has mapped is truncated.
    """
    found = list[tuple[TurnRow, bytes]]()
    for number in range(ROWS if len(data) >= _SIZE else 0):
        library, pid, state, due_at, since, step_s, held_at, names = _ROW.unpack_from(data, _place(number))
        if library and state < len(_STATES):
            row = TurnRow(
                number, library, pid, _STATES[state], due_at, since, step_s, held_at, _devices_of(names)
            )  # fmt: skip
            at = _ROWS_END + number * WORK_BYTES
            found.append((row, data[at : at + WORK_BYTES]))
    return found


def _devices_of(names: bytes) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(name.decode(errors="replace")) for name in names.rstrip(b"\0").split(b"\0"))


class _BoardLock:
    """The lock of a board, by its file. A class, because a generator would cost a hand-over 10 us."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        until = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another holds it, or the file system has no locks
                until = until or time.monotonic() + _LOCK_S
                if time.monotonic() > until:
                    return
                time.sleep(_LOCK_TRY_S)
            else:
                return

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _place(number: int) -> int:
    return _HEADER.size + number * _ROW.size

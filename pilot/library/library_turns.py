"""Libraries that share devices take turns. In each turn, one engine computes one iteration.

`stoker.pilot.core.turns` decides which library is next. The libraries of a pilot share a board, a memory-mapped file
with one row per engine. A library that ends an iteration writes the next turn on the board, and wakes the next library
with a datagram.

The board's lock protects only the order of turns. If the process that has the lock is stopped, other libraries continue
after 50 ms. At worst, two libraries compute simultaneously for one iteration. A library loses its turn if its process
died, was stopped, or takes much longer than announced. Each engine also writes its work (`EngineWork`),
which the agent reads without the lock.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import logging
import math
import mmap
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from stoker.contexts.inference.adapter import EngineWork
from stoker.decoding import UNREADABLE
from stoker.pilot.core.turns import TurnRequest, choose_next_turns
from stoker.protocol.ids import DeviceId, LibraryId

# ---- the work of an engine, with a checksum that detects half-written data

MOST_PROMPTS = 32  # maximum number of listed prompts; the last entry merges all remaining prompts
MOST_ANSWERS = 32  # maximum number of listed answers; an engine with more answers lists none
_WORK_HEAD = struct.Struct("<II")  # checksum, and length of the rest
# MessagePack: at most 9 bytes per number, 1 byte per list.
WORK_BYTES = _WORK_HEAD.size + 128 + 37 * MOST_PROMPTS + 28 * MOST_ANSWERS
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[LibraryId, EngineWork]).decode


def pack_engine_work(library: LibraryId, work: EngineWork) -> bytes:
    prompts = work.prompts
    if len(prompts) > MOST_PROMPTS:
        rest = prompts[MOST_PROMPTS - 1 :]
        merged = (sum(tokens for tokens, *_ in rest), *rest[-1][1:3], 0)
        work = work._replace(prompts=[*prompts[: MOST_PROMPTS - 1], merged])
    if len(work.answers) > MOST_ANSWERS:
        work = work._replace(answers=())
    data = _encode((library, work))
    return _WORK_HEAD.pack(zlib.crc32(data), len(data)) + data


def unpack_engine_work(data: bytes) -> tuple[LibraryId, EngineWork] | None:
    """Decode a library id and the work of its engine. Return None if the bytes are damaged."""
    checksum, length = _WORK_HEAD.unpack_from(data)
    body = data[_WORK_HEAD.size : _WORK_HEAD.size + length]
    if zlib.crc32(body) != checksum:
        return None
    try:
        return _decode(body)
    except UNREADABLE:
        return None


# ---- the board

MOST_ROWS = 64  # maximum number of engines; further engines compute without turns
_HEADER = struct.Struct("<Q")
_ROW = struct.Struct("<QIIdddd64s")
_TURN_FIELDS, _TURN_FIELDS_OFFSET = struct.Struct("<Idddd"), 12  # the part of a row that changes with each turn
_ROWS_END = _HEADER.size + MOST_ROWS * _ROW.size
_SIZE = _ROWS_END + MOST_ROWS * WORK_BYTES
_LOCK_S, _LOCK_TRY_S = 0.05, 0.0001


class TurnState(enum.IntEnum):
    IDLE = 0
    WAITS = 1
    HOLDS = 2


_STATES = tuple(TurnState)


class TurnRow(msgspec.Struct):
    """A row of the board, which describes one engine. Times are in seconds of the monotonic clock."""

    number: int
    library: LibraryId
    pid: int
    state: TurnState
    due_at: float
    since: float
    step_s: float
    held_at: float
    devices: tuple[DeviceId, ...]

    def is_of_same_process(self, other: TurnRow) -> bool:
        return self.library == other.library and self.pid == other.pid


class TurnBoard:
    """The memory-mapped file with the engines' turns to compute. `with board` locks the file. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Always allocate: if the disk is full, a write into a hole of the mapped file kills the process.
            os.posix_fallocate(self._file, 0, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
        except BaseException:
            os.close(self._file)
            raise
        self._occupied_rows, self._occupied_at_change = list[int](), -1
        """The rows that were occupied at the last reading, and the value of `change_count` at that time."""

    @property
    def change_count(self) -> int:
        """Number of times that an engine joined or left the board."""
        found: int = _HEADER.unpack_from(self._memory, 0)[0]
        return found

    def snapshot(self) -> bytes:
        # Read the count of changes before the rows: in the opposite order, a library that joins could be missed.
        changes = self._memory[: _HEADER.size]
        return changes + self._memory[_HEADER.size : _ROWS_END]

    def read_rows(self, board_snapshot: bytes = b"") -> list[TurnRow]:
        """Return the occupied rows of the board, or of `board_snapshot` if it is given."""
        data = board_snapshot or self.snapshot()
        changes = _HEADER.unpack_from(data, 0)[0]
        among = self._occupied_rows if changes == self._occupied_at_change else range(MOST_ROWS)
        found = [row for number in among if (row := _read_row(number, data)) is not None]
        if among is not self._occupied_rows:
            self._occupied_rows, self._occupied_at_change = [row.number for row in found], changes
        return found

    def read_row(self, number: int) -> TurnRow | None:
        return _read_row(number, self._memory)

    def write_turn(self, row: TurnRow) -> None:
        at = _row_offset(row.number) + _TURN_FIELDS_OFFSET
        _TURN_FIELDS.pack_into(self._memory, at, row.state, row.due_at, row.since, row.step_s, row.held_at)

    def write_work(self, number: int, data: bytes) -> None:
        at = _ROWS_END + number * WORK_BYTES
        self._memory[at : at + len(data)] = data

    def occupy_row(self, library: LibraryId, devices: Sequence[DeviceId]) -> TurnRow | None:
        """Occupy and return a free row. Return None if the board is full or the device names are too long."""
        names = b"\0".join(device.encode() for device in devices)
        if len(names) > 64:
            return None
        with self:
            for number in range(MOST_ROWS):
                if self.read_row(number) is None:
                    row = TurnRow(number, library, os.getpid(), TurnState.IDLE, 0.0, 0.0, 0.0, 0.0, tuple(devices))
                    _ROW.pack_into(self._memory, _row_offset(number), library, row.pid, 0, 0.0, 0.0, 0.0, 0.0, names)
                    _HEADER.pack_into(self._memory, 0, (self.change_count + 1) % 2**64)
                    return row
        return None

    def contains(self, row: TurnRow) -> bool:
        here = self.read_row(row.number)
        return here is not None and here.is_of_same_process(row)

    def free_row(self, row: TurnRow) -> None:
        """Free a row. The caller must hold the board's lock."""
        if self.contains(row):
            self._memory[_row_offset(row.number) : _row_offset(row.number + 1)] = bytes(_ROW.size)
            _HEADER.pack_into(self._memory, 0, (self.change_count + 1) % 2**64)

    def __enter__(self) -> None:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:  # another process has the lock, or the file system has no locks
                if time.monotonic() > until:
                    return
                time.sleep(_LOCK_TRY_S)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


def unpack_board_rows(data: bytes) -> list[tuple[TurnRow, bytes]]:
    """Return each row of a board file with the engine's packed work. `data` is a copy: if a mapped file were truncated,
    a read would kill the agent.
    """
    found = list[tuple[TurnRow, bytes]]()
    for number in range(MOST_ROWS if len(data) >= _SIZE else 0):
        if (row := _read_row(number, data)) is not None:
            at = _ROWS_END + number * WORK_BYTES
            found.append((row, data[at : at + WORK_BYTES]))
    return found


def _read_row(number: int, data: bytes | mmap.mmap) -> TurnRow | None:
    library, pid, state, due_at, since, step_s, held_at, names = _ROW.unpack_from(data, _row_offset(number))
    if not library or state >= len(_STATES):
        return None
    return TurnRow(number, library, pid, _STATES[state], due_at, since, step_s, held_at, _decode_devices(names))


@functools.lru_cache(maxsize=MOST_ROWS)
def _decode_devices(names: bytes) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(name.decode(errors="replace")) for name in names.rstrip(b"\0").split(b"\0"))


def _row_offset(number: int) -> int:
    return _HEADER.size + number * _ROW.size


log = logging.getLogger(__name__)

_BOARD_CHECK_S = 0.025  # seconds between two checks of the board during a wait
_SWEEP_S = 1.0  # seconds between two searches for ended libraries on shared devices
_OVERDUE_FACTOR, _OVERDUE_S = 2.0, 0.03  # an engine loses its turn after twice the announced seconds plus 0.03 s
_OVERDUE_UNKNOWN_S = 10.0  # an engine that announced no seconds loses its turn after 10 s, for example in a compilation
_MAX_TURN_WAIT_S = 60.0  # seconds after which a library computes without a turn, because the board may be wrong
_TIMEOUT = struct.Struct("@ll")  # a `struct timeval`, for SO_RCVTIMEO


class LibraryTurns:
    """Requests and releases the turns of one engine, in one thread. Raises OSError if the board cannot be used."""

    def __init__(self, board: Path, library: LibraryId, devices: Sequence[DeviceId]) -> None:
        self._board = TurnBoard(board)
        self._library, self._devices = library, tuple(devices)
        self._row: TurnRow | None = None
        self._waker: socket.socket | None = None
        self._joined = False
        self._seen_change, self._shared = -1, False
        self._swept_at = 0.0

    @property
    def shared(self) -> bool:
        """True if another engine shares a device with this engine."""
        return self._ensure_own_row() is not None and self._shared

    def begin(
        self, *, due_at: float = math.inf, step_s: float = 0.0, work: Callable[[], EngineWork] | None = None
    ) -> float:
        """Wait for a turn; more urgent work goes first. Return the seconds of the handover, in which no library could
        compute: from the end of the previous library's iteration until this library was awake.

        `due_at`: earliest due time of a token, on `time.monotonic`. `step_s`: expected seconds of the iteration (0:
        unknown). `work`: work to publish, called after the next library was woken.
        """
        row = self._ensure_own_row()
        if row is None:
            return 0.0
        now = time.monotonic()
        row.due_at, row.since, row.step_s = due_at, now, step_s
        has_turn = self._try_to_take_turn(row, now)
        kept_s = time.monotonic() - now
        if work is not None:
            self._board.write_work(row.number, pack_engine_work(self._library, work()))
        if has_turn:
            return kept_s
        while not self._is_holding_turn():
            if time.monotonic() > now + _MAX_TURN_WAIT_S:
                log.warning("no turn came within %.0f s; this library computes without a turn", _MAX_TURN_WAIT_S)
                return 0.0
            assert self._waker is not None
            try:
                self._waker.recv(1)
            except OSError:  # time-out: check whether another library has lost its turn
                self._reclaim_lost_turns(row)
        return time.monotonic() - max(row.held_at, now)

    def end(self) -> None:
        """Release the turn, because the engine has no further iteration now."""
        row = self._ensure_own_row() if self._row is not None else None
        if row is None or row.state is TurnState.IDLE:
            return
        row.state = TurnState.IDLE
        if not self._shared:
            self._board.write_turn(row)
            return
        with self._board:
            self._board.write_turn(row)
            next_ones = self._give_free_devices(time.monotonic())
        self._wake_engines(next_ones)

    def publish(self, work: EngineWork) -> None:
        """Publish the engine's work. The agent uses the work to decide whether a further call fits."""
        row = self._ensure_own_row()
        if row is not None:
            self._board.write_work(row.number, pack_engine_work(self._library, work))

    def close(self) -> None:
        try:
            self.leave()
        finally:
            self._joined = True
            self._board.close()

    def leave(self) -> None:
        """Leave the board until the next request, and release the devices."""
        row, self._row, self._joined = self._row, None, False
        try:
            if row is not None:
                with self._board:
                    if self._board.contains(row):
                        # Remove the socket before the row is free: the next engine in this row uses a socket of the
                        # same name.
                        Path(_waker_socket_path(self._board, row.number)).unlink(missing_ok=True)
                        self._board.free_row(row)
                    next_ones = self._give_free_devices(time.monotonic())
                self._wake_engines(next_ones)
        finally:
            if self._waker is not None:
                self._waker.close()
                self._waker = None

    def _ensure_own_row(self) -> TurnRow | None:
        if not self._joined:
            self._join_turn_board()
        row, changes = self._row, self._board.change_count
        if row is None or changes == self._seen_change:
            return row
        if not self._board.contains(row):
            row, changes = self._join_turn_board(), self._board.change_count
            if row is None:
                return None
        mine = set(row.devices)
        others = [other for other in self._board.read_rows() if other.number != row.number]
        self._seen_change, self._shared = changes, any(not mine.isdisjoint(other.devices) for other in others)
        return row

    def _join_turn_board(self) -> TurnRow | None:
        self._joined = True
        row = self._row = self._board.occupy_row(self._library, self._devices)
        if row is None:
            return None
        path = _waker_socket_path(self._board, row.number)
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        try:
            waker = self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            # With a timeout on the blocking socket, each wait takes one system call.
            waker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.pack(0, int(_BOARD_CHECK_S * 1e6)))
            Path(path).unlink(missing_ok=True)  # left by an earlier library in this row
            waker.bind(path)
        except OSError as error:
            log.warning("this engine does not take turns with other libraries on its device: %s: %s", path, error)
            with self._board:
                self._board.free_row(row)
            self._row = None
        return self._row

    def _try_to_take_turn(self, row: TurnRow, now: float) -> bool:
        """Take the turn if no other engine shares a device, or keep the turn if this engine is again the next one.
        Otherwise request a turn.
        """
        if not self._shared:
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write_turn(row)
            if self._board.change_count == self._seen_change or self._ensure_own_row() is not row or not self._shared:
                return True
            # A library has joined in the meantime, and may have taken a turn before it saw this row.
        if self._request_turn_unless_kept(row, now):
            return False
        row.state, row.held_at = TurnState.HOLDS, now
        self._board.write_turn(row)
        return True

    def _request_turn_unless_kept(self, row: TurnRow, now: float) -> bool:
        if now > self._swept_at + _SWEEP_S:
            self._swept_at = now
            others = (other for other in self._board.read_rows() if other.number != row.number)
            gone = [other for other in others if _process_state(other.pid) in _ENDED_STATES]
            if gone:
                with self._board:
                    for other in gone:
                        self._board.free_row(other)
        board = self._board
        read = board.snapshot()
        rows = {other.number: other for other in board.read_rows(read)}
        mine = rows.pop(row.number, None)
        chosen = _choose_next_rows(rows.values(), row)
        if chosen == [row.number] and mine is not None and mine.state is TurnState.HOLDS:
            return False
        row.state = TurnState.WAITS
        with board:
            if board.snapshot() == read:  # no change since the choice, so the choice is valid
                rows[row.number] = row
                board.write_turn(row)
                self._write_turns(chosen, rows, now)
            else:
                board.write_turn(row)
                chosen = self._give_free_devices(now)
        self._wake_engines(chosen)
        return True

    def _is_holding_turn(self) -> bool:
        assert self._row is not None
        row = self._board.read_row(self._row.number)
        if row is None or not row.is_of_same_process(self._row):  # another library concluded that this process is dead
            self._join_turn_board()
            return True
        self._row.state, self._row.held_at = row.state, row.held_at
        return row.state is TurnState.HOLDS

    def _reclaim_lost_turns(self, row: TurnRow) -> None:
        now, rows = time.monotonic(), self._board.read_rows()
        if (
            row.state is not TurnState.IDLE
            and not _choose_next_rows(rows)
            and not any(_has_lost_turn(other, now) for other in rows)
        ):
            return
        with self._board:
            if row.state is TurnState.IDLE:
                row.state = TurnState.WAITS
                self._board.write_turn(row)
            for other in self._board.read_rows():
                if other.number != row.number and _has_lost_turn(other, now):
                    other.state = TurnState.IDLE
                    self._board.write_turn(other)
            next_ones = self._give_free_devices(now)
        self._wake_engines(next_ones)

    def _give_free_devices(self, now: float) -> list[int]:
        """Give free devices to the next engines, and return their rows. The caller must hold the lock, and wake these
        engines later.
        """
        rows = {row.number: row for row in self._board.read_rows()}
        chosen = _choose_next_rows(rows.values())
        self._write_turns(chosen, rows, now)
        return chosen

    def _write_turns(self, chosen: Iterable[int], rows: dict[int, TurnRow], now: float) -> None:
        for number in chosen:
            row = rows[number]
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write_turn(row)

    def _wake_engines(self, numbers: Iterable[int]) -> None:
        own = self._row.number if self._row is not None else -1
        for number in numbers:
            if number != own and self._waker is not None:
                with contextlib.suppress(OSError):  # an engine that is not woken checks the board soon
                    self._waker.sendto(b"", socket.MSG_DONTWAIT, _waker_socket_path(self._board, number))


def _choose_next_rows(rows: Iterable[TurnRow], requesting: TurnRow | None = None) -> list[int]:
    waiting, busy = list[TurnRequest](), set[DeviceId]()
    for row in rows if requesting is None else (*rows, requesting):
        if row is requesting or row.state is TurnState.WAITS:
            # The row number identifies the engine, because a library may have several engines.
            waiting.append(TurnRequest(LibraryId(row.number), row.devices, row.due_at, row.since))
        elif row.state is TurnState.HOLDS:
            busy.update(row.devices)
    return [int(library) for library in choose_next_turns(waiting, busy)] if waiting else []


def _waker_socket_path(board: TurnBoard, number: int) -> str:
    return f"{board.path}.{number}"


def _has_lost_turn(row: TurnRow, now: float) -> bool:
    """True if the row holds a turn and its process is dead, stopped or overdue."""
    if row.state is not TurnState.HOLDS or now < row.held_at + _BOARD_CHECK_S:
        return False
    most_s = _OVERDUE_FACTOR * row.step_s + _OVERDUE_S if row.step_s > 0 else _OVERDUE_UNKNOWN_S
    return now > row.held_at + most_s or _process_state(row.pid) in (*_ENDED_STATES, "T", "t")


_ENDED_STATES = ("", "Z", "X")


def _process_state(pid: int) -> str:
    """Return the letter of the process state in /proc; empty if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]

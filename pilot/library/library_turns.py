"""A library's turns on its devices: it asks before each iteration, and hands the devices on after it.

Who is next is the pilot core's to say (`stoker.pilot.core.turns`: the shortest headroom first, SLINFER §VI-A).
The library whose iteration has ended works it out from the board (`turn_board`), writes it there, and wakes the next
one by a datagram; the agent takes no part. A library that shares its devices with nobody makes no system call, and
neither does one that keeps its turn because it is still the most urgent.

A holder that has died or was stopped, or that takes much longer than it has said, loses its turn: whoever waits looks
at it every few hundredths of a second. It asks again when it goes on. Whoever looks only reads; the lock is taken when
there is something to change, so that a look never stands in the way of a library that hands its turn on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from stoker.contexts.inference.adapter import EngineWork
from stoker.pilot.core.turns import TurnRequest, next_turns
from stoker.pilot.library.turn_board import TurnBoard, TurnRow, TurnState, packed
from stoker.protocol.ids import DeviceId, LibraryId

log = logging.getLogger(__name__)

_LOOK_S = 0.025
"""Seconds between two looks at the board while waiting. A holder with a younger turn is left alone, so a lost one is
found at the second look, within 0.1 s."""
_SWEEP_S = 1.0
"""A library that shares its devices looks for libraries that are gone this often."""
_OVERDUE_FACTOR = 2.0
_OVERDUE_S = 0.03
"""A holder that computes longer than this many times its own forecast, and this much longer, has lost its turn."""
_OVERDUE_UNKNOWN_S = 10.0
"""A holder without a forecast has lost its turn after this long: another process may have its process's id by now. If
its first step does take longer (it compiles), two libraries compute side by side until it ends."""
_LONGEST_WAIT_S = 60.0
"""The longest wait for a turn: a wrong board costs speed only."""
_TIMEOUT = struct.Struct("@ll")
"""A `struct timeval`, for SO_RCVTIMEO."""


class LibraryTurns:
    """The turns of one engine of a library. Used by one thread.

    `board`: a file that all libraries of the pilot map. Raises OSError where it cannot be used.
    """

    def __init__(self, board: Path, library: LibraryId, devices: Sequence[DeviceId]) -> None:
        self._board = TurnBoard(board)
        self._library, self._devices = library, tuple(devices)
        self._row: TurnRow | None = None
        self._waker: socket.socket | None = None
        """The socket on which others wake this engine, while it has a row."""
        self._joined = False
        self._seen, self._shared = -1, False
        self._swept_at = 0.0

    @property
    def shared(self) -> bool:
        """True if another library on the board has one of its devices too. Computed when libraries join or leave."""
        return self._present_row() is not None and self._shared

    def begin(
        self, *, due_at: float = math.inf, step_s: float = 0.0, work: Callable[[], EngineWork] | None = None
    ) -> None:
        """Wait for a turn and hold it. A library that holds one passes it on first if another is more urgent.

        `due_at`: due time of the most urgent token of its requests, on `time.monotonic`; `step_s`: expected length of
        the iteration, 0 if unknown; `work`: returns what to publish, after the next library is woken.
        """
        row = self._present_row()
        if row is None:
            return
        now = time.monotonic()
        row.due_at, row.since, row.step_s = due_at, now, step_s
        has_turn = self._takes_turn_at_once(row, now)
        self._write_work(row, work)
        while not has_turn and not self._holds():
            if time.monotonic() > now + _LONGEST_WAIT_S:
                log.warning("no turn has come in %.0f s; this library computes without one", _LONGEST_WAIT_S)
                return
            if not self._woken():
                self._take_lost_turns(row)

    def end(self) -> None:
        """The library wants no further iteration for now. No-op if it holds no turn."""
        row = self._present_row() if self._row is not None else None
        if row is None or row.state is TurnState.IDLE:
            return
        row.state = TurnState.IDLE
        if not self._shared:
            self._board.write(row)
            return
        with self._board.lock():
            self._board.write(row)
            next_ones = self._hand_on(time.monotonic())
        self._wake(next_ones)

    def publish(self, work: EngineWork) -> None:
        """Let others see what the engine has to do: the pilot's agent weighs offers by it."""
        row = self._present_row()
        if row is not None:
            self._write_work(row, lambda: work)

    def close(self) -> None:
        """Leave the board; the devices go to the next."""
        row, self._row, self._joined = self._row, None, True
        try:
            if row is not None:
                self._leave(row)
        finally:
            if self._waker is not None:
                self._waker.close()
            self._board.close()

    # ---- the board

    def _present_row(self) -> TurnRow | None:
        """Return this engine's row on the board; None if there is no room for it.

        The engine joins with its first turn: a library without an engine never asks for one. It joins again if another
        library took it for dead and freed its row. Computed when libraries join or leave.
        """
        if not self._joined:
            self._join()
        row, changes = self._row, self._board.changes
        if row is None or changes == self._seen:
            return row
        if not self._board.has(row):
            row, changes = self._join(), self._board.changes
            if row is None:
                return None
        mine = set(row.devices)
        others = [other for other in self._board.rows() if other.number != row.number]
        self._seen, self._shared = changes, any(not mine.isdisjoint(other.devices) for other in others)
        return row

    def _join(self) -> TurnRow | None:
        self._joined = True
        row = self._row = self._board.join(self._library, self._devices)
        if row is None:
            return None
        path = _waker_of(self._board, row.number)
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        try:
            waker = self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            # A blocking socket with the kernel's own time limit: a wait is one system call.
            waker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.pack(0, int(_LOOK_S * 1e6)))
            Path(path).unlink(missing_ok=True)  # of an earlier library in this row
            waker.bind(path)
        except OSError as error:
            log.warning("this engine computes without turns: %s: %s", path, error)
            with self._board.lock():
                self._board.clear(row)
            self._row = None
        return self._row

    def _write_work(self, row: TurnRow, work: Callable[[], EngineWork] | None) -> None:
        if work is not None:
            self._board.write_work(row.number, packed(self._library, work()))

    def _leave(self, row: TurnRow) -> None:
        with self._board.lock():
            if self._board.has(row):
                # While the row is still this engine's: the next engine in it has a socket of the same name.
                Path(_waker_of(self._board, row.number)).unlink(missing_ok=True)
                self._board.clear(row)
            next_ones = self._hand_on(time.monotonic())
        self._wake(next_ones)

    def _takes_turn_at_once(self, row: TurnRow, now: float) -> bool:
        """Hold a turn if the devices are not shared, or if this library keeps one. Otherwise ask for one."""
        if not self._shared:
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write(row)
            if self._board.changes == self._seen or self._present_row() is not row or not self._shared:
                return True
            # A library has come meanwhile: it may have taken a turn before it could see this one.
        if self._hands_on(row, now):
            return False
        row.state, row.held_at = TurnState.HOLDS, now
        self._board.write(row)
        return True

    def _hands_on(self, row: TurnRow, now: float) -> bool:
        """Ask for the next turn, and give the devices to the library whose turn it is. False if this library holds a
        turn and keeps it; a library that asks a moment later waits for one more step."""
        if now > self._swept_at + _SWEEP_S:
            self._swept_at = now
            self._sweep()
        board = self._board
        read = board.snapshot()
        rows = {other.number: other for other in board.rows(read)}
        mine = rows.pop(row.number, None)
        chosen = _next(rows.values(), row)
        if chosen == [row.number] and mine is not None and mine.state is TurnState.HOLDS:
            return False
        row.state = TurnState.WAITS
        with board.lock():
            if board.snapshot() == read:  # nobody has written meanwhile: what was worked out holds
                rows[row.number] = row
                board.write(row)
                self._give(chosen, rows, now)
            else:
                board.write(row)
                chosen = self._hand_on(now)
        self._wake(chosen)
        return True

    def _holds(self) -> bool:
        """True if another library has given the turn to this one."""
        assert self._row is not None
        row = self._board.row(self._row.number)
        if row is None or not row.is_of(self._row):  # somebody took it for dead
            self._join()
            return True
        self._row.state, self._row.held_at = row.state, row.held_at
        return row.state is TurnState.HOLDS

    def _take_lost_turns(self, row: TurnRow) -> None:
        """After a wait without a wake-up: hand lost turns on, and ask again if others took this library for lost."""
        now, rows = time.monotonic(), self._board.rows()
        if row.state is not TurnState.IDLE and not _next(rows) and not any(_is_lost(other, now) for other in rows):
            return
        with self._board.lock():
            if row.state is TurnState.IDLE:
                row.state = TurnState.WAITS
                self._board.write(row)
            for other in self._board.rows():
                if other.number != row.number and _is_lost(other, now):
                    other.state = TurnState.IDLE
                    self._board.write(other)
            next_ones = self._hand_on(now)
        self._wake(next_ones)

    def _sweep(self) -> None:
        gone = [row for row in self._board.rows() if row.number != self._number and _is_gone(row.pid)]
        if gone:
            with self._board.lock():
                for row in gone:
                    self._board.clear(row)

    def _hand_on(self, now: float) -> list[int]:
        """Give free devices to those whose turn it is, under the lock. Returns the rows to wake, without the lock."""
        rows = {row.number: row for row in self._board.rows()}
        chosen = _next(rows.values())
        self._give(chosen, rows, now)
        return chosen

    def _give(self, chosen: Iterable[int], rows: dict[int, TurnRow], now: float) -> None:
        for number in chosen:
            row = rows[number]
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write(row)

    def _wake(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number != self._number and self._waker is not None:
                with contextlib.suppress(OSError):  # it looks by itself a little later
                    self._waker.sendto(b"", socket.MSG_DONTWAIT, _waker_of(self._board, number))

    def _woken(self) -> bool:
        assert self._waker is not None
        try:
            self._waker.recv(1)
        except OSError:
            return False
        return True

    @property
    def _number(self) -> int:
        return self._row.number if self._row is not None else -1


def _next(rows: Iterable[TurnRow], asks: TurnRow | None = None) -> list[int]:
    """Return the rows that get turns: of the waiting ones, and of a row that `asks` in addition."""
    waiting, busy = list[TurnRequest](), set[DeviceId]()
    for row in rows:
        if row.state is TurnState.WAITS:
            waiting.append(_request(row))
        elif row.state is TurnState.HOLDS:
            busy.update(row.devices)
    if asks is not None:
        waiting.append(_request(asks))
    return [int(library) for library in next_turns(waiting, busy)] if waiting else []


def _request(row: TurnRow) -> TurnRequest:
    # The row's number stands for the library, which may have several engines.
    return TurnRequest(LibraryId(row.number), row.devices, row.due_at, row.since)


def _waker_of(board: TurnBoard, number: int) -> str:
    return f"{board.path}.{number}"


def _is_lost(row: TurnRow, now: float) -> bool:
    """True if the row holds a turn and its process is dead or stopped, or takes much longer than it has said."""
    if row.state is not TurnState.HOLDS or now < row.held_at + _LOOK_S:
        return False
    most_s = _OVERDUE_FACTOR * row.step_s + _OVERDUE_S if row.step_s > 0 else _OVERDUE_UNKNOWN_S
    return now > row.held_at + most_s or _process_state(row.pid) in ("", "Z", "X", "T", "t")


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return False
    except (OSError, OverflowError):
        return True
    return False


def _process_state(pid: int) -> str:
    """The letter that Linux gives a process's state (proc(5)); empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]

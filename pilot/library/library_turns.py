"""A library's turns on its devices: it asks before each iteration, and hands the devices on after it.

Who is next is the pilot core's to say (`stoker.pilot.core.device_turns`: the shortest headroom first, SLINFER §VI-A).
The library whose iteration has ended works it out from the board (`turn_board`), writes it there, and wakes the next
one by a datagram; the agent takes no part. A library that shares its devices with nobody makes no system call.

A holder that has died or was stopped, or that takes much longer than it has said, loses its turn: whoever waits looks
at it every few hundredths of a second. It asks again when it goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.manager.protocol.ids import DeviceId, LibraryId
from stoker.pilot.core.device_turns import TurnRequest, next_turns
from stoker.pilot.library.turn_board import TurnBoard, TurnRow, TurnState

log = logging.getLogger(__name__)

_LOOK_S = 0.02
"""A library that waits looks at the holder this often: the next goes on within 0.1 s after a holder is lost."""
_SWEEP_S = 1.0
"""A library that shares its devices looks for libraries that are gone this often."""
_OVERDUE_FACTOR = 2.0
_OVERDUE_S = 0.03
"""A holder that computes longer than this many times its own forecast, and this much longer, has lost its turn."""


_LONGEST_WAIT_S = 60.0
"""Nobody waits longer: a wrong board costs speed and no more."""


class LibraryTurns:
    """The turns of one engine of a library. Used by one thread.

    `board`: a file that all libraries of the pilot map. Raises OSError where it cannot be used.
    """

    def __init__(self, board: Path, library: LibraryId, devices: Sequence[DeviceId]) -> None:
        self._board = TurnBoard(board)
        self._library, self._devices = library, tuple(devices)
        self._row: TurnRow | None = None
        self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waker.setblocking(False)
        self._joined = False
        self._seen, self._shared = -1, False
        self._swept_at = 0.0

    @property
    def shared(self) -> bool:
        """Whether another library on the board has one of its devices too. Looked at when somebody comes or goes."""
        row = self._row
        if row is None:
            return False
        changes = self._board.changes
        if changes != self._seen:
            mine = set(row.devices)
            others = [other for other in self._board.rows() if other.number != row.number]
            self._seen, self._shared = changes, any(not mine.isdisjoint(other.devices) for other in others)
        return self._shared

    def begin(self, *, due_at: float = math.inf, step_s: float = 0.0) -> None:
        """Wait for a turn and hold it. A library that holds one passes it on first if another comes before it.

        `due_at`: when the most urgent token of its requests is due, of `time.monotonic`; `step_s`: how long the
        iteration probably takes, 0 if nobody knows.
        """
        row = self._row if self._joined else self._join()
        if row is None:
            return
        now = time.monotonic()
        row.due_at, row.since, row.step_s = due_at, now, step_s
        if not self.shared:
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write(row)
            return
        row.state = TurnState.WAITS
        with self._board.lock():
            self._board.write(row)
            if now > self._swept_at + _SWEEP_S:
                self._swept_at = now
                self._drop_lost(now)
            self._hand_on(now)
        while not self._holds():
            if time.monotonic() > now + _LONGEST_WAIT_S:
                log.warning("no turn has come in %.0f s; this library computes without one", _LONGEST_WAIT_S)
                return
            if not self._woken():
                self._pass_over_lost(row)

    def end(self) -> None:
        """The library wants no further iteration for now. No-op if it holds no turn."""
        row = self._row
        if row is None or row.state is TurnState.IDLE:
            return
        row.state = TurnState.IDLE
        if not self.shared:
            self._board.write(row)
            return
        with self._board.lock():
            self._board.write(row)
            self._hand_on(time.monotonic())

    def close(self) -> None:
        """Leave the board; the devices go to the next."""
        row, self._row = self._row, None
        if row is not None:
            with self._board.lock():
                self._board.clear(row.number)
                self._hand_on(time.monotonic())
            _waker_of(self._board, row.number).unlink(missing_ok=True)
        self._waker.close()
        self._board.close()

    # ---- the board

    def _join(self) -> TurnRow | None:
        """Come onto the board, at the first turn: a library without an engine never asks for one."""
        self._joined = True
        row = self._row = self._board.join(self._library, self._devices)
        if row is None:
            return None
        path = _waker_of(self._board, row.number)
        waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        waker.setblocking(False)
        self._waker.close()
        self._waker = waker
        try:
            path.unlink(missing_ok=True)  # of an earlier library in this row
            waker.bind(str(path))
        except OSError as error:
            log.warning("this engine computes without turns: %s: %s", path, error)
            with self._board.lock():
                self._board.clear(row.number)
            self._row = None
        return self._row

    def _holds(self) -> bool:
        """Whether somebody has written that this library's turn has come."""
        assert self._row is not None
        row = self._board.row(self._row.number)
        if row is None or row.library != self._row.library:  # somebody took it for dead
            self._join()
            return True
        self._row.state, self._row.held_at = row.state, row.held_at
        return row.state is TurnState.HOLDS

    def _pass_over_lost(self, row: TurnRow) -> None:
        """See whether a holder is lost, and ask anew if others took this library for lost."""
        with self._board.lock():
            now = time.monotonic()
            if row.state is TurnState.IDLE:
                row.state = TurnState.WAITS
                self._board.write(row)
            self._drop_lost(now)
            self._hand_on(now)

    def _hand_on(self, now: float) -> None:
        """Give free devices to those whose turn it is, under the lock."""
        rows = {row.number: row for row in self._board.rows()}
        waiting = [
            TurnRequest(LibraryId(row.number), row.devices, row.due_at, row.since)  # a library may have several engines
            for row in rows.values()
            if row.state is TurnState.WAITS
        ]
        busy = {device for row in rows.values() if row.state is TurnState.HOLDS for device in row.devices}
        for number in next_turns(waiting, busy):
            row = rows[number]
            row.state, row.held_at = TurnState.HOLDS, now
            self._board.write(row)
            if self._row is None or row.number != self._row.number:
                self._wake(row)

    def _drop_lost(self, now: float) -> None:
        """Take the turn from holders that are lost, and their rows from libraries that are dead, under the lock."""
        for row in self._board.rows():
            if self._row is not None and row.number == self._row.number:
                continue
            life = _process_state(row.pid)
            if life in ("", "Z", "X"):
                self._board.clear(row.number)
            elif _is_overdue(row, now) or (life in ("T", "t") and row.state is not TurnState.IDLE):
                row.state = TurnState.IDLE
                self._board.write(row)

    def _wake(self, row: TurnRow) -> None:
        with contextlib.suppress(OSError):  # it looks by itself a little later
            self._waker.sendto(b"", str(_waker_of(self._board, row.number)))

    def _woken(self) -> bool:
        """Wait for a datagram; False if none comes in time."""
        ready, _, _ = select.select([self._waker], [], [], _LOOK_S)
        if ready:
            with contextlib.suppress(OSError):
                self._waker.recv(1)
        return bool(ready)


def _waker_of(board: TurnBoard, number: int) -> Path:
    return board.path.with_name(f"{board.path.name}.{number}")


def _is_overdue(row: TurnRow, now: float) -> bool:
    if row.state is not TurnState.HOLDS or not row.step_s:
        return False
    return now > row.held_at + _OVERDUE_FACTOR * row.step_s + _OVERDUE_S


def _process_state(pid: int) -> str:
    """The letter that Linux gives a process's state (proc(5)); empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]

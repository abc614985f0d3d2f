"""The manager's clock: seconds since the epoch when the session started, and from then on what really passes.

Times in the journal and in stories are to mean the same after a restart, so they count from the epoch. But a wall clock
is set forward and back while a session lasts, and an hour that nobody lived through must not make every pilot silent
for an hour, stop every timer for one, nor drop every call that waits with a deadline. So the wall clock is read once.

A manager that is started again goes on with the clock of the one before: a small file says how far that clock was ahead
of the kernel's monotonic one. On another machine, or after a boot, the manager reads the wall clock again.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from stoker import locks
from stoker.decoding import UNREADABLE


class _Kept(msgspec.Struct, frozen=True):
    """What a manager leaves to the next one. `monotonic` names the monotonic clock that `ahead_s` counts from."""

    monotonic: str
    ahead_s: float


class Clock:
    """`not_before`: the last time that the journal knows; a clock never starts before it. `file`: where the clock is
    kept for the next manager."""

    def __init__(self, *, not_before: float = 0.0, file: Path | None = None) -> None:
        ahead_s = _read(file) if file is not None else None
        if ahead_s is None or ahead_s + time.monotonic() < not_before:
            ahead_s = max(time.time(), not_before) - time.monotonic()
        self._ahead_s = ahead_s
        if file is not None:
            _write(file, _Kept(_monotonic(), ahead_s))

    def now(self) -> float:
        """Seconds since the epoch; never goes back."""
        return self._ahead_s + time.monotonic()


def _monotonic() -> str:
    """Processes that read the same here have the same monotonic clock."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # an old kernel, which has one for all
        namespace = ""
    return f"{locks.machine()} {namespace}"


def _read(file: Path) -> float | None:
    """How far the clock of the manager before was ahead; None where that says nothing here."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, *UNREADABLE):
        return None
    return kept.ahead_s if kept.monotonic == _monotonic() else None


def _write(file: Path, kept: _Kept) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next manager reads the wall clock
        file.write_bytes(msgspec.json.encode(kept))
        file.chmod(0o600)

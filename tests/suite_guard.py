"""End every process of a run within 5 s after pytest has ended or is interrupted by Ctrl-C, SIGTERM or SIGKILL.

All processes of a run inherit `STOKER_TEST_RUN` from pytest, even in other process groups. This file runs as a separate
process, which reads a pipe that only pytest keeps open. When the pipe closes, the guard sends SIGTERM to every process
of the run, then SIGKILL. After Ctrl-C pytest may tear down fixtures for minutes. So pytest writes a byte, and the guard
ends the processes and finally pytest.

`python -I -S suite_guard.py RUN` uses only the standard library, to start in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

VARIABLE = "STOKER_TEST_RUN"
_TIDY_S = 1.0
"""Seconds from an interrupt to SIGTERM, for fixtures that end their own processes."""
_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
_KILLING_S = 10.0
"""Seconds of repeated SIGKILL, because new processes may start meanwhile."""


class Guard:
    """The guard of this pytest run. `close` ends leftover processes and waits for their end."""

    def __init__(self) -> None:
        run = f"{os.getpid()}-{time.monotonic_ns()}"
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        command = [sys.executable, "-I", "-S", __file__, run]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True)
        os.environ[VARIABLE] = run

    def pytest_keyboard_interrupt(self) -> None:
        """End all processes of the run within 5 s, even if pytest still tears down fixtures."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"i")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def processes(run: str) -> list[int]:
    mark = f"{VARIABLE}={run}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):  # the environment of a zombie is empty
                    found.append(int(entry))
        except OSError:
            continue
    return found


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def end(run: str) -> None:
    _send(processes(run), signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until and processes(run):
        time.sleep(0.1)
    until = time.monotonic() + _KILLING_S
    while time.monotonic() < until and (left := processes(run)):
        _send(left, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    pytest_process = os.getppid()
    interrupted = os.read(0, 4096)
    if interrupted:
        time.sleep(_TIDY_S)
    end(sys.argv[1])
    if interrupted and os.getppid() == pytest_process:
        _send([pytest_process], signal.SIGKILL)

"""What ran, and what it printed last, where a command of Parsl's `bash_app` has failed.

Parsl's own exception names the app and the exit code alone. The command is in a local variable of Parsl's function, and
its output in the file that the call named for standard error, or else in the library's log. Both become attributes of
the exception, with which it travels (`stoker.manager.executor.failures`). A library imports Parsl only if a call
does.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

NAME = "BashExitFailure"
"""Parsl's class of such an exception."""
_LINES = 10
_MOST_BYTES = 16_384
_COMMAND_MOST = 1_000
_RUNS_IT = "remote_side_bash_executor"
_HEAD_ENDS = "--> end executable <--"
"""Parsl writes the command into the file for standard error, up to this line."""


def explain(error: BaseException, *, log: str, log_from: int) -> str:
    """Set `command` and `last_lines` of an exception that Parsl raised for a command. Returns both in short, for
    people; nothing for any other exception. The call's output begins at the byte `log_from` of the library's log."""
    found = _locals(error.__traceback__)
    if found is None or type(error).__name__ != NAME:
        return ""
    stderr = found.get("std_err")
    lines = _tail(str(stderr.name)) if stderr is not None else _tail(log, start=log_from)
    command, last_lines = str(found.get("executable", "")).strip(), "\n".join(lines[-_LINES:])
    error.command, error.last_lines = command, last_lines  # type: ignore[attr-defined]
    return f"{NAME}: {in_words(str(error), command=command, last_lines=last_lines)}"


def in_words(first: str, *, command: str, last_lines: str) -> str:
    """What Parsl says first, then the command and its last lines."""
    if command:
        first += f": {command if len(command) <= _COMMAND_MOST else command[:_COMMAND_MOST] + ' …'}"
    if not last_lines:
        return f"{first}\nit printed nothing"
    return "\n".join([first, "its last lines:", *(f"  {line}" for line in last_lines.splitlines())])


def _locals(trace: TracebackType | None) -> dict[str, Any] | None:
    """The local variables of Parsl's function that ran the command."""
    while trace is not None:
        if trace.tb_frame.f_code.co_name == _RUNS_IT:
            return dict(trace.tb_frame.f_locals)
        trace = trace.tb_next
    return None


def _tail(path: str, *, start: int = 0) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if _HEAD_ENDS in lines:
        lines = lines[lines.index(_HEAD_ENDS) + 1 :]
    return [line for line in lines if line.strip()]

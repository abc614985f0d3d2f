"""What Parsl's `bash_app` raises for a command that failed, with the command and what it printed last.

Parsl's own exception names the app and the exit code alone. The command stands in a local variable of Parsl's function,
and its output in the file that the call named for standard error, or else in the library's log.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from parsl.app import errors

_LINES = 10
_MOST_BYTES = 16_384
_COMMAND_MOST = 1_000
_RUNS_IT = "remote_side_bash_executor"
_HEAD_ENDS = "--> end executable <--"
"""Parsl writes the command into the file for standard error, up to this line."""


class BashExitFailure(errors.BashExitFailure):  # type: ignore[misc]  # parsl is untyped
    """A command of a `bash_app` ended with another exit code than 0.

    `app_name` and `exitcode` are those of Parsl's exception; `command` is what ran, `last_lines` what it printed last.
    """

    def __init__(self, app_name: str, exitcode: int, command: str = "", last_lines: str = "") -> None:
        super().__init__(app_name, exitcode)
        self.args = (app_name, exitcode)
        self.command = command
        self.last_lines = last_lines

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.app_name, self.exitcode, self.command, self.last_lines)

    def __str__(self) -> str:
        first = super().__str__()
        if self.command:
            shown = self.command.strip()
            first += f": {shown if len(shown) <= _COMMAND_MOST else shown[:_COMMAND_MOST] + ' …'}"
        printed = ["its last lines:", *(f"  {line}" for line in self.last_lines.splitlines())]
        return "\n".join([first, *printed]) if self.last_lines else f"{first}\nit printed nothing"


def explained(error: BaseException, *, log: str, log_from: int) -> tuple[BaseException, str]:
    """The exception that Parsl raised for a command, as one that says more, and that in short for people; any other one
    as it is, and nothing. The output of the call begins at the byte `log_from` of the library's log."""
    found = _locals(error.__traceback__)
    if found is None or not isinstance(error, errors.BashExitFailure):
        return error, ""
    stderr = found.get("std_err")
    lines = _tail(str(stderr.name)) if stderr is not None else _tail(log, start=log_from)
    said = BashExitFailure(error.app_name, error.exitcode, str(found.get("executable", "")), "\n".join(lines[-_LINES:]))
    said.__cause__, said.__suppress_context__ = error.__cause__, True
    return said.with_traceback(error.__traceback__), f"BashExitFailure: {said}"


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

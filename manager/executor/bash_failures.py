"""The exception of a `bash_app` whose command failed, with the command and what it printed last."""

from __future__ import annotations

from parsl.app import errors

from stoker.pilot.library.failures import in_words


class BashExitFailure(errors.BashExitFailure):  # type: ignore[misc]  # parsl is untyped
    """A command of a `bash_app` ended with another exit code than 0.

    `app_name` and `exitcode` are those of Parsl's exception; `command` is what ran, `last_lines` what it printed last.
    """

    def __init__(self, app_name: str, exitcode: int, command: str = "", last_lines: str = "") -> None:
        super().__init__(app_name, exitcode)
        self.args = (app_name, exitcode)
        self.command = command
        self.last_lines = last_lines

    def __str__(self) -> str:
        return in_words(super().__str__(), command=self.command, last_lines=self.last_lines)


def with_its_command(error: BaseException) -> BaseException:
    """Parsl's exception for a command as one that says what a library has found out; any other one as it is."""
    facts = vars(error)
    if type(error) is not errors.BashExitFailure or "command" not in facts:
        return error
    app_name, exitcode = facts.get("app_name", ""), facts.get("exitcode", 0)
    more = BashExitFailure(app_name, exitcode, str(facts["command"]), str(facts.get("last_lines", "")))
    more.__cause__ = error.__cause__
    return more

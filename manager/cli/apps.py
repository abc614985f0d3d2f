"""`stoker run APP`: an application is a click command that an installed package declares as an entry point.

Entry points are loaded when they are wanted: the command line starts without importing what an application needs, and
an application that cannot be imported ends in a sentence and disturbs no other.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from pathlib import Path
from typing import Any

import click

from stoker.errors import SessionError, StokerError
from stoker.manager.cli import console, entry_points, programs
from stoker.manager.executor.detached import JOINS, wait_for_begun
from stoker.protocol.session import find_session


class FromEntryPoints(click.Group):
    """A group whose subcommands come from entry points, wholly or in part."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does it; a subcommand that cannot be imported says so in its place."""
        rows: list[tuple[str, str]] = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
            except StokerError as error:
                rows.append((name, str(error).partition("\n")[0]))
                continue
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=formatter.width - 6 - len(name))))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class Apps(FromEntryPoints):
    """One subcommand an application."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        """Every application that is installed."""
        return entry_points.names(entry_points.APPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The application's own command. Raises StokerError when it cannot be imported."""
        if programs.is_program(cmd_name):
            return with_session(_program(Path(cmd_name)))
        name = entry_points.matching(entry_points.APPS, cmd_name)
        return with_session(entry_points.load_command(entry_points.APPS, name)) if name else None

    def invoke(self, ctx: click.Context) -> Any:
        """As click does it; with `--detach` the arguments are checked, and a process of its own runs them."""
        if not ctx.params.get("detach"):
            if ctx.params.get("name"):
                raise click.UsageError("--name names a detached run; write --detach too")
            return super().invoke(ctx)
        first = ctx._protected_args if hasattr(ctx, "_protected_args") else ctx.protected_args  # click before 8.2
        given = [*first, *ctx.args]
        if not given:
            raise click.UsageError("--detach needs a program or an application: stoker run --detach ./my_app.py")
        name, command, arguments = self.resolve_command(ctx, given)
        assert name is not None
        assert command is not None
        session = ctx.params.get("session")
        below = command.make_context(name, arguments, parent=ctx)
        _check_before_detaching(name, session=below.params.get("session") or session)
        detaching = importlib.import_module("stoker.manager.cli.detaching")
        before = ["--session", session] if session else []
        detaching.start([*before, *given], name=ctx.params["name"], what=name)
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest name for one that is not there."""
        names = self.list_commands(ctx)
        if args and programs.is_program(args[0]):
            return super().resolve_command(ctx, args)
        if args and not args[0].startswith("-") and not entry_points.matching(entry_points.APPS, args[0]):
            close = difflib.get_close_matches(args[0], names, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            hint = hint if names else entry_points.RENEW
            hint += "; a program of your own is named by its file: stoker run ./my_app.py"
            if Path(f"{args[0]}.py").is_file():
                hint = f"did you mean ./{args[0]}.py?"
            ctx.fail(f"no application {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


_SESSION = "stoker.manager.cli.apps.session"
_SESSION_HELP = "Join a session that is up (stoker up) instead of starting one."


def with_session(command: click.Command) -> click.Command:
    """An application's command that takes `--session` too: what it loads then is the session that is named."""
    if any(parameter.name == "session" for parameter in command.params) or command.callback is None:
        return command
    inner = command.callback
    command.params.append(click.Option(["--session"], metavar="ID", help=_SESSION_HELP))

    @functools.wraps(inner)
    def call(*args: Any, session: str | None = None, **options: Any) -> Any:
        session = session or click.get_current_context().meta.get(_SESSION)
        if session and options.get("site"):
            raise click.UsageError("--session and --site say different things; give one")
        if session:
            wait_for_begun(session)
            if over := find_session(session).over():  # one line here, and a traceback of the program later
                raise SessionError(f"session {session} is over: {over}; `stoker sessions` lists all sessions")
            os.environ[JOINS] = session
        return inner(*args, **options)

    command.callback = call
    return command


def _program(path: Path) -> click.Command:
    """A command that runs a file, with whatever arguments it is given."""

    @click.command(
        str(path), add_help_option=False, context_settings={"ignore_unknown_options": True}, help=f"Run {path}."
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def program(*, arguments: tuple[str, ...]) -> None:
        if "--detach" in arguments:
            console.note(f"--detach is given to {path}; to detach it write stoker run --detach {path}")
        programs.run_program(path, arguments)

    return program


def _check_before_detaching(name: str, *, session: str | None) -> None:
    """Raise for what the detached process would fail with at once: a program that cannot be read, a session that is not
    there."""
    if programs.is_program(name):
        programs.read_program(Path(name))
    if session:
        find_session(session)


@click.group(cls=Apps, short_help="Run an application, or a program of your own.")
@click.option("--session", metavar="ID", help=_SESSION_HELP)
@click.option("--detach", is_flag=True, help="Run it in a process that goes on when you log out.")
@click.option("--name", metavar="NAME", default="", help="What a detached run is called. [the program's name-NUMBER]")
@click.pass_context
def run(context: click.Context, /, *, session: str | None, detach: bool, name: str) -> None:
    """Run an application (stoker run APP --help says what it takes), or a program of your own: stoker run ./my_app.py.

    With --session ID it joins a session that is up, as long as it names no site itself.

    With --detach, before the application or program, it goes on when the terminal is closed. stoker attach NAME follows
    it to its end, stoker down NAME stops it, and stoker sessions lists all with their exit status.
    """
    del detach, name  # `Apps.invoke` has acted on them
    context.meta[_SESSION] = session

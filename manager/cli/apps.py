"""`stoker run APP`: applications are the subpackages of `stoker.apps` with a module `cli` that has a `command`.

They stand above this package, so they are looked up by name when they are wanted: the command line starts without
importing what an application needs.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import pkgutil
from pathlib import Path
from typing import Any

import click

from stoker.errors import StokerError
from stoker.manager.cli import programs
from stoker.manager.executor.detached import JOINS


class Apps(click.Group):
    """One subcommand an application."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        """Every application that is installed."""
        apps = importlib.import_module("stoker.apps")
        found = (module.name for module in pkgutil.iter_modules(apps.__path__) if module.ispkg)
        return sorted(name for name in found if importlib.util.find_spec(f"stoker.apps.{name}.cli"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The application's own command. Raises StokerError when something that it imports is not installed."""
        if programs.is_program(cmd_name):
            return with_session(_program(Path(cmd_name)))
        name = cmd_name.replace("-", "_")
        if name not in self.list_commands(ctx):
            return None
        try:
            command: click.Command = importlib.import_module(f"stoker.apps.{name}.cli").command
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("stoker"):
                raise
            raise StokerError(
                f'{name} needs the module {error.name}, which is not installed: pip install "stoker[models]"'
            ) from error
        return with_session(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest name for one that is not there."""
        names = self.list_commands(ctx)
        if args and programs.is_program(args[0]):
            return super().resolve_command(ctx, args)
        if args and not args[0].startswith("-") and args[0].replace("-", "_") not in names:
            close = difflib.get_close_matches(args[0], names, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            hint += "; a program of your own is named by its file: stoker run ./my_app.py"
            ctx.fail(f"no application {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def with_session(command: click.Command) -> click.Command:
    """An application's command that takes `--session` too: what it loads then is the session that is named."""
    if any(parameter.name == "session" for parameter in command.params) or command.callback is None:
        return command
    inner = command.callback
    about = "Join a session that is up (stoker up) instead of starting one."
    command.params.append(click.Option(["--session"], metavar="ID", help=about))

    @functools.wraps(inner)
    def call(*args: Any, session: str | None = None, **options: Any) -> Any:
        if session and options.get("site"):
            raise click.UsageError("--session and --site say different things; give one")
        if session:
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
        programs.run_program(path, arguments)

    return program


@click.group(cls=Apps, short_help="Run an application, or a program of your own.")
def run() -> None:
    """Run an application (stoker run APP --help says what it takes), or a program of your own: stoker run ./my_app.py.

    With --session ID it joins a session that is up, as long as it names no site itself.
    """

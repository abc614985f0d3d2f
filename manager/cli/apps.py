"""`stoker run`: run an application, or a user's program.

Installed packages extend the command line with these entry points, which Stoker imports on demand:

    stoker.apps         NAME = module:command     a click command: `stoker run NAME`
    stoker.commands     NAME = module:command     a click command or group: `stoker NAME`
    stoker.forecasts    NAME = module:WORK        a `stoker.planning.Work`: `stoker plan SITE NAME`

Stoker also reads the checkout's setup.cfg, because an editable install does not update its entry points. If a program
defines a click command `command` and has no `if __name__ == "__main__"`, `stoker run ./my_app.py` passes its arguments
to the command.
"""

from __future__ import annotations

import configparser
import functools
import os
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stoker
from stoker.config_errors import suggest_similar_name
from stoker.errors import ConfigError, SessionError, StokerError
from stoker.manager.cli import console, runs
from stoker.manager.executor.detached import SESSION_VARIABLE, wait_for_starting_sessions
from stoker.protocol.session import find_session

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# ---- entry points


APPS, COMMANDS, FORECASTS = "stoker.apps", "stoker.commands", "stoker.forecasts"
REINSTALL_HINT = (
    "the list of entry points in this environment is older than Stoker's code: install Stoker again"
    " (in a checkout: make install, or pip install -e .)"
)
CHECKOUT_SETUP_FILE = Path(stoker.__file__).parents[2] / "setup.cfg"


def list_entry_point_names(group: str) -> list[str]:
    return sorted({point.name for point in _entry_points(group)})


def find_entry_point_name(group: str, name: str) -> str:
    return next(
        (each for each in list_entry_point_names(group) if each.replace("-", "_") == name.replace("-", "_")), ""
    )


def load_entry_point(group: str, name: str) -> Any:
    """Load a known entry point. Raises StokerError if the entry point is broken or declared twice."""
    points = {point.value: point for point in _entry_points(group) if point.name == name}
    owners = {value: point.dist.name if point.dist else value.partition(".")[0] for value, point in points.items()}
    if len(points) > 1:
        by = " and ".join(sorted(f"{owner} ({value})" for value, owner in owners.items()))
        raise StokerError(f"{name} is declared twice in {group}, by {by}; uninstall one of them")
    [(value, point)] = points.items()
    try:
        return point.load()
    except Exception as error:  # the imported package may raise any error
        missing = (error.name or str(error)) if isinstance(error, ModuleNotFoundError) else ""
        if missing and point.module != missing and not point.module.startswith(f"{missing}."):
            extra = ': pip install "stoker[models]"' if owners[value] == "stoker" else ""
            raise StokerError(f"{name} needs the module {missing}, which is not installed{extra}") from error
        what = f"{name} cannot be imported ({value}, of the package {owners[value]})"
        raise StokerError(f"{what}: {type(error).__name__}: {error}") from error


def load_command(group: str, name: str) -> click.Command:
    command = load_entry_point(group, name)
    if not isinstance(command, click.Command):
        fix = "put @click.command() above the function"
        raise StokerError(f"{name} in {group} is of type {type(command).__name__}, and must be a click command: {fix}")
    return command


def _entry_points(group: str) -> Iterable[EntryPoint]:
    from importlib.metadata import EntryPoint, entry_points  # this import takes a fifth of a command's start-up time

    found = entry_points(group=group)
    declared = configparser.ConfigParser()
    declared.read(CHECKOUT_SETUP_FILE)
    lines = declared.get("options.entry_points", group, fallback="").split("\n")
    pairs = [line.split("=", 1) for line in lines if "=" in line]
    own = [EntryPoint(name.strip(), value.strip(), group) for name, value in pairs]
    there = {(point.name, point.value) for point in found}
    return [*found, *(point for point in own if (point.name, point.value) not in there)]


# ---- programs of the user


def read_program(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be run: {error.strerror}", file=str(path)) from None


def run_program(path: Path, arguments: Sequence[str]) -> None:
    source = read_program(path)
    module = types.ModuleType("__main__")
    module.__file__ = str(path.absolute())
    sys.modules["__main__"] = module
    sys.path.insert(0, str(path.absolute().parent))
    sys.argv = [str(path), *arguments]
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:  # print the traceback without the frames of `stoker run`
        frames = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames.tb_next if frames is not None else None), None)
        raise SystemExit(1) from None
    command = vars(module).get("command")
    if isinstance(command, click.Command) and b"__main__" not in source:
        command.main(list(arguments), prog_name=f"stoker run {path}", standalone_mode=False)


# ---- stoker run


class EntryPointGroup(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(self.explain_unknown(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def explain_unknown(self, name: str, known: list[str]) -> str:
        hint = suggest_similar_name(name, known, cutoff=0.4, otherwise="stoker --help lists them")
        return f"no command {name!r}; {hint}"


class ApplicationGroup(EntryPointGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list_entry_point_names(APPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name.endswith(".py"):
            return add_session_option(_program_command(Path(cmd_name)))
        name = find_entry_point_name(APPS, cmd_name)
        return add_session_option(load_command(APPS, name)) if name else None

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.params.get("detach"):
            if ctx.params.get("name"):
                raise click.UsageError("--name names a detached run; write --detach too")
            return super().invoke(ctx)
        first = ctx._protected_args if hasattr(ctx, "_protected_args") else ctx.protected_args  # for click < 8.2
        given = [*first, *ctx.args]
        if not given:
            raise click.UsageError("--detach needs a program or an application: stoker run --detach ./my_app.py")
        name, command, arguments = self.resolve_command(ctx, given)
        assert name is not None
        assert command is not None
        session = ctx.params.get("session")
        below = command.make_context(name, arguments, parent=ctx)
        if name.endswith(".py"):  # raise early errors here, not in the detached process
            read_program(Path(name))
        if joined := below.params.get("session") or session:
            find_session(joined)
        before = ["--session", session] if session else []
        runs.start_run([*before, *given], name=ctx.params["name"], what=name)
        return None

    def explain_unknown(self, name: str, known: list[str]) -> str:
        hint = suggest_similar_name(name, known, cutoff=0.4) if known else REINSTALL_HINT
        hint += "; name your own program by its file: stoker run ./my_app.py"
        if Path(f"{name}.py").is_file():
            hint = f"did you mean ./{name}.py?"
        return f"no application {name!r}; {hint}"


_SESSION = "stoker.manager.cli.apps.session"
_SESSION_HELP = "Join a running session (stoker up) instead of starting a session."


def add_session_option(command: click.Command) -> click.Command:
    if any(parameter.name == "session" for parameter in command.params) or command.callback is None:
        return command
    inner = command.callback
    command.params.append(click.Option(["--session"], metavar="ID", help=_SESSION_HELP))

    @functools.wraps(inner)
    def call(*args: Any, session: str | None = None, **options: Any) -> Any:
        session = session or click.get_current_context().meta.get(_SESSION)
        if session and options.get("site"):
            raise click.UsageError("--session and --site exclude each other; give one")
        if session:
            wait_for_starting_sessions(session)
            if over := find_session(session).end_reason():  # fail here, so that the program prints no traceback
                raise SessionError(f"session {session} is over: {over}; `stoker sessions` lists all sessions")
            os.environ[SESSION_VARIABLE] = session
        return inner(*args, **options)

    command.callback = call
    return command


def _program_command(path: Path) -> click.Command:
    @click.command(
        str(path), add_help_option=False, context_settings={"ignore_unknown_options": True}, help=f"Run {path}."
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def program(*, arguments: tuple[str, ...]) -> None:
        if "--detach" in arguments:
            console.note(f"--detach is passed to {path}; to detach the program write stoker run --detach {path}")
        run_program(path, arguments)

    return program


@click.group(cls=ApplicationGroup, short_help="Run an application, or a program of your own.")
@click.option("--session", metavar="ID", help=_SESSION_HELP)
@click.option("--detach", is_flag=True, help="Run the program in a process that continues after you log out.")
@click.option("--name", metavar="NAME", default="", help="Name of a detached run. [the program's name-NUMBER]")
@click.pass_context
def run(context: click.Context, /, *, session: str | None, detach: bool, name: str) -> None:
    """Run an application (stoker run APP --help shows its options), or your own program: stoker run ./my_app.py.

    With --session ID, the program joins a running session, unless the program names a site.

    With --detach before the program's name, the program continues after the terminal closes. stoker attach NAME follows
    the run, stoker down NAME stops the run, and stoker sessions lists all runs with their exit status.
    """
    del detach, name  # `ApplicationGroup.invoke` uses these options
    context.meta[_SESSION] = session

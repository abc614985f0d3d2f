"""Command-line options that all runs share, and texts that suggest the next commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import msgspec

from stoker.errors import ConfigError
from stoker.run_folder import read_options

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options", bound=msgspec.Struct)
WIDE = {"max_content_width": 120}
_FOLDER = click.Path(path_type=Path)


def add_run_options(*, prefix: str, formats: Sequence[str]) -> Callable[[Function], Function]:
    """Add the options of a run to a command. `prefix`: start of the run folder's name. The first of `formats` is the
    default.
    """
    options = [
        click.option("--site", metavar="FILE", help="Where to run: a site file. [this machine]"),
        click.option("--out", metavar="DIR", type=_FOLDER, help=f"The run folder. [runs/{prefix}-DATE-TIME]"),
        click.option("--resume", metavar="DIR", type=_FOLDER, help="Continue this run, with its options."),
        click.option(
            "--fresh", is_flag=True, help="Start a new run, even if an unfinished run with the same options exists."
        ),
        click.option("--format", type=click.Choice(formats), help=f"Format of the results file. [{formats[0]}]"),
        click.option(
            "--json", "json_", is_flag=True, help="The summary as JSON on stdout; everything else goes to stderr."
        ),
    ]

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def add_site_and_session_options(function: Function) -> Function:
    """Add --site and --session to a command. A user may give only one of these options."""

    @click.option("--site", metavar="FILE", default="", help="Where to run: a site file. [this machine]")
    @click.option("--session", metavar="ID", default="", help="Join a session that is up (stoker up) instead.")
    @functools.wraps(function)
    def call(*args: Any, site: str, session: str, **options: Any) -> Any:
        if site and session:
            raise click.UsageError("--session and --site exclude each other; give one")
        return function(*args, site=site, session=session, **options)

    return cast(Function, call)


def refuse_options_with_resume(resume: Path | None, **others: Any) -> None:
    """Raise UsageError if `--resume` is combined with one of these options."""
    if resume and any(others.values()):
        *names, last = (name if name.isupper() else f"--{name}" for name in others)
        raise click.UsageError(f"--resume names the run to continue; leave {', '.join(names)} and {last} out")


def drop_unset_options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def resolve(
    kind: type[Options], given: Mapping[str, Any], *, app: str, resume: Path | None, files: Sequence[str]
) -> Options:
    """Combine defaults, the options of the resumed run, and the given options. Later options override earlier options.

    The paths of `files` become absolute, so that a run can be resumed from another folder. An existing `model` path
    becomes absolute too; otherwise `model` is a name on the model hub. Raises ConfigError for unreadable stored
    options.
    """
    here = dict(given)
    for name in (*files, "site", "model"):
        if here.get(name) and (name != "model" or Path(here[name]).exists()):
            here[name] = str(Path(here[name]).absolute())
    try:
        return msgspec.convert({**(read_options(resume, app=app) if resume else {}), **here}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the run's options cannot be read: {error}") from None


def command(app: str, arguments: str, *, through_make: bool = False) -> str:
    if through_make and "MAKELEVEL" in os.environ:
        escaped = arguments.replace("$", "$$").replace('"', '\\"')
        return f'make run ARGS="{escaped}"'
    return f"stoker run {app} {arguments}"


def columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of the `next:` block, which suggests commands. `lines`: pairs of a command and its effect."""
    wide = max((len(line) for line, _ in lines), default=0)
    return [
        f"  {'next: ' if number == 0 else '      '}{line:{wide}}   {why}" for number, (line, why) in enumerate(lines)
    ]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_estimated_wait(seconds: float) -> str:
    if seconds < 55:
        return "a minute"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{round(seconds / 3600)} h"

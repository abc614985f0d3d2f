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
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class RunChoice(msgspec.Struct, frozen=True):
    """The run folder (`out` for a new run, `resume` for an earlier run), and the format of the report."""

    out: Path | None = None
    resume: Path | None = None
    fresh: bool = False
    json: bool = False


def add_run_options(*, prefix: str, formats: Sequence[str]) -> Callable[[Function], Function]:
    """Add the options that all runs share. The command receives a RunChoice (`choice`) and the options that are set."""
    options = [
        click.option("--site", metavar="FILE", help="Where to run: a site file. [this machine]"),
        click.option("--out", metavar="DIR", type=_FOLDER, help=f"The run folder. [runs/{prefix}-DATE-TIME]"),
        click.option("--resume", metavar="DIR", type=_FOLDER, help="Continue this run, with its options."),
        click.option(
            "--fresh", is_flag=True, help="Start a new run, even if an unfinished run with the same options exists."
        ),
        click.option("--format", type=click.Choice(formats), help=f"Format of the results file. [{formats[0]}]"),
        click.option(
            "--json", "json_", is_flag=True, help="Print the summary as JSON on stdout and all other output on stderr."
        ),
    ]

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call_with_choice(
            *args: Any, out: Path | None, resume: Path | None, fresh: bool, json_: bool, **given: Any
        ) -> Any:
            if resume and (out or fresh):
                raise click.UsageError("--resume names the run to continue; leave --out and --fresh out")
            return function(*args, choice=RunChoice(out, resume, fresh, json_), **drop_unset_options(given))

        return cast(Function, functools.reduce(lambda made, option: option(made), reversed(options), call_with_choice))

    return decorate


def add_dtype_option(context: str, **more: Any) -> Callable[[Function], Function]:
    help = f"The dtype, as in {context}(dtype=...). [auto]"
    return click.option("--dtype", type=click.Choice(_DTYPES), help=help, **more)


def add_site_and_session_options(function: Function) -> Function:
    """Add the options `--site` and `--session`, which exclude each other."""

    @click.option("--site", metavar="FILE", default="", help="Where to run: a site file. [this machine]")
    @click.option("--session", metavar="ID", default="", help="Join this running session (see stoker up).")
    @functools.wraps(function)
    def call_with_site_and_session(*args: Any, site: str, session: str, **options: Any) -> Any:
        if site and session:
            raise click.UsageError("--session and --site exclude each other; give one")
        return function(*args, site=site, session=session, **options)

    return cast(Function, call_with_site_and_session)


def drop_unset_options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def resolve_options(
    kind: type[Options], given: Mapping[str, Any], *, app: str, resume: Path | None, files: Sequence[str]
) -> Options:
    """Combine defaults, the options of the resumed run, and the given options. Later values win.

    Paths become absolute, so that a run can be resumed from another folder.
    """
    here = dict(given)
    for name in (*files, "site", "model"):
        if here.get(name) and (name != "model" or Path(here[name]).exists()):
            here[name] = str(Path(here[name]).absolute())
    try:
        return msgspec.convert({**(read_options(resume, app=app) if resume else {}), **here}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the run's options cannot be read: {error}") from None


def format_command(app: str, arguments: str, *, through_make: bool = False) -> str:
    if through_make and "MAKELEVEL" in os.environ:
        escaped = arguments.replace("$", "$$").replace('"', '\\"')
        return f'make run ARGS="{escaped}"'
    return f"stoker run {app} {arguments}"


def align_next_steps(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return the aligned lines of the `next:` block. `lines`: pairs of a command and its effect."""
    wide = max((len(line) for line, _ in lines), default=0)
    return [
        f"  {'next: ' if number == 0 else '      '}{line:{wide}}   {why}" for number, (line, why) in enumerate(lines)
    ]


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_estimated_wait(seconds: float) -> str:
    if seconds < 55:
        return "a minute"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{round(seconds / 3600)} h"

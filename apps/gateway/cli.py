"""The options of `stoker serve` and of its subcommands."""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from stoker.apps.gateway.keys import KeyFile, KeyLimits, KeyRecord
from stoker.apps.gateway.usage import (
    COLUMNS,
    COUNTS,
    DEFAULT_BY,
    DEFAULT_SINCE,
    UsageFile,
    UsageQuery,
    UsageRow,
    parse_first_day,
)
from stoker.console import ByteSize, WholeNumber, line, lines, note
from stoker.console import json as print_json
from stoker.errors import StokerError

DEFAULT_BODY_LIMIT_BYTES = 32_000_000
_MOST_WORKERS = 256
_MISSING_PACKAGE_ERROR = "{} needs {}, which is not installed: pip install 'stoker[serve]'"


class ServeGroup(click.Group):
    """The command group `serve`. If the first word is not a subcommand, for example `keys`, it runs `serve` itself."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_RUN_COMMAND, *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or serve_models

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return "" if found is serve_models else name, found, rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] [SITE] MODELS")
        for words in ("keys add|set|list|remove ...", "groups set|list|remove ...", "usage ..."):
            formatter.write_usage(ctx.command_path, words, prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        serve_models.format_options(click.Context(serve_models, parent=ctx), formatter)


_RUN_COMMAND = "run"


@click.group("serve", cls=ServeGroup, short_help="Serve models at one OpenAI-compatible address.", no_args_is_help=True)
def command() -> None:
    """Serve the models in MODELS (a TOML file, see docs/serve.md) at one OpenAI-compatible address. A session on SITE
    (a site file; default: this machine) runs the models.

    The gateway joins the session of `stoker up SITE`, or starts a session. The session keeps running when the gateway
    ends. A restarted gateway has the same address and finds its models loaded.

    Without keys, the gateway serves all users of this machine and no other machine.
    """


@click.command(_RUN_COMMAND, context_settings={"max_content_width": 120})
@click.argument("files", nargs=-1, required=True, metavar="[SITE] MODELS")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The interface to listen on.")
@click.option(
    "--port", metavar="N", type=WholeNumber(most=65535), help="The port. [the last port, or a free port from 8000]"
)
@click.option("--uds", metavar="PATH", default="", help="Listen on this Unix socket, not on a port.")
@click.option("--tls-cert", metavar="FILE", default="", help="Serve HTTPS with this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", default="", help="The certificate's key (PEM).")
@click.option("--session", metavar="ID", default="", help="The session to join (stoker up).")
@click.option(
    "--origin", "origins", metavar="URL", multiple=True,
    help="An origin whose web pages may send requests with a key; may be given several times. [all origins]",
)  # fmt: skip
@click.option("--max-body", metavar="SIZE", type=ByteSize(), help="Limit of a request's body, for example 8MB. [32MB]")
@click.option(
    "--workers", metavar="N", type=WholeNumber(most=_MOST_WORKERS), default=1, show_default=True,
    help="Number of processes that answer requests.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON document, for programs.")
@click.pass_context
def serve_models(
    context: click.Context, /, *, files: tuple[str, ...], host: str, port: int | None, uds: str, tls_cert: str,
    tls_key: str, session: str, origins: tuple[str, ...], max_body: int | None, workers: int, as_json: bool,
) -> None:  # fmt: skip
    """Serve the models until Ctrl-C."""
    if len(files) > 2:
        raise click.UsageError(f"give one site file and one models file; there are {len(files)} files")
    if uds and (port or host != "127.0.0.1"):
        raise click.UsageError("--uds listens on a Unix socket, not on a port: leave out --host and --port")
    site = files[0] if len(files) == 2 else ""
    if site and session:
        raise click.UsageError("--session joins a session that already has sites: leave out SITE")
    for origin in origins:
        if not re.fullmatch(r"https?://[^/?#\s]+", origin):
            raise click.UsageError(f"--origin {origin}: write a scheme and a host, as in https://lab.example")
    if workers > 1 and workers > (cores := len(os.sched_getaffinity(0))):
        note(f"warning: --workers {workers}: only {cores} cores are available; more workers answer no faster")
    with report_missing_serve_extra("stoker serve"):
        from stoker.apps.gateway.run import run_gateway  # imported here, because the import of Parsl would slow --help
    code = run_gateway(
        Path(files[-1]), site=site, host=host, port=port or 0, uds=uds, tls_cert=tls_cert, tls_key=tls_key,
        session=session, origins=origins, most_bytes=max_body or DEFAULT_BODY_LIMIT_BYTES,
        number=workers, as_json=as_json,
    )  # fmt: skip
    context.exit(code)


@contextmanager
def report_missing_serve_extra(command: str) -> Iterator[None]:
    """Raise StokerError if an import in the block fails because a package of the extra `serve` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise StokerError(_MISSING_PACKAGE_ERROR.format(command, error.name)) from error


@command.group("keys", short_help="Manage the keys of clients.")
def manage_keys() -> None:
    """Keys of clients. Only digests are kept, so a key is shown once. A running gateway uses changes immediately."""


def _add_limit_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that limit a key or a group. The command receives their values as the argument `limits`."""

    @click.option("--requests-per-minute", metavar="N", type=WholeNumber(), help="At most N requests per minute.")
    @click.option(
        "--tokens-per-minute", metavar="N", type=WholeNumber(), help="At most N tokens per minute, read or written."
    )
    @click.option("--concurrent", metavar="N", type=WholeNumber(), help="At most N requests at a time.")
    @functools.wraps(function)
    def call_with_limits(**given: Any) -> None:
        function(limits=KeyLimits(*(given.pop(name) or 0 for name in KeyLimits.__struct_fields__)), **given)

    return call_with_limits


def _add_key_options(function: Callable[..., None]) -> Callable[..., None]:
    admin = click.option("--admin", is_flag=True, help="Let the key see the usage of all keys at /v1/usage.")
    group = click.option(
        "--group", metavar="GROUP", default="", help="Share the limits of this group (stoker serve groups set)."
    )
    return _add_limit_options(group(admin(function)))


@manage_keys.command("add")
@click.argument("name")
@_add_key_options
def add_key(*, name: str, limits: KeyLimits, group: str, admin: bool) -> None:
    """Make a key for NAME, and show it."""
    file = KeyFile.at_default_path()
    first = not file.exists
    key = file.add_key(name, limits, group=group, admin=admin)
    line(key)
    note(f"the key of {name}: clients send it as `Authorization: Bearer KEY`; it is shown only now")
    if first:
        note("this is the first key: from now on your gateways require a key")


@manage_keys.command("set")
@click.argument("name")
@_add_key_options
def set_key(*, name: str, limits: KeyLimits, group: str, admin: bool) -> None:
    """Replace the limits, the group and the rights of NAME's key. Values that are not given are removed."""
    changed = KeyFile.at_default_path().change_key(name, limits, group=group, admin=admin)
    line(f"the key of {name}: {_describe_key(changed)}")


@manage_keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def list_keys(*, as_json: bool) -> None:
    """List the keys and their limits."""
    file = KeyFile.at_default_path()
    records = file.read_current().keys.values()
    if as_json:
        names = ("name", "created", "limits", "group", "admin")
        shown = [{name: getattr(each, name) for name in names} for each in records]
        print_json({"file": str(file.path), "wanted": file.exists, "keys": shown})
    elif not records:
        none = "there are no keys, so every request is refused"
        if not file.exists:
            none = "no key is required: everybody on this machine may send requests"
        line(f"{none}; stoker serve keys add NAME creates a key")
    for each in () if as_json else records:
        day = time.strftime("%Y-%m-%d", time.localtime(each.created))
        line(f"  {each.name:<20}  {day}  {_describe_key(each)}")


@manage_keys.command("remove")
@click.argument("name")
def remove_key(*, name: str) -> None:
    """Remove the key of NAME. The gateway refuses the key from now on."""
    file = KeyFile.at_default_path()
    file.remove_key(name)
    line(f"the key of {name} is removed")
    if not file.read_current().keys:
        note(f"no key is left, so every request is refused; to serve without keys, remove {file.path}")


@command.group("groups", short_help="Manage groups of keys that share limits.")
def manage_groups() -> None:
    """Groups of keys (stoker serve keys add NAME --group GROUP). The keys of a group share the group's limits, in
    addition to their own limits. A running gateway uses changes immediately.
    """


@manage_groups.command("set")
@click.argument("name")
@_add_limit_options
def set_group(*, name: str, limits: KeyLimits) -> None:
    """Make the group NAME, or replace its limits: a limit that is not given is removed."""
    file = KeyFile.at_default_path()
    first = not file.exists
    file.set_group(name, limits)
    line(f"the group {name}: {_format_limits(limits)}")
    if first:
        note("from now on your gateways require a key: stoker serve keys add NAME creates a key")


@manage_groups.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def list_groups(*, as_json: bool) -> None:
    """List the groups, their limits and their keys."""
    file = KeyFile.at_default_path()
    kept = file.read_current()
    keys_of = {name: [key.name for key in kept.keys.values() if key.group == name] for name in kept.groups}
    if as_json:
        shown = [{"name": name, "limits": each, "keys": keys_of[name]} for name, each in kept.groups.items()]
        print_json({"file": str(file.path), "groups": shown})
    elif not kept.groups:
        line("there are no groups; stoker serve groups set NAME makes a group")
    for name, each in () if as_json else kept.groups.items():
        line(f"  {name:<20}  {_format_limits(each)}; keys: {', '.join(keys_of[name]) or 'none'}")


@manage_groups.command("remove")
@click.argument("name")
def remove_group(*, name: str) -> None:
    """Remove the group NAME. The group must have no keys."""
    KeyFile.at_default_path().remove_group(name)
    line(f"the group {name} is removed")


_COUNT_HEADINGS = ("requests", "tokens read", "written", "refused", "failed")


def _parse_since_option(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return parse_first_day(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@command.command("usage", short_help="Requests and tokens per key.")
@click.option("--key", metavar="NAME", default="", help="Only this key; - selects clients without a key.")
@click.option("--model", metavar="NAME", default="", help="Only this model.")
@click.option(
    "--since", metavar="TIME", callback=_parse_since_option, default=DEFAULT_SINCE, show_default=True,
    help="The first day: a number of days (30d), or a date.",
)  # fmt: skip
@click.option(
    "--by", multiple=True, type=click.Choice(COLUMNS), default=DEFAULT_BY, show_default=True,
    help="A column of the table; may be given several times.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values.")
def show_usage(*, key: str, model: str, since: str, by: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """Show the requests and tokens of your gateways. Counts are kept for 400 days. No gateway needs to run.

    Refused requests exceeded a limit of the key, or would have been answered too late. Failed requests got another
    error.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other; give one")
    file, by = UsageFile.at_default_path(), tuple(dict.fromkeys(by))
    try:
        rows = file.read_report(UsageQuery(since, key, model, by))
    except (OSError, sqlite3.Error) as error:
        raise StokerError(f"{file.path}: cannot be read: {error}; try again, or move the file away") from error
    if as_json:
        print_json({"file": str(file.path), "since": since, "usage": rows})
    elif as_csv:
        lines(_format_usage_csv(rows, by))
    elif rows:
        lines(_format_usage_table(rows, by))
    else:
        line(f"no requests since {since}")


def _format_usage_csv(rows: Sequence[UsageRow], by: Sequence[str]) -> list[str]:
    written = io.StringIO()
    table = csv.DictWriter(written, [*by, *COUNTS], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue().splitlines()


def _format_usage_table(rows: Sequence[UsageRow], by: Sequence[str]) -> Iterator[str]:
    sums = [sum(row[name] for row in rows) for name in COUNTS]
    blanks = [""] * (len(by) - 1)
    cells = [[*by, *_COUNT_HEADINGS], *([*row.values()] for row in rows), ["all", *blanks, *sums]]
    texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in cells]
    wide = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (f"{cell:{'<' if place < len(by) else '>'}{wide[place]}}" for place, cell in enumerate(row))
        yield "  " + "  ".join(padded)


def _describe_key(key: KeyRecord) -> str:
    group = f"; in the group {key.group}" if key.group else ""
    return f"{_format_limits(key.limits)}{group}{'; sees all usage' if key.admin else ''}"


def _format_limits(limits: KeyLimits) -> str:
    whats = ("requests a minute", "tokens a minute", "at a time")
    said = [f"{most:,} {what}" for most, what in zip(msgspec.structs.astuple(limits), whats, strict=True) if most]
    return ", ".join(said) or "no limits"

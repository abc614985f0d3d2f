"""`stoker serve` and `stoker serve keys`: their options, checked."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from stoker.apps.gateway.keys import KeyFile, KeyLimits
from stoker.apps.gateway.options import GatewayOptions
from stoker.console import ByteSize, Screen, WholeNumber, line, lines, note
from stoker.console import json as print_json
from stoker.errors import StokerError

_MISSING = "stoker serve needs {}, which is not installed: pip install 'stoker[serve]'"


class ServeGroup(click.Group):
    """`serve SITE MODELS`, with `serve keys` below it: any other first word is an argument of the former."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_SERVES, *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or run

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; the one that serves has no name in usage texts."""
        name, found, rest = super().resolve_command(ctx, args)
        return "" if found is run else name, found, rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] [SITE] MODELS")
        formatter.write_usage(ctx.command_path, "keys add|list|remove ...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run.format_options(click.Context(run, parent=ctx), formatter)


_SERVES = "run"


@click.group("serve", cls=ServeGroup, short_help="Serve models at one OpenAI-compatible address.", no_args_is_help=True)
def command() -> None:
    """Serve the models of MODELS (a TOML file: docs/serve.md) at one OpenAI-compatible address, from a session on SITE
    (a site file; this machine, if none is named).

    The session is the one that `stoker up SITE` keeps; if none is up, it is started, and stays when the gateway ends.
    A gateway that was killed and is started again has the same address, and finds its models loaded.

    Without keys the gateway answers everybody on this machine, and listens on no other interface.
    """


@click.command(_SERVES, context_settings={"max_content_width": 120})
@click.argument("files", nargs=-1, required=True, metavar="[SITE] MODELS")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The interface to listen on.")
@click.option(
    "--port", metavar="N", type=WholeNumber(most=65535), help="The port. [the one of last time, else from 8000]"
)
@click.option("--uds", metavar="PATH", default="", help="Listen on a Unix socket of yours instead.")
@click.option("--tls-cert", metavar="FILE", default="", help="Serve HTTPS with this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", default="", help="The certificate's key (PEM).")
@click.option("--session", metavar="ID", default="", help="The session to join (stoker up).")
@click.option(
    "--origin", "origins", metavar="URL", multiple=True,
    help="A site whose pages may ask with a key; may be given several times. [all sites]",
)  # fmt: skip
@click.option("--max-body", metavar="SIZE", type=ByteSize(), help="No request may be larger, as in 8MB. [32MB]")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as one JSON document, for programs.")
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    files: tuple[str, ...],
    host: str,
    port: int | None,
    uds: str,
    tls_cert: str,
    tls_key: str,
    session: str,
    origins: tuple[str, ...],
    max_body: int | None,
    as_json: bool,
) -> None:
    """Serve."""
    if len(files) > 2:
        raise click.UsageError(f"one site file and one models file are wanted, and there are {len(files)} files")
    if uds and (port or host != "127.0.0.1"):
        raise click.UsageError("--uds listens on no port: leave out --host and --port")
    site = files[0] if len(files) == 2 else ""
    if site and session:
        raise click.UsageError("--session has its own sites: leave out SITE")
    for origin in origins:
        if not re.fullmatch(r"https?://[^/?#\s]+", origin):
            raise click.UsageError(f"--origin {origin}: write a scheme and a host, as in https://lab.example")
    options = GatewayOptions(
        site=site, models=Path(files[-1]), host=host, port=port or 0, uds=uds, tls_cert=tls_cert, tls_key=tls_key,
        session=session, origins=origins, most_bytes=max_body or GatewayOptions(models=Path()).most_bytes,
        as_json=as_json,
    )  # fmt: skip
    try:
        from stoker.apps.gateway.run import serve  # it imports Parsl and the HTTP server: --help does not wait
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise StokerError(_MISSING.format(error.name)) from error
    context.exit(serve(options, screen=Screen(json_only=as_json)))


@command.group("keys", short_help="Who may ask.")
def keys() -> None:
    """Keys of clients. Only digests are kept, so a key is shown once. A gateway that runs sees changes at once."""


@keys.command("add")
@click.argument("name")
@click.option("--requests-per-minute", metavar="N", type=WholeNumber(), help="At most N requests a minute.")
@click.option(
    "--tokens-per-minute", metavar="N", type=WholeNumber(), help="At most N tokens a minute, read or written."
)
@click.option("--concurrent", metavar="N", type=WholeNumber(), help="At most N requests at a time.")
def add(*, name: str, requests_per_minute: int | None, tokens_per_minute: int | None, concurrent: int | None) -> None:
    """Make a key for NAME, and show it."""
    file = KeyFile.usual()
    first = not file.exists
    limits = KeyLimits(requests_per_minute or 0, tokens_per_minute or 0, concurrent or 0)
    key = file.add(name, limits)
    line(key)
    note(f"the key of {name}: clients send it as `Authorization: Bearer KEY`; it is shown only now")
    if first:
        note("this is the first key: from now on your gateways want one")


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def list_keys(*, as_json: bool) -> None:
    """List the keys and their limits."""
    file = KeyFile.usual()
    records = file.read()
    if as_json:
        shown: list[dict[str, Any]] = [
            {"name": each.name, "created": each.created, "limits": each.limits} for each in records
        ]
        print_json({"file": str(file.path), "wanted": file.exists, "keys": shown})
    elif not records:
        none = (
            "there are no keys, so every request is refused"
            if file.exists
            else "no key is wanted: everybody on this machine may ask"
        )
        line(f"{none}; stoker serve keys add NAME makes one")
    else:
        lines(
            f"  {each.name:<20}  {time.strftime('%Y-%m-%d', time.localtime(each.created))}  {_shown(each.limits)}"
            for each in records
        )


@keys.command("remove")
@click.argument("name")
def remove(*, name: str) -> None:
    """Remove the key of NAME: it is refused from now on."""
    file = KeyFile.usual()
    file.remove(name)
    line(f"the key of {name} is removed")
    if not file.read():
        note(f"no key is left, so every request is refused; to serve without keys, remove {file.path}")


def _shown(limits: KeyLimits) -> str:
    said = [
        f"{number:,} {what}"
        for number, what in (
            (limits.requests_per_minute, "requests a minute"),
            (limits.tokens_per_minute, "tokens a minute"),
            (limits.concurrent, "at a time"),
        )
        if number
    ]
    return ", ".join(said) or "no limits"

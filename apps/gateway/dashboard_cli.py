"""The options of `stoker dashboard`."""

from __future__ import annotations

import click

from stoker.apps.gateway.cli import report_missing_serve_extra
from stoker.console import Screen, WholeNumber


@click.command("dashboard", short_help="Show a session in a browser, and to Prometheus.")
@click.argument("session", default="")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The interface to listen on.")
@click.option("--port", metavar="N", type=WholeNumber(most=65535), help="The port. [the first free port from 8100]")
@click.option("--uds", metavar="PATH", default="", help="Listen on this Unix socket, not on a port.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON document, for programs.")
@click.pass_context
def command(context: click.Context, /, *, session: str, host: str, port: int | None, uds: str, as_json: bool) -> None:
    """Show SESSION on a page: pilots, contexts, queues, maps with progress and time left, failures, slow calls, and the
    last day's rates and memory. Default: the session that `stoker status` shows.

    The server also answers /metrics for Prometheus. The server changes nothing in the session, and ends with Ctrl-C.
    The page of a gateway (stoker serve) also shows the gateway's models.

    Without keys (stoker serve keys), everybody on this machine can read the page, and other machines cannot.
    """
    if uds and (port or host != "127.0.0.1"):
        raise click.UsageError("--uds listens on a Unix socket, not on a port: leave out --host and --port")
    with report_missing_serve_extra("stoker dashboard"):
        from stoker.apps.gateway.dashboard import serve_dashboard  # here, because its imports would slow --help
    context.exit(
        serve_dashboard(session, host=host, port=port or 0, uds=uds, as_json=as_json, screen=Screen(json_only=as_json))
    )

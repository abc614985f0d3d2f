"""`stoker calls`: which calls there are, and what each is called."""

from __future__ import annotations

import click

from stoker.contexts.recipe import BARE
from stoker.manager.cli import choosing, console
from stoker.manager.cli.numbers import WholeNumber
from stoker.manager.cli.sessions import calls_of, takes_session
from stoker.manager.protocol.listed import ListedCall, ListedState
from stoker.manager.protocol.to_client import Calls
from stoker.units import show_seconds

_LIMIT = 20


@click.command(short_help="List calls that run, wait or have failed.")
@click.option(
    "--state",
    "only",
    type=click.Choice([state.value for state in ListedState]),
    help="List the calls of this state only.",
)
@click.option(
    "--limit",
    metavar="N",
    default=_LIMIT,
    type=WholeNumber(1, 10_000),
    help=f"At most N of each state. [{_LIMIT}]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@takes_session(default=choosing.SHOWN_BY_DEFAULT)
def calls(*, session: str, only: str | None, limit: int, as_json: bool) -> None:
    """List calls of SESSION: the longest running, the next to run, and the last that failed.

    A program's first call is c-0; calls of a second program in the same session read c-1.0, c-1.1, …
    """
    wanted = ListedState(only) if only else None
    found, over = calls_of(session, limit=limit, only=wanted)
    if as_json:
        console.json({"over": over, "calls": found})
        return
    if over:
        console.line(f"{over}; its last state:")
    console.lines(render(found, only=wanted))


def render(found: Calls, *, only: ListedState | None = None) -> list[str]:
    """The lines of `stoker calls`."""
    numbers = {
        ListedState.RUNNING: found.running,
        ListedState.WAITING: found.waiting,
        ListedState.FAILED: found.failed,
    }
    counted = ", ".join(f"{number:,} {state.value}" for state, number in numbers.items())
    out = [f"session {found.session} · {counted}"]
    rows = [_row(call) for call in found.calls]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    states = [call.state for call in found.calls]
    for state, number in numbers.items():
        if only not in (None, state) or not number:
            continue
        shown = [row for row, of in zip(rows, states, strict=True) if of is state]
        out += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)]
        if number > len(shown):
            out.append(f"  … {number - len(shown):,} more {state.value}")
    if found.calls:
        out += ["", f"why one is where it is: stoker explain {found.calls[0].call} {found.session}"]
    return out


def _row(call: ListedCall) -> tuple[str, ...]:
    ahead = f", {call.ahead} before it" if call.ahead else ""
    where = " ".join(call.where) + ahead
    context = call.context if call.context != BARE.name else "no context"
    return call.call, call.state.value, show_seconds(call.since_s), call.function, context, where or call.error

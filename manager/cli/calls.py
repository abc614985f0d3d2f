"""`stoker calls`: list the names and states of calls."""

from __future__ import annotations

import click

from stoker.contexts.recipe import BARE
from stoker.manager.cli import console, session_choice
from stoker.manager.cli.console import WholeNumber
from stoker.manager.cli.session_choice import add_session_argument, read_calls
from stoker.protocol.calls import FailureGroup, ListedCall, ListedState
from stoker.protocol.to_client import Calls
from stoker.units import show_seconds

_DEFAULT_LIMIT = 20


@click.command(short_help="List calls that run, wait or have failed.")
@click.option(
    "--state",
    "only",
    type=click.Choice([state.value for state in ListedState]),
    help="List only the calls in this state.",
)
@click.option(
    "--limit",
    metavar="N",
    default=_DEFAULT_LIMIT,
    type=WholeNumber(1, 10_000),
    help=f"List at most N calls per state. [{_DEFAULT_LIMIT}]",
)
@click.option("--all", "each", is_flag=True, help="List each failed call instead of groups.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@add_session_argument(default=session_choice.SHOWN_BY_DEFAULT)
def calls(*, session: str, only: str | None, limit: int, each: bool, as_json: bool) -> None:
    """List calls of SESSION: the longest running, the next to run, and the failed ones.

    Failed calls are grouped by function, exception and line, with the number, the times and the last of these calls.
    --all lists each failed call, the latest first.

    The first program of a session names its calls c-0, c-1, …; the second program's calls are c-1.0, c-1.1, …
    """
    wanted = ListedState(only) if only else None
    found, over = read_calls(session, limit=limit, only=wanted)
    if as_json:
        console.json({"over": over, "calls": found})
        return
    if over:
        console.line(f"{over}; its last state:")
    console.lines(render_calls(found, only=wanted, limit=limit, each=each))


def render_calls(
    found: Calls, *, only: ListedState | None = None, limit: int = _DEFAULT_LIMIT, each: bool = False
) -> list[str]:
    numbers = {ListedState.RUNNING: found.running, ListedState.WAITING: found.waiting, ListedState.FAILED: found.failed}
    counted = ", ".join(f"{number:,} {state.value}" for state, number in numbers.items())
    out = [f"session {found.session} · {counted}"]
    rows = [_row(call) for call in found.calls]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    states = [call.state for call in found.calls]
    example = found.calls[0].call if found.calls else ""
    for state, number in numbers.items():
        if only not in (None, state) or not number:
            continue
        if state is ListedState.FAILED and found.groups and not each:
            out += ["", *_format_failure_groups(found.groups, limit=limit)]
            example = example if only is None and states[0] is not state else found.groups[0].example
            continue
        shown = [row for row, of in zip(rows, states, strict=True) if of is state]
        out += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)]
        if number > len(shown):
            out.append(f"  … {number - len(shown):,} more {state.value}")
    if example:
        out += ["", f"more about a call: stoker explain {example} {found.session}"]
    return out


def _format_failure_groups(groups: tuple[FailureGroup, ...], *, limit: int) -> list[str]:
    out = []
    for group in groups[:limit]:
        when = f"{show_seconds(group.last_s)} ago"
        if group.count > 1:
            when = f"{show_seconds(group.first_s)} to {when}"
        place = f" at {group.place}" if group.place else ""
        out.append(f"  {group.count:,} x  {group.function}  {group.error}{place}  {when}, the last is {group.example}")
        if group.message:
            out.append(f"      {group.message}")
    if len(groups) > limit:
        rest = sum(group.count for group in groups[limit:])
        out.append(f"  … {rest:,} more in {len(groups) - limit:,} other groups; show more groups: --limit N")
    return [*out, "  each failed call: stoker calls --all --state failed"]


def _row(call: ListedCall) -> tuple[str, ...]:
    ahead = f", {call.ahead} before it" if call.ahead else ""
    where = " ".join(call.where) + ahead
    context = call.context if call.context != BARE.name else "no context"
    return call.call, call.state.value, show_seconds(call.since_s), call.function, context, where or call.error

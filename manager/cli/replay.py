"""`stoker replay`: whether a session's journal leads to the same decisions again."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.errors import SessionError
from stoker.manager.cli import console, session_choice
from stoker.manager.cli.logs import is_call
from stoker.manager.live import presence
from stoker.protocol.session import SessionFolder
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.manager.live.replay import FirstDifference, Replayed
    from stoker.manager.study.calibrate import MakespanComparison

_SEEDS = 9


@click.command(short_help="Check that a session's journal leads to the same decisions.")
@click.argument("run", default="")
@click.option(
    "--simulate", is_flag=True, help="Also simulate the session with its measured times, and compare makespans."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def replay(*, run: str, simulate: bool, as_json: bool) -> None:
    """Replay the journal of RUN through the scheduler, and compare each decision with the one that was made then.

    RUN is a session (its id, a beginning of it, or its folder; without RUN the one that `stoker status` shows) or a
    journal, which is all that a bug report needs. The exit status is 1 when something was decided otherwise.
    """
    from stoker.manager.live.replay import session_in, verify
    from stoker.manager.live.session_policies import policies_of

    if run.startswith("c-") and is_call(run):
        raise click.UsageError(
            f"{run} is a call, and stoker replay takes a session; `stoker explain {run}` shows the call"
        )
    path = Path(run)
    where = path if run and path.is_file() else session_choice.session_to_show(run, hint="stoker replay").path
    journal, session = session_in(where)
    folder = SessionFolder(where if where.is_dir() else where.parent)
    began = time.monotonic()
    with console.redrawn() as place:

        def tell(events: int, after_s: float) -> None:
            if console.is_terminal() and not as_json:
                place.show([f"session {session} · {events:,} events, {show_seconds(after_s)} replayed"])

        found = verify(journal, session=session, policies=policies_of(folder), tell=tell)
    took_s = time.monotonic() - began
    makespans = None
    if simulate:
        from stoker.manager.study.calibrate import calibrate, compare, read_session

        measured = calibrate(read_session(journal, session=session, policies=policies_of(folder)))
        makespans = compare(measured, policies=lambda: policies_of(folder), seeds=range(_SEEDS))
    live = False
    with contextlib.suppress(SessionError):
        live = not as_json and journal == folder.journal and presence.is_up(folder)
    if as_json:
        console.json({"journal": str(journal), "took_s": took_s, "replayed": found, "simulated": makespans})
    else:
        console.lines(render(found, took_s=took_s, live=live))
        if makespans is not None:
            console.line(compared(makespans))
    if found.difference is not None:
        raise SessionError(
            f"session {session}: event {found.difference.event:,} was decided otherwise than when the session lived\n"
            f"either this is not the version of Stoker, or not the policy, that ran the session; or it is a fault of"
            f" Stoker's: then {journal} is all that a bug report needs",
            session=session,
        )


def render(found: Replayed, *, took_s: float, live: bool = False) -> list[str]:
    times = "once" if found.restarts == 1 else f"{found.restarts} times"
    came_back = f", the manager came back {times}" if found.restarts else ""
    lived, took = show_seconds(found.lasted_s), show_seconds(took_s)
    out = [f"session {found.session} · {found.events:,} events of {lived} replayed in {took}{came_back}"]
    if found.since:
        out.append(
            f"  note  what happened before {datetime.fromtimestamp(found.since):%Y-%m-%d %H:%M:%S} was compacted"
        )
    if found.lost:
        out.append(f"  note  {found.lost} parts of the journal are damaged; decisions after them are not compared")
    if found.is_old:
        why = "its manager has not written that yet" if live else "it is an old journal, or its manager was killed soon"
        out.append(f"  note  this journal does not tell what was decided: {why}")
        out.append("        Its events were replayed, and nothing was compared.")
    elif found.difference is None:
        out.append(f"  ok    {found.checked:,} decisions are the same")
        unknown = found.events - found.checked
        if unknown:
            these = "1 event" if unknown == 1 else f"{unknown:,} events"
            why = (
                "the session is live, and its manager writes that a moment later"
                if live and not found.restarts
                else "a manager was killed before it had written that"
            )
            out.append(f"  note  what was decided about {these} is not in the journal: {why}")
    else:
        out += _told(found.difference, same=found.checked)
    return out


def compared(makespans: MakespanComparison) -> str:
    live, error = show_seconds(makespans.live_s), makespans.error
    simulated = show_seconds(makespans.live_s * (1 + error))
    return f"  from its first call to its last end: {live} live, {simulated} simulated ({error:+.1%})"


def _told(difference: FirstDifference, *, same: int) -> list[str]:
    at = f"event {difference.event:,}, {difference.after_s:.3f} s after the start"
    out = [f"  {same:,} decisions are the same, then {at}, is decided otherwise", "", "  what happened"]
    out += [f"    {line}" for line in difference.happened]
    out += ["", "  what this version decides about it (of the decision then, the journal has a checksum only)"]
    return out + [f"    {line}" for line in difference.decides]

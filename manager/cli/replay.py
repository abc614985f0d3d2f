"""`stoker replay`: replay a session's journal, and check that each decision is the same again."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.errors import SessionError
from stoker.manager.cli import console, session_choice
from stoker.manager.cli.logs import is_call_id
from stoker.manager.live import presence
from stoker.protocol.session import SessionFolder
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.manager.live.replay import FirstDifference, ReplayResult
    from stoker.manager.study.calibrate import MakespanComparison

_SEEDS = 9


@click.command(short_help="Check that a session's journal leads to the same decisions.")
@click.argument("run", default="")
@click.option(
    "--simulate", is_flag=True, help="Also simulate the session with its measured times, and compare makespans."
)
@click.option(
    "--perfetto", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Also write a timeline for"
    " ui.perfetto.dev: pilots, libraries, calls; gzipped if FILE ends in .gz.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def replay(*, run: str, simulate: bool, perfetto: Path | None, as_json: bool) -> None:
    """Replay the journal of RUN through the scheduler, and compare each decision with the original decision.

    RUN is a journal or a session (its id, a prefix of the id, or its folder; default: as in `stoker status`). The exit
    status is 1 if a decision differs.
    """
    from stoker.manager.live.replay import find_journal_and_session, verify_replay
    from stoker.manager.live.session_policies import create_policies_of_session

    if run.startswith("c-") and is_call_id(run):
        hint = f"`stoker explain {run}` shows the call"
        raise click.UsageError(f"{run} is a call, and stoker replay requires a session; {hint}")
    path = Path(run)
    where = path if run and path.is_file() else session_choice.session_to_show(run, hint="stoker replay").path
    journal, session = find_journal_and_session(where)
    folder = SessionFolder(where if where.is_dir() else where.parent)
    began = time.monotonic()
    with console.redrawn() as place:

        def show_progress(events: int, after_s: float) -> None:
            if console.is_terminal() and not as_json:
                place.show([f"session {session} · {events:,} events, {show_seconds(after_s)} replayed"])

        found = verify_replay(journal, session=session, policies=create_policies_of_session(folder), tell=show_progress)
    took_s = time.monotonic() - began
    makespans = None
    if simulate:
        from stoker.manager.study.calibrate import calibrate_world, compare_makespans, read_recorded_session

        measured = calibrate_world(
            read_recorded_session(journal, session=session, policies=create_policies_of_session(folder))
        )
        makespans = compare_makespans(
            measured, policies=lambda: create_policies_of_session(folder), seeds=range(_SEEDS)
        )
    if perfetto is not None:
        from stoker.manager.study.session_timeline import write_session_timeline

        try:
            drawn = write_session_timeline(
                perfetto, journal, session=session, policies=create_policies_of_session(folder)
            )
        except OSError as error:
            raise SessionError(f"--perfetto {perfetto}: cannot be written: {error.strerror or error}") from None
        console.note(f"{drawn:,} calls are in {perfetto}: open it in ui.perfetto.dev")
    if as_json:
        console.json({"journal": str(journal), "took_s": took_s, "replayed": found, "simulated": makespans})
    else:
        live = False
        with contextlib.suppress(SessionError):
            live = journal == folder.journal and presence.is_manager_up(folder)
        console.lines(render_replay_result(found, took_s=took_s, live=live))
        if makespans is not None:
            console.line(describe_makespans(makespans))
    if found.difference is not None:
        raise SessionError(
            f"session {session}: this replay decides event {found.difference.event:,} differently from the session\n"
            "the version of Stoker or the policy has changed since the session; if neither has, Stoker has a bug:"
            f" attach {journal} to a report",
            session=session,
        )


def render_replay_result(found: ReplayResult, *, took_s: float, live: bool = False) -> list[str]:
    times = "once" if found.restarts == 1 else f"{found.restarts} times"
    restart_note = f", the manager was restarted {times}" if found.restarts else ""
    lived, took = show_seconds(found.lasted_s), show_seconds(took_s)
    out = [f"session {found.session} · {found.events:,} events of {lived} replayed in {took}{restart_note}"]
    if found.since:
        since = datetime.fromtimestamp(found.since)
        out.append(f"  note  events before {since:%Y-%m-%d %H:%M:%S} were compacted")
    if found.lost:
        out.append(f"  note  {found.lost} parts of the journal are damaged; decisions after them are not compared")
    if found.lacks_checksums:
        why = "its manager has not written them yet" if live else "the journal is old, or its manager was killed early"
        out.append(f"  note  this journal has no decisions: {why}")
        out.append("        Its events were replayed, and nothing was compared.")
    elif found.difference is not None:
        out += _difference_lines(found.difference, same=found.checked)
    else:
        out.append(f"  ok    {found.checked:,} decisions are the same")
        if unknown := found.events - found.checked:
            these = "1 event" if unknown == 1 else f"{unknown:,} events"
            why = "a manager was killed before it wrote them"
            if live and not found.restarts:
                why = "the session is live, and its manager writes them a moment later"
            out.append(f"  note  the decisions about {these} are not in the journal: {why}")
    return out


def describe_makespans(makespans: MakespanComparison) -> str:
    live, simulated = (show_seconds(makespans.live_s * factor) for factor in (1, 1 + makespans.error))
    both = f"{live} live, {simulated} simulated ({makespans.error:+.1%})"
    return f"  from the first submission to the last result: {both}"


def _difference_lines(difference: FirstDifference, *, same: int) -> list[str]:
    at = f"event {difference.event:,}, {difference.after_s:.3f} s after the start"
    out = [f"  {same:,} decisions are the same; {at}, is decided differently", "", "  what happened"]
    out += [f"    {line}" for line in difference.happened]
    out += ["", "  what this version decides (the journal has only a checksum of the session's decision)"]
    return out + [f"    {line}" for line in difference.decides]

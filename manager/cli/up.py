"""`stoker up`: start a session that outlives programs, and report on its first blocks."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from stoker.errors import ConfigError, SessionError, UnitError
from stoker.manager.cli import console, doctor_site, down
from stoker.manager.cli.ask import Observer
from stoker.manager.executor import detached, new_sessions
from stoker.manager.live.lease import LeaseHolder
from stoker.protocol import show_status
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.site import Site
from stoker.units import parse_seconds

# ---- the first blocks


_ANSWER_LIMIT_S = 20.0
_REASON_LIMIT_S = 5.0
"""Seconds to wait for the batch system's reasons why blocks are pending."""
_ASK_EVERY_S = 0.25
_REFUSED_REASON = "refused"


def wait_for_first_answer(folder: SessionFolder, sites: Sequence[Site], *, wait: bool) -> Status:
    """Wait until the batch systems have answered about the first blocks, or until a time limit."""
    first = sum(site.pilot.init_blocks for site in sites)
    until = time.monotonic() + (_ANSWER_LIMIT_S if first and wait else 0)
    answered = False
    with Observer(folder) as observer:
        while True:
            status = observer.status()
            asked = [job for job in status.jobs if job.phase == BlockPhase.ASKED.value]
            silent = [job for job in show_status.pending_blocks(status.jobs) if not job.reason]
            if status.trouble or (not asked and (status.jobs or status.ended_blocks or status.pilots)):
                if not answered:
                    answered, until = True, time.monotonic() + _REASON_LIMIT_S
                if not silent:
                    return status
            if time.monotonic() > until:
                return status
            time.sleep(_ASK_EVERY_S)


def is_first_job_refused(status: Status) -> bool:
    taken = [job for job in status.jobs if job.phase != BlockPhase.ASKED.value]
    return list(status.ended_blocks) == [_REFUSED_REASON] and not taken and not status.pilots


_END_LIMIT_S = 60.0


@click.command(short_help="Start a session that outlives programs.")
@click.argument("sites", nargs=-1, metavar="[SITE]...", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Print the exact submit script of each site, and submit nothing.")
@click.option("--idle", metavar="TIME", default="", help='End the session after TIME without a program ("8 h").')
@click.option(
    "--folder", metavar="DIR", default="", help="Keep the session's files in DIR, which compute nodes must see."
)
@click.option("--no-wait", is_flag=True, help="Do not wait for the first blocks, and stay up even if they are refused.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def up(*, sites: tuple[Path, ...], dry_run: bool, idle: str, folder: str, no_wait: bool, as_json: bool) -> None:
    """Start a session that outlives programs: its manager, and pilots of the SITE files (default: this machine).

    Programs join the session with stoker.load(session=...) or `stoker run APP --session ID`, and use contexts that
    earlier programs have loaded. The session continues when programs end and you log out; `stoker down` ends it. The
    command refuses a walltime above the limit of Slurm's partition. If the batch system refuses the first block, the
    session ends with the reason.
    """
    wanted = new_sessions.load_listed_sites(sites)
    idle_s = _parse_idle_time(idle)
    path = Path(folder)
    # Accept only an empty folder, because a failed start removes the folder with all its files.
    if folder and path.is_dir() and any(path.iterdir()) and not SessionFolder(path).file.exists():
        raise ConfigError(f"--folder: {path} is not empty; name a new or empty folder", key="folder")
    for note in doctor_site.refuse_sites_that_never_start(wanted):
        console.note(note)
    if dry_run:
        shown = [doctor_site.render_submit_script(site) for site in wanted]
        console.lines("\n\n".join("\n".join(lines) for lines, _ in shown).split("\n"))
        if any(refused for _, refused in shown):
            raise click.exceptions.Exit(1)
        return
    made = new_sessions.create_session(wanted, place=folder, idle_s=idle_s)
    try:
        holder = detached.start_session_manager(made, on_wait=console.note)
        status = wait_for_first_answer(made, wanted, wait=not no_wait)
    except KeyboardInterrupt:
        if not made.file.exists():  # the manager has not started
            detached.delete_session(made)
            raise
        name = made.read().session
        console.note(f"session {name} is up; its queues: stoker status {name}; end it: stoker down {name}")
        raise
    if is_first_job_refused(status) and not no_wait:
        _end_refused_session(made, status, wanted, files=sites, as_json=as_json)
    ended = status.ended_blocks and not status.jobs and not status.pilots
    why = _first_block_headline(made) if ended else ""
    if as_json:
        console.json({"session": status.session, "folder": str(made.path), "manager": holder, "status": status})
    else:
        console.lines(render_session(status, holder, wanted, folder=made, why=why, now=datetime.datetime.now()))
    if why:
        raise click.exceptions.Exit(1)


def _end_refused_session(
    folder: SessionFolder, status: Status, sites: Sequence[Site], *, files: Sequence[Path], as_json: bool
) -> NoReturn:
    why = _first_block_headline(folder)
    named = (site.provider.kind.title for site in sites if why.startswith(f"block of source {site.name}"))
    words = f"{next(named, 'the batch system')} refused the first job: {why.partition('refused: ')[2] or why}"
    down.end_session(folder, reason=words.partition("\n")[0])
    remains = down.wait_until_gone(folder, status, wait_s=_END_LIMIT_S, on_wait=console.note)
    if as_json:
        console.json({"session": status.session, "folder": str(folder.path), "refused": why, "left": remains})
        raise click.exceptions.Exit(1)
    again = " ".join(["stoker up", *map(str, files)])
    lines = [
        words,
        f"session {status.session} was ended; fix the site file and try again",
        f"the submit script and the batch system's answer: {again} --dry-run",
        f"attempts: stoker logs factory {status.session}; to stay up and keep trying: {again} --no-wait",
    ]
    raise SessionError("\n".join([*lines, *(down.render_remains(remains, name=status.session) if remains else [])]))


def _first_block_headline(folder: SessionFolder) -> str:
    with Observer(folder) as observer:
        return observer.story("b1").headline


def render_session(
    status: Status,
    holder: LeaseHolder,
    sites: Sequence[Site],
    *,
    folder: SessionFolder,
    now: datetime.datetime,
    why: str = "",
) -> list[str]:
    """Return the lines about a started session. `why`: reason why all submitted blocks have ended, if they have."""
    facts = [f"manager here (pid {holder.pid})", *_describe_submitted_blocks(status, sites)]
    out = [f"session {status.session} is up: {', '.join(facts)}"]
    here = {site.name for site in sites if site.is_local}
    pending = [job for job in show_status.pending_blocks(status.jobs) if job.source not in here]
    if pending:
        soonest = show_status.soonest_start_s(pending)
        first = f"; the first is expected at {show_status.format_start_time(soonest, now)}" if soonest else ""
        out.append(f"  queued   {len(pending)}   {show_status.format_reasons(pending) or 'no reason given yet'}{first}")
    if status.pilots:
        out.append(f"  here     {len(status.pilots)}   {', '.join(pilot.pilot for pilot in status.pilots[:4])}")
    out += [f"  trouble  {source}: {text}" for source, text in status.trouble.items()]
    out += [f"  ended    {text}" for text in show_status.format_counts_by_reason(status.ended_blocks)]
    if why:
        out += [
            f"no pilot has joined; the first job {why.partition(': ')[2] or why}",
            "fix the site file and start another session",
            f"the job's output: stoker logs b1 {status.session}; end the session: stoker down {status.session}",
        ]
        return out
    out += [
        f'use it: stoker.load(session="{status.session}") in a program, or stoker run APP --session {status.session}',
        f"log out any time: `stoker attach {status.session}` works on any login node that sees {folder.path},"
        f" `stoker down {status.session}` ends the session",
    ]
    return out


def _describe_submitted_blocks(status: Status, sites: Sequence[Site]) -> list[str]:
    told = []
    for site in sites:
        jobs = [job for job in status.jobs if job.source == site.name]
        ids = [job.job for job in jobs if job.job]
        where = site.provider.partition or site.provider.queue or site.name
        named = f"submitted to {where} ({'job' if len(ids) == 1 else 'jobs'} {show_status.format_job_ids(ids)})"
        how = "on this machine" if site.is_local else named if ids else f"requested from {where}"
        told.append(f"{console.format_count(len(jobs), 'block')} {how}")
    return told


def _parse_idle_time(text: str) -> float:
    try:
        seconds = parse_seconds(text) if text else 0.0
    except UnitError as error:
        raise ConfigError(f"--idle: {error}", key="idle") from None
    if text and seconds < 1:
        raise ConfigError(f"--idle: {text} is too short for a program to join; write for example 8 h", key="idle")
    return seconds

"""`stoker up`: a session that outlives programs, and the first blocks of its sites in their queues."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path

import click

from stoker.errors import ConfigError, UnitError
from stoker.manager.cli import console, dry_run
from stoker.manager.cli.ask import Observer
from stoker.manager.executor import detached
from stoker.manager.live.lease import Holder
from stoker.manager.protocol import show_blocks
from stoker.manager.protocol.blocks import BlockPhase
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.to_client import Status
from stoker.site import Site
from stoker.units import parse_seconds

_FIRST_BLOCKS_S = 20.0
"""How long to wait for what the batch systems say to the first blocks."""
_REASONS_S = 5.0
"""How long to wait for why they are in the queue: batch systems tell that at their next look."""
_ASK_EVERY_S = 0.25


@click.command()
@click.argument("sites", nargs=-1, metavar="[SITE]...", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Print the exact submit script of each site, and submit nothing.")
@click.option("--idle", metavar="TIME", default="", help='End it when nobody has used it for so long ("8 h").')
@click.option("--folder", metavar="DIR", default="", help="Where the session lives: compute nodes must see it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def up(*, sites: tuple[Path, ...], dry_run: bool, idle: str, folder: str, as_json: bool) -> None:
    """Start a session that stays: its manager, and pilots of the SITE files (none: this machine).

    Programs join it with stoker.load(session=...) or `stoker run APP --session ID`, one after another or at the same
    time, and find hot what an earlier one has loaded. It goes on when they leave, and when you log out; `stoker down`
    ends it.
    """
    wanted = detached.collect(sites)
    idle_s = _idle(idle)
    if dry_run:
        console.lines(scripts(wanted))
        return
    made = detached.make(wanted, place=folder, idle_s=idle_s)
    try:
        holder = detached.start(made, waiting=console.note)
    except KeyboardInterrupt:
        detached.forget(made)
        raise
    try:
        status = _first_blocks(made, wanted)
    except KeyboardInterrupt:
        name = made.read().session
        console.note(f"session {name} is up; what is queued: stoker status {name}; end it: stoker down {name}")
        raise
    why = _why_none(made) if _nothing_came(status) else ""
    if as_json:
        console.json({"session": status.session, "folder": str(made.path), "manager": holder, "status": status})
    else:
        console.lines(render(status, holder, wanted, folder=made, why=why, now=datetime.datetime.now()))
    if why:
        raise click.exceptions.Exit(1)


def scripts(sites: Sequence[Site]) -> list[str]:
    """What would be submitted, a site after the other."""
    out: list[str] = []
    for site in sites:
        out += [*([""] if out else []), *dry_run.show(site)]
    return out


def render(
    status: Status,
    holder: Holder,
    sites: Sequence[Site],
    *,
    folder: SessionFolder,
    now: datetime.datetime,
    why: str = "",
) -> list[str]:
    """What `stoker up` says of a session that is up. `why`: nothing was taken by any batch system, for this reason."""
    facts = [f"manager here (pid {holder.pid})", *_submitted(status, sites)]
    out = [f"session {status.session} is up: {', '.join(facts)}"]
    here = {site.name for site in sites if site.is_local}
    pending = [job for job in show_blocks.pending_of(status.jobs) if job.source not in here]
    if pending:
        soonest = show_blocks.soonest(pending)
        first = f"; the first is expected at {show_blocks.expected(soonest, now)}" if soonest else ""
        out.append(f"  queued   {len(pending)}   {show_blocks.reasons(pending) or 'no reason is told yet'}{first}")
    if status.pilots:
        out.append(f"  here     {len(status.pilots)}   {', '.join(pilot.pilot for pilot in status.pilots[:4])}")
    out += [f"  trouble  {source}: {text}" for source, text in status.trouble.items()]
    out += [f"  ended    {text}" for text in show_blocks.ended(status.ended_blocks)]
    if why:
        out += [
            f"no block was taken, the first is a {why}",
            "mend the site file and start another session",
            f"what was tried: stoker status {status.session}; end this one: stoker down {status.session}",
        ]
        return out
    out += [
        f'use it: stoker.load(session="{status.session}") in a program, or stoker run APP --session {status.session}',
        f"leave any time: `stoker attach {status.session}` from any login node that sees {folder.path},"
        f" `stoker down {status.session}` to end it",
    ]
    return out


def _submitted(status: Status, sites: Sequence[Site]) -> list[str]:
    told = []
    for site in sites:
        jobs = [job for job in status.jobs if job.source == site.name]
        ids = [job.job for job in jobs if job.job]
        where = site.provider.partition or site.provider.queue or site.name
        blocks = f"{len(jobs)} block{'s' * (len(jobs) != 1)}"
        if site.is_local:
            told.append(f"{blocks} on this machine")
        elif ids:
            kind = "job" if len(ids) == 1 else "jobs"
            told.append(f"{blocks} submitted to {where} ({kind} {show_blocks.job_ids(ids)})")
        else:
            told.append(f"{blocks} asked of {where}")
    return told


def _first_blocks(folder: SessionFolder, sites: Sequence[Site]) -> Status:
    """The session, once the batch systems have answered for all blocks that are asked for, or take too long."""
    first = sum(site.pilot.init_blocks for site in sites)
    until = time.monotonic() + (_FIRST_BLOCKS_S if first else 0)
    answered = False
    with Observer(folder) as observer:
        while True:
            status = observer.status()
            asked = [job for job in status.jobs if job.phase == BlockPhase.ASKED.value]
            silent = [job for job in show_blocks.pending_of(status.jobs) if not job.reason]
            if status.trouble or (not asked and (status.jobs or status.ended_blocks or status.pilots)):
                if not answered:
                    answered, until = True, time.monotonic() + _REASONS_S
                if not silent:
                    return status
            if time.monotonic() > until:
                return status
            time.sleep(_ASK_EVERY_S)


def _why_none(folder: SessionFolder) -> str:
    """What became of the first block."""
    with Observer(folder) as observer:
        return observer.story("b1").headline


def _nothing_came(status: Status) -> bool:
    return bool(status.ended_blocks) and not status.jobs and not status.pilots


def _idle(text: str) -> float:
    if not text:
        return 0.0
    try:
        seconds = parse_seconds(text)
    except UnitError as error:
        raise ConfigError(f"--idle: {error}", key="idle") from None
    if seconds < 1:
        raise ConfigError(f"--idle: {text} is too short to join a session in", key="idle")
    return seconds

"""`stoker down`: end a session, and check that none of its processes and jobs remain."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable

import click

from stoker.config import read_sites
from stoker.errors import ConfigError, SessionError
from stoker.manager.cli import console, runs, session_choice, session_remains, sessions
from stoker.manager.cli.ask import NoAnswerError, Observer, SessionEndedError
from stoker.manager.cli.console import Seconds
from stoker.manager.executor import detached
from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status

_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 2.0
_FILE_S = 10.0
_SILENT_S = 2.0


@click.command(short_help="End a session or a detached run.")
@click.option(
    "--wait",
    "wait_s",
    metavar="S",
    type=Seconds(),
    default=60.0,
    help="Seconds to wait for the session's processes and jobs to end. [60]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@session_choice.add_session_argument(default=session_choice.CHANGED_BY_DEFAULT)
def down(*, session: str, wait_s: float, as_json: bool) -> None:
    """End SESSION: open calls are cancelled, pilots end, jobs are cancelled. If processes or jobs remain, show how to
    remove them, and exit with 1. Also list files that pilots keep for the next session.

    If SESSION is a detached run, end its program as Ctrl-C does.
    """
    if run := runs.find_detached_run(session):
        runs.stop(run, wait_s=wait_s, as_json=as_json)
        return
    folder = session_choice.session_to_show(session) if session else session_choice.session_to_change()
    before = end(folder)
    remains = wait_until_gone(folder, before, wait_s=wait_s, waiting=console.note)
    shutil.rmtree(folder.objects, ignore_errors=True)  # arguments and results are useless without their session
    name, unwritten = folder.read().session, lease.unwritten(folder.lease)
    stays: list[str] = []
    if before is not None and (before.pilots or before.gone_pilots):
        with contextlib.suppress(ConfigError):  # the session has ended even if its site files are invalid
            stays = sessions.stays(read_sites(folder.sites).values())
    if as_json:
        console.json({"session": name, "left": remains, "stays": stays, "status": before, "unwritten": unwritten})
    else:
        console.lines(render(remains, name=name) if remains else [ended(before, name=name)])
        if unwritten:
            why = f"the last records of its journal are not written ({unwritten}, {folder.journal})"
            console.note(f"{why}: `stoker status` and `stoker explain` may miss the session's last events")
        for text in stays:
            console.note(text)
    if remains:
        raise click.exceptions.Exit(1)


def end(folder: SessionFolder, *, reason: str = "stoker down") -> Status | None:
    """End the session. Return the session's last status, if the manager has answered. Restart a dead manager first,
    because only the manager knows the jobs. Raises SessionError."""
    for _ in range(2):
        try:
            with Observer(folder) as observer:
                status = observer.status()
                observer.end(reason)
            return status
        except SessionEndedError:
            if folder.over() or not detached.is_detached(folder):
                return None
            console.note("the manager has ended; it is restarted to end its pilots and jobs")
            try:
                detached.start(folder, waiting=console.note, to_end=True)
            except SessionError:
                if not folder.over():
                    raise
                return None
        except NoAnswerError:
            if not _end_by_file(folder):
                raise
            return None
    return None


def _end_by_file(folder: SessionFolder) -> bool:
    """End a session whose manager reads no messages because the disk is full. Return False on failure."""
    try:
        try:
            until = time.monotonic() + _FILE_S
            while not (is_over := bool(folder.over())) and time.monotonic() < until:
                folder.asked_to_end.touch()  # the manager reacts only to a new modification time
                time.sleep(_LOOK_EVERY_S)
        finally:  # otherwise the file would end the session later
            folder.asked_to_end.unlink(missing_ok=True)
    except OSError:
        return False
    return is_over


def wait_until_gone(
    folder: SessionFolder, before: Status | None, *, wait_s: float, waiting: Callable[[str], None]
) -> list[session_remains.LeftBehind]:
    began, said = time.monotonic(), ""
    while True:
        here = list(session_remains.processes(folder))
        remains = here or list(session_remains.jobs(folder, before))
        took = time.monotonic() - began
        if not remains or took > wait_s:
            return session_remains.list_jobs_before_processes(here, folder, before) if here else remains
        text = ", ".join(dict.fromkeys(each.what for each in remains))
        if took > _SILENT_S and text != said:
            said = text
            waiting(f"waiting for {text}")
        time.sleep(_LOOK_EVERY_S if here else _ASK_EVERY_S)


def render(remains: list[session_remains.LeftBehind], *, name: str) -> list[str]:
    lines = (f"  left  {each.what}" + (f"; end it: {each.remove}" if each.remove else "") for each in remains)
    return [
        f"session {name} has not ended completely:",
        *lines,
        f"try again later: stoker down {name}; the session's logs: stoker logs --session {name}",
    ]


def ended(before: Status | None, *, name: str) -> str:
    return f"session {name} has ended{_summary(before)}; no process or job remains"


def _summary(status: Status | None) -> str:
    if status is None:
        return " already"
    cancelled = status.cancelled + status.queued + status.running
    facts = [f"{console.count(status.done, 'call')} done"]
    facts += [f"{number:,} {what}" for number, what in ((status.failed, "failed"), (cancelled, "cancelled")) if number]
    for things, noun, what in ((status.pilots, "pilot", "released"), (status.jobs, "job", "ended")):
        facts += [f"{console.count(len(things), noun)} {what}"] if things else []
    return f": {', '.join(facts)}"

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

_PROCESS_CHECK_EVERY_S = 0.2
_JOB_CHECK_EVERY_S = 2.0
_END_FILE_LIMIT_S = 10.0
_FIRST_NOTE_AFTER_S = 2.0


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
        runs.stop_run(run, wait_s=wait_s, as_json=as_json)
        return
    folder = session_choice.session_to_show(session) if session else session_choice.session_to_change()
    before = end_session(folder)
    remains = wait_until_gone(folder, before, wait_s=wait_s, on_wait=console.note)
    shutil.rmtree(folder.objects, ignore_errors=True)  # no program can use the session's arguments and results any more
    name, unwritten = folder.read().session, lease.why_journal_is_incomplete(folder.lease)
    stays: list[str] = []
    if before is not None and (before.pilots or before.gone_pilots):
        with contextlib.suppress(ConfigError):  # the session has ended even if its site files are invalid
            stays = sessions.describe_remaining_files(read_sites(folder.sites).values())
    if as_json:
        console.json({"session": name, "left": remains, "stays": stays, "status": before, "unwritten": unwritten})
    else:
        console.lines(render_remains(remains, name=name) if remains else [describe_ended_session(before, name=name)])
        if unwritten:
            why = f"the last records of its journal are not written ({unwritten}, {folder.journal})"
            console.note(f"{why}: `stoker status` and `stoker explain` may miss the session's last events")
        for text in stays:
            console.note(text)
    if remains:
        raise click.exceptions.Exit(1)


def end_session(folder: SessionFolder, *, reason: str = "stoker down") -> Status | None:
    """End the session. Return its last status, or None if no manager answered. Raises SessionError.

    A dead manager is restarted first, because only a manager can end its pilots and jobs.
    """
    for _ in range(2):
        try:
            with Observer(folder) as observer:
                status = observer.status()
                observer.end(reason)
            return status
        except SessionEndedError:
            if folder.end_reason() or not detached.is_detached(folder):
                return None
            console.note("the manager has ended; it is restarted to end its pilots and jobs")
            try:
                detached.start_session_manager(folder, on_wait=console.note, only_ends_session=True)
            except SessionError:
                if not folder.end_reason():
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
            until = time.monotonic() + _END_FILE_LIMIT_S
            while not (is_over := bool(folder.end_reason())) and time.monotonic() < until:
                folder.end_request.touch()  # the manager ends the session when this file's modification time changes
                time.sleep(_PROCESS_CHECK_EVERY_S)
        finally:  # remove the file, or it would end the session after a later restart
            folder.end_request.unlink(missing_ok=True)
    except OSError:
        return False
    return is_over


def wait_until_gone(
    folder: SessionFolder, before: Status | None, *, wait_s: float, on_wait: Callable[[str], None]
) -> list[session_remains.LeftBehind]:
    began, said = time.monotonic(), ""
    while True:
        here = list(session_remains.find_processes(folder))
        remains = here or list(session_remains.find_jobs(folder, before))
        took = time.monotonic() - began
        if not remains or took > wait_s:
            return session_remains.list_jobs_before_processes(here, folder, before) if here else remains
        text = ", ".join(dict.fromkeys(each.what for each in remains))
        if took > _FIRST_NOTE_AFTER_S and text != said:
            said = text
            on_wait(f"waiting for {text}")
        time.sleep(_PROCESS_CHECK_EVERY_S if here else _JOB_CHECK_EVERY_S)


def render_remains(remains: list[session_remains.LeftBehind], *, name: str) -> list[str]:
    lines = (f"  left  {each.what}" + (f"; end it: {each.remove}" if each.remove else "") for each in remains)
    return [
        f"session {name} has not ended completely:",
        *lines,
        f"try again later: stoker down {name}; the session's logs: stoker logs --session {name}",
    ]


def describe_ended_session(before: Status | None, *, name: str) -> str:
    return f"session {name} has ended{_describe_last_status(before)}; no process or job remains"


def _describe_last_status(status: Status | None) -> str:
    if status is None:
        return " already"
    cancelled = status.cancelled + status.queued + status.running
    facts = [f"{console.format_count(status.done, 'call')} done"]
    facts += [f"{number:,} {what}" for number, what in ((status.failed, "failed"), (cancelled, "cancelled")) if number]
    for things, noun, what in ((status.pilots, "pilot", "released"), (status.jobs, "job", "ended")):
        facts += [f"{console.format_count(len(things), noun)} {what}"] if things else []
    return f": {', '.join(facts)}"

"""`stoker status` shows a session. `stoker attach` follows a session, and restarts a dead manager."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from stoker.config import read_sites
from stoker.errors import SessionError
from stoker.manager.cli import console, runs, session_choice
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.cli.session_choice import add_session_argument, read_session_status
from stoker.manager.executor import detached
from stoker.protocol.session import SessionFolder, read_gateway_notes
from stoker.protocol.show_status import format_gateway_rows, render
from stoker.protocol.to_client import Status
from stoker.site import Site

# ---- stoker status


_WATCH_EVERY_S = 1.0
_WATCH_EVERY_ON_A_PIPE_S = 10.0


@click.command(short_help="Show pilots, contexts, queues, rates and a forecast.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--watch", is_flag=True, help="Update until Ctrl-C; on a pipe, print only changes.")
@add_session_argument(default=session_choice.SHOWN_BY_DEFAULT)
def status(*, session: str, as_json: bool, watch: bool) -> None:
    """Show the pilots, devices, contexts, queues, rates and the forecast of SESSION.

    Rates cover the last 30 seconds. If no pilot has joined, the forecast counts from the arrival of the first pilot. A
    detached run is shown with its state and its session.
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json: use only one of these options; a program can run --json repeatedly")
    if watch:
        try:
            StatusDisplay(session_choice.session_to_show(session)).run(may_restart_manager=False)
        except SessionEndedError as ended:
            console.line(str(ended))
        return
    run = runs.find_detached_run(session)
    if run is not None and not as_json:
        console.line(run.describe(now=time.time()))
        if not run.session:
            return
    folder, answer = read_session_status(session)
    policy = describe_policy(folder)
    if as_json:
        found: dict[str, object] = {"over": answer.over, "folder": str(folder.path), "policy": policy or "default"}
        found |= {"status": answer.status, "gateways": read_gateway_notes(folder)}
        console.json(found | ({"run": runs.run_to_json(run)} if run is not None else {}))
        return
    if answer.over:
        console.line(f"{answer.over}; its last state:")
    served = [] if answer.over else _gateway_lines(folder, answer.status)
    console.lines(render(answer.status, has_ended=bool(answer.over), policy=policy, served=served))


class StatusDisplay:
    """Displays a session until the session ends; on a pipe, prints only changes."""

    def __init__(self, folder: SessionFolder) -> None:
        self.last: Status | None = None
        self._folder = folder
        self._policy = describe_policy(folder)
        self._trouble = ""

    def run(self, *, may_restart_manager: bool) -> None:
        """Show the status until SessionEndedError. `may_restart_manager`: restart a dead manager."""
        with console.redrawn() as place:
            while True:
                try:
                    with Observer(self._folder) as observer:
                        while True:
                            self._show(observer.status(), place)
                            time.sleep(_WATCH_EVERY_S if console.is_terminal() else _WATCH_EVERY_ON_A_PIPE_S)
                except SessionError as error:
                    if not may_restart_manager:
                        raise
                    self._show_trouble(str(error).partition("\n")[0], place)
                    self._ensure_manager_is_running()

    def _show(self, status: Status, place: console.Redrawn) -> None:
        if console.is_terminal():
            place.show(render(status, policy=self._policy, served=_gateway_lines(self._folder, status)))
        else:
            console.lines(lines_if_status_changed(status, before=self.last, policy=self._policy))
        self.last, self._trouble = status, ""

    def _show_trouble(self, text: str, place: console.Redrawn) -> None:
        if console.is_terminal():
            place.show([text])
        elif text != self._trouble:
            console.line(text)
        self._trouble = text

    def _ensure_manager_is_running(self) -> None:
        until = time.monotonic() + _RESTART_WAIT_S
        while time.monotonic() < until and not self._folder.end_reason():
            if detached.is_manager_up(self._folder):
                return
            time.sleep(0.1)
        restart_dead_manager(self._folder)


def lines_if_status_changed(status: Status, *, before: Status | None, policy: str = "") -> list[str]:
    """Return the whole status if pilots, blocks or contexts have changed; its first line if only call counts have."""
    if before is None or _state_without_call_counts(status) != _state_without_call_counts(before):
        return [*render(status, policy=policy), ""]
    return render(status)[:1] if _count_calls(status) != _count_calls(before) else []


def _state_without_call_counts(status: Status) -> tuple[object, ...]:
    return (
        [
            (pilot.pilot, pilot.state, pilot.draining, [device.fault for device in pilot.devices])
            for pilot in status.pilots
        ],
        [(job.block, job.phase, job.reason) for job in status.jobs],
        [(context.name, context.hot, context.loading, context.last_failure) for context in status.contexts],
        (status.blocks, status.ended_blocks, status.trouble, status.lost_pilots),
    )


def _count_calls(status: Status) -> tuple[int, ...]:
    return status.queued, status.running, status.done, status.failed, status.cancelled


def _gateway_lines(folder: SessionFolder, status: Status) -> list[str]:
    return format_gateway_rows(read_gateway_notes(folder), status, now=time.time())


def describe_policy(folder: SessionFolder) -> str:
    from stoker.manager.live.session_policies import describe_policies

    return describe_policies(folder)


# ---- stoker attach


_RESTART_WAIT_S = 10.0
"""Seconds to wait for another process to restart a dead manager, before `stoker attach` restarts it."""


@click.command(short_help="Show a session or a detached run live.")
@session_choice.add_session_argument(default=session_choice.CHANGED_BY_DEFAULT)
def attach(*, session: str) -> None:
    """Show SESSION until the session ends or until Ctrl-C. The session continues after Ctrl-C. On a pipe, print the
    status once, then each change.

    For a detached run (stoker run --detach): print its log until it ends, and exit with its exit status. The run
    continues after Ctrl-C.

    A dead manager is restarted here from its journal: running calls continue, and ended calls do not run again.
    """
    if run := runs.find_detached_run(session):
        runs.follow_run(run)
        return
    folder = session_choice.session_to_show(session) if session else session_choice.session_to_change()
    restart_dead_manager(folder)
    picture = StatusDisplay(folder)
    try:
        picture.run(may_restart_manager=True)
    except SessionEndedError as ended:
        console.line(str(ended))
    except KeyboardInterrupt:
        console.line(
            describe_running_session(picture.last, name=folder.read().session, stays=detached.is_detached(folder))
        )


def restart_dead_manager(folder: SessionFolder) -> None:
    """Restart a dead manager. Raises SessionError, or SessionEndedError if the session has ended."""
    if detached.is_manager_up(folder):
        return
    if why := folder.end_reason():
        raise SessionEndedError(f"session {folder.read().session} is over: {why}; its last state: stoker status")
    before = folder.read().address
    holder = detached.start_session_manager(folder, on_wait=console.note)
    console.note(f"the manager had ended; it is restarted here (pid {holder.pid}) and continues from its journal")
    if lost := unreachable_pilots_warning(read_sites(folder.sites).values(), before=before, now=folder.read().address):
        console.note(lost)


def unreachable_pilots_warning(sites: Iterable[Site], *, before: str, now: str) -> str:
    """Return a warning if the manager's address has changed and pilots without shared files cannot learn it."""
    blind = [site.name for site in sites if not site.provider.shared_files]
    if before == now or not blind:
        return ""
    return (
        f"the manager listens on {now} now, but pilots of {' and '.join(blind)} share no files with this host: they "
        f"look for it at {before}, and exit after their lease; their calls run again on new pilots. To keep them, "
        "end the manager here, and attach from its previous host"
    )


def describe_running_session(last: Status | None, *, name: str, stays: bool) -> str:
    count = 0 if last is None else last.running + last.queued
    calls = f" with {console.format_count(count, 'open call')}" if count else ""
    if not stays:
        return f"session {name} keeps running{calls}, and ends with its program"
    return f"session {name} stays up{calls}; `stoker down {name}` ends it"

"""`stoker status`: the session in a dozen lines."""

from __future__ import annotations

import time

import click

from stoker.manager.cli import choosing, console, detaching, runs
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.cli.sessions import status_of, takes_session
from stoker.protocol.gateway_notes import gateway_notes
from stoker.protocol.session import SessionFolder
from stoker.protocol.show_gateways import gateway_rows
from stoker.protocol.show_status import render
from stoker.protocol.to_client import Status

_WATCH_EVERY_S = 1.0
_WATCH_EVERY_ON_A_PIPE_S = 10.0
"""A log is not a screen: what was said there is not said again until it has changed (`log_lines`)."""


@click.command(short_help="Show pilots, contexts, queues, rates and a forecast.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C; on a pipe: what changes.")
@takes_session(default=choosing.SHOWN_BY_DEFAULT)
def status(*, session: str, as_json: bool, watch: bool) -> None:
    """Show the pilots, devices, contexts, queues, rates and the forecast of SESSION.

    Rates are of the last half minute. Without a pilot the forecast counts from when the first one is here.
    With the name of a detached run: its state, and the session that it has loaded.
    """
    if watch and as_json:
        raise click.UsageError("--watch is for people and --json for programs: ask again instead")
    if watch:
        _watch(session)
        return
    run = runs.named_run(session)
    if run is not None and not as_json:
        console.line(run.title(now=time.time()))
        if not run.session:
            return
    folder, answer = status_of(session)
    policy = policy_of(folder)
    if as_json:
        console.json(
            {
                "over": answer.over,
                "folder": str(folder.path),
                "policy": policy or "default",
                "status": answer.status,
                "gateways": gateway_notes(folder),
                **({"run": detaching.facts_of(run)} if run is not None else {}),
            }
        )
        return
    if answer.over:
        console.line(f"{answer.over}; its last state:")
    served = [] if answer.over else _served(folder, answer.status)
    console.lines(render(answer.status, over=bool(answer.over), policy=policy, served=served))


class StatusPicture:
    """A session that is looked at again and again. On a terminal it stands still; elsewhere what is new is printed.
    `policy`: who decides in it, where it is not the default; `folder`: where its gateways leave their notes, if they
    are to be shown."""

    def __init__(self, place: console.Redrawn, *, policy: str = "", folder: SessionFolder | None = None) -> None:
        self._place = place
        self._policy = policy
        self._folder = folder
        self._last: Status | None = None
        self._trouble = ""

    def show(self, status: Status) -> None:
        """Show it as it is now."""
        if console.is_terminal():
            served = _served(self._folder, status) if self._folder is not None else []
            self._place.show(render(status, policy=self._policy, served=served))
        else:
            console.lines(log_lines(status, before=self._last, policy=self._policy))
        self._last, self._trouble = status, ""

    def show_trouble(self, text: str) -> None:
        """Show why it cannot be seen."""
        if console.is_terminal():
            self._place.show([text])
        elif text != self._trouble:
            console.line(text)
        self._trouble = text


def log_lines(status: Status, *, before: Status | None, policy: str = "") -> list[str]:
    """What to say of a session in a log: all of it when pilots, blocks or contexts have changed, one line when only
    calls have come or ended, nothing when nothing has happened."""
    if before is None or _standing(status) != _standing(before):
        return [*render(status, policy=policy), ""]
    return render(status)[:1] if _moving(status) != _moving(before) else []


def _standing(status: Status) -> tuple[object, ...]:
    return (
        [
            (pilot.pilot, pilot.state, pilot.draining, [device.fault for device in pilot.devices])
            for pilot in status.pilots
        ],
        [(job.block, job.phase, job.reason) for job in status.jobs],
        [(context.name, context.hot, context.loading, context.last_failure) for context in status.contexts],
        (status.blocks, status.ended_blocks, status.trouble, status.lost_pilots),
    )


def _moving(status: Status) -> tuple[int, ...]:
    return status.queued, status.running, status.done, status.failed, status.cancelled


def _served(folder: SessionFolder, status: Status) -> list[str]:
    return gateway_rows(gateway_notes(folder), status, now=time.time())


def policy_of(folder: SessionFolder) -> str:
    """Who decides in a session, in words; empty where the default policies do."""
    from stoker.manager.live.chosen import policy_in_words

    return policy_in_words(folder)


def watch_every_s() -> float:
    """How often a session is looked at that is watched."""
    return _WATCH_EVERY_S if console.is_terminal() else _WATCH_EVERY_ON_A_PIPE_S


def _watch(session: str) -> None:
    try:
        folder = choosing.session_to_show(session)
        with Observer(folder) as observer, console.redrawn() as place:
            picture = StatusPicture(place, policy=policy_of(folder), folder=folder)
            while True:
                picture.show(observer.status())
                time.sleep(watch_every_s())
    except SessionEndedError as ended:
        console.line(str(ended))

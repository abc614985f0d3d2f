"""`stoker status`: the session in a dozen lines."""

from __future__ import annotations

import time

import click

from stoker.manager.cli import console
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.cli.sessions import NEWEST, find, status_of, takes_session
from stoker.manager.protocol.show_status import render

_WATCH_EVERY_S = 1.0
_WATCH_EVERY_ON_A_PIPE_S = 10.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--watch", is_flag=True, help="Keep it on the screen until Ctrl-C.")
@takes_session(default=NEWEST)
def status(*, session: str, as_json: bool, watch: bool) -> None:
    """Pilots, devices, contexts, queues and rates of SESSION."""
    if watch and as_json:
        raise click.UsageError("--watch is for people and --json for programs: ask again instead")
    if watch:
        _watch(session)
        return
    folder, answer = status_of(session)
    if as_json:
        console.json({"over": answer.over, "folder": str(folder.path), "status": answer.status})
        return
    if answer.over:
        console.line(f"{answer.over}; this is how it was left")
    console.lines(render(answer.status, over=bool(answer.over)))


def watch_every_s() -> float:
    """How often a picture of a session is drawn again."""
    return _WATCH_EVERY_S if console.is_terminal() else _WATCH_EVERY_ON_A_PIPE_S


def _watch(session: str) -> None:
    try:
        with Observer(find(session)) as observer, console.redrawn() as place:
            while True:
                place.show(render(observer.status()))
                time.sleep(watch_every_s())
    except SessionEndedError as ended:
        console.line(str(ended))

"""`stoker attach`: look at a session that is up, from any login node; bring its manager back if that has died."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from stoker.errors import SessionError
from stoker.manager.cli import choosing, console, detaching, runs, sessions, status
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.executor import detached
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.site import Site

_BACK_WITHIN_S = 10.0
"""A manager that dies is started again by its parent: so long nobody else tries."""


@click.command(short_help="Show a session or a detached run live.")
@sessions.takes_session(default=choosing.CHANGED_BY_DEFAULT)
def attach(*, session: str) -> None:
    """Show SESSION until Ctrl-C, which leaves it up, or until it is over. On a pipe: once, and then what changes.

    With the name of a detached run (stoker run --detach): print its log until it ends, and exit with its exit status.
    Ctrl-C leaves it running.

    A manager that has died is started again here, and goes on from its journal: calls that run go on, and those that
    have ended are not run again.
    """
    if run := runs.named_run(session):
        detaching.follow(run)
        return
    folder = choosing.session_to_show(session) if session else choosing.session_to_change()
    revive(folder)
    watch = AttachedPicture(folder)
    try:
        watch.run()
    except SessionEndedError as ended:
        console.line(str(ended))
    except KeyboardInterrupt:
        console.line(leave(watch.last, name=folder.read().session, stays=detached.is_detached(folder)))


def revive(folder: SessionFolder) -> None:
    """See that the session has a manager. Raises SessionEndedError for one that is over, SessionError where none can
    be started."""
    if detached.is_up(folder):
        return
    if why := detached.over(folder):
        raise SessionEndedError(f"session {folder.read().session} is over: {why}; stoker status tells how it went")
    before = folder.read().address
    holder = detached.start(folder, waiting=console.note)
    console.note(f"its manager was gone: it is started again here (pid {holder.pid}), and goes on from its journal")
    if lost := out_of_sight(detached.sites_of(folder).values(), before=before, now=folder.read().address):
        console.note(lost)


def out_of_sight(sites: Iterable[Site], *, before: str, now: str) -> str:
    """Which pilots do not find a manager that has moved, in words; empty if all do. They look in the session's folder:
    those without shared files have but the copy that came with them."""
    blind = [site.name for site in sites if not site.provider.shared_files]
    if before == now or not blind:
        return ""
    return (
        f"it listens on {now} now, and pilots of {' and '.join(blind)} share no files with this host: those that run "
        f"go on looking at {before}, and end after their lease; their calls run again on new ones. To keep them, end "
        "the manager here and attach from the host where it was"
    )


class AttachedPicture:
    """A picture of a session that stands still, while managers come and go. `last`: what it showed last."""

    def __init__(self, folder: SessionFolder) -> None:
        self.last: Status | None = None
        self._folder = folder

    def run(self) -> None:
        """Show the session until it is over (SessionEndedError)."""
        with console.redrawn() as place:
            picture = status.StatusPicture(place, policy=status.policy_of(self._folder), folder=self._folder)
            while True:
                try:
                    with Observer(self._folder) as observer:
                        while True:
                            self.last = observer.status()
                            picture.show(self.last)
                            time.sleep(status.watch_every_s())
                except SessionError as error:
                    picture.show_trouble(str(error).partition("\n")[0])
                    self._wait_back()

    def _wait_back(self) -> None:
        until = time.monotonic() + _BACK_WITHIN_S
        while time.monotonic() < until and not detached.over(self._folder):
            if detached.is_up(self._folder):
                return
            time.sleep(0.1)
        revive(self._folder)


def leave(last: Status | None, *, name: str, stays: bool) -> str:
    """What is said to one who leaves a session that `stays`, or lives with its program."""
    count = 0 if last is None else last.running + last.queued
    calls = f" with {count:,} open call{'s' * (count != 1)}" if count else ""
    if not stays:
        return f"session {name} goes on{calls}, and ends with its program"
    return f"session {name} stays up{calls}; `stoker down {name}` ends it"

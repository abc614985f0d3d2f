"""The session that stays for a site: found if one is up (`stoker up`), started if none is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.config import site_text
from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError
from stoker.manager.executor import detached, standing
from stoker.protocol.session import SessionFolder, holds_session
from stoker.site import Site


class KeptSession(msgspec.Struct, frozen=True):
    """A session of `stoker up`: its id and folder, and whether it was started just now."""

    session: str
    folder: Path
    started: bool


def kept_session(
    site: str | os.PathLike[str] | None = None, *, before: str = "", waiting: Callable[[str], None] = lambda _said: None
) -> KeptSession:
    """The session that stays for a site file (None: this machine): the one named `before`, if it still goes on for the
    same sites; else the newest that is up for them; else a new one, as `stoker up SITE` starts it.

    `waiting` hears what is waited for. `stoker.load(session=...)` joins it. Raises SessionError and ConfigError.
    """
    sites = detached.collect([site] if site is not None else [])
    for folder in _sessions(before):
        with suppress(SessionError, ConfigError):  # one that is damaged is not the one that is meant
            name = standing.name_of(folder)
            if _is_for(folder, sites) and (name == before or standing.is_up(folder)):
                return KeptSession(name, folder.path, started=False)
    made = detached.make(sites)
    try:
        detached.start(made, waiting=waiting)
    except BaseException:
        if not made.file.exists():  # its manager has not come up
            detached.forget(made)
        raise
    return KeptSession(made.read().session, made.path, started=True)


def _sessions(before: str) -> Iterator[SessionFolder]:
    """The sessions that stay and are not over: the one of this name, then the others, the newest first."""
    links = [link for link in (state_folder() / "sessions").glob("*") if holds_session(link)]
    links.sort(key=lambda link: (link.name != before, -link.lstat().st_mtime))
    for link in links:
        folder = SessionFolder(link.resolve())
        if standing.is_detached(folder) and not standing.over(folder):
            yield folder


def _is_for(folder: SessionFolder, sites: Sequence[Site]) -> bool:
    there = {name: site_text(site) for name, site in detached.sites_of(folder).items()}
    return there == {site.name: site_text(site) for site in sites}

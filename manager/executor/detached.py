"""Sessions that outlive programs: `stoker up` makes one, programs join it, `stoker attach` restarts its manager.

The session folder keeps how its manager was started (`manager.json`), so that any login node that sees the folder can
restart it. The command that makes a session may be killed at any moment, and its manager starts nevertheless: so a
session is known by its id before, and commands that look for a session wait while it starts.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.config import load_sites, read_sites, site_text, write_sites
from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.locks import is_locked
from stoker.manager.environment.carrying import prepare
from stoker.manager.executor import engines
from stoker.manager.executor.processes import (
    make_folder,
    manager_options,
    new_session_id,
    register,
    spawn_manager,
    with_log,
)
from stoker.manager.factory.pilot_command import refuse_odd_imports
from stoker.manager.live import interfaces, lease, presence
from stoker.manager.live.lease import TAKEN_OVER
from stoker.manager.live.session_policies import check_policies, keep_policies
from stoker.protocol.session import SessionFolder, changed_at, find_session, holds_session, is_begun
from stoker.site import Site

# ---- sessions whose manager does not listen yet


_MANAGER_STARTS_S = 5.0
_LISTENS_S = 60.0
_POLL_S = 0.02


def is_coming_up(folder: Path) -> bool:
    if not is_begun(folder):
        return False
    age_s = time.time() - changed_at(folder / "manager.json")
    return 0 <= age_s < _MANAGER_STARTS_S or (age_s < _LISTENS_S and is_locked(folder / "manager.lock") is True)


def wait_for_begun(name: str = "") -> None:
    """Wait until no session whose id begins with `name` is starting."""
    links = state_folder() / "sessions"
    while any(is_coming_up(link) for link in links.glob("*") if link.name.startswith(name)):
        time.sleep(_POLL_S)


# ---- the state of a session, as its folder says


JOINS = "STOKER_SESSION"
"""The environment variable with the session that programs join if they name no site."""
RUN = "STOKER_RUN"
"""The environment variable with the run's folder, in a detached program (`stoker run --detach`)."""


class Launch(msgspec.Struct, frozen=True):
    session: str
    options: tuple[str, ...]


def name_of(folder: SessionFolder) -> str:
    if folder.file.exists():
        return folder.read().session
    return read_launch(folder).session if folder.launch.exists() else folder.path.name


def is_detached(folder: SessionFolder) -> bool:
    return folder.launch.exists()


def is_up(folder: SessionFolder) -> bool:
    return presence.is_up(folder)


def unreachable(folder: SessionFolder) -> str:
    """Return why a manager on this machine cannot be reached; empty if the network here is not at fault."""
    if not folder.file.exists():
        return ""
    file, holder = folder.read(), lease.read_if_whole(lease.lease_file(folder))
    if holder is None or not lease.is_alive(holder) or not (why := interfaces.no_way_to(file.address)):
        return ""
    return f"the manager of session {file.session} ({holder}) at {file.address} cannot be reached: {why}"


def over(folder: SessionFolder) -> str:
    return folder.over()


def unwritten(folder: SessionFolder) -> str:
    return lease.unwritten(lease.lease_file(folder))


def read_launch(folder: SessionFolder) -> Launch:
    try:
        return msgspec.json.decode(folder.launch.read_bytes(), type=Launch)
    except OSError:
        raise SessionError(
            f"the session in {folder.path} belonged to a program and is over with it; `stoker up` starts one that stays"
        ) from None
    except UNREADABLE as error:
        raise SessionError(f"{folder.launch} is damaged: {error}") from error


# ---- making, finding and starting


log = logging.getLogger("stoker")

_TRIES = 5
START_LIMIT_S = 60.0
_TERMINATE_S = 5.0


def collect(files: Sequence[str | os.PathLike[str]]) -> tuple[Site, ...]:
    """Return the sites of these files and those that they name. Raises ConfigError."""
    found: dict[str, Site] = {}
    for file in files or (None,):
        for site in load_sites(file):
            if found.setdefault(site.name, site) != site:
                raise ConfigError(f"two sites are called {site.name}; give one another `name`", key="name")
    engines.refuse(found.values())
    check_policies(found.values())
    return tuple(found.values())


def make(sites: Sequence[Site], *, place: str = "", idle_s: float = 0.0) -> SessionFolder:
    """Make a session's folder, with keys and site files: at `place`, or in the state folder, which compute nodes see if
    it is in a shared home. Raises SessionError, ConfigError."""
    engines.must_be_here(sites)
    name = new_session_id()
    folder = SessionFolder(place or default_place(name))
    if folder.file.exists() or folder.journal.exists():
        raise SessionError(f"{folder.path} holds a session already; name another folder, or leave --folder away")
    make_folder(folder, elsewhere="stoker up --folder DIR, or the environment variable STOKER_HOME")
    keep_policies(folder, sites, search_path=python_path())
    idle = ("--idle", f"{idle_s:g}") if idle_s else ()
    launch = Launch(name, (*manager_options(sites), *idle))
    try:
        write_sites(folder.sites, sites, python_path=python_path())
        prepare(folder, sites)
        engines.prepare(folder, sites, session=name, python_path=python_path(), kept=True)
        folder.launch.write_bytes(msgspec.json.encode(launch))
    except OSError as error:
        raise SessionError(f"the session folder {folder.path} cannot be written: {error}") from error
    register(folder, name=name)  # before there is anything of it that outlives this process
    return folder


def default_place(session: str) -> Path:
    return state_folder() / "sessions.d" / session


def sites_of(folder: SessionFolder) -> dict[str, Site]:
    return read_sites(folder.sites)


def forget(folder: SessionFolder) -> None:
    _unregister(folder)
    shutil.rmtree(folder.path, ignore_errors=True)


def _unregister(folder: SessionFolder) -> None:
    for link in (state_folder() / "sessions").glob("*"):
        if link.is_symlink() and link.resolve() == folder.path.resolve():
            link.unlink(missing_ok=True)


def find(name: str) -> tuple[SessionFolder, Site]:
    """Return a session by id or folder, and its site's name in a Site. Restart a manager that is gone. Raises
    SessionError."""
    wait_for_begun(name)
    folder = find_session(name)
    if not is_up(folder):
        start(folder, waiting=log.warning)
    sites = "+".join(sites_of(folder)) if is_detached(folder) else folder.read().site
    return folder, msgspec.structs.replace(Site.default(), name=sites, engine=engines.engine_of(folder))


def start(folder: SessionFolder, *, waiting: Callable[[str], None], to_end: bool = False) -> lease.LeaseHolder:
    """Start the manager of a session here, wait until it listens, and return its lease. Another process may start it at
    the same time: one of the two remains.

    `waiting` gets a message if this takes long. `to_end`: start it to end the session, on any port if its site's ports
    are taken. Raises SessionError.
    """
    launch = read_launch(folder)
    if to_end:
        launch = msgspec.structs.replace(launch, options=(*launch.options, "--any-port"))
    if why := unreachable(folder):
        raise SessionError(why, session=launch.session)
    path = lease.lease_file(folder)
    before, said_before = lease.read(path), _written_at(folder)
    if before is not None and before.over:
        raise _over(launch, before.over)
    patience_s = START_LIMIT_S
    if before is not None and lease.is_alive(before) is None:
        patience_s += lease.PATIENCE_S + lease.SETTLE_S
        waiting(
            f"the manager of session {launch.session} was {before}; it is started here if that one gives no sign of "
            f"life for {lease.PATIENCE_S:.0f} s"
        )
    said_at = folder.manager_log.stat().st_size if folder.manager_log.exists() else 0
    process, tries_left = _spawn(folder, launch), _TRIES
    until = time.monotonic() + patience_s
    try:
        while _written_at(folder) == said_before or (holder := lease.read(path)) is None:
            if process.poll() is not None:
                other = lease.read(path)
                if other is not None and other.over:  # another process was quicker, and has ended the session as well
                    raise _over(launch, other.over)
                if other is not None and is_up(folder):  # another process, or its keeper, was quicker
                    register(folder)
                    return other
                if other is None or not lease.is_alive(other):
                    tries_left -= 1
                    if (process.returncode >= 0 and process.returncode != TAKEN_OVER) or not tries_left:
                        what = f"the manager ended with exit code {process.returncode} before it listened"
                        raise with_log(what, folder.manager_log, said_at=said_at)
                    process = _spawn(folder, launch)  # it was killed, or the one that it found was
            if time.monotonic() > until:
                what = f"the manager did not listen within {patience_s:.0f} s"
                raise with_log(what, folder.manager_log, said_at=said_at)
            time.sleep(0.02)
    except BaseException:  # Ctrl-C too
        if _written_at(folder) == said_before:  # else it is up, and known by its id
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)
        if not folder.file.exists():  # it never came up: no command needs to wait for it
            _unregister(folder)
        raise
    register(folder)
    return holder


def _over(launch: Launch, why: str) -> SessionError:
    return SessionError(f"session {launch.session} is over: {why}", session=launch.session)


def _spawn(folder: SessionFolder, launch: Launch) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "stoker.manager.main", "--session", str(folder.path)]
    options = ["--name", launch.session, *launch.options, "--detached", "--kept"]
    return spawn_manager([*command, *options], folder.manager_log)


def _written_at(folder: SessionFolder) -> int:
    return folder.file.stat().st_mtime_ns if folder.file.exists() else 0


def python_path() -> str:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = list(dict.fromkeys([str(working_folder()), *filter(None, given)]))
    refuse_odd_imports(paths)
    return os.pathsep.join(paths)


# ---- the session that stays for a site


class KeptSession(msgspec.Struct, frozen=True):
    """A session of `stoker up`: its id and folder, and `started` if it was started now."""

    session: str
    folder: Path
    started: bool


def kept_session(
    site: str | os.PathLike[str] | None = None, *, before: str = "", waiting: Callable[[str], None] = lambda _said: None
) -> KeptSession:
    """Return the session that stays for a site file; start one, as `stoker up SITE` does, if there is none.

    Args:
        site: A site file; None = this machine.
        before: The session to prefer, if it is not over and has the same sites.
        waiting: Called with a message if this takes long.

    Returns:
        The session, for `stoker.load(session=...)`.

    Raises:
        SessionError: It cannot start.
        ConfigError: A wrong site file.
    """
    sites = collect([site] if site is not None else [])
    texts = {each.name: site_text(each) for each in sites}
    for folder in _sessions(before):
        with suppress(SessionError, ConfigError):  # one that is damaged is not the one that is meant
            name = name_of(folder)
            there = {key: site_text(one) for key, one in sites_of(folder).items()}
            if there == texts and (name == before or is_up(folder)):
                return KeptSession(name, folder.path, started=False)
    made = make(sites)
    try:
        start(made, waiting=waiting)
    except BaseException:
        if not made.file.exists():  # its manager has not come up
            forget(made)
        raise
    return KeptSession(made.read().session, made.path, started=True)


def _sessions(before: str) -> Iterator[SessionFolder]:
    links = [link for link in (state_folder() / "sessions").glob("*") if holds_session(link)]
    links.sort(key=lambda link: (link.name != before, -link.lstat().st_mtime))
    for link in links:
        folder = SessionFolder(link.resolve())
        if is_detached(folder) and not over(folder):
            yield folder

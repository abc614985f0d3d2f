"""Sessions that outlive programs: `stoker up` makes one, programs join it, `stoker attach` brings its manager back.

The session folder keeps how its manager was started (`manager.json`), so that any login node that sees the folder can
start it again. That the old one does not live any more is the lease's business (`manager.live.lease`).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.config import load_sites, read_sites, write_sites
from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.manager.environment.carrying import prepare
from stoker.manager.executor import engines, standing
from stoker.manager.executor.begun import wait_for_begun
from stoker.manager.executor.processes import make_folder, manager_options, new_session_id, register
from stoker.manager.factory.pilot_command import refuse_odd_imports
from stoker.manager.live import lease
from stoker.manager.live.chosen import check_policies, keep_policies
from stoker.manager.live.taken import TAKEN_OVER
from stoker.protocol.session import SessionFolder, find_session
from stoker.site import Site

log = logging.getLogger("stoker")

_TRIES = 5
START_LIMIT_S = 60.0
"""A manager that has many calls in its journal takes a while to read it."""
_TAIL_LINES = 15
_TERMINATE_S = 5.0


def collect(files: Sequence[str | os.PathLike[str]]) -> tuple[Site, ...]:
    """The sites of these files and those that they name; of none, this machine. Raises ConfigError."""
    found: dict[str, Site] = {}
    for file in files or (None,):
        for site in load_sites(file):
            if found.setdefault(site.name, site) != site:
                raise ConfigError(f"two sites are called {site.name}; give one another `name`", key="name")
    engines.refuse(found.values())
    check_policies(found.values())
    return tuple(found.values())


def make(sites: Sequence[Site], *, place: str = "", idle_s: float = 0.0) -> SessionFolder:
    """A new session's folder, with keys and site files: at `place`, or in the state folder, which compute nodes
    see when it lies in a shared home. Raises SessionError, ConfigError."""
    engines.must_be_here(sites)
    name = new_session_id()
    folder = SessionFolder(place or default_place(name))
    if folder.file.exists() or folder.journal.exists():
        raise SessionError(f"{folder.path} holds a session already; name another folder, or leave --folder away")
    make_folder(folder, elsewhere="stoker up --folder DIR, or the environment variable STOKER_HOME")
    keep_policies(folder, sites, search_path=python_path())
    idle = ("--idle", f"{idle_s:g}") if idle_s else ()
    launch = standing.Launch(name, (*manager_options(sites), *idle))
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
    """Where the folder of a session lies that nobody has named a place for: in the user's home, which compute nodes
    see mostly."""
    return state_folder() / "sessions.d" / session


def sites_of(folder: SessionFolder) -> dict[str, Site]:
    """The sites of a session, by name. Raises ConfigError."""
    return read_sites(folder.sites)


def forget(folder: SessionFolder) -> None:
    """Remove the folder of a session that is over, or never was up, and what knows of it."""
    _unregister(folder)
    shutil.rmtree(folder.path, ignore_errors=True)


def _unregister(folder: SessionFolder) -> None:
    for link in (state_folder() / "sessions").glob("*"):
        if link.is_symlink() and link.resolve() == folder.path.resolve():
            link.unlink(missing_ok=True)


def find(name: str) -> tuple[SessionFolder, Site]:
    """The session that a program joins, by id or folder, and what it calls the site. A manager that is gone is started
    again. Raises SessionError."""
    wait_for_begun(name)
    folder = find_session(name)
    if not standing.is_up(folder):
        start(folder, waiting=log.warning)
    sites = "+".join(sites_of(folder)) if standing.is_detached(folder) else folder.read().site
    return folder, msgspec.structs.replace(Site.default(), name=sites, engine=engines.engine_of(folder))


def start(folder: SessionFolder, *, waiting: Callable[[str], None], to_end: bool = False) -> lease.LeaseHolder:
    """Start the manager of a session here, for the first time or again, and wait until it listens; who it is. Where
    somebody else starts it at the same time there is one all the same.

    `waiting` hears what is waited for, if that takes long. `to_end`: it is started to end the session, and listens on
    any port if those of its site are taken. Raises SessionError with the end of the manager's log.
    """
    launch = standing.read_launch(folder)
    if to_end:
        launch = msgspec.structs.replace(launch, options=(*launch.options, "--any-port"))
    if why := standing.unreachable(folder):
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
                if other is not None and other.over:  # somebody was quicker, and has ended the session as well
                    raise _over(launch, other.over)
                if other is not None and standing.is_up(folder):  # somebody else, or its keeper, was quicker
                    register(folder)
                    return other
                if other is None or not lease.is_alive(other):
                    tries_left -= 1
                    if (process.returncode >= 0 and process.returncode != TAKEN_OVER) or not tries_left:
                        what = f"the manager ended with exit code {process.returncode} before it listened"
                        raise _failed(folder, what, said_at=said_at)
                    process = _spawn(folder, launch)  # it was killed, or the one that it found was
            if time.monotonic() > until:
                raise _failed(folder, f"the manager did not listen within {patience_s:.0f} s", said_at=said_at)
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


def _over(launch: standing.Launch, why: str) -> SessionError:
    return SessionError(f"session {launch.session} is over: {why}", session=launch.session)


def _spawn(folder: SessionFolder, launch: standing.Launch) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "stoker.manager.main", "--session", str(folder.path)]
    with open(folder.manager_log, "ab") as log:
        return subprocess.Popen(
            [*command, "--name", launch.session, *launch.options, "--detached", "--kept"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _written_at(folder: SessionFolder) -> int:
    """When `session.json` was written last: a manager writes it once it listens."""
    return folder.file.stat().st_mtime_ns if folder.file.exists() else 0


def python_path() -> str:
    """Programs that join the session lie in the folder that it was started in, mostly: its pilots import from there."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = list(dict.fromkeys([str(working_folder()), *filter(None, given)]))
    refuse_odd_imports(paths)
    return os.pathsep.join(paths)


def _failed(folder: SessionFolder, what: str, *, said_at: int) -> SessionError:
    """`said_at`: the size of the manager's log before this manager was started."""
    log = folder.manager_log
    said = log.read_bytes() if log.exists() else b""
    if len(said) >= said_at:  # else the log was full and began anew
        said = said[said_at:]
    lines = said.decode(errors="replace").splitlines()[-_TAIL_LINES:]
    text = "".join(f"\n  {line}" for line in lines) or " (it said nothing)"
    return SessionError(f"{what}; the end of {log}:{text}", log=str(log))

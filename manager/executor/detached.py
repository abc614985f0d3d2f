"""Find sessions that outlive programs, and restart their managers.

A session is registered before its manager starts, so that commands find it even if the starting command is killed.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.config import read_sites
from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.locks import is_locked
from stoker.manager.executor.processes import error_with_log_tail, register_session, spawn_manager
from stoker.manager.live import interfaces, lease
from stoker.manager.live.presence import is_manager_up as is_manager_up
from stoker.protocol.session import SessionFolder, find_session, is_starting, modification_time
from stoker.site import Engine, Site

# ---- sessions whose manager does not listen yet


_MAX_START_S = 5.0
_MAX_LISTEN_S = 60.0
_POLL_S = 0.02


def is_session_starting(folder: Path) -> bool:
    if not is_starting(folder):
        return False
    age_s = time.time() - modification_time(folder / "manager.json")
    return 0 <= age_s < _MAX_START_S or (age_s < _MAX_LISTEN_S and is_locked(folder / "manager.lock") is True)


def wait_for_starting_sessions(name: str = "") -> None:
    """Wait while a session whose id begins with `name` is starting."""
    links = state_folder() / "sessions"
    while any(is_session_starting(link) for link in links.glob("*") if link.name.startswith(name)):
        time.sleep(_POLL_S)


# ---- the state of a session, read from its folder


SESSION_VARIABLE = "STOKER_SESSION"
"""Environment variable with the session that programs join if they name no site."""
RUN_FOLDER_VARIABLE = "STOKER_RUN"
"""Environment variable that tells a detached program (`stoker run --detach`) the folder of its run."""


class LaunchOptions(msgspec.Struct, frozen=True):
    session: str
    options: tuple[str, ...]


def session_name(folder: SessionFolder) -> str:
    if folder.file.exists():
        return folder.read().session
    return read_launch_options(folder).session if folder.launch.exists() else folder.path.name


def engine_of(folder: SessionFolder) -> Engine:
    return Engine.TASKVINE if any(folder.path.glob("taskvine-*.json")) else Engine.STOKER


def is_detached(folder: SessionFolder) -> bool:
    return folder.launch.exists()


def explain_unreachable_manager(folder: SessionFolder) -> str:
    """Return why this machine's network cannot reach the manager, or an empty text."""
    if not folder.file.exists():
        return ""
    file, holder = folder.read(), lease.read_lease_or_none(folder.lease)
    if (
        holder is None
        or not lease.is_holder_alive(holder)
        or not (why := interfaces.explain_missing_route(file.address))
    ):
        return ""
    return f"the manager of session {file.session} ({holder}) at {file.address} cannot be reached: {why}"


def read_launch_options(folder: SessionFolder) -> LaunchOptions:
    try:
        return msgspec.json.decode(folder.launch.read_bytes(), type=LaunchOptions)
    except OSError:
        raise SessionError(
            f"the session in {folder.path} belonged to a program and ended with it; `stoker up` starts a session that"
            " stays up"
        ) from None
    except UNREADABLE as error:
        raise SessionError(f"{folder.launch} is damaged: {error}") from error


# ---- finding and starting


log = logging.getLogger("stoker")

_TRIES = 5
START_LIMIT_S = 60.0
_TERMINATE_S = 5.0


def delete_session(folder: SessionFolder) -> None:
    remove_session_links(folder)
    shutil.rmtree(folder.path, ignore_errors=True)


def remove_session_links(folder: SessionFolder) -> None:
    for link in (state_folder() / "sessions").glob("*"):
        if link.is_symlink() and link.resolve() == folder.path.resolve():
            link.unlink(missing_ok=True)


def find_and_restart_session(name: str) -> tuple[SessionFolder, Site]:
    """Find a session by id or folder, and restart its manager if needed. Return the session's folder, and a Site
    whose name joins the names of the session's sites (`a+b`).
    """
    wait_for_starting_sessions(name)
    folder = find_session(name)
    if not is_manager_up(folder):
        start_session_manager(folder, on_wait=log.warning)
    sites = "+".join(read_sites(folder.sites)) if is_detached(folder) else folder.read().site
    return folder, msgspec.structs.replace(Site.default(), name=sites, engine=engine_of(folder))


def start_session_manager(
    folder: SessionFolder, *, on_wait: Callable[[str], None], only_ends_session: bool = False
) -> lease.LeaseHolder:
    """Start a session's manager on this machine. Return the manager's lease when the manager listens.

    `on_wait` is called with a message if the earlier manager may still run. `only_ends_session`: the manager only ends
    the session, and may use any port.
    """
    launch = read_launch_options(folder)
    if only_ends_session:
        launch = msgspec.structs.replace(launch, options=(*launch.options, "--any-port"))
    if why := explain_unreachable_manager(folder):
        raise SessionError(why, session=launch.session)
    path = folder.lease
    before, said_before = lease.read_lease(path), _session_file_mtime_ns(folder)
    if before is not None and before.over:
        raise _session_over_error(launch, before.over)
    patience_s = START_LIMIT_S
    if before is not None and lease.is_holder_alive(before) is None:
        patience_s += lease.PATIENCE_S + lease.SETTLE_S
        on_wait(
            f"the manager of session {launch.session} was {before}; another manager starts here if that manager "
            f"does not renew its lease within {lease.PATIENCE_S:.0f} s"
        )
    log_offset = folder.manager_log.stat().st_size if folder.manager_log.exists() else 0
    process, tries_left = _spawn_session_manager(folder, launch), _TRIES
    until = time.monotonic() + patience_s
    try:
        while _session_file_mtime_ns(folder) == said_before or (holder := lease.read_lease(path)) is None:
            if process.poll() is not None:
                other = lease.read_lease(path)
                if other is not None and other.over:  # another process started a manager and ended the session
                    raise _session_over_error(launch, other.over)
                if other is not None and is_manager_up(folder):  # use the manager that another process started
                    register_session(folder)
                    return other
                if other is None or not lease.is_holder_alive(other):
                    tries_left -= 1
                    if (process.returncode >= 0 and process.returncode != lease.TAKEN_OVER) or not tries_left:
                        what = f"the manager ended with exit code {process.returncode} before it listened"
                        raise error_with_log_tail(what, folder.manager_log, log_offset=log_offset)
                    process = _spawn_session_manager(folder, launch)  # retry, as a signal killed the process
            if time.monotonic() > until:
                what = f"the manager did not listen within {patience_s:.0f} s"
                raise error_with_log_tail(what, folder.manager_log, log_offset=log_offset)
            time.sleep(_POLL_S)
    except BaseException:  # also clean up after Ctrl-C
        if _session_file_mtime_ns(folder) == said_before:  # keep a manager that commands can already find
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)
        if not folder.file.exists():  # without a session file, no command must wait for the manager
            remove_session_links(folder)
        raise
    register_session(folder)
    return holder


def _session_over_error(launch: LaunchOptions, why: str) -> SessionError:
    return SessionError(f"session {launch.session} is over: {why}", session=launch.session)


def _spawn_session_manager(folder: SessionFolder, launch: LaunchOptions) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "stoker.manager.main", "--session", str(folder.path)]
    options = ["--name", launch.session, *launch.options, "--detached", "--kept"]
    return spawn_manager([*command, *options], folder.manager_log)


def _session_file_mtime_ns(folder: SessionFolder) -> int:
    return folder.file.stat().st_mtime_ns if folder.file.exists() else 0

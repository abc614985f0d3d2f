"""Start, watch, restart and end the manager's process, for the client that owns it.

A dead manager is restarted with its journal. If the manager dies repeatedly without progress, or before it listens, the
session ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from zmq import curve_keypair

from stoker.contexts.folders import state_folder
from stoker.errors import SessionError
from stoker.folders import refuse_non_utf8_path
from stoker.log_files import read_last_lines
from stoker.manager.live import interfaces, lease
from stoker.manager.live.keeper import RestartLimiter, format_pause
from stoker.protocol.session import KeyPair, SessionFolder, is_session_folder, is_starting, modification_time
from stoker.site import ProviderKind, Site

logger = logging.getLogger("stoker")

_TAIL_LINES = 15
KEPT_SESSIONS = 50


def create_session_folder(folder: SessionFolder, *, elsewhere: str = "stoker.load(run_dir=...)") -> None:
    """Create a session folder and its keys. `elsewhere`: advice for the error message."""
    refuse_non_utf8_path(
        folder.path, what="the session folder", advice=f"rename that file, or name another folder: {elsewhere}"
    )
    try:
        folder.create_folders()
        for role in ("server", "client"):
            public, secret = curve_keypair()
            folder.write_key(role, KeyPair(public=public.decode(), secret=secret.decode()))
        folder.write_key("transfer", KeyPair(public="", secret=secrets.token_hex(32)))
    except OSError as error:
        raise SessionError(
            f"the session folder {folder.path} cannot be made: {error.strerror}; make room there, or name a place that"
            f" you can write to: {elsewhere}"
        ) from error


def folder_removed_error(folder: SessionFolder) -> SessionError:
    return SessionError(
        f"the session folder {folder.path} was removed while the session ran: the session is over, and calls that had"
        " not ended are lost; run the program again, and keep its run folder (run_dir) until it has ended"
    )


def manager_command_options(sites: Sequence[Site]) -> list[str]:
    first = sites[0].session
    interface = next((site.session.interface for site in sites if site.session.interface), "")
    if not interface:
        here = all(site.provider.kind is ProviderKind.LOCAL for site in sites)
        interface = interfaces.LOOPBACK if here else interfaces.AUTO
    options = ["--interface", interface, "--ports", first.ports]
    if first.sync is not None:
        options += ["--sync", "yes" if first.sync else "no"]
    return [*options, "--heartbeat", f"{first.heartbeat_s:g}", "--pilot-lease", f"{first.lease_s:g}"]


def new_session_id() -> str:
    """Return an unused id of four characters, for example `k3v9`."""
    links = state_folder() / "sessions"
    while True:
        name = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(4))
        try:
            if not (links / name).is_symlink():
                return name
        except OSError as error:
            raise _state_folder_error(links, "read", error) from error


def register_session(folder: SessionFolder, *, name: str = "") -> None:
    """Link the session into the user's state folder, where `stoker status` finds it. `name`: the session's id, if no
    manager has listened yet."""
    links = state_folder() / "sessions"
    try:
        name = name or folder.read().session
        links.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest_first = sorted(links.iterdir(), key=modification_time, reverse=True)
        for place, old in enumerate(newest_first):
            is_one = is_session_folder(old) or is_starting(old)
            if not is_one or (place >= KEPT_SESSIONS and not _session_may_run(SessionFolder(old))):
                old.unlink(missing_ok=True)
        draft = links / f".{name}-{secrets.token_hex(4)}"  # unique, because other processes may register too
        draft.symlink_to(folder.path)
        draft.replace(links / name)
    except OSError as error:
        raise _state_folder_error(links, "written", error) from error


def link_joined_session(folder: SessionFolder, link: Path) -> None:
    """Link a joined session into the program's run folder, where commands find it."""
    with suppress(OSError):
        link.symlink_to(folder.path.resolve(), target_is_directory=True)


def _state_folder_error(links: Path, what: str, error: OSError) -> SessionError:
    return SessionError(
        f"Stoker's state folder {links.parent} cannot be {what}: {error.strerror}; set the environment variable"
        " STOKER_HOME to a folder that you can write to, on a disk with room"
    )


def _session_may_run(folder: SessionFolder) -> bool:
    try:
        holder = lease.read_lease(folder.lease)
    except (OSError, SessionError):  # unknown, because the file system does not answer
        return True
    if holder is None:
        return folder.launch.exists() and not is_starting(folder.path)
    return not holder.over and (folder.launch.exists() or lease.is_holder_alive(holder) is not False)


class ManagerProcess:
    """The manager of a session. The watching thread calls `on_lost` if restarts fail."""

    def __init__(
        self, folder: SessionFolder, *, on_lost: Callable[[SessionError], None], options: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-P", "-m", "stoker.manager.main"),
    ) -> None:  # fmt: skip
        self._folder = folder
        self._on_lost = on_lost
        self._command = [*command, "--session", str(folder.path), "--parent", str(os.getpid()), *options]
        self._stopping = threading.Event()
        self._restarts = RestartLimiter(folder.progress)
        self._lock = threading.Lock()
        self._process = self._start_manager()
        threading.Thread(target=self._watch_manager, name="stoker-manager-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_listening(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._folder.file.exists():
            if self._process.poll() is not None and not self._folder.file.exists():
                raise self._manager_error(
                    f"the manager ended with exit code {self._process.returncode} before it listened"
                )
            if time.monotonic() > until:
                raise self._manager_error(f"the manager did not listen within {timeout_s:.0f} s")
            time.sleep(0.005)

    def expect_manager_exit(self) -> None:
        with self._lock:
            self._stopping.set()

    def end_process(self, *, grace_s: float) -> None:
        self.expect_manager_exit()
        for stop, wait_s in (("poll", grace_s), ("terminate", 2.0), ("kill", 2.0)):
            getattr(self._process, stop)()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                return

    def _start_manager(self) -> subprocess.Popen[bytes]:
        self._restarts.mark_start()
        return spawn_manager(self._command, self._folder.manager_log)

    def _watch_manager(self) -> None:
        while True:
            code = self._process.wait()
            if self._stopping.is_set() or code == 0:  # exit code 0: a signal ended the session
                return
            if not os.path.isdir(self._folder.path):
                self._on_lost(folder_removed_error(self._folder))
                return
            what = f"the manager ended with exit code {code}"
            if not self._folder.file.exists():
                self._on_lost(self._manager_error(what))
                return
            how = f"the manager was killed by signal {-code}" if code < 0 else what
            while (pause_s := self._restarts.record_death()) is not None:
                log = self._folder.manager_log
                logger.warning("%s; it is started again%s with its journal (%s)", how, format_pause(pause_s), log)
                self._stopping.wait(pause_s)
                try:
                    with self._lock:
                        if not self._stopping.is_set():
                            self._process = self._start_manager()
                    break
                except OSError as error:  # try again: the host may be out of descriptors, memory or processes
                    what = how = f"the manager could not be started ({error})"
            else:
                self._on_lost(self._manager_error(f"{what}, repeatedly"))
                return

    def _manager_error(self, what: str) -> SessionError:
        return error_with_log_tail(what, self._folder.manager_log)


def spawn_manager(command: Sequence[str], log_file: Path) -> subprocess.Popen[bytes]:
    with open(log_file, "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def error_with_log_tail(what: str, log: Path, *, log_offset: int = 0) -> SessionError:
    """Return an error with the last lines of a manager's log. `log_offset`: the log's size before its start."""
    lines = read_last_lines(log, start=log_offset, lines=_TAIL_LINES).splitlines()
    text = "".join(f"\n  {line}" for line in lines) or " (the manager printed nothing)"
    return SessionError(f"{what}; the end of {log}:{text}", log=str(log))

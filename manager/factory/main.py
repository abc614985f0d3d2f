"""The factory process, which the manager starts: `python -m stoker.manager.factory.main --session DIR`.

Two locks (flock) in the session folder ensure that a session has one factory.

- A factory locks `factory.lock`. A second factory waits for this lock, and kills the first after `TURN_LIMIT_S`.
- Every command of a batch system inherits `commands.lock`, and keeps this lock after the factory dies. The new factory
  must not repeat a submission in progress, so it waits for the command's time limit, and then kills the command.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker import locks
from stoker.config import read_python_path, read_sites
from stoker.errors import SessionError, StokerError
from stoker.log_files import log_to_file
from stoker.manager.factory import commands
from stoker.manager.factory.factory import END_LIMIT_S, Ending, Factory
from stoker.protocol.session import SessionFolder
from stoker.units import show_seconds

log = logging.getLogger("stoker.factory")

TURN_LIMIT_S = 60.0
_AFTER_KILL_S = 5.0
_PATIENCE_S = 0.1
_MODULE = "stoker.manager.factory.main"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stoker-factory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="session folder, with its site files and keys")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID", help="process id of the manager")
    parser.add_argument("--turn-limit-s", type=float, default=TURN_LIMIT_S, help="seconds for the old factory to exit")
    parser.add_argument("--end-limit-s", type=float, default=END_LIMIT_S, help="seconds for the session's jobs to end")
    options = parser.parse_args(arguments)
    folder = SessionFolder(options.session)
    log_to_file(folder.path / "factory.log")
    # The client handles Ctrl-C in the user's terminal. SIGTERM ends the factory and leaves all jobs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.info("the factory starts: pid %d, started by pid %d", os.getpid(), options.parent)
    try:
        return _run(folder, options)
    except StokerError as error:
        log.critical("%s", error)
        print(error, file=sys.stderr)  # noqa: T201
        return Ending.FAILED
    except Exception:
        log.exception("the factory failed; another one continues from the batch system's records")
        return Ending.FAILED


def _run(folder: SessionFolder, options: argparse.Namespace) -> int:
    sites = read_sites(folder.sites)
    if not take_turn(folder.path / "factory.lock", parent=options.parent, limit_s=options.turn_limit_s):
        return Ending.OVER
    limit_s = max((site.provider.command_limit_s for site in sites.values()), default=0.0)
    acquire_command_lock(folder.path / "commands.lock", limit_s=limit_s)
    path = read_python_path(folder.sites)
    factory = Factory(folder, sites=sites, parent=options.parent, python_path=path, end_limit_s=options.end_limit_s)
    try:
        ending = factory.run()
    finally:
        factory.close()
        commands.kill_running()
    log.info("the factory ends: %s", ending.name.lower())
    return ending


def take_turn(file: Path, *, parent: int, limit_s: float = TURN_LIMIT_S) -> bool:
    """Become the session's only factory. Return False if this factory's manager exits first."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if locks.take(descriptor):
        return True
    began = time.monotonic()
    text = "another factory of the session is running, %s: waiting for its exit, for %s at most"
    log.info(text, _holders(file), show_seconds(limit_s))
    if not _wait(descriptor, limit_s=limit_s, give_up=lambda: os.getppid() != parent):
        if os.getppid() != parent:
            log.info("the manager that started this factory (pid %d) is gone: this factory exits", parent)
            return False
        for holder in locks.holders(file):
            if _MODULE in holder.words:
                log.warning("%s has not exited for %s: it is killed", holder, show_seconds(limit_s))
                with suppress(ProcessLookupError):
                    os.kill(holder.pid, signal.SIGKILL)
        if not _wait(descriptor, limit_s=_AFTER_KILL_S):
            raise SessionError(
                f"{file} is held by {_holders(file)} after {show_seconds(time.monotonic() - began)}: no other factory "
                "can start; kill the holder by hand"
            )
    log.info("the other factory is gone, after %s", show_seconds(time.monotonic() - began))
    return True


def acquire_command_lock(file: Path, *, limit_s: float) -> None:
    """Wait until the commands of a killed factory end, or kill them after `limit_s`, then take their lock."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if not locks.take(descriptor):
        age_s = min((_process_age_s(each.pid) for each in locks.holders(file)), default=0.0)
        text = "a command of the previous factory still runs, %s: waiting until it ends or has run for %s"
        log.info(text, _holders(file), show_seconds(limit_s))
        began = time.monotonic()
        if not _wait(descriptor, limit_s=max(0.0, limit_s - age_s)):
            for holder in locks.holders(file):
                log.warning("%s has run for longer than %s: it is killed", holder, show_seconds(limit_s))
                commands.kill_tree(holder.pid)
            if not _wait(descriptor, limit_s=_AFTER_KILL_S):
                log.warning("the command does not end, %s: the factory continues without waiting", _holders(file))
                os.close(descriptor)
                return
        log.info("that command has ended, after %s", show_seconds(time.monotonic() - began))
    commands.inherit(descriptor)


def _process_age_s(pid: int) -> float:
    started_s = locks.started(pid) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s if started_s else 0.0


def _wait(descriptor: int, *, limit_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
    until = time.monotonic() + limit_s
    while not locks.take(descriptor):
        if give_up() or time.monotonic() > until:
            return False
        time.sleep(_PATIENCE_S)
    return True


def _holders(file: Path) -> str:
    return ", ".join(map(str, locks.holders(file))) or "a process that this host does not see"


if __name__ == "__main__":
    sys.exit(main())

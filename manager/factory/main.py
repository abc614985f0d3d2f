"""The factory process, which the manager starts: `python -m stoker.manager.factory.main --session DIR`.

Two locks (flock) in the session folder ensure that a session has one factory.

- A factory locks `factory.lock`. A second factory waits for this lock, and kills the first factory after
  `OLD_FACTORY_EXIT_LIMIT_S` seconds.
- Every command of a batch system inherits the lock on `commands.lock`, and keeps it if the factory dies. The new
  factory must not repeat a submission that still runs, so it waits until the command ends or exceeds its time limit.
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
from stoker.manager.factory.factory import CANCELLATION_LIMIT_S, BatchJobFactory, FactoryEnd
from stoker.protocol.session import SessionFolder
from stoker.units import show_seconds

log = logging.getLogger("stoker.factory")

OLD_FACTORY_EXIT_LIMIT_S = 60.0
_LOCK_WAIT_AFTER_KILL_S = 5.0
_LOCK_RETRY_S = 0.1
_MODULE = "stoker.manager.factory.main"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stoker-factory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="session folder, with its site files and keys")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID", help="process id of the manager")
    parser.add_argument(
        "--turn-limit-s", type=float, default=OLD_FACTORY_EXIT_LIMIT_S, help="seconds for the old factory to exit"
    )
    parser.add_argument(
        "--end-limit-s", type=float, default=CANCELLATION_LIMIT_S, help="seconds for the session's jobs to end"
    )
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
        return FactoryEnd.FAILED
    except Exception:
        log.exception("the factory failed; another one continues from the batch system's records")
        return FactoryEnd.FAILED


def _run(folder: SessionFolder, options: argparse.Namespace) -> int:
    sites = read_sites(folder.sites)
    if not acquire_factory_lock(folder.path / "factory.lock", parent=options.parent, limit_s=options.turn_limit_s):
        return FactoryEnd.OVER
    limit_s = max((site.provider.command_limit_s for site in sites.values()), default=0.0)
    acquire_command_lock(folder.path / "commands.lock", limit_s=limit_s)
    path = read_python_path(folder.sites)
    factory = BatchJobFactory(
        folder, sites=sites, parent=options.parent, python_path=path, end_limit_s=options.end_limit_s
    )
    try:
        ending = factory.run()
    finally:
        factory.close()
        commands.kill_running_commands()
    log.info("the factory ends: %s", ending.name.lower())
    return ending


def acquire_factory_lock(file: Path, *, parent: int, limit_s: float = OLD_FACTORY_EXIT_LIMIT_S) -> bool:
    """Wait until no other factory of the session runs. Return False if the manager of this factory exits first."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if locks.try_lock(descriptor):
        return True
    began = time.monotonic()
    text = "another factory of the session is running, %s: waiting for its exit, for %s at most"
    log.info(text, _describe_lock_holders(file), show_seconds(limit_s))
    if not _wait_for_lock(descriptor, limit_s=limit_s, may_give_up=lambda: os.getppid() != parent):
        if os.getppid() != parent:
            log.info("the manager that started this factory (pid %d) is gone: this factory exits", parent)
            return False
        for holder in locks.find_lock_holders(file):
            if _MODULE in holder.words:
                log.warning("%s has not exited for %s: it is killed", holder, show_seconds(limit_s))
                with suppress(ProcessLookupError):
                    os.kill(holder.pid, signal.SIGKILL)
        if not _wait_for_lock(descriptor, limit_s=_LOCK_WAIT_AFTER_KILL_S):
            raise SessionError(
                f"{file} is held by {_describe_lock_holders(file)} after {show_seconds(time.monotonic() - began)}: "
                "no other factory can start; kill the holder by hand"
            )
    log.info("the other factory is gone, after %s", show_seconds(time.monotonic() - began))
    return True


def acquire_command_lock(file: Path, *, limit_s: float) -> None:
    """Wait until the commands of a killed factory have ended, or kill them after `limit_s`, and take their lock."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if not locks.try_lock(descriptor):
        age_s = min((_process_age_s(each.pid) for each in locks.find_lock_holders(file)), default=0.0)
        text = "a command of the previous factory still runs, %s: waiting until it ends or has run for %s"
        log.info(text, _describe_lock_holders(file), show_seconds(limit_s))
        began = time.monotonic()
        if not _wait_for_lock(descriptor, limit_s=max(0.0, limit_s - age_s)):
            for holder in locks.find_lock_holders(file):
                log.warning("%s has run for longer than %s: it is killed", holder, show_seconds(limit_s))
                commands.kill_process_tree(holder.pid)
            if not _wait_for_lock(descriptor, limit_s=_LOCK_WAIT_AFTER_KILL_S):
                log.warning(
                    "the command does not end, %s: the factory continues without waiting", _describe_lock_holders(file)
                )
                os.close(descriptor)
                return
        log.info("that command has ended, after %s", show_seconds(time.monotonic() - began))
    commands.inherit_descriptor(descriptor)


def _process_age_s(pid: int) -> float:
    started_s = locks.process_start_ticks(pid) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s if started_s else 0.0


def _wait_for_lock(descriptor: int, *, limit_s: float, may_give_up: Callable[[], bool] = lambda: False) -> bool:
    until = time.monotonic() + limit_s
    while not locks.try_lock(descriptor):
        if may_give_up() or time.monotonic() > until:
            return False
        time.sleep(_LOCK_RETRY_S)
    return True


def _describe_lock_holders(file: Path) -> str:
    return ", ".join(map(str, locks.find_lock_holders(file))) or "a process that this host does not see"


if __name__ == "__main__":
    sys.exit(main())

"""The factory process: `python -m stoker.manager.factory.main --session DIR`. Started and kept by the manager.

There is one a session: whoever comes second waits for the lock, and leaves if the manager that started it ends
meanwhile. Commands of a batch system inherit another lock: a factory that follows one that was killed waits until the
last command of its predecessor has ended (a submission that is on its way must be seen, not repeated).
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
import time
from pathlib import Path

from stoker.errors import StokerError
from stoker.manager.factory import commands
from stoker.manager.factory.factory import END_LIMIT_S, Ending, Factory
from stoker.manager.protocol.session import SessionFolder
from stoker.site_files import read_python_path, read_sites

log = logging.getLogger("stoker.factory")

_PATIENCE_S = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Run a factory until its session is over. Returns the exit status, an `Ending`."""
    parser = argparse.ArgumentParser(prog="stoker-factory", description=__doc__.splitlines()[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="session folder, with its site files and keys")
    parser.add_argument(
        "--end-limit-s", type=float, default=END_LIMIT_S, metavar="S", help="for jobs to be gone at the end"
    )
    options = parser.parse_args(arguments)
    folder = SessionFolder(options.session)
    logging.basicConfig(
        filename=folder.path / "factory.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    # Ctrl-C in the user's terminal is the client's business. A factory that is told to end leaves all as it is.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _run(folder, end_limit_s=options.end_limit_s)
    except StokerError as error:
        log.critical("%s", error)
        print(error, file=sys.stderr)  # noqa: T201
        return Ending.FAILED
    except Exception:
        log.exception("the factory failed; another one goes on from what the batch system says")
        return Ending.FAILED


def _run(folder: SessionFolder, *, end_limit_s: float) -> int:
    sites = read_sites(folder.sites)
    if not _lock(folder.path / "factory.lock", parent=os.getppid()):
        return Ending.OVER
    limit_s = max((site.provider.command_limit_s for site in sites.values()), default=0.0)
    _wait_for_commands(folder.path / "commands.lock", limit_s=limit_s)
    path = read_python_path(folder.sites)
    factory = Factory(folder, sites=sites, python_path=path, end_limit_s=end_limit_s)
    try:
        ending = factory.run()
    finally:
        factory.close()
        commands.kill_running()
    log.info("the factory ends: %s", ending.name.lower())
    return ending


def _lock(file: Path, *, parent: int) -> bool:
    """Be the session's only factory. False if the one that started this process is gone before that can be."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    waits = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                log.info("another factory of the session is there: waiting for it to end")
            waits = True
            if os.getppid() != parent:
                return False
            time.sleep(_PATIENCE_S)
        else:
            return True


def _wait_for_commands(file: Path, *, limit_s: float) -> None:
    """Wait until no command of a factory that was killed runs any more; from now on ours hold the lock."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                log.warning("a command of the factory before this one runs for %g s now: not waited for", limit_s)
                return
            time.sleep(_PATIENCE_S)
        else:
            commands.inherit(descriptor)
            return


if __name__ == "__main__":
    sys.exit(main())

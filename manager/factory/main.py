"""The factory process: `python -m stoker.manager.factory.main --session DIR`. Started and kept by the manager.

There is one a session, and it begins when the last command of the one before has ended (`turn`). From its first moment
it says in factory.log what it waits for: to its manager it is only silent until it has said hello, and the last line
of that log is what people are told then.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from stoker.config import read_python_path, read_sites
from stoker.errors import StokerError
from stoker.log_files import keep_log
from stoker.manager.factory import commands, parsl_parts
from stoker.manager.factory.factory import END_LIMIT_S, Ending, Factory
from stoker.manager.factory.turn import TURN_LIMIT_S, take_turn, wait_for_commands
from stoker.protocol.session import SessionFolder

log = logging.getLogger("stoker.factory")


def main(arguments: list[str] | None = None) -> int:
    """Run a factory until its session is over. Returns the exit status, an `Ending`."""
    parser = argparse.ArgumentParser(prog="stoker-factory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="session folder, with its site files and keys")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID", help="who starts it (its manager)")
    parser.add_argument(
        "--turn-limit-s", type=float, default=TURN_LIMIT_S, metavar="S", help="for the factory before to be gone"
    )
    parser.add_argument(
        "--end-limit-s", type=float, default=END_LIMIT_S, metavar="S", help="for jobs to be gone at the end"
    )
    options = parser.parse_args(arguments)
    folder = SessionFolder(options.session)
    parsl_parts.import_in_parts()
    keep_log(folder.path / "factory.log")
    # Ctrl-C in the user's terminal is the client's business. A factory that is told to end leaves all as it is.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.info("a factory begins: pid %d, started by pid %d", os.getpid(), options.parent)
    try:
        return _run(folder, options)
    except StokerError as error:
        log.critical("%s", error)
        print(error, file=sys.stderr)  # noqa: T201
        return Ending.FAILED
    except Exception:
        log.exception("the factory failed; another one goes on from what the batch system says")
        return Ending.FAILED


def _run(folder: SessionFolder, options: argparse.Namespace) -> int:
    sites = read_sites(folder.sites)
    if not take_turn(folder.path / "factory.lock", parent=options.parent, limit_s=options.turn_limit_s):
        return Ending.OVER
    limit_s = max((site.provider.command_limit_s for site in sites.values()), default=0.0)
    wait_for_commands(folder.path / "commands.lock", limit_s=limit_s)
    path = read_python_path(folder.sites)
    factory = Factory(folder, sites=sites, parent=options.parent, python_path=path, end_limit_s=options.end_limit_s)
    try:
        ending = factory.run()
    finally:
        factory.close()
        commands.kill_running()
    log.info("the factory ends: %s", ending.name.lower())
    return ending


if __name__ == "__main__":
    sys.exit(main())

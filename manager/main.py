"""The manager process: `python -m stoker.manager.main --session DIR`. An executor starts and restarts the process.

In a session that outlives programs (`stoker up`) the manager runs with `--detached`, and a parent process restarts it
(`--kept`).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from stoker import connections
from stoker.errors import StokerError
from stoker.log_files import log_to_file
from stoker.manager.live import interfaces, journal, keeper, lease
from stoker.manager.live.lease import TAKEN_OVER, TakenError
from stoker.manager.live.peer_watch import PeerTimeLimits
from stoker.manager.live.presence import check_folder, restore_session_file
from stoker.manager.live.server import ManagerServer
from stoker.manager.live.session_policies import policies_of, read_chosen_policies
from stoker.manager.live.sockets import PortsTakenError
from stoker.protocol.session import SessionFolder
from stoker.site import Session


def main(arguments: list[str] | None = None) -> int:
    """Run a manager until its session ends.

    Returns the exit status: 0 = session ended, 1 = cannot start, 3 = another manager runs, 4 = cannot continue, 5 = no
    free port at a restart.
    """
    options = _parser().parse_args(arguments)
    folder = SessionFolder(options.session)
    log_to_file(folder.manager_log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C, and ends the session
    if options.kept:
        given = [each for each in (sys.argv[1:] if arguments is None else arguments) if each != "--kept"]
        return keeper.keep([sys.executable, "-P", "-m", "stoker.manager.main", *given], progress=folder.progress)
    connections.raise_descriptor_limit()
    try:
        check_folder(folder)
        held = lease.take(folder.lease, room_s=lease.ROOM_S if folder.file.exists() else 0.0)
    except StokerError as error:
        return _exit_status(error, restarts=isinstance(error, lease.NoRoomError) and folder.file.exists())
    over = unwritten = ""
    try:
        held.keep(_exit_after_takeover)
        if held.has_remote_predecessor:
            lease.copy_journal(folder.journal)
        server = _server(folder, options, sure=held.wait_until_lease_confirmed)
        held.renewed = partial(restore_session_file, folder, server.session_file)
        try:
            over = server.run()
        finally:
            server.close()
    except StokerError as error:
        if not over or isinstance(error, TakenError):
            return _exit_status(error, restarts=not isinstance(error, TakenError) and folder.file.exists())
        # A restart would not help, because only the last records of the journal are unwritten.
        unwritten = server.journal.trouble or journal.SLOW
        logging.critical("the last records of the session's journal are not written: %s", unwritten)
    except Exception:
        logging.exception("the manager failed; its journal is intact, and a restart continues from the journal")
        return keeper.FAILED
    finally:
        held.release(over=over, unwritten=unwritten)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker-manager", description=__doc__)
    parser.add_argument("--session", required=True, help="session folder, with its keys")
    parser.add_argument("--name", default="", help="session id (default: the folder's name)")
    parser.add_argument(
        "--interface",
        default=interfaces.LOOPBACK,
        help="the address or interface that pilots reach: an address, ib0, or auto",
    )
    parser.add_argument("--ports", default=Session().ports, help="ports to listen on, low-high (default: %(default)s)")
    parser.add_argument("--any-port", action="store_true", help="listen on another port if all of --ports are taken")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds between a pilot's heartbeats")
    parser.add_argument("--pilot-lease", type=float, default=60.0, help="seconds that a pilot waits for a lost manager")
    parser.add_argument(
        "--sync", choices=("auto", "yes", "no"), default="auto", help="sync the journal (auto: detached)"
    )
    parser.add_argument("--detached", action="store_true", help="keep running when clients leave")
    parser.add_argument(
        "--parent",
        type=int,
        default=0,
        help="process id of the starting program; if it exits before a client connects, the manager ends",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=0.0,
        help="detached: seconds without clients and calls after which the manager ends",
    )
    parser.add_argument("--kept", action="store_true", help="restart the manager when it dies")
    return parser


def _server(folder: SessionFolder, options: argparse.Namespace, *, sure: Callable[[], None]) -> ManagerServer:
    heartbeat_s = options.heartbeat
    patience = PeerTimeLimits(heartbeat_s, 3 * heartbeat_s, pilot_lease_s=options.pilot_lease, idle_s=options.idle)
    logging.info("policy: %s", read_chosen_policies(folder))
    return ManagerServer(
        folder,
        session=options.name or folder.path.name,
        policies=policies_of(folder),
        patience=patience,
        interface=interfaces.resolve(options.interface),
        ports=Session(ports=options.ports).port_range,
        any_port=options.any_port,
        detached=options.detached,
        parent=options.parent,
        sure=sure,
        sync=options.detached if options.sync == "auto" else options.sync == "yes",
    )


def _exit_after_takeover(holder: lease.LeaseHolder | None) -> None:
    """Exit at once, so that this manager sends no further message."""
    who = "the session's folder is gone" if holder is None else f"its manager is {holder}"
    logging.critical("this manager no longer manages the session: %s", who)
    logging.shutdown()
    os._exit(TAKEN_OVER)


def _exit_status(error: StokerError, *, restarts: bool) -> int:
    """Log an error, and return the exit status. `restarts`: the manager's parent may start the manager again."""
    logging.critical("%s", error)
    if restarts:
        return keeper.NO_PORT if isinstance(error, PortsTakenError) else keeper.FAILED
    print(error, file=sys.stderr)  # noqa: T201
    return TAKEN_OVER if isinstance(error, TakenError) else 1


if __name__ == "__main__":
    sys.exit(main())

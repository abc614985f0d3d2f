"""The manager process: `python -m stoker.manager.main --session DIR`. An executor starts and restarts the process.

If `stoker up` has started the session, it continues without programs: the manager runs with `--detached`, and a parent
process (`--kept`) restarts it after a failure.
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
from stoker.manager.live.lease import TAKEN_OVER, LeaseTakenError
from stoker.manager.live.peer_watch import PeerTimeLimits
from stoker.manager.live.presence import check_session_folder, restore_session_file
from stoker.manager.live.server import ManagerServer
from stoker.manager.live.session_policies import create_policies_of_session, read_chosen_policies
from stoker.manager.live.sockets import PortsTakenError
from stoker.protocol.session import SessionFolder
from stoker.site import Session


def main(arguments: list[str] | None = None) -> int:
    """Run a manager until its session ends.

    Returns the exit status: 0 = session ended, 1 = cannot start, 3 = another manager runs, 4 = cannot continue, 5 = no
    free port at a restart.
    """
    options = _create_parser().parse_args(arguments)
    folder = SessionFolder(options.session)
    log_to_file(folder.manager_log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C, and ends the session
    if options.kept:
        given = [each for each in (sys.argv[1:] if arguments is None else arguments) if each != "--kept"]
        return keeper.run_with_restarts(
            [sys.executable, "-P", "-m", "stoker.manager.main", *given], progress=folder.progress
        )
    connections.raise_descriptor_limit()
    try:
        check_session_folder(folder)
        held = lease.take_lease(folder.lease, room_s=lease.ROOM_S if folder.file.exists() else 0.0)
    except StokerError as error:
        return _log_error_and_choose_exit_status(
            error, may_restart=isinstance(error, lease.NoDiskSpaceError) and folder.file.exists()
        )
    over = unwritten = ""
    try:
        held.start_renewing(_exit_after_takeover)
        if held.has_remote_predecessor:
            lease.copy_journal(folder.journal)
        server = _create_server(folder, options, wait_until_sure=held.wait_until_lease_confirmed)
        held.on_renewed = partial(restore_session_file, folder, server.session_file)
        try:
            over = server.run()
        finally:
            server.close()
    except StokerError as error:
        if not over or isinstance(error, LeaseTakenError):
            return _log_error_and_choose_exit_status(
                error, may_restart=not isinstance(error, LeaseTakenError) and folder.file.exists()
            )
        # The session has ended, and only the last records of its journal are missing. A restart would not help.
        unwritten = server.journal.trouble or journal.UNCONFIRMED
        logging.critical("the last records of the session's journal are not written: %s", unwritten)
    except Exception:
        logging.exception("the manager failed; its journal is intact, and a restart continues from the journal")
        return keeper.MANAGER_FAILED
    finally:
        held.release(over=over, unwritten=unwritten)
    return 0


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker-manager", description=__doc__)
    parser.add_argument("--session", required=True, help="session folder, with its keys")
    parser.add_argument("--name", default="", help="session id (default: the folder's name)")
    parser.add_argument(
        "--interface",
        default=interfaces.LOOPBACK,
        help="address or network interface to which pilots connect: an address, an interface such as ib0, or auto",
    )
    parser.add_argument("--ports", default=Session().ports, help="ports to listen on, low-high (default: %(default)s)")
    parser.add_argument("--any-port", action="store_true", help="listen on another port if all of --ports are taken")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds between a pilot's heartbeats")
    parser.add_argument("--pilot-lease", type=float, default=60.0, help="seconds that a pilot waits for a lost manager")
    parser.add_argument(
        "--sync",
        choices=("auto", "yes", "no"),
        default="auto",
        help="sync the journal to disk (auto: only with --detached)",
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
        help="with --detached: end after this many seconds without clients and calls",
    )
    parser.add_argument("--kept", action="store_true", help="restart the manager when it dies")
    return parser


def _create_server(
    folder: SessionFolder, options: argparse.Namespace, *, wait_until_sure: Callable[[], None]
) -> ManagerServer:
    heartbeat_s = options.heartbeat
    patience = PeerTimeLimits(heartbeat_s, 3 * heartbeat_s, pilot_lease_s=options.pilot_lease, idle_s=options.idle)
    logging.info("policy: %s", read_chosen_policies(folder))
    return ManagerServer(
        folder,
        session=options.name or folder.path.name,
        policies=create_policies_of_session(folder),
        patience=patience,
        interface=interfaces.resolve_interface(options.interface),
        ports=Session(ports=options.ports).port_range,
        any_port=options.any_port,
        detached=options.detached,
        parent=options.parent,
        wait_until_sure=wait_until_sure,
        sync=options.detached if options.sync == "auto" else options.sync == "yes",
    )


def _exit_after_takeover(holder: lease.LeaseHolder | None) -> None:
    """Exit at once, because another manager has taken over the session: this manager must send no more messages."""
    who = "the session's folder is gone" if holder is None else f"its manager is {holder}"
    logging.critical("this manager no longer manages the session: %s", who)
    logging.shutdown()
    os._exit(TAKEN_OVER)


def _log_error_and_choose_exit_status(error: StokerError, *, may_restart: bool) -> int:
    """Log an error, and return the exit status. `may_restart`: True if the parent process may restart the manager."""
    logging.critical("%s", error)
    if may_restart:
        return keeper.NO_PORT if isinstance(error, PortsTakenError) else keeper.MANAGER_FAILED
    print(error, file=sys.stderr)  # noqa: T201
    return TAKEN_OVER if isinstance(error, LeaseTakenError) else 1


if __name__ == "__main__":
    sys.exit(main())

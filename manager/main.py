"""The manager process: `python -m stoker.manager.main --session DIR`. Started by an executor, restarted if it dies."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from stoker.errors import StokerError
from stoker.manager.live.server import Patience, Server, check_folder
from stoker.manager.policies import default_policies
from stoker.manager.protocol.session import SessionFolder


def main(arguments: list[str] | None = None) -> int:
    """Run a manager until its session is over. Returns the exit status: 0 over, 1 could not start or go on."""
    parser = argparse.ArgumentParser(prog="stoker-manager", description=__doc__)
    parser.add_argument("--session", required=True, help="session folder, with its keys")
    parser.add_argument("--name", default="", help="session id (default: the folder's name)")
    parser.add_argument("--interface", default="127.0.0.1", help="address that pilots reach")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds between a pilot's heartbeats")
    parser.add_argument("--pilot-lease", type=float, default=60.0, help="seconds that a pilot waits for a lost manager")
    options = parser.parse_args(arguments)
    folder = SessionFolder(options.session)
    logging.basicConfig(
        filename=folder.manager_log, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    # Ctrl-C in the user's terminal is the client's business: it ends the session in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        check_folder(folder)
        patience = Patience(
            heartbeat_s=options.heartbeat, silence_s=3 * options.heartbeat, pilot_lease_s=options.pilot_lease
        )
        server = Server(
            folder,
            session=options.name or folder.path.name,
            policies=default_policies(),
            patience=patience,
            interface=options.interface,
        )
    except StokerError as error:
        logging.critical("%s", error)
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    try:
        server.run()
    except StokerError as error:
        logging.critical("%s", error)
        return 1
    except Exception:
        logging.exception("the manager failed; its journal is whole, a restart goes on from it")
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run all pool commands in one process, because HTCondor's bindings load slowly and tests query often."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from batch.condor import act, query

SOCKET = "commands"


def run(folder: Path, command: str, arguments: list[str]) -> int:
    match command:
        case "condor_q":
            return query.condor_q(folder, arguments)
        case "condor_history":
            return query.condor_history(folder, arguments)
        case "condor_status":
            return query.condor_status(folder, arguments)
        case "condor_config_val":
            return query.condor_config_val(arguments)
        case "condor_submit":
            return act.condor_submit(folder, arguments)
        case _:
            return act.main(folder, command, arguments)


def serve(folder: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir(folder)  # socket paths must be short
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{SOCKET}.new")
        door.listen(64)
        os.rename(f"{SOCKET}.new", SOCKET)
        while True:
            guest, _ = door.accept()
            if os.fork() == 0:
                os._exit(_be_one(folder, guest))
            guest.close()


def _be_one(folder: Path, guest: socket.socket) -> int:
    data, (out, err, place), _, _ = socket.recv_fds(guest, 1 << 20, 3)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.fchdir(place)
    command, *arguments = data.decode().split("\0")
    code = 1
    try:
        code = run(folder, command, arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        guest.send(bytes([code]))
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

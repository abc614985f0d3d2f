"""The manager's socket closes, whatever happened to its connections while it was not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from live.peers import session_folder
from polling import PATIENCE_S

CLOSES = """
import socket, sys, time
from stoker.connections import split_address
from stoker.manager.live.doors import Doors
from stoker.protocol.session import SessionFolder

doors = Doors(SessionFolder(sys.argv[1]), any_port=True)
where = split_address(doors.address.removeprefix("tcp://"))
for _ in range(int(sys.argv[2])):
    with socket.create_connection(where):
        pass
time.sleep(1)
doors.close()
"""
CONNECTIONS = 1200
"""Each is two or three events; a monitor of pyzmq's holds two thousand, and libzmq waits with a lock for the next."""


def test_a_manager_that_did_not_read_what_happened_to_thousands_of_connections_still_ends(tmp_path: Path) -> None:
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-c", CLOSES, str(folder.path), str(CONNECTIONS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr

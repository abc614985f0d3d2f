"""A thousand silent connections to a manager with 1,024 file descriptors do not affect the session."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from live.peers import Manager, Peers, session_folder, until, welcomed
from polling import PATIENCE_S

from stoker.connections import split_address
from stoker.manager.live import lease
from stoker.manager.live.admission import UnprovenConnections
from stoker.protocol import to_pilot
from stoker.protocol.session import SessionFolder

# ---- silent connections


STRANGERS = 1000
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"


@pytest.fixture
def limited(folder: SessionFolder) -> Iterator[Manager]:
    """A manager with 1,024 descriptors; this process may open thousands."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4096:
        pytest.skip(f"this machine lets a process open {before[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    with closing(Manager(folder, patch=LIMITED)) as manager:
        yield manager
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect_again(strangers: list[socket.socket | None], where: tuple[str, int]) -> None:
    """Replace each closed connection by a new silent connection."""
    for place, made in enumerate(strangers):
        if made is None or _is_cut(made):
            if made is not None:
                made.close()
            strangers[place] = None
            with suppress(OSError):
                strangers[place] = socket.create_connection(where, timeout=5)


def _is_cut(made: socket.socket) -> bool:
    try:
        return not made.recv(100, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.long
def test_thousand_silent_connections_disturb_no_session(limited: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot = welcomed(peers, "client", "pilot")
    client.define()
    strangers: list[socket.socket | None] = [None] * STRANGERS
    where = split_address(folder.read().address.removeprefix("tcp://"))
    holder = lease.read_lease(folder.lease)
    answered = []
    for _ in range(10):
        connect_again(strangers, where)
        began = time.monotonic()
        assert client.status().pilots
        answered.append(time.monotonic() - began)
    until(lambda: lease.read_lease(folder.lease) != holder, what="the lease is renewed")
    welcomed(peers, "client")
    client.submit(0)
    pilot.serve()
    assert pilot.hear(to_pilot.RunCalls).calls[0].call == 0
    *_, third, _, _ = sorted(answered)  # a pause of the machine may delay two answers
    assert third < 1.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    for made in filter(None, strangers):
        made.close()


@pytest.mark.long
def test_oldest_silent_connection_of_the_busiest_address_is_cut() -> None:
    places = UnprovenConnections()
    places.unproven.most = 4
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.2", 0)) as other:
        pairs = []
        for server in (other, listening, listening, listening, listening, listening):
            ours = socket.create_connection(server.getsockname(), source_address=(server.getsockname()[0], 0))
            theirs, _ = server.accept()
            pairs.append((ours, theirs))
            places.add_connection(theirs.fileno())
        cut = [_ends(ours) for ours, _ in pairs]
        assert cut == [False, True, True, False, False, False]
        assert len(places.unproven) == 4
        places.remove_connection(pairs[3][1].fileno())
        assert len(places.unproven) == 3
        for pair in pairs:
            for each in pair:
                each.close()


def _ends(made: socket.socket) -> bool:
    made.settimeout(0.05)
    try:
        return made.recv(1) == b""
    except TimeoutError:
        return False


def test_connection_with_a_reused_descriptor_is_not_cut() -> None:
    places = UnprovenConnections()
    places.unproven.most = 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        number = theirs.fileno()
        places.add_connection(number)
        second = socket.create_connection(listening.getsockname())
        innocent, _ = listening.accept()
        os.dup2(innocent.fileno(), number)
        third = socket.create_connection(listening.getsockname())
        late, _ = listening.accept()
        places.add_connection(late.fileno())
        assert not _ends(second)
        for each in (first, second, third, theirs, innocent, late):
            each.close()


HOLDER = """
import os, resource, sys, time
from pathlib import Path
from stoker.manager.live import lease
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = lease.take_lease(Path(sys.argv[1]), renew_s=0.05)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
held.start_renewing(lambda holder: os._exit(3))
os.write(1, b"full\\n")
sys.stdin.readline()
os.close(taken.pop()), os.close(taken.pop())
time.sleep(0.5)
held.release()
"""


def test_lease_is_renewed_when_no_descriptor_is_left(tmp_path: Path) -> None:
    path = tmp_path / "manager.lease"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "full\n"
        for _ in range(3):
            before = lease.read_lease(path)
            assert before is not None
            until(lambda: lease.read_lease(path) != before, what="the lease changes")  # noqa: B023
        holder.stdin.write("go on\n")
        holder.stdin.flush()
        assert holder.wait(20) == 0
        assert not path.exists()
    finally:
        holder.kill()
        holder.communicate()


def test_too_low_descriptor_limit_is_an_error() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from stoker.errors import SessionError
from stoker.manager.live.admission import UnprovenConnections
try:
    UnprovenConnections()
except SessionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "may open 64 files here (ulimit -n)" in done.stdout, done.stderr


# ---- sockets


CLOSES = """
import socket, sys, time
from stoker.connections import split_address
from stoker.manager.live.sockets import ManagerSockets
from stoker.protocol.session import SessionFolder

sockets = ManagerSockets(SessionFolder(sys.argv[1]), any_port=True)
where = split_address(sockets.address.removeprefix("tcp://"))
for _ in range(int(sys.argv[2])):
    with socket.create_connection(where):
        pass
time.sleep(1)
sockets.close()
"""
CONNECTIONS = 1200
"""Each connection makes two or three events. The buffer of a pyzmq monitor holds 2,000 events; if it is full, libzmq
blocks with a held lock.
"""


def test_manager_exits_with_thousands_of_unread_events(tmp_path: Path) -> None:
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-c", CLOSES, str(folder.path), str(CONNECTIONS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr

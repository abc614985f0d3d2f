"""A thousand silent connections to a manager with 1,024 file descriptors do not affect the session."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live.peers import session_folder, until
from polling import PATIENCE_S

from stoker.connections import split_address
from stoker.manager.cli.ask import Observer
from stoker.manager.live import lease
from stoker.manager.live.admission import UnprovenConnections
from stoker.protocol.session import SessionFolder, find_session

# ---- silent connections


SITE = """
name = "one"
[pilot]
devices = "cpu:1"
"""
PROGRAM = """
import sys, time
import stoker
from stoker import app

@app()
def double(number):
    return 2 * number

with stoker.load(sys.argv[1]) as session:
    assert double(1).result() == 2
    print("ready", flush=True)
    sys.stdin.readline()
    assert list(stoker.map(double, range(200))) == [2 * each for each in range(200)]
    print("done", flush=True)
"""
STRANGERS = 1000


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if before[1] != resource.RLIM_INFINITY and before[1] < wanted:
        pytest.skip(f"this machine lets a process open {before[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], wanted), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Strangers:
    """Silent connections to an address; a closed connection reconnects."""

    def __init__(self, address: str, count: int) -> None:
        self._where = split_address(address.removeprefix("tcp://"))
        self._stop = threading.Event()
        self._open = [self._connect() for _ in range(count)]
        self._thread = threading.Thread(target=self._come_again, daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket | None:
        try:
            made = socket.create_connection(self._where, timeout=5)
        except OSError:
            return None
        made.setblocking(False)
        return made

    def _come_again(self) -> None:
        while not self._stop.wait(0.2):
            for place, made in enumerate(self._open):
                if made is None or _is_cut(made):
                    if made is not None:
                        made.close()
                    self._open[place] = self._connect()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for made in self._open:
            if made is not None:
                made.close()


def _is_cut(made: socket.socket) -> bool:
    try:
        return not made.recv(100)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.long
@pytest.mark.usefixtures("many_files")
def test_thousand_silent_connections_disturb_no_session(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(SITE)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py", "one.toml"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)),
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    strangers = None
    try:
        assert program.stdout.readline() == "ready\n"
        folder = find_session()
        strangers = Strangers(folder.read().address, STRANGERS)
        counter = _lease_of(folder).counter

        answered = [_seconds_of_status(folder) for _ in range(10)]
        until(lambda: _lease_of(folder).counter > counter, what="the lease is renewed")
        program.stdin.write("go on\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        assert program.wait(30) == 0
        *_, third, _, _ = sorted(answered)  # a pause of the machine may delay two answers
        assert third < 1.0 * _patience()
    finally:
        if strangers is not None:
            strangers.close()
        program.kill()
        program.communicate()


def _patience() -> float:
    """Return the factor by which this machine's load slows a test down."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _lease_of(folder: SessionFolder) -> lease.LeaseHolder:
    holder = lease.read(folder.lease)
    assert holder is not None
    return holder


def _seconds_of_status(folder: SessionFolder) -> float:
    began = time.monotonic()
    with Observer(folder, timeout_s=20) as observer:
        assert observer.status().pilots
    return time.monotonic() - began


@pytest.mark.long
def test_oldest_silent_connection_of_the_busiest_address_is_cut() -> None:
    places = UnprovenConnections()
    places.places.most = 4
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.2", 0)) as other:
        pairs = []
        for server in (other, listening, listening, listening, listening, listening):
            ours = socket.create_connection(server.getsockname(), source_address=(server.getsockname()[0], 0))
            theirs, _ = server.accept()
            pairs.append((ours, theirs))
            places.accepted(theirs.fileno())
        cut = [_ends(ours) for ours, _ in pairs]
        assert cut == [False, True, True, False, False, False]
        assert (len(places.places), places.cut) == (4, 2)
        places.settled(pairs[3][1].fileno())
        assert len(places.places) == 3
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
    places.places.most = 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        number = theirs.fileno()
        places.accepted(number)
        second = socket.create_connection(listening.getsockname())
        innocent, _ = listening.accept()
        os.dup2(innocent.fileno(), number)
        third = socket.create_connection(listening.getsockname())
        late, _ = listening.accept()
        places.accepted(late.fileno())
        assert not _ends(second)
        for each in (first, second, third, theirs, innocent, late):
            each.close()


HOLDER = """
import os, resource, sys, time
from pathlib import Path
from stoker.manager.live import lease
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = lease.take(Path(sys.argv[1]), renew_s=0.05)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
held.keep(lambda holder: os._exit(3))
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
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "full\n"
        for _ in range(3):
            before = lease.read(path)
            assert before is not None
            until(lambda: lease.read(path) != before, what="the lease changes")  # noqa: B023
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
"""Each connection makes two or three events. A pyzmq monitor buffers two thousand events; libzmq blocks with a held
lock when the buffer is full.
"""


def test_manager_exits_with_thousands_of_unread_events(tmp_path: Path) -> None:
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-c", CLOSES, str(folder.path), str(CONNECTIONS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fetched import get
from transfer.hosts import KEY, Host, Original, until

import stoker
from stoker.contexts.objects import has_content_of, publish_objects
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectSource
from stoker.pilot.transfer.fetch import SEED_FILE, send_result
from stoker.protocol.session import KeyPair, SessionFile, SessionFolder

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def session(tmp_path: Path) -> SessionFolder:
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    folder.write_key("transfer", KeyPair(public="", secret=KEY.hex()))
    folder.write(SessionFile(session="test", protocol=1, address="tcp://127.0.0.1:1", server_key=""))
    return folder


def seed_process(session: SessionFolder, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "stoker.pilot.transfer.seed", "--session", str(session.path), *options]
    return subprocess.Popen(command)


@pytest.fixture
def start(session: SessionFolder) -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def run() -> subprocess.Popen[bytes]:
        file = session.path / SEED_FILE
        before = file.stat().st_mtime_ns if file.exists() else 0
        made.append(seed_process(session))
        until(lambda: file.exists() and file.stat().st_mtime_ns != before, what="a seed that listens")
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.wait()


def address(session: SessionFolder) -> str:
    return (session.path / SEED_FILE).read_text()


def test_published_objects_are_served_to_clients_with_the_key(
    start: Start, session: SessionFolder, host: Callable[..., Host], big: Original, folder: Original, tmp_path: Path
) -> None:
    start()
    publish_objects(session.objects, (big.ref,))
    seed = ObjectSource(address=address(session), label="seed", origin=True)
    assert host().get(big, seed).origin_bytes == big.ref.size_bytes
    for use in (
        lambda: get(big.name, tmp_path / "out", addresses=[seed.address], key=bytes(32)),
        lambda: send_result("result-1-0123456789ab", b"x", address=seed.address, key=bytes(32)),
    ):
        with pytest.raises(wire.PeerError, match="does not know the session's transfer key"):
            use()
    assert not (session.objects / "result-1-0123456789ab").exists()
    taker = host()
    with pytest.raises(wire.PeerError, match="does not have the object"):
        taker.get(folder, seed)
    publish_objects(session.objects, (folder.ref,))
    taker.get(folder, seed)
    (folder.path / "weights").unlink()
    (folder.path / "weights").write_bytes(b"changed")
    with pytest.raises(wire.PeerError):
        get(folder.name, tmp_path / "out", addresses=[seed.address], key=KEY)
    assert not (tmp_path / "out").exists()


def test_arguments_are_served_and_results_accepted(
    start: Start, session: SessionFolder, big: Original, tmp_path: Path
) -> None:
    start()
    # clients name files of arguments in this format
    shutil.copy(big.path, session.objects / f"{big.name}~0123abcd")
    get(big.name, tmp_path / "arguments", addresses=[address(session)], key=KEY)
    assert has_content_of(tmp_path / "arguments", big.ref)
    data = os.urandom(3_000_000)
    name = "result-1f-0123456789ab"
    where = send_result(name, memoryview(data), address=address(session), key=KEY)
    assert Path(where) == session.objects / name
    assert Path(where).read_bytes() == data
    for odd in ("../evil", "result-1f-0123456789ab/..", "file-" + "0" * 64, ""):
        with pytest.raises(wire.PeerError, match="not a result"):
            send_result(odd, b"x", address=address(session), key=KEY)
    assert sorted(path.name for path in session.objects.iterdir()) == sorted([f"{big.name}~0123abcd", name])


def test_incomplete_result_leaves_no_file(start: Start, session: SessionFolder) -> None:
    start()
    for size in (100, 4):
        channel = wire.connect_to_peer(address(session), key=KEY)
        channel.send({"op": "put", "name": "result-1-0123456789ab", "size": size, "sha256": "0" * 64})
        assert channel.receive()["go"]
        channel.send_body(b"half")
        if size == 4:
            assert "changed in transit" in channel.receive()["text"]
        channel.close()
        until(lambda: not list(session.objects.iterdir()), what="no draft that stays")


def test_killed_seed_is_replaced_at_the_same_address(start: Start, session: SessionFolder) -> None:
    first = start()
    there = address(session)
    waiting = seed_process(session)
    try:
        file = session.path / SEED_FILE
        before = file.stat().st_mtime_ns
        first.send_signal(signal.SIGKILL)
        first.wait()
        until(lambda: file.stat().st_mtime_ns != before, what="the second seed's turn")
        assert address(session) == there
        wire.connect_to_peer(there, key=KEY).close()
    finally:
        waiting.terminate()
        assert waiting.wait(20) == 0


def test_seed_that_cannot_write_its_address_serves_and_retries(session: SessionFolder) -> None:
    in_its_way = session.path / SEED_FILE
    in_its_way.mkdir()
    seed = seed_process(session)
    try:
        log = session.path / "seed.log"
        until(
            lambda: log.exists() and "address cannot be written" in log.read_text(), what="the seed's error in its log"
        )
        in_its_way.rmdir()
        until(lambda: (session.path / SEED_FILE).is_file(), what="its address")
        wire.connect_to_peer(address(session), key=KEY).close()
    finally:
        seed.terminate()
        assert seed.wait(20) == 0


def test_waiting_seed_exits_with_the_manager_that_started_it(start: Start, session: SessionFolder) -> None:
    serving = start()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    waiting = seed_process(session, "--parent", str(gone.pid))
    assert waiting.wait(20) == 0
    assert serving.poll() is None


@pytest.mark.parametrize("how", ["objects", "lease"])
def test_seed_ends_with_its_session(start: Start, session: SessionFolder, how: str) -> None:
    seed = start()
    if how == "objects":
        shutil.rmtree(session.objects)
    else:
        (session.path / "manager.lease").write_text(json.dumps({"over": "stoker down"}))
    assert seed.wait(20) == 0


def test_node_with_only_python_can_fetch(start: Start, session: SessionFolder, big: Original, tmp_path: Path) -> None:
    """Use the starter modules in an interpreter without packages."""
    start()
    publish_objects(session.objects, (big.ref,))
    carried, root = tmp_path / "carried", Path(stoker.__file__).parent
    transfer = [path.stem for path in (root / "pilot" / "transfer").glob("*.py") if path.stem != "seed"]
    for name in ("connections", "errors", "contexts/manifest", *(f"pilot/transfer/{stem}" for stem in transfer)):
        place = carried / "stoker" / f"{name}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / f"{name}.py", place)
    for package in ("", "contexts", "pilot", "pilot/transfer"):
        (carried / "stoker" / package / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(carried)!r})\n"
        "from pathlib import Path\n"
        "from stoker.pilot.transfer.board import ObjectSource\n"
        "from stoker.pilot.transfer.fetch import ObjectFetch, read_key\n"
        "fetch = ObjectFetch(sys.argv[2], key=read_key(sys.argv[1]))\n"
        "fetch.set_sources([ObjectSource(address=sys.argv[4], origin=True)])\n"
        "print(fetch.run(Path(sys.argv[3]), no_source_limit_s=0.0).origin_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(session.key_file("transfer")), big.name,
         str(tmp_path / "archive"), address(session)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == big.ref.size_bytes
    assert has_content_of(tmp_path / "archive", big.ref)

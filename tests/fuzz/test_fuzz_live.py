from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_manager import FakeManager, recipe
from live.peers import Manager, Peer, pilot_hello, session_folder

from benchmarks.reliability.fuzz_inputs import damage_bytes, value_of
from stoker.contexts.recipe import BARE
from stoker.errors import ProtocolError
from stoker.protocol import to_client, to_manager, to_pilot, wire
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.ids import CLIENT_SHIFT, CallId

FRAMES = 1000
SEED = 3


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(session_folder(tmp_path / "session"))
    yield manager
    manager.close()


def damaged(union: Any, *, without: tuple[type, ...] = ()) -> Iterator[bytes]:
    chance = random.Random(SEED)
    kinds = [kind for kind in union.__args__ if kind not in without]
    right = [wire.encode([value_of(kind, chance)], sequence=each) for kind in kinds for each in (0, 1, 2)]
    for _ in range(FRAMES):
        yield damage_bytes(chance, chance.choice(right), right)


@pytest.mark.parametrize("role", ["client", "pilot"])
def test_manager_runs_calls_after_receiving_random_frames(role: str, manager: Manager) -> None:
    rude, client = Peer(manager.folder, role, f"rude-{role}"), Peer(manager.folder, "client", "kind-client")
    try:
        ends = (to_manager.EndSession,)  # a client with a valid key may end the session
        union = to_manager.FromClient if role == "client" else to_manager.FromPilot
        hello: Any = to_manager.ClientHello(wire.VERSION, rude.session)
        rude.send(hello if role == "client" else pilot_hello(rude.session), numbered=False)
        for frame in damaged(union, without=ends):
            rude.socket.send(frame)
        client.send(to_manager.ClientHello(wire.VERSION, client.session), numbered=False)
        base = client.hear(to_client.ClientWelcome, seconds=30).number << CLIENT_SHIFT
        rude.close()
        pilot = Peer(manager.folder, "pilot", "kind-pilot")
        pilot.send(pilot_hello(pilot.session), numbered=False)
        pilot.hear(to_pilot.PilotWelcome, seconds=30)
        plain = msgspec.structs.replace(BARE, key="kind")  # type: ignore[arg-type]
        client.send(to_manager.DefineRecipe(plain), to_manager.DefineFunction("kind", "f", b"code"))  # type: ignore[arg-type]
        client.send(to_manager.Submit("kind", plain.key, [CallSpec(CallId(base | 1), b"arguments")]))  # type: ignore[arg-type]
        library = pilot.hear(to_pilot.StartLibrary, seconds=30).library
        pilot.send(to_manager.LibraryReady(library, 0.1, 0.2))
        call = pilot.hear(to_pilot.RunCalls, seconds=30, where=lambda run: run.library == library).calls[0].call
        pilot.send(to_manager.CallsEnded(library, [CallEnd(call, True, b"result", 0.001)]))
        client.hear(to_client.Results, seconds=30)
        pilot.close()
    finally:
        client.close()
    assert manager.process is not None
    assert manager.process.poll() is None


def test_pilot_runs_calls_after_receiving_random_frames(tmp_path: Path) -> None:
    """Send a real pilot damaged manager messages that it cannot read."""
    manager = FakeManager(tmp_path)
    try:
        process = manager.start_pilot()
        manager.hello()
        manager.ready(recipe())
        read, sent = wire.to_pilot_decoder(), 0
        for frame in damaged(to_pilot.ToPilot):
            try:
                read(frame)
            except ProtocolError:
                manager.socket.send_multipart([manager.peer, frame])
                sent += 1
        assert sent > FRAMES / 2
        assert manager.results(manager.run(_seven, [()])) == [7]
        assert process.poll() is None
    finally:
        manager.close()
    [log] = manager.folder.path.glob("pilots/*/pilot.log")
    assert 1 <= log.read_text().count("refused a frame of the manager") <= 5


def _seven() -> int:
    return 7

"""Pieces of a result through a real manager: they pass its journal by, and are there again after its death."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live.peers import Manager, Peer, pilot_hello

from stoker.contexts.recipe import BARE
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec
from stoker.protocol.session import SessionFolder

Peers = Callable[..., Peer]
RUN = 5


def yielded(pilot: Peer, first: int, *items: bytes) -> None:
    pilot.send(say.CallYielded(1, 0, RUN, first, list(items)), numbered=False)  # type: ignore[arg-type]


def joined(peers: Peers) -> tuple[Peer, Peer]:
    """A client and a pilot; the pilot runs the client's call 0, which gives pieces."""
    client, pilot = peers("client"), peers("pilot")
    client.hear(to_client.ClientWelcome)
    pilot.hear(to_pilot.PilotWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]
    specs = [CallSpec(0, b"arguments")]  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", specs, CallOptions(stream=True)))  # type: ignore[arg-type]
    pilot.hear(to_pilot.StartLibrary)
    pilot.send(say.LibraryReady(1, 0.1, 0.2))  # type: ignore[arg-type]
    assert pilot.hear(to_pilot.RunCalls).options.stream
    return client, pilot


def written(folder: SessionFolder) -> int:
    return sum(file.stat().st_size for file in folder.path.rglob("journal*") if file.is_file())


def test_pieces_are_passed_on_and_no_byte_of_them_is_written(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    client, pilot = joined(peers)
    client.send(say.AskStatus(), numbered=False)
    client.hear(to_client.Status)
    before = written(folder)
    for number in range(50):
        yielded(pilot, number, b"x" * 1000)
    heard = [client.hear(to_client.Pieces) for _ in range(50)]
    assert [piece.first for piece in heard] == list(range(50))
    client.send(say.PiecesTaken(0, RUN, 50), numbered=False)  # type: ignore[arg-type]
    assert pilot.hear(to_pilot.AckPieces).upto == 50
    assert written(folder) - before < 1000
    assert before > 0
    pilot.send(say.CallsEnded(1, [CallEnd(0, True, pieces=50)]))  # type: ignore[arg-type, list-item]
    assert client.hear(to_client.Results).ends[0].pieces == 50


def test_after_a_kill_the_lane_is_open_as_soon_as_both_are_back(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    client, pilot = joined(peers)
    yielded(pilot, 0, b"a")
    client.hear(to_client.Pieces)
    manager.kill()
    manager.start()
    client.send(say.ClientHello(wire.VERSION, client.session, acknowledged=client.sequence), numbered=False)
    client.hear(to_client.ClientWelcome)
    client.send(say.PiecesTaken(0, RUN, 1, again=True), numbered=False)  # type: ignore[arg-type]
    facts = say.LibraryFacts(1, "bare", ("cpu:0",), True, (0,))  # type: ignore[arg-type]
    hello: Any = pilot_hello(pilot.session, libraries=(facts,))
    pilot.send(hello, numbered=False)
    pilot.hear(to_pilot.PilotWelcome)
    yielded(pilot, 1, b"b")
    assert client.hear(to_client.Pieces).items == [b"b"]
    client.send(say.PiecesTaken(0, RUN, 2, again=True), numbered=False)  # type: ignore[arg-type]
    assert pilot.hear(to_pilot.AckPieces, where=lambda ack: ack.upto == 2).again

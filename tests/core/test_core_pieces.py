"""The manager forwards pieces to their client, and acknowledgements back."""

from __future__ import annotations

from typing import Any

import pytest
from core.builders import Cluster, Make

from stoker.manager.core.clients import has_only_result_pieces
from stoker.manager.core.events import FromClient, FromPilot, ToClient, ToPilot
from stoker.manager.live.decisions import decision_checksum
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import ClientId, LibraryId, PilotId, format_call_id

RUN = 9


@pytest.fixture
def c(cluster: Make) -> Cluster:
    return cluster(pilots=1).call("s", stream=True).ready().forget()


def came(c: Cluster, first: int, *items: bytes, waits: bool = False, pilot: str = "p1", library: int = 1) -> list[Any]:
    message = say.CallYielded(LibraryId(library), c.ids["s"], RUN, first, list(items), waits)
    event = FromPilot(PilotId(pilot), 0, [message])
    assert has_only_result_pieces(event)
    return c.core.pass_on(event, c.now)


def taken(c: Cluster, upto: int, *, client: str = "ana", again: bool = False) -> list[Any]:
    event = FromClient(ClientId(client), 0, [say.PiecesTaken(c.ids["s"], RUN, upto, again)])
    assert has_only_result_pieces(event)
    return c.core.pass_on(event, c.now)


def test_result_pieces_go_to_the_client_and_acks_to_the_library(c: Cluster) -> None:
    said = came(c, 0, b"a", b"b")
    assert said == [ToClient(ClientId("ana"), to_client.Pieces(c.ids["s"], RUN, 0, [b"a", b"b"]))]
    back = taken(c, 2, again=True)
    assert back == [ToPilot(PilotId("p1"), to_pilot.AckPieces(LibraryId(1), c.ids["s"], RUN, 2, again=True))]
    assert decision_checksum([*said, *back]) == 0  # messages about pieces are not decisions
    c.nothing_else_was_said()


def test_result_pieces_without_a_reader_are_dropped(c: Cluster) -> None:
    assert came(c, 0, b"a", pilot="p2") == []
    assert came(c, 0, b"a", library=5) == []
    assert taken(c, 1, client="bob") == []
    c.end("s")
    assert came(c, 0, b"a") == []
    assert taken(c, 1) == []
    assert not c.core.state.streams


def test_result_pieces_of_a_call_without_a_stream_are_dropped(cluster: Make) -> None:
    c = cluster(pilots=1).call("s").ready().forget()
    assert came(c, 0, b"a") == []


def test_gang_with_a_streamed_result_is_refused(cluster: Make) -> None:
    c = cluster(pilots=2).call("g", stream=True, gang=(1, 2))
    assert "a gang cannot stream its result" in c.failure("g").message


def test_result_pieces_in_numbered_frames_are_refused(c: Cluster) -> None:
    message = say.CallYielded(LibraryId(1), c.ids["s"], RUN, 0, [b"a"])
    assert not has_only_result_pieces(FromPilot(PilotId("p1"), 3, [message]))
    c.report("p1", message)
    c.tell("ana", say.PiecesTaken(c.ids["s"], RUN, 0))
    assert c.refused == {"pieces of results in a frame for the journal": 2}
    c.nothing_else_was_said()


def test_explain_shows_sent_pieces_and_the_wait_for_the_reader(c: Cluster) -> None:
    c.by_hand = True  # no replay: the journal contains neither status requests nor pieces

    def told() -> str:
        return c.the_story(format_call_id(c.ids["s"])).headline

    assert "piece" not in told()
    came(c, 0, b"a")
    assert told().endswith("1 piece sent")
    came(c, 1, b"b", waits=True)
    c.wait(5)
    assert told().endswith("2 pieces sent; it has waited for its reader for 5.0 s")
    taken(c, 2)
    assert told().endswith("2 pieces sent")


def test_end_of_an_abandoned_run_of_a_stream_is_ignored(cluster: Make) -> None:
    """The client may lack pieces of the abandoned run."""
    c = cluster(pilots=2).call("s", stream=True).ready()
    first = c.holders("s")[0]
    lost, other = first.pilot.id, {"p1": "p2", "p2": "p1"}[first.pilot.id]
    c.cut(lost).lose(lost).ready()
    assert c.held(other) == ["s"]
    c.come_back(lost, **{f"lib{first.id}": ("s",)}).forget()
    assert came(c, 0, b"a", pilot=lost, library=first.id) == []
    c.report(lost, say.CallsEnded(first.id, [CallEnd(c.ids["s"], True, pieces=3)]))
    assert "s" not in c.ended
    assert not first.withdrawn_calls
    c.end("s")
    assert c.ended["s"].ok

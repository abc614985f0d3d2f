"""Clients join, come back, get every result once, leave; sessions end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.builders import SESSION, Cluster

from stoker.manager.core import registry
from stoker.manager.core.events import ClientGone, FromClient
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallSpec, FailureKind
from stoker.protocol.ids import make_call_id

Make = Callable[..., Cluster]


def test_strangers_are_refused(cluster: Make) -> None:
    c = cluster()
    c.tell("bob", say.ClientHello(wire.VERSION, "other"), numbered=False)
    assert "you asked for session other" in c.hears("bob", to_client.ClientRefused).reason
    c.tell("eve", say.AskStatus())
    c.nothing_else_was_said()
    assert list(c.core.state.clients) == ["ana"]
    assert sum(c.refused.values()) == 2


def test_returning_client_gets_only_the_results_it_lacks(cluster: Make) -> None:
    c = cluster(pilots=1).calls(4).ready().end("1").end("2")
    c.tell("ana", say.Received(1))
    assert [end.call for end in c.core.state.clients["ana"].unacked] == [c.ids["2"]]  # type: ignore[index]
    c._received["ana"] = 1
    del c.ended["2"]
    c.client("ana", received=1)
    assert set(c.ended) == {"1", "2"}
    c.end("3")
    assert set(c.ended) == {"1", "2", "3"}
    c.tell("ana", say.Received(3))
    assert not c.core.state.clients["ana"].unacked  # type: ignore[index]


def test_client_cannot_acknowledge_results_that_do_not_exist(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1").client("ana", received=7).end("2")
    assert set(c.ended) == {"1", "2"}
    assert c.refused == {"client has more results than there are": 1}


def test_repeated_and_early_frames_of_a_client_are_ignored(cluster: Make) -> None:
    c = cluster()
    c._frames["ana"] -= 1
    c.call("repeated")
    c._frames["ana"] += 7
    c.call("early")
    assert c.waiting() == []
    assert c.refused == {"repeated or early frame of a client": 2}


def test_a_client_cannot_submit_or_cancel_for_another(cluster: Make) -> None:
    c = cluster().client("bob").call("1")
    c.tell("bob", say.Cancel([c.ids["1"]]))  # type: ignore[list-item]
    stolen = make_call_id(client=0, sequence=500)
    c.names[stolen] = "stolen"
    c.tell("bob", say.Submit("f", "bare", [CallSpec(stolen, b"")]))  # type: ignore[arg-type]
    assert c.waiting() == ["1"]
    assert "another client's number" in c.ended["stolen"].failure.message  # type: ignore[union-attr]


def test_an_observer_sees_and_does_nothing(cluster: Make) -> None:
    c = cluster(pilots=1).client("tv", observer=True).call("1")
    assert c.status("tv").running + c.status("tv").queued == 1
    c.call("x", client="tv")
    assert "observer" in c.ended["x"].failure.message  # type: ignore[union-attr]
    c.event(ClientGone("tv"))  # type: ignore[arg-type]
    assert "tv" not in c.core.state.clients
    assert not c.over


def test_clients_have_numbers_of_their_own(cluster: Make) -> None:
    c = cluster(pilots=1).client("bob").call("a").call("b", client="bob").ready().end("a").end("b")
    assert c.ids["b"] >> 40 == 1
    assert set(c.ended) == {"a", "b"}
    assert c.story("c-1.2").startswith("ended") or "journal" in c.story("c-1.2")


def test_when_its_client_is_gone_the_session_ends(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().forget()
    c.event(ClientGone("ana"))  # type: ignore[arg-type]
    assert c.over == "its client is gone"
    assert isinstance(c.mail["p1"][-1], to_pilot.Exit)
    assert c.core.state.calls == {}


def test_calls_of_one_client_end_with_it_and_the_others_go_on(cluster: Make) -> None:
    c = cluster(pilots=1).client("bob").call("a0").ready().end("a0").call("a").call("b", client="bob")
    c.event(ClientGone("ana"))  # type: ignore[arg-type]
    assert not c.over
    c.report("p1", say.CallsReturned(1, (c.ids["a"],)))  # type: ignore[arg-type]
    c.end("b")
    assert set(c.ended) == {"a0", "b"}
    c.client("ana", received=1)  # it comes back after all, and finds how its call ended
    assert c.ended["a"].failure.kind is FailureKind.CANCELLED  # type: ignore[union-attr]


def test_the_end_of_a_session_ends_every_call_once_and_then_says_so(cluster: Make) -> None:
    c = cluster(pilots=1).calls(5).ready().forget()
    c.tell("ana", say.EndSession("done for today"))
    assert len(c.ended) == 5
    assert {end.failure.kind for end in c.ended.values()} == {FailureKind.CANCELLED}  # type: ignore[union-attr]
    assert c.hears("p1", to_pilot.Exit).reason == "done for today"
    assert c.hears("ana", to_client.SessionOver).reason == "done for today"
    c.nothing_else_was_said()
    assert c.over == "done for today"
    c.call("late")
    assert "the session is ending" in c.ended["late"].failure.message  # type: ignore[union-attr]
    c.report("p9", say.PilotHello(wire.VERSION, SESSION, "h", 1, ()), numbered=False)
    assert "over" in c.hears("p9", to_pilot.PilotRefused).reason


def test_results_precede_the_end_of_the_session(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    commands = c.give(FromClient("ana", 0, [say.EndSession("now")]))  # type: ignore[arg-type]
    kinds = [type(x.message).__name__ for x in commands if getattr(x, "client", "") == "ana"]
    assert kinds == ["Results", "SessionOver"]


def test_groups_that_nobody_uses_any_more_are_forgotten(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KEPT_GROUPS", 5)
    c = cluster(pilots=1).call("0").ready().end("0")
    for n in range(1, 20):
        c.call(str(n), limit_s=float(n)).end(str(n))
    assert len(c.core.state.groups) == 5
    c.check()
    c.by_hand = True  # replayed already, while few are kept

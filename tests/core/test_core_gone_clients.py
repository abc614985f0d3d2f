"""Results of a program that left a session which stays are kept for a day; a program that is late is told so."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from core.builders import SESSION, Cluster, recipe

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.clients import KEPT_S, MOST_KEPT_BYTES, SETTLE_S
from stoker.manager.core.events import ClientGone, DiscardObject, SessionKept
from stoker.manager.sim.validate import validate
from stoker.protocol import to_client, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import ClientId

Make = Callable[..., Cluster]
FILE = ObjectRef("result-1", 10, "/session/objects/result-1")


def left(cluster: Make, *payloads: bytes | ObjectRef) -> Cluster:
    """`ana` has left a kept session, with these results unfetched."""
    c = cluster(pilots=1).event(SessionKept()).client("bob").calls(len(payloads)).ready()
    for name, payload in enumerate(payloads, 1):
        c.report("p1", say.CallsEnded(c.library().id, [CallEnd(c.ids[str(name)], True, payload)]))  # type: ignore[arg-type]
    return c.event(ClientGone(ClientId("ana")))


def back(c: Cluster) -> str:
    """`ana` says hello; why it is refused."""
    c.forget()
    c.tell("ana", say.ClientHello(wire.VERSION, SESSION), numbered=False)
    mail = c.mail.get("ana")
    return mail[0].reason if mail and isinstance(mail[0], to_client.ClientRefused) else ""


def test_they_are_kept_for_a_day(cluster: Make) -> None:
    c = left(cluster, b"a", b"b").wait(KEPT_S - 10)
    assert len(c.core.state.clients["ana"].unacked) == 2  # type: ignore[index]
    assert not back(c)


def test_old_results_are_dropped_with_files_and_the_program_is_told(cluster: Make) -> None:
    c = left(cluster, b"a", FILE).wait(KEPT_S + 10)
    assert "ana" not in c.core.state.clients
    assert [each.path for each in c.others if isinstance(each, DiscardObject)] == [FILE.source]
    assert "its 2 results were dropped after 1 day" in back(c).replace("24 h", "1 day")
    assert any("did not come back" in line.text for line in c.status("bob").notices)


def test_too_many_bytes_are_not_kept(cluster: Make) -> None:
    c = left(cluster, bytes(MOST_KEPT_BYTES + 1)).wait(SETTLE_S + 1)
    assert "because they were" in back(c)


@pytest.mark.parametrize("returns_after_s", [1.0, SETTLE_S + 1])
def test_a_program_that_came_back_keeps_its_results(cluster: Make, returns_after_s: float) -> None:
    c = left(cluster, b"a").wait(returns_after_s)
    assert not back(c)
    c.wait(2 * KEPT_S)
    assert len(c.core.state.clients["ana"].unacked) == 1  # type: ignore[index]


def test_what_only_a_program_that_is_gone_for_a_day_had_is_forgotten(cluster: Make) -> None:
    """A session that stays up for months has many programs: it keeps what is in use."""
    c = cluster(pilots=1).event(SessionKept()).client("bob")
    state = c.core.state
    c.tell("bob", say.DefineRecipe(recipe("shared")), say.DefineFunction("g", "g", b"of bob"))  # type: ignore[arg-type]
    for day in range(20):
        name, pilot = f"program{day}", f"p{day + 1}"
        own = msgspec.structs.replace(recipe(f"own{day}"), objects=(ObjectRef(f"object{day}", 5, "/x"),))
        messages = (
            say.DefineRecipe(recipe("shared")),
            say.DefineRecipe(own),
            say.DefineManifest(f"object{day}", b"digests"),
        )
        c.client(name).tell(name, *messages, say.DefineFunction(f"h{day}", "h", bytes(1000)))  # type: ignore[arg-type]
        c.call(f"call{day}", context=f"own{day}", function=f"h{day}", client=name).ready().end(f"call{day}")
        c.report(pilot, say.ObjectsHere((say.ObjectArrival(f"object{day}", 5),)))
        c.tell(name, say.Received(1)).event(ClientGone(ClientId(name))).lose(pilot).join(f"p{day + 2}").wait(
            KEPT_S + 10
        )
        validate(state)
    assert set(state.functions) >= {"f", "g"}
    assert "shared" in state.contexts
    clients = state.clients, state.clients_by_number
    for kept in (*clients, state.functions, state.contexts, state.costs, state.groups, state.timers):
        assert len(kept) <= 8, kept
    assert len(state.transfers.objects) <= 2


def test_a_program_that_was_forgotten_is_told_to_begin_anew(cluster: Make) -> None:
    c = left(cluster).wait(KEPT_S + 10)
    assert "start the program anew" in back(c)


def test_what_a_library_still_holds_is_kept_and_looked_at_again(cluster: Make) -> None:
    c = cluster(pilots=1).event(SessionKept()).client("bob").define(recipe("a")).call("1", context="a").ready().end("1")
    c.tell("ana", say.Received(1)).event(ClientGone(ClientId("ana"))).wait(KEPT_S + 10)
    assert c.lives_on("a") == ["p1"]
    assert "a" in c.core.state.contexts
    c.lose("p1").wait(2 * KEPT_S)
    assert "a" not in c.core.state.contexts
    c.tell("bob", say.DefineRecipe(recipe("a")))
    assert "a" in c.core.state.contexts

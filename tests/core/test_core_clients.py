from __future__ import annotations

import msgspec
import pytest
from core.builders import Cluster, Make, recipe

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import ending
from stoker.manager.core.clients import KEEP_RESULTS_S, MAX_KEPT_BYTES, SIZE_CHECK_AFTER_S
from stoker.manager.core.events import ClientGone, DiscardObject, FromClient, SessionKept
from stoker.manager.sim.validate import check_state
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec, FailureKind
from stoker.protocol.ids import ClientId, make_call_id


def test_peers_with_a_wrong_key_are_refused(cluster: Make) -> None:
    c = cluster()
    c.tell("bob", say.ClientHello(wire.VERSION, "other"), numbered=False)
    assert "you asked for session other" in c.hears("bob", to_client.ClientRefused).reason
    c.tell("eve", say.AskStatus())
    c.nothing_else_was_said()
    assert list(c.core.state.clients) == ["ana"]
    assert sum(c.refused.values()) == 2


def test_returning_client_gets_only_missing_results(cluster: Make) -> None:
    c = cluster(pilots=1).calls(4).ready().end("1").end("2")
    c.tell("ana", say.Received(1))
    assert [end.call for end in c.core.state.clients["ana"].unacked] == [c.ids["2"]]
    c._received["ana"] = 1
    del c.ended["2"]
    c.client("ana", received=1)
    assert set(c.ended) == {"1", "2"}
    c.end("3")
    assert set(c.ended) == {"1", "2", "3"}
    c.tell("ana", say.Received(3))
    assert not c.core.state.clients["ana"].unacked


def test_client_cannot_acknowledge_results_that_do_not_exist(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1").client("ana", received=7).end("2")
    assert set(c.ended) == {"1", "2"}
    assert c.refused == {"client acknowledged more results than were sent": 1}


def test_repeated_and_early_frames_of_a_client_are_ignored(cluster: Make) -> None:
    c = cluster()
    c._frames["ana"] -= 1
    c.call("repeated")
    c._frames["ana"] += 7
    c.call("early")
    assert c.waiting() == []
    assert c.refused == {"repeated or early frame of a client": 2}


def test_client_cannot_submit_or_cancel_for_another_client(cluster: Make) -> None:
    c = cluster().client("bob").call("1")
    c.tell("bob", say.Cancel([c.ids["1"]]))
    stolen = make_call_id(client=0, sequence=500)
    c.names[stolen] = "stolen"
    c.tell("bob", say.Submit("f", "bare", [CallSpec(stolen, b"")]))
    assert c.waiting() == ["1"]
    assert "another client's number" in c.failure("stolen").message


def test_observer_sees_the_session_and_changes_nothing(cluster: Make) -> None:
    c = cluster(pilots=1).client("tv", observer=True).call("1")
    assert c.status("tv").running + c.status("tv").queued == 1
    c.call("x", client="tv")
    assert "observer" in c.failure("x").message
    c.event(ClientGone("tv"))
    assert "tv" not in c.core.state.clients
    assert not c.over


def test_session_ends_when_its_client_is_gone(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().forget()
    c.event(ClientGone("ana"))
    assert c.over == "its client is gone"
    assert isinstance(c.mail["p1"][-1], to_pilot.Exit)
    assert c.core.state.calls == {}


def test_calls_of_a_departed_client_end_and_other_calls_continue(cluster: Make) -> None:
    c = cluster(pilots=1).client("bob").call("a0").ready().end("a0").call("a").call("b", client="bob")
    c.event(ClientGone("ana"))
    assert not c.over
    c.report("p1", say.CallsReturned(1, (c.ids["a"],)))
    c.end("b")
    assert set(c.ended) == {"a0", "b"}
    c.client("ana", received=1)  # the client returns and gets the end of its call
    assert c.failure("a").kind is FailureKind.CANCELLED


def test_end_of_a_session_ends_every_call_once_and_is_announced(cluster: Make) -> None:
    c = cluster(pilots=1).calls(5).ready().forget()
    c.tell("ana", say.EndSession("done for today"))
    assert len(c.ended) == 5
    assert {end.failure.kind for end in c.ended.values()} == {FailureKind.CANCELLED}
    assert c.hears("p1", to_pilot.Exit).reason == "done for today"
    assert c.hears("ana", to_client.SessionOver).reason == "done for today"
    c.nothing_else_was_said()
    assert c.over == "done for today"
    c.call("late")
    assert "the session is ending" in c.failure("late").message
    c.hello("p9")
    assert "over" in c.hears("p9", to_pilot.PilotRefused).reason


def test_results_precede_the_end_of_the_session(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    commands = c.give(FromClient("ana", 0, [say.EndSession("now")]))
    kinds = [type(x.message).__name__ for x in commands if getattr(x, "client", "") == "ana"]
    assert kinds == ["Results", "SessionOver"]


def test_unused_call_groups_are_forgotten(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "KEPT_GROUPS", 5)
    c = cluster(pilots=1).call("0").ready().end("0")
    for n in range(1, 20):
        c.call(str(n), limit_s=float(n)).end(str(n))
    assert len(c.core.state.groups) == 5
    c.check()
    c.by_hand = True  # a later replay would keep more groups; `check` has already replayed the events


FILE = ObjectRef("result-1", 10, "/session/objects/result-1")


def left(cluster: Make, *payloads: bytes | ObjectRef) -> Cluster:
    c = cluster(pilots=1).event(SessionKept()).client("bob").calls(len(payloads)).ready()
    for name, payload in enumerate(payloads, 1):
        c.report("p1", say.CallsEnded(c.library().id, [CallEnd(c.ids[str(name)], True, payload)]))
    return c.event(ClientGone(ClientId("ana")))


def back(c: Cluster) -> str:
    c.forget()
    c.client_hello("ana")
    mail = c.mail.get("ana")
    return mail[0].reason if mail and isinstance(mail[0], to_client.ClientRefused) else ""


def test_results_of_a_long_absent_program_are_dropped_and_reported(cluster: Make) -> None:
    c = left(cluster, b"a", FILE).wait(KEEP_RESULTS_S + 10)
    assert "ana" not in c.core.state.clients
    assert [each.path for each in c.commands(DiscardObject)] == [FILE.source]
    assert "its 2 results were dropped after 1 day" in back(c).replace("24 h", "1 day")
    assert any("did not reconnect" in line.text for line in c.status("bob").notices)


def test_results_kept_for_an_absent_program_have_a_byte_limit(cluster: Make) -> None:
    c = left(cluster, bytes(MAX_KEPT_BYTES + 1)).wait(SIZE_CHECK_AFTER_S + 1)
    assert "because they were" in back(c)


@pytest.mark.parametrize("returns_after_s", [1.0, SIZE_CHECK_AFTER_S + 1])
def test_program_that_reconnected_keeps_its_results(cluster: Make, returns_after_s: float) -> None:
    c = left(cluster, b"a").wait(returns_after_s)
    assert not back(c)
    c.wait(2 * KEEP_RESULTS_S)
    assert len(c.core.state.clients["ana"].unacked) == 1


def test_data_used_only_by_a_program_gone_for_a_day_is_forgotten(cluster: Make) -> None:
    """A long session with many programs keeps only recipes and functions in use."""
    c = cluster(pilots=1).event(SessionKept()).client("bob")
    state = c.core.state
    c.tell("bob", say.DefineRecipe(recipe("shared")), say.DefineFunction("g", "g", b"of bob"))
    for day in range(20):
        name, pilot = f"program{day}", f"p{day + 1}"
        own = msgspec.structs.replace(recipe(f"own{day}"), objects=(ObjectRef(f"object{day}", 5, "/x"),))
        messages = (
            say.DefineRecipe(recipe("shared")),
            say.DefineRecipe(own),
            say.DefineManifest(f"object{day}", b"digests"),
        )
        c.client(name).tell(name, *messages, say.DefineFunction(f"h{day}", "h", bytes(1000)))
        c.call(f"call{day}", context=f"own{day}", function=f"h{day}", client=name).ready().end(f"call{day}")
        c.report(pilot, say.ObjectsCached((say.ObjectArrival(f"object{day}", 5),)))
        c.tell(name, say.Received(1)).event(ClientGone(ClientId(name))).lose(pilot).join(f"p{day + 2}").wait(
            KEEP_RESULTS_S + 10
        )
        check_state(state)
    assert set(state.functions) >= {"f", "g"}
    assert "shared" in state.contexts
    clients = state.clients, state.clients_by_number
    for kept in (*clients, state.functions, state.contexts, state.costs, state.groups, state.timers):
        assert len(kept) <= 8, kept
    assert len(state.transfers.objects) <= 2


def test_forgotten_program_is_told_to_start_again(cluster: Make) -> None:
    c = left(cluster).wait(KEEP_RESULTS_S + 10)
    assert "start the program again" in back(c)


def test_context_used_by_a_library_is_kept_until_the_library_ends(cluster: Make) -> None:
    c = cluster(pilots=1).event(SessionKept()).client("bob").define(recipe("a")).call("1", context="a").ready().end("1")
    c.tell("ana", say.Received(1)).event(ClientGone(ClientId("ana"))).wait(KEEP_RESULTS_S + 10)
    assert c.lives_on("a") == ["p1"]
    assert "a" in c.core.state.contexts
    c.lose("p1").wait(2 * KEEP_RESULTS_S)
    assert "a" not in c.core.state.contexts
    c.tell("bob", say.DefineRecipe(recipe("a")))
    assert "a" in c.core.state.contexts


def steps(c: Cluster, *numbers: int) -> None:
    """Run a call of several functions; the client reports each unused function."""
    for number in numbers:
        c.tell("ana", say.DefineFunction(f"f{number}", "f", bytes(1000)))
        c.call(f"{number}", function=f"f{number}")
        if number:
            c.tell("ana", say.Received(0, (f"f{number - 1}",)))


def test_unused_functions_are_forgotten_after_their_calls(cluster: Make) -> None:
    c = cluster(pilots=1)
    state = c.core.state
    before = set(state.functions)
    for number in range(20):
        steps(c, number)
        c.ready().end(f"{number}")
        check_state(state)
        assert set(state.functions) - before <= {f"f{number - 1}", f"f{number}"}
    assert len(state.groups) <= 2
    assert len(state.costs) <= 2
    assert len(state.unused_functions) <= 1


def test_open_calls_keep_their_functions(cluster: Make) -> None:
    c = cluster(pilots=1)
    steps(c, 0, 1, 2)
    assert {"f0", "f1", "f2"} <= set(c.core.state.functions)
    c.ready().end("0").end("1").end("2")
    steps(c, 3)
    assert {"f0", "f1", "f2", "f3"} & set(c.core.state.functions) == {"f3"}


def test_redefined_function_can_be_called_again(cluster: Make) -> None:
    c = cluster(pilots=1)
    steps(c, 0)
    c.ready().end("0")
    steps(c, 1)
    c.tell("ana", say.DefineFunction("f0", "f", bytes(1000)))
    c.end("1").call("once more", function="f0").end("once more")
    assert not c.refused
    steps(c, 2)
    c.tell("ana", say.Received(0, ("f0",)))
    assert {"f0", "f1", "f2"} & set(c.core.state.functions) == {"f2"}

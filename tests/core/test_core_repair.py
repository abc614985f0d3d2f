"""If the manager restarts with a shorter journal, peers restore the missing facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from core.builders import Cluster, Make, cluster, recipe

from stoker.contexts.recipe import BARE
from stoker.manager.core.events import DiscardObject, ManagerRestarted, RecordsLost, SessionDefined
from stoker.manager.core.nouns import CallState, LibraryState
from stoker.manager.core.state import JOURNAL_LOST
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, ProvisioningRule, Source
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure, FailureKind
from stoker.protocol.ids import BlockId


@pytest.fixture
def c() -> Iterator[Cluster]:
    """Yield a manager that has lost its whole journal."""
    made = Cluster().event(ManagerRestarted())
    yield made
    made.check()


def bob(c: Cluster, *, received: int = 0, acknowledged: int = 5, number: int = 3) -> bool:
    """Send a hello of client `bob`, known only in the lost part of the journal. Return True if the manager requests
    the calls again.
    """
    c._frames["bob"], c._received["bob"] = acknowledged, received
    c.client_hello("bob", received=received, acknowledged=acknowledged, number=number)
    mail = c.mail.get("bob")
    return bool(mail) and isinstance(mail.popleft(), to_client.ClientWelcome)


def again(c: Cluster, *calls: int, **how: Any) -> None:
    specs = [CallSpec(3 << 40 | call, b"arguments") for call in calls]
    c.names.update({spec.call: f"b{spec.call & 0xFF}" for spec in specs})
    definitions = say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code of f")
    submit = say.Submit("f", "bare", specs, CallOptions(**how))
    c.tell("bob", *definitions, submit, say.Resubmitted())


def back(c: Cluster, *facts: say.LibraryFacts, acknowledged: int = 9, **more: Any) -> Cluster:
    """Reconnect pilot `old`, which the manager may not know."""
    c._frames["old"] = acknowledged
    c.hello("old", libraries=facts, acknowledged=acknowledged, recipes=(BARE,), **more)
    c.hears("old", to_pilot.PilotWelcome)
    return c


def facts(*calls: int, **more: Any) -> say.LibraryFacts:
    ids = tuple(3 << 40 | call for call in calls)
    return say.LibraryFacts(7, "bare", ("cpu:0",), True, ids, reserved_bytes=10**9, **more)


def test_client_is_asked_to_resubmit_calls_lost_from_the_journal(c: Cluster) -> None:
    assert bob(c)
    assert bob(c), "the client has not submitted again, so perhaps the welcome was lost"
    again(c, 1, 2)
    assert len(c.core.state.calls) == 2
    assert JOURNAL_LOST in c.core.state.notices
    assert not bob(c, acknowledged=6)


@pytest.mark.parametrize("lost", ["recipe", "function"])
def test_calls_with_lost_definitions_are_submitted_again(cluster: Make, lost: str) -> None:
    """The record of a definition is damaged, but the record of the calls is intact."""
    c = cluster(pilots=1)
    c.event(RecordsLost(100, "its checksum is wrong"))
    recipe_key, function = ("new", "f") if lost == "recipe" else ("bare", "new")
    known = (say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code of f"))
    spec = CallSpec(5, b"arguments")
    c.tell("ana", *known, say.Submit(function, recipe_key, [spec], CallOptions()))
    assert not c.ended
    c.event(ManagerRestarted())
    sent = c._frames["ana"]
    c.client_hello("ana", acknowledged=sent, number=0)
    assert c.hears("ana", to_client.ClientWelcome).again, "it is asked to say everything again"


def test_client_keeps_its_number_and_the_next_client_gets_another(c: Cluster) -> None:
    bob(c)
    assert c.core.state.clients["bob"].number == 3
    c.client("carl")
    assert c.core.state.clients["carl"].number > 3
    c.client_hello("eve", acknowledged=1, number=3)
    assert "another client has the number" in c.hears("eve", to_client.ClientRefused).reason


def test_calls_that_the_client_does_not_submit_again_have_ended(cluster: Make) -> None:
    c = cluster(pilots=1).calls(3).ready()
    c.event(ManagerRestarted())
    c.client_hello("ana", acknowledged=50, number=0)
    assert c.hears("ana", to_client.ClientWelcome).again
    c._frames["ana"] = 50
    spec = c.core.state.calls[c.ids["2"]].spec
    c.tell("ana", say.Submit("f", "bare", [spec]), say.Resubmitted())
    assert list(c.core.state.calls) == [c.ids["2"]]
    assert "repeated call" not in c.refused
    assert not c.ended, "nothing is told of calls whose results the client has"
    assert c.core.state.done == 2


@pytest.mark.parametrize("when", ["before the hello", "after the hello"])
def test_failed_rerun_of_a_call_with_a_known_result_is_not_counted(cluster: Make, when: str) -> None:
    """The journal lost the end of the call, so the call runs again, without the file of its arguments."""
    c = cluster(pilots=1).calls(2).ready()
    c.event(ManagerRestarted()).come_back("p1", lib1=()).forget()
    c._received["ana"] = 1
    c._frames["ana"] = 50
    if when == "after the hello":
        c.client_hello("ana", received=1, acknowledged=50, number=0)
    gone = Failure(FailureKind.SERIALIZATION, "its arguments cannot be read: No such file or directory")
    c.end("1", failure=gone)
    if when == "before the hello":
        c.client_hello("ana", received=1, acknowledged=50, number=0)
    assert c.hears("ana", to_client.ClientWelcome).again
    c.tell("ana", say.Submit("f", "bare", [c.the_call("2").spec]), say.Resubmitted())
    assert (c.status().failed, c.status().done, c.core.state.failed_calls) == (0, 1, {})
    assert not c.ended, "it is not told of a call for which it does not wait"
    c.end("2")
    assert c.ended.keys() == {"2"}, "the numbers of results mean the same to both"


def test_call_that_fails_while_its_client_resubmits_fails_once(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).ready()
    c.event(ManagerRestarted()).come_back("p1", lib1=()).forget()
    library = next(iter(c.core.state.libraries.values()))
    c._frames["ana"] = 50
    c.client_hello("ana", acknowledged=50, number=0)
    assert c.hears("ana", to_client.ClientWelcome).again
    spec = c.the_call("1").spec
    failure = Failure(FailureKind.TIMEOUT, "it ran too long")
    c.report("p1", say.CallsEnded(library.id, [CallEnd(spec.call, False, b"", 0.0, failure)]))
    assert not c.ended
    c.tell("ana", say.Submit("f", "bare", [spec]), say.Resubmitted())
    assert c.ended["1"].failure == failure
    assert (c.status().failed, c.core.state.calls) == (1, {})


def test_client_gets_only_new_results_after_a_journal_loss(cluster: Make) -> None:
    """Repeated lost ends would give client and manager different result numbers."""
    c = cluster(pilots=2).calls(4).ready().end("1")
    c.event(ManagerRestarted())
    c.come_back("p1", lib1=tuple(c.names[id] for id in c.core.state.libraries[1].held)).forget()
    held = c.held("p1")[0]
    c.end(held)  # a new end, which the manager had not reported before its restart
    c.forget()
    c.ended.clear()
    c._received["ana"] = 3
    c.client_hello("ana", received=3, acknowledged=2, number=0)
    assert c.hears("ana", to_client.ClientWelcome).again
    results = c.core.state.clients["ana"]
    assert (results.first_unacked, [end.call for end in results.unacked]) == (3, [c.ids[held]])


def test_unknown_library_is_adopted_with_its_memory(c: Cluster) -> None:
    back(c, facts())
    library = c.core.state.libraries[7]
    assert library.state is LibraryState.READY
    assert library.devices[0].promised_bytes == 10**9
    assert c.core.state.next_library > 7
    bob(c)
    again(c, 1)
    assert c.hears("old", to_pilot.RunCalls).library == 7


def test_unknown_library_larger_than_its_device_is_stopped(c: Cluster) -> None:
    too_large = say.LibraryFacts(7, "bare", ("cpu:0",), True, reserved_bytes=10**12)
    back(c, too_large)
    assert c.hears("old", to_pilot.StopLibrary).library == 7


def test_running_call_continues_when_its_client_resubmits_it(c: Cluster) -> None:
    back(c, facts(1))
    bob(c)
    again(c, 1, 2)
    assert [id & 0xFF for id in c.core.state.libraries[7].held] == [1]
    c.report("old", say.CallsEnded(7, [CallEnd(3 << 40 | 1, True)]))
    sent = [spec.call & 0xFF for spec in c.hears("old", to_pilot.RunCalls).calls]
    assert sent == [2], "the one that runs is not sent again"


def test_result_that_arrives_before_its_client_returns_is_kept(c: Cluster) -> None:
    back(c, facts(1))
    end = CallEnd(3 << 40 | 1, True, b"result", 1.0)
    c.report("old", say.CallsEnded(7, [end]))
    bob(c, received=4)
    again(c, 1)
    client = c.core.state.clients["bob"]
    assert (client.first_unacked, list(client.unacked)) == (4, [end])
    assert not c.core.state.orphans


def test_running_call_that_its_client_does_not_resubmit_is_cancelled(c: Cluster) -> None:
    back(c, facts(1, 2))
    bob(c)
    again(c, 2)
    assert c.hears("old", to_pilot.CancelCalls).calls == (3 << 40 | 1,)
    assert list(c.core.state.libraries[7].held) == [3 << 40 | 2]


def test_repeated_call_end_does_not_delete_the_result_file(c: Cluster) -> None:
    back(c, facts(1))
    bob(c)
    again(c)
    ref = say.ObjectRef("result-1", 10, "/session/objects/result-1")
    c.report("old", say.CallsEnded(7, [CallEnd(3 << 40 | 1, True, ref, 1.0)]))
    assert not c.commands(DiscardObject)


def test_ranks_of_a_gang_are_ended_and_the_gang_restarts(c: Cluster) -> None:
    back(c, facts(1))
    bob(c)
    again(c, 1, gang=(2, 2))
    dropped = c.hears("old", to_pilot.CancelCalls)
    assert (dropped.running, dropped.grace_s) == (True, 10.0)
    call = c.core.state.calls[3 << 40 | 1]
    assert call.state is CallState.WAITING


def test_frame_numbers_continue_from_those_the_pilot_reports(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).ready()
    call = c.ids["1"]
    c.event(ManagerRestarted()).come_back("p1", lib1=("1",))
    c.hello("p1", acknowledged=40, libraries=(say.LibraryFacts(1, "bare", ("cpu:0",), True, (call,)),))
    c._frames["p1"] = 40
    c.end("1")
    assert c.core.state.done == 1


def test_device_fault_lost_from_the_journal_keeps_its_quarantine(c: Cluster) -> None:
    back(c, facts(), faults={"cpu:0": "wrong product, twice"})
    assert c.core.state.pilots["old"].devices["cpu:0"].fault == "wrong product, twice"
    assert c.core.state.libraries[7].state is LibraryState.STOPPING


def test_lost_block_is_adopted_with_its_pilots(c: Cluster) -> None:
    source = Source("mine", ProvisioningRule.OPPORTUNISTIC, first=0, most=4, keep_pending=2, idle_s=100.0)
    c.event(SessionDefined((source,)))
    back(c, facts(), block="b7")
    c.client_hello("factory", factory=True, acknowledged=12)
    c._frames["factory"] = 12
    c.tell("factory", say.BlockUpdate(BlockId("b7"), BlockPhase.RUNNING, "j7", source="mine"))
    block = c.core.state.blocks["b7"]
    assert (block.phase, list(block.pilots)) == (BlockPhase.RUNNING, ["old"])
    assert c.core.state.next_block == 8
    assert c.core.state.pilots["old"].source == "mine"


def test_block_requested_again_keeps_its_former_pilots(c: Cluster) -> None:
    """The journal lost its first records, so the next block of the source has the name b1 again."""
    back(c, facts(), block="b1").event(SessionDefined((Source("mine", ProvisioningRule.FIXED, first=1, most=1),)))
    block = c.core.state.blocks["b1"]
    assert list(block.pilots) == ["old"]
    assert not block.has_expected_pilot, "status says no more that its pilot is to come"


def test_ended_block_that_is_reported_running_is_cancelled() -> None:
    source = Source("mine", ProvisioningRule.FIXED, first=1, most=1)
    c = cluster().sources(source)
    c.block("b1", phase=BlockPhase.ENDED, reason="done").forget()
    c.tell("factory", say.BlockUpdate(BlockId("b1"), BlockPhase.RUNNING, "j1", source="mine"))
    assert c.hears("factory", to_client.CancelBlocks).blocks == ("b1",)
    c.check()


def test_library_numbers_lost_from_the_journal_are_not_reused(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1").ready().end("1").event(ManagerRestarted())
    c.come_back("p1", lib1=()).forget().call("2", context="a")
    assert c.hears("p1", to_pilot.StartLibrary).library >= 1000


@pytest.mark.parametrize("known", [True, False])
def test_call_end_ignored_after_a_journal_gap_counts_when_repeated(cluster: Make, *, known: bool) -> None:
    """The damaged record was the assignment of the call to its library. The manager once ignored the end of the call
    and, because of its number, also the repeated end. The call then never ended.
    """
    c = cluster(pilots=1).calls(1).ready()
    if known:
        c.event(RecordsLost(100, "its checksum is wrong")).event(ManagerRestarted())
    else:
        c.end("1").event(RecordsLost(100, "its checksum is wrong")).event(ManagerRestarted()).call("2")
    call, before = ("1" if known else "2"), c.taken("p1")
    end = say.CallsEnded(next(iter(c.core.state.libraries)), [CallEnd(c.ids[call], True)])
    c._frames["p1"] = before + 3  # the journal lost the last frames of the pilot
    c.report("p1", end)
    number = c._frames["p1"]
    c.come_back("p1", acknowledged=number - 1, lib1=(call,))
    c._frames["p1"] = number - 1
    c.report("p1", end)
    assert c.ids[call] not in c.core.state.calls
    assert (c.status().done, c.status().running) == (1 if known else 2, 0)
    c.check()


def test_block_numbers_lost_from_the_journal_are_not_reused(cluster: Make) -> None:
    c = cluster().sources(Source("mine", ProvisioningRule.FIXED, first=1, most=1)).event(ManagerRestarted())
    c.client_hello("factory", factory=True)
    c.block("b1", phase=BlockPhase.ENDED).wait(120)
    assert [block.id for block in c.core.state.blocks.values()] == ["b100"]

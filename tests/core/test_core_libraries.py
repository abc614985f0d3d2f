from __future__ import annotations

import pytest
from core.builders import Cluster, Make, devices, recipe

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepSample, group_samples
from stoker.manager.core import holding
from stoker.manager.core.events import RecordSteps
from stoker.manager.core.nouns import LibraryState
from stoker.manager.core.seams import Load, PolicyError, Resize, Send, Unload
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import FailureKind

GB = 10**9


def test_contexts_share_a_device_while_their_memory_fits(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(*(recipe(name, memory="3 GB") for name in "abc"))
    c.call("1", context="a").call("2", context="b").call("3", context="c")
    assert (c.lives_on("a"), c.lives_on("b"), c.lives_on("c")) == (["p1"], ["p1"], [])
    with pytest.raises(PolicyError, match="cpu:0 of p1 has 2000000000 bytes left"):
        c.apply([Load("c", "p1", ("cpu:0",), 3 * GB)], seam="residency")
    assert c.pilot().devices["cpu:0"].promised_bytes == 6 * GB


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (Load("bare", "p1", (), 0), "needs at least one device"),
        (Load("bare", "p1", ("cpu:0", "cpu:0"), 0), "each device only once"),
        (Load("bare", "p1", ("cuda:9",), 0), "has no device cuda:9"),
        (Load("bare", "p9", ("cpu:0",), 0), "no pilot p9"),
        (Load("what", "p1", ("cpu:0",), 0), "no context what"),
        (Load("bare", "p1", ("cpu:0",), -1), "cannot be promised"),
        (Load("bare", "p2", ("cpu:0",), 0), "p2 is cut"),
    ],
)
def test_illegal_load_changes_nothing(cluster: Make, load: Load, why: str) -> None:
    c = cluster(pilots=2).cut("p2")
    with pytest.raises(PolicyError, match=why):
        c.apply([load], seam="residency")
    assert c.core.state.libraries == {}
    c.core.manager.strict = False
    c.apply([load], seam="residency")
    assert sum(c.refused.values()) == 1
    c.by_hand = True


def test_call_of_an_illegal_offer_stays_in_its_queue(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(recipe("a", memory="3 GB")).call("1", context="a").ready()
    c.by_hand = True
    library, call = c.library(context="a"), c.the_call("1")
    holding.remove_held_call(library, call.id)
    holding.requeue_calls(c.core.manager, (call,), why="for a test")
    with pytest.raises(PolicyError, match="wants 6000000000 more"):
        c.apply([Send(call.id, library.id, offer=True, reserve_bytes=9 * GB)], seam="dispatch")
    assert list(c.context("a").queue) == [call]


def test_unmeasured_context_gets_a_whole_device_until_measured(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(recipe("a"), recipe("b")).call("1", context="a").call("2", context="b")
    start = c.hears("p1", to_pilot.StartLibrary)
    assert start.device_memory_bytes == 8 * GB - 256_000_000  # some memory stays free for calls without a context
    assert c.lives_on("b") == []
    c.report("p1", say.LibraryReady(1, 0.1, 2.0, 2 * GB, 2 * GB))
    assert c.library(context="a").promised_bytes == 2.2 * GB
    assert c.hears("p1", to_pilot.StartLibrary).recipe.key == "b"
    assert c.runs("p1") == ["1"]
    c.nothing_else_was_said()


def test_two_failed_loads_fail_waiting_calls_but_not_later_calls(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).calls(2, context="a")
    c.fail_load(c.library(context="a"))
    assert c.ended == {}
    c.fail_load(c.library(context="a"))
    assert {end.failure.kind for end in c.ended.values()} == {FailureKind.CONTEXT}
    assert "no such model" in c.failure("1").message
    assert c.lives_on("a") == []
    c.call("3", context="a").ready(only="").end("3")
    assert c.ended["3"].ok


def test_library_stopped_while_loading_may_become_ready(cluster: Make) -> None:
    c = cluster(pilots=1).call("1")
    c.by_hand = True
    library = c.library()
    c.apply([Unload(library.id, "for a test")], seam="residency")
    c.report("p1", say.LibraryReady(library.id, 0.1, 0.1))
    assert library.state is LibraryState.STOPPING
    assert c.refused == {}
    c.die(library, failure=None).ready().end("1")
    assert c.ended["1"].ok


class Hand:
    """A cluster with libraries `lib1` and `lib2` on one device; its events are not replayed."""

    def __init__(self, c: Cluster) -> None:
        self.c = c
        c.define(recipe("a", memory="3 GB"), recipe("b", memory="3 GB")).call("1", context="a").call("2", context="b")
        c.ready().forget()
        c.by_hand = True
        self.lib1, self.lib2 = c.library(context="a"), c.library(context="b")

    def do(self, *actions: Resize | Unload) -> None:
        self.c.apply(actions, seam="residency")
        self.c.core.manager.commands.clear()

    def resized(self, size: float) -> None:
        self.c.report("p1", say.LibraryResized(self.lib1.id, int(size)))


def test_one_plan_may_shrink_one_library_and_grow_another(cluster: Make) -> None:
    hand = Hand(cluster(pilots=1, memory="8 GB"))
    with pytest.raises(PolicyError, match="wants 3000000000 more"):
        hand.do(Resize(hand.lib2.id, 6 * GB))
    hand.do(Resize(hand.lib1.id, 1 * GB), Resize(hand.lib2.id, 6 * GB))
    assert (hand.lib1.promised_bytes, hand.lib2.promised_bytes) == (1 * GB, 6 * GB)
    with pytest.raises(PolicyError, match="wants 2000000000 more"):
        hand.do(Resize(hand.lib1.id, 3 * GB))


def test_device_budget_holds_if_a_library_refuses_to_shrink(cluster: Make) -> None:
    hand = Hand(cluster(pilots=1, memory="8 GB"))
    hand.do(Resize(hand.lib1.id, 1 * GB), Resize(hand.lib2.id, 6 * GB))
    hand.resized(3 * GB)  # the context of lib1 has refused the new size
    assert hand.lib1.promised_bytes == 2 * GB, "the budget stays whole"
    assert "uses 3.0 GB of its device, more than is free" in hand.c.story("lib-1")


def test_second_answer_to_a_resize_does_not_answer_the_next_resize(cluster: Make) -> None:
    """After a pilot reconnects, the manager repeats the order, and both answers arrive."""
    hand = Hand(cluster(pilots=1, memory="8 GB"))
    hand.do(Resize(hand.lib1.id, 1 * GB))
    answer = say.LibraryResized(hand.lib1.id, 1 * GB, ordered_bytes=1 * GB)
    hand.c.report("p1", answer)
    hand.do(Resize(hand.lib1.id, 4 * GB))
    hand.c.report("p1", answer)
    assert (hand.lib1.promised_bytes, hand.lib1.unanswered_resizes) == (4 * GB, [4 * GB])
    # the pilot of lib1 has refused the new size
    hand.c.report("p1", say.LibraryResized(hand.lib1.id, 1 * GB, ordered_bytes=4 * GB))
    assert (hand.lib1.promised_bytes, hand.lib1.unanswered_resizes) == (1 * GB, [])


def test_crossing_resizes_never_free_memory_the_later_resize_needs(cluster: Make) -> None:
    hand = Hand(cluster(pilots=1, memory="8 GB"))
    hand.do(Resize(hand.lib1.id, 1 * GB), Resize(hand.lib1.id, 2 * GB))
    hand.resized(1 * GB)
    assert hand.lib1.promised_bytes == 2 * GB
    hand.resized(2 * GB)
    assert (hand.lib1.promised_bytes, hand.lib1.unanswered_resizes) == (2 * GB, [])


def test_unrequested_resize_answer_is_refused(cluster: Make) -> None:
    hand = Hand(cluster(pilots=1, memory="8 GB"))
    hand.resized(1 * GB)
    assert hand.lib1.promised_bytes == 3 * GB
    assert hand.c.refused == {"resize that the manager did not order": 1}


def test_library_reserves_memory_on_each_of_its_devices(cluster: Make) -> None:
    c = cluster().join("p1", of=devices(3)).define(recipe("wide", memory="5 GB", devices=2))
    c.calls(2, context="wide")
    assert c.hears("p1", to_pilot.StartLibrary).devices == ("cpu:0", "cpu:1")
    c.nothing_else_was_said()
    assert [d.promised_bytes for d in c.pilot().devices.values()] == [5 * GB, 5 * GB, 0]


def test_library_reports_its_batch_and_its_step_times(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").ready()
    load = EngineLoad(running=23, waiting=3, decode_steps=1240, row_steps=22816, new_tokens=824, busy_s=2.0, rows=64)
    times = group_samples([StepSample(False, 8, 64, 0.02)])
    said = "batch: 23 of 64 rows running, 3 wait; mean 18.4 over 1,240 steps; 412 tokens/s"
    assert "batch" not in c.story("lib-1")
    assert c.status().libraries[0].batch is None
    c.report("p1", say.LibraryEngineReport(1, load, times))
    assert c.story("lib-1").endswith(said)
    assert c.status().libraries[0].batch == load
    assert c.commands(RecordSteps) == [RecordSteps("a", "cpu", times)]
    c.report("p1", say.LibraryEngineReport(1, EngineLoad(running=1)))
    assert c.story("lib-1").endswith("batch: 1 row running")
    assert len(c.commands(RecordSteps)) == 1

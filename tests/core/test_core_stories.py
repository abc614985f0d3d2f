"""What `stoker explain` and `stoker status` say in each state."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import BROKEN, Cluster, recipe

from stoker.manager.protocol import to_manager as say

Make = Callable[..., Cluster]


def test_without_pilots_a_call_waits_for_one_and_the_blocks_say_why(cluster: Make) -> None:
    c = cluster().call("c1").wait(48)
    assert "waits for 48 s: no pilot has joined yet (no block was submitted)" in c.story("c-1")
    c.tell("ana", say.WantPilots({"b1": "pending: Priority"}))
    assert "no pilot has joined yet (block b1: pending: Priority)" in c.story("c-1")


def test_a_pilot_that_is_cut_off_is_said_to_be(cluster: Make) -> None:
    c = cluster(pilots=1).cut("p1").call("c1")
    assert "no pilot is here (1 cut off" in c.story("c-1")
    assert "cut" in c.story("p1").splitlines()[0]


def test_a_context_on_its_way_tells_where_and_how_long(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").wait(3)
    c.report("p1", say.LibraryNews(1, say.LibraryPhase.LOADING))  # type: ignore[arg-type]
    assert "bare is on its way (loading) on cpu:0 of p1 for 3.0 s" in c.story("c-1")


def test_behind_busy_libraries_the_wait_is_predicted(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=2.0, load_s=100.0)
    c.calls(6)
    story = c.story("c-7")
    assert "behind 4 calls of bare; 5 calls of bare are queued, its 1 hot library is busy" in story
    assert "all done in about 10 s" in story
    assert "where bare is hot" in c.story("c-2")


def test_calls_before_it_in_a_library_are_counted(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001).calls(5)
    assert "3 calls of that library are before it" in c.story("c-5")


def test_a_call_that_came_back_says_why(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().lose("p1")
    story = c.story("1")
    assert "p1 was lost (silent for 15 s): back in the queue, not counted as a try" in story
    assert "no pilot is here any more" in story
    c.join("p2").ready().die(c.library("p2"), "c1")
    assert "its library died (ended by signal 9 (killed)), 1 of 2" in c.story("1")


def test_a_call_that_failed_is_kept_with_its_story(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().end("c1", ok=False)
    assert "raised an exception in your code after 1.000 s" in c.story("c-1")
    c.call("c2").end("c2")
    assert "its story is in the journal" in c.story("c-2")
    assert "no such call" in c.story("c-99")
    assert "no call, pilot, library, context or block" in c.story("what")


def test_the_last_failures_are_kept_and_no_more(cluster: Make) -> None:
    c = cluster().calls(1200).tell("ana", say.Cancel(list(range(1, 1201))))  # type: ignore[arg-type]
    assert len(c.core.state.failed) == 1000
    assert "cancelled by its client" in c.story("c-1200")


def test_contexts_and_libraries_tell_what_happened_to_them(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("llm")).call("c1", context="llm")
    c.fail_load(c.library(context="llm"))
    assert "last failed load: FileNotFoundError" in c.story("llm")
    c.ready(load_s=4.0, memory="2 GB")
    story = c.story("llm")
    assert "1 hot, 0 calls queued, 0 ended, 1 loads of 4.1 s, 2.0 GB each" in story
    assert "ready: 0.10 s to start, 4.00 s to load" in c.story("lib-2")
    assert "told to load on cpu:0" in c.story("p1")
    assert "no call" in c.story("lib-77")
    c.die(c.library(context="llm"), "c1", failure=BROKEN)
    assert "lib-2 on p1 ended" in c.story("c-1")


def test_no_room_is_said_with_what_is_free(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(recipe("a", memory="5 GB"), recipe("b", memory="5 GB"))
    c.call("c1", context="a").ready().call("c2", context="b")
    assert "no device has room for b beside what is busy there (most free: 3.0 GB)" in c.story("c-2")


def test_status_counts_everything_once(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).calls(5, context="a").ready(memory="1 GB", load_s=2.0)
    c.wait(2).end("1", run_s=2.0).end("2", run_s=2.0, ok=False)
    status = c.status()
    assert (status.queued, status.running, status.done, status.failed) == (1, 2, 2, 1)
    assert status.rate == 2.0
    assert status.left_s == 1.5
    context = next(x for x in status.contexts if x.name == "a")
    assert (context.hot, context.queued, context.running, context.loads, context.ended) == (2, 1, 2, 2, 2)
    assert (context.load_total_s, context.run_total_s, context.memory_bytes) == (4.2, 4.0, 10**9)
    assert "queued" in context.waits_for
    assert [pilot.pilot for pilot in status.pilots] == ["p1", "p2"]
    assert status.pilots[0].devices[0].promised_bytes > 0
    assert {library.running for library in status.libraries} == {1}
    c.wait(60)
    assert c.status().rate == 0.0

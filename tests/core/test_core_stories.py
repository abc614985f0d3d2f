from __future__ import annotations

import pickle

import msgspec
from core.builders import BROKEN, Make, devices, recipe

from stoker.contexts.recipe import Needs
from stoker.manager.cli.logs import explain_missing_output
from stoker.manager.core import report
from stoker.manager.core.events import ManagerRestarted
from stoker.protocol import show_status
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, Source
from stoker.protocol.calls import CallSpec
from stoker.protocol.show_status import format_forecast, render


def test_call_without_pilots_shows_why_the_blocks_wait(cluster: Make) -> None:
    c = cluster().call("c1").wait(48)
    assert "waits for 48 s: no pilot has joined yet (no block was submitted)" in c.story("c-1")
    c.tell("ana", say.ParslBlockStates({"b1": "pending: Priority"}))
    assert "no pilot has joined yet (block b1: pending: Priority)" in c.story("c-1")


def test_own_block_is_named_b0_and_runs_once_its_pilot_has_joined(cluster: Make) -> None:
    c = cluster().call("c1")
    c.tell("ana", say.ParslBlockStates({"0": "pending", "1": "failed: exit code 1"}))
    assert "block that the program started itself: pending, none of its pilots has joined" in c.story("b0")
    c.join("p1", block="0")
    assert "running, pilots p1" in c.story("b0")
    assert not c.the_story("b7").found
    assert c.status().blocks == {"0": "running", "1": "failed: exit code 1"}
    c.tell("ana", say.EndSession("done"))
    assert report.build_session_status(c.core.state).blocks == {
        "0": "ended with the session",
        "1": "failed: exit code 1",
    }


def test_status_shows_that_a_block_ended_before_its_pilot_joined(cluster: Make) -> None:
    c = cluster().call("c1")
    c.tell("ana", say.ParslBlockStates({"0": "pending"}), say.EndSession("done"))
    assert report.build_session_status(c.core.state).blocks == {"0": "ended before a pilot came"}


def test_logs_command_explains_why_an_open_call_has_no_output(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=100.0, load_s=100.0).calls(2)
    waits = explain_missing_output(c.the_story("c-3"))
    assert waits == ("c-3 waits: its library runs other calls\nread the output after the call ends: stoker logs c-3")
    assert explain_missing_output(c.the_story("c-2")).splitlines() == [
        "c-2 runs in lib-1; read the output after the call ends: stoker logs c-2",
        "until then: stoker logs lib-1 -f",
    ]
    assert explain_missing_output(c.the_story("c-3"), over="session k3v9 ended at 09:24:20") == (
        "c-3 had not ended when its session ended (session k3v9 ended at 09:24:20)"
    )
    c.tell("ana", say.Cancel([c.ids["3"]]))
    assert explain_missing_output(c.the_story("c-3")).startswith(
        "c-3 never ran, so it printed nothing: it ended without a result"
    )


def test_call_behind_others_in_its_library_shows_its_position(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001).calls(5)
    assert "3 calls are before it in that library" in c.story("c-5")
    assert explain_missing_output(c.the_story("c-5")).startswith(
        "c-5 waits in lib-1: 3 calls are before it in that library\n"
    )


def test_disconnected_pilot_is_shown_as_disconnected(cluster: Make) -> None:
    c = cluster(pilots=1).cut("p1").call("c1")
    assert "no pilot is connected (1 cut off" in c.story("c-1")
    assert "cut" in c.story("p1").splitlines()[0]


def test_wait_behind_busy_libraries_is_predicted(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=2.0, load_s=100.0)
    c.calls(6)
    story = c.story("c-7")
    assert "behind 4 calls of the same context; its library runs other calls" in story
    assert "is expected to start in about 10 s" in story
    assert "sent to lib-1 (cpu:0 of p1)" in c.story("c-2")


def test_explain_shows_why_a_call_was_requeued(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().lose("p1")
    story = c.story("1")
    assert "p1 was lost (silent for 15 s): back in the queue, not counted as a try" in story
    assert (
        "no pilot is connected any more (the last one, p1, 0.0 ms ago: silent for 15 s; no block was submitted)"
        in story
    )
    c.join("p2").ready().die(c.library("p2"), "c1")
    assert "its library died (ended by signal 9 (killed)), 1 of 2" in c.story("1")


def test_failed_call_can_be_explained_after_its_end(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().end("c1", ok=False)
    assert "raised an exception in your code after 1.000 s" in c.story("c-1")
    c.call("c2").end("c2")
    assert "its story is in the journal" in c.story("c-2")
    assert "no such call" in c.story("c-99")
    assert "no call, pilot, library, context or block" in c.story("what")


def test_number_of_kept_failures_is_bounded(cluster: Make) -> None:
    c = cluster().calls(1200).tell("ana", say.Cancel(list(range(1, 1201))))
    assert len(c.core.state.failed_calls) == 1000
    assert "cancelled by its client" in c.story("c-1200")


def test_explain_shows_loads_and_failures_of_contexts_and_libraries(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("llm")).call("c1", context="llm")
    c.fail_load(c.library(context="llm"))
    assert "last failed load: FileNotFoundError" in c.story("llm")
    c.ready(load_s=4.0, memory="2 GB")
    story = c.story("llm")
    assert "1 hot, 0 calls queued, 0 ended, 1 load of 4.1 s, 2.0 GB each" in story
    assert "ready: 0.10 s to start, 4.00 s to load" in c.story("lib-2")
    assert "starts on cpu:0" in c.story("p1")
    assert "no call" in c.story("lib-77")
    c.die(c.library(context="llm"), "c1", failure=BROKEN)
    assert "lib-2 on p1 ended" in c.story("c-1")


def test_multi_line_failure_is_one_line_of_status(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("llm")).call("c1", context="llm")
    failure = msgspec.structs.replace(BROKEN, message="the loader raised ValueError: a\n  b\n\tc")
    c.die(c.library(context="llm"), failure=failure, loading=True)
    context = next(each for each in c.status().contexts if each.last_failure)
    assert context.last_failure == "the loader raised ValueError: a b c"
    assert "\n" not in context.waits_for


def test_lack_of_device_memory_is_shown_with_the_free_memory(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(recipe("a", memory="5 GB"), recipe("b", memory="5 GB"))
    c.call("c1", context="a").ready().call("c2", context="b")
    assert "no device has room for b next to its busy libraries (most free: 3.0 GB)" in c.story("c-2")


def test_status_shows_call_counts_rate_time_left_and_contexts(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).calls(5, context="a").ready(memory="1 GB", load_s=2.0)
    c.wait(2).end("1", run_s=2.0).end("2", run_s=2.0, ok=False)
    status = c.status()
    assert (status.queued, status.running, status.done, status.failed) == (1, 2, 1, 1)
    assert status.rate == 2.0
    assert status.left_s == 3.0, "three calls of 2 s on two libraries"
    context = next(x for x in status.contexts if x.name == "a")
    assert (context.hot, context.queued, context.running, context.loads, context.ended) == (2, 1, 2, 2, 2)
    assert (context.load_total_s, context.run_total_s, context.memory_bytes) == (4.2, 4.0, 10**9)
    assert context.waits_for == "all 2 libraries run other calls"
    assert [pilot.pilot for pilot in status.pilots] == ["p1", "p2"]
    assert status.pilots[0].devices[0].promised_bytes > 0
    assert {library.running for library in status.libraries} == {1}
    c.wait(60)
    assert c.status().rate == 0.0


# ---- one forecast
def test_forecast_of_short_calls_uses_the_shown_rate(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).calls(40, context="a").ready()
    for number in range(1, 21):
        c.wait(1).end(str(number), run_s=0.001)
    status = c.status()
    assert status.rate == status.contexts[0].rate + status.contexts[1].rate == status.pilots[0].rate
    assert round(status.left_s, 6) == round(20 / status.rate, 6), "not what 1 ms a call would come to"


def test_forecast_counts_pilots_awaited_after_a_manager_restart(cluster: Make) -> None:
    c = cluster().sources(Source("lab", first=1, most=2)).define(recipe("a"))
    c.call("1", context="a").block("b1", phase=BlockPhase.RUNNING).join("p1", of=devices(2), block="b1")
    c.ready().end("1", run_s=2.0).calls(40, context="a").ready()
    c.block("b2", phase=BlockPhase.PENDING, reason="Priority", expected_in_s=600.0)
    before = c.status().left_s
    c.event(ManagerRestarted()).wait(10)
    status = c.status()
    assert status.pilot_in_s == 0.0
    assert before <= status.left_s < before + 2.0
    assert "after the first pilot" not in render(status)[0]


def test_running_load_is_part_of_the_forecast(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").ready(load_s=20.0).end("1", run_s=4.0)
    c.die(c.library(context="a")).calls(2, context="a").wait(5)
    assert 23.0 < c.status().left_s < 23.2, "15.1 s of its load are left, and two calls of 4 s"


def test_forecast_without_a_pilot_counts_from_the_first_pilot(cluster: Make) -> None:
    c = cluster().sources(Source("lab", first=1, most=2)).define(recipe("a"))
    c.call("1", context="a").block("b1", phase=BlockPhase.RUNNING).join("p1", of=devices(4), block="b1")
    c.ready().end("1", run_s=60.0).lose("p1").block("b1", phase=BlockPhase.ENDED, reason="preempted")
    c.calls(80, context="a")
    assert format_forecast(c.status()) == "done about 20 min after the first pilot"
    c.block("b2", phase=BlockPhase.PENDING, reason="Priority", expected_in_s=4 * 3600.0)
    status = c.status()
    assert (status.left_s, status.pilot_in_s) == (1201.1, 14_400.0), "1.1 s to load, then 20 calls on each"
    assert "done about 20 min after the first pilot, expected in 4 h" in render(status)[0]
    c.block("b2", phase=BlockPhase.RUNNING).join("p2", of=devices(4), block="b2")
    assert c.status().pilot_in_s == 0.0
    assert "after the first pilot" not in render(c.status())[0]


def test_forecast_of_unmeasured_work_shows_only_the_pilot_start(cluster: Make) -> None:
    c = cluster().sources(Source("lab")).define(recipe("a")).call("1", context="a")
    assert format_forecast(c.status()) == ""
    c.block("b1", phase=BlockPhase.PENDING, reason="Priority", expected_in_s=600.0)
    assert format_forecast(c.status()) == "first pilot expected in 10 min"


# ---- stories of ended and lost things
def test_ended_call_names_its_library_pilot_and_device(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1", ok=False).tell("ana", say.Cancel([2]))
    assert "sent to lib-1 (cpu:0 of p1)" in c.story("c-1")
    c.calls(1).tell("ana", say.Cancel([3]))
    assert "the call was not sent to a library" in c.story("c-3") or "sent to lib-1 (cpu:0 of p1)" in c.story("c-3")


def test_ended_libraries_and_lost_pilots_can_be_explained(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("llm")).call("c1", context="llm").ready()
    c.die(c.library(context="llm"), "c1").ready()
    assert "ended: ended by signal 9" in c.story("lib-1")
    assert "lib-1 (llm): ended" in c.story("p1")
    c.lose("p1")
    assert "lost with its pilot: silent for 15 s" in c.story("lib-2")
    assert "lib-2 (llm): lost with its pilot" in c.story("p1")
    assert "lib-1 on p1: ended" in c.story("llm")


def test_number_of_remembered_ended_libraries_is_bounded(cluster: Make) -> None:
    c = cluster(pilots=1)
    for _ in range(250):
        c.calls(1).ready()
        c.die(c.library())
    assert len(c.core.state.gone_libraries) == 200


def test_explain_accepts_a_unique_prefix_of_a_name(cluster: Make) -> None:
    c = cluster().join("n014-ab12", "n021-cd34", "n021-ef56").define(recipe("llm-7f3a"), recipe("llm-09aa"))
    assert c.the_story("n014").subject == "n014-ab12"
    assert c.the_story("llm-7").subject == "llm-7f3a"
    several = c.the_story("n021")
    assert (several.found, several.headline) == (False, "matches n021-cd34, n021-ef56; write a longer prefix")
    c.lose("n021-cd34")
    assert c.the_story("n021").subject == "n021-ef56", "one that is here comes first"
    assert c.the_story("n021-cd").subject == "n021-cd34", "one that is gone is known"
    assert not c.the_story("n03").found
    assert c.the_story("host-n014-ab12").found


def test_two_recipes_of_one_loader_are_distinguished_by_arguments(cluster: Make) -> None:
    three, four = (msgspec.structs.replace(recipe(f"t-{n}"), arguments=f"({n})") for n in (3, 4))
    c = cluster(pilots=1).define(three, four).call("c1", context="t-3").call("c2", context="t-4")
    assert "wants t-3(3)" in c.story("c-1")
    assert "wants t-4(4)" in c.story("c-2")
    assert c.the_story("t-4(4)").found
    assert any(line.lstrip().startswith(("contexts  t-3(3)", "t-3(3)")) for line in render(c.status()))


def test_explain_shows_the_shortened_arguments_of_a_call(cluster: Make) -> None:
    c = cluster().tell("ana", say.Submit("f", "bare", [
        CallSpec(7, pickle.dumps((("claims.txt",), {"n": 3}), 5)), CallSpec(8, b"\x80garbage"),
        CallSpec(9, pickle.dumps((("x" * 70_000,), {}), 5)),
    ]))  # fmt: skip
    assert show_status.format_explanation_lines(c.the_story("c-7"))[0].startswith(
        "call c-7  f('claims.txt', n=3)  wants no context"
    )
    assert show_status.format_explanation_lines(c.the_story("c-8"))[0].startswith("call c-8  f  wants no context")
    assert show_status.format_explanation_lines(c.the_story("c-9"))[0].startswith(
        "call c-9  f(70.0 kB of arguments)  wants"
    )
    assert not c.the_story("c-9").payload


def test_context_for_a_missing_device_kind_waits_for_blocks(cluster: Make) -> None:
    c = cluster().sources(Source("cpus", first=1, most=1), Source("gpus", first=1, most=1, kind="a100"))
    wants = msgspec.structs.replace(recipe("a"), needs=Needs(kinds=("a100",)))
    c.define(wants).block("b1", phase=BlockPhase.RUNNING).join("p1", of=devices(2), block="b1")
    c.block("b2", phase=BlockPhase.PENDING, reason="Priority").call("1", context="a")
    assert "no pilot has a device of a kind that a needs (a100); block" in c.story("c-1")
    assert "block b2: pending: Priority" in c.story("c-1")

"""Residency by default: load where it is wanted and pays, keep until room is needed, let everybody have a turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from core.builders import Cluster, devices, recipe

from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.nouns import LibraryState
from stoker.manager.core.seams import Policies
from stoker.manager.policies import default_policies
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.protocol import to_pilot
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_manager import DefineFunction

Make = Callable[..., Cluster]


def test_while_nothing_was_measured_every_idle_device_is_used(cluster: Make) -> None:
    c = cluster(pilots=5).define(recipe("a")).calls(3, context="a")
    assert c.lives_on("a") == ["p1", "p2", "p3"]


def test_a_context_is_loaded_elsewhere_only_when_the_wait_is_longer_than_the_load(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a")
    c.hot(context="a", run_s=1.0, load_s=9.9).join("p2").forget()
    c.calls(10, context="a").wait(5)  # 10 calls of 1 s on one library: the last waits 9 s, a load takes 10 s
    assert c.lives_on("a") == ["p1"]
    c.calls(5, context="a").wait(5)
    assert c.lives_on("a") == ["p1", "p2"]


def test_advice_from_history_counts_as_long_as_nothing_was_measured(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a"))
    c.event(
        AdviceArrived(
            OfContext("a"),
            CostAdvice({"cpu": ContextAdvice(load_s=20.0, run_s=1.0, resident_bytes=10**9, peak_bytes=2 * 10**9)}),
        )
    )  # type: ignore[arg-type]
    c.calls(30, context="a")
    assert c.lives_on("a") == ["p1", "p2"]  # 30 s on one, 15 s on each of two
    assert c.library(context="a").promised_bytes == 2.2 * 10**9


def test_quick_calls_of_another_function_say_nothing_of_those_that_want_no_context(cluster: Make) -> None:
    c = cluster(pilots=1).call("quick")
    c.hot(run_s=0.001, load_s=1.0).join("p2").forget()
    c.tell("ana", DefineFunction("slow", "slow", b"code"))  # type: ignore[arg-type]
    c.calls(4, function="slow").wait(5)
    assert c.lives_on() == ["p1", "p2"]


def test_a_slow_start_makes_no_more_libraries_than_calls(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a", slots=4)).calls(6, context="a")
    assert len(c.lives_on("a")) == 2


def test_idle_libraries_are_evicted_least_recently_used_first_and_only_when_room_is_needed(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(*(recipe(x, memory="3 GB") for x in "abc"))
    for at, name in enumerate("ab"):
        c.wait(at).call(name, context=name).ready().end(name)
    c.wait(100).call("a2", context="a").end("a2")  # b is the colder one now
    assert (c.lives_on("a"), c.lives_on("b")) == (["p1"], ["p1"])
    c.forget().call("c", context="c")
    assert c.hears("p1", to_pilot.StopLibrary).library == c.library(context="b").id
    assert c.hears("p1", to_pilot.StartLibrary).recipe.key == "c", "in the same plan: the pilot waits for the memory"
    c.nothing_else_was_said()
    c.die(c.library(context="b"), failure=None)
    assert c.lives_on("c") == ["p1"]


def test_no_more_is_evicted_than_is_needed_and_a_busy_library_stays(cluster: Make) -> None:
    c = cluster(pilots=1, memory="9 GB").define(*(recipe(x, memory="3 GB") for x in "abd"), recipe("c", memory="5 GB"))
    for name in "abd":
        c.call(name, context=name).ready()
    c.end("b", "d").call("c", context="c").wait(0.1)
    stopping = {x.context.recipe.key for x in c.core.state.libraries.values() if x.state is LibraryState.STOPPING}
    assert stopping == {"b", "d"}


def test_a_recipe_that_no_device_can_ever_hold_fails_at_once_with_what_is_there(cluster: Make) -> None:
    c = cluster(pilots=2, devices_each=3, memory="12 GB").define(recipe("big", memory="17.2 GB"))
    c.call("c1", context="big")
    failure = c.ended["c1"].failure
    assert failure is not None
    assert failure.kind is FailureKind.NO_DEVICE
    assert failure.message == (
        "context big can be loaded nowhere: it needs 17.2 GB of memory; devices seen: cpu 12.0 GB x 6\n"
        '  the CPU devices of one pilot have 36.0 GB together: set [pilot] devices = "cpu:2" in the site file'
    )


def test_context_without_room_on_cpus_names_memory(cluster: Make) -> None:
    c = cluster().define(recipe("big", memory="5 GB")).join("p1", of=devices(2, memory="2 GB"))
    said = c.call("c1", context="big").ended["c1"].failure.message  # type: ignore[union-attr]
    assert said.endswith(
        "\n  the CPU devices of one pilot have 4.0 GB together: ask for more in the site file ([provider] memory)"
    )


def test_context_without_room_on_gpus_names_gpus(cluster: Make) -> None:
    big = recipe("big", device_memory_bytes=30 * 10**9)
    c = cluster().define(big).join("p1", of=devices(1, kind="NVIDIA A10", memory="24 GB"))
    said = c.call("c1", context="big").ended["c1"].failure.message  # type: ignore[union-attr]
    assert "ask for GPUs with more memory in the site file ([provider] gpus)" in said


def test_so_does_one_that_wants_another_kind_or_more_devices(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).define(recipe("gpu", kinds=("a100",)), recipe("wide", devices=3))
    c.call("1", context="gpu").call("2", context="wide")
    assert "kind a100" in c.ended["1"].failure.message  # type: ignore[union-attr]
    assert "3 devices on one pilot" in c.ended["2"].failure.message  # type: ignore[union-attr]


def test_while_no_pilot_has_come_nothing_is_impossible(cluster: Make) -> None:
    c = cluster().define(recipe("big", memory="17 GB")).call("c1", context="big")
    assert c.ended == {}
    c.join("p1", of=devices(1, kind="NVIDIA A100", memory="40 GB"))
    assert c.lives_on("big") == ["p1"]


def test_on_a_gpu_only_device_memory_counts(cluster: Make) -> None:
    c = cluster().join("p1", of=devices(1, kind="NVIDIA A10", memory="24 GB"))
    c.define(recipe("a", memory="60 GB", device_memory_bytes=7 * 10**9)).call("1", context="a")
    start = c.hears("p1", to_pilot.StartLibrary)
    assert (start.memory_bytes, start.device_memory_bytes) == (60 * 10**9, 7 * 10**9)


def test_a_context_that_starves_gets_its_turn_from_whoever_holds_most(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.calls(50, context="a").ready().wait(1).call("b1", context="b")
    c.wait(8)
    assert c.lives_on("a") == ["p1", "p2"]
    c.wait(5)
    stopping = [x for x in c.context("a").libraries.values() if x.state is LibraryState.STOPPING]
    assert len(stopping) == 1
    c.end(*[c.names[id] for id in stopping[0].held]).die(stopping[0], failure=None)
    assert len(c.lives_on("b")) == 1
    c.ready().end("b1")
    assert c.ended["b1"].ok


def test_with_one_device_two_queues_take_turns(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.calls(50, context="a").ready().calls(50, context="b")
    turns = []
    for _ in range(60):
        c.wait(1)
        for library in list(c.core.state.libraries.values()):
            if library.held:
                c.end(*[c.names[id] for id in library.held], run_s=1.0)
            if library.state is LibraryState.STOPPING:
                c.die(library, failure=None)
        c.ready()
        turns += [x.context.recipe.key for x in c.core.state.libraries.values()]
    changes = sum(a != b for a, b in pairwise(turns))
    assert 3 <= changes <= 6  # each has the device for about ten seconds


def test_a_wide_context_gets_room_on_one_pilot_even_if_one_of_its_devices_is_free(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).define(recipe("a", memory="8 GB"), recipe("wide", memory="8 GB", devices=2))
    c.call("1", context="a").ready().end("1").call("2", context="wide")
    c.die(c.library(context="a"), failure=None).ready().end("2")
    assert c.ended["2"].ok


def test_a_context_waits_for_the_pilot_that_is_cut_off_only_so_long(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a", memory="8 GB")).call("1", context="a").ready().end("1")
    home = c.lives_on("a")[0]
    c.cut(home).call("2", context="a").wait(10)
    assert len(c.lives_on("a")) == 2


def test_a_queue_that_shrinks_and_grows_again_is_asked_about_again(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a"))
    c.call("x", context="a").hot(context="a", run_s=1.0, load_s=10.0).calls(100, context="a").join("p2", "p3")
    held = len(c.lives_on("a"))
    assert held == 3
    for pilot in ("p2", "p3"):
        c.lose(pilot)
    while len(c.waiting("a")) > 5:
        c.end(*c.held(context="a"), run_s=1.0)
    c.core.state.timers.clear()  # no timer helps
    c.by_hand = True
    c.join("p4").forget().calls(30, context="a")
    assert c.lives_on("a") == ["p1", "p4"]


@pytest.mark.parametrize("policies", [default_policies, prompt_tuner])
def test_no_room_is_made_on_a_pilot_that_ends_before_the_load_would(
    cluster: Make, policies: Callable[[], Policies]
) -> None:
    c = cluster(policies=policies).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.join("p1", of=devices(1), ends_in_s=60.0).call("x", context="a").ready().end("x")
    c.event(AdviceArrived(OfContext("b"), CostAdvice({"cpu": ContextAdvice(50.0, 1.0, 10**9, 10**9)})))  # type: ignore[arg-type]
    c.forget().call("y", context="b", gang=(1, 2)).wait(15)
    assert not [said for said in c.mail.get("p1", ()) if isinstance(said, to_pilot.StopLibrary)]
    assert c.lives_on("a") == ["p1"]
    c.join("p2", of=devices(1), ends_in_s=600.0).wait(1)
    assert c.lives_on("b") == ["p2"]


def test_while_room_is_on_its_way_nothing_more_is_evicted(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.calls(2, context="a").ready().end("1", "2").call("b1", context="b").wait(5)
    states = sorted(x.state.value for x in c.context("a").libraries.values())
    assert states == ["ready", "stopping"]


def test_nobody_loses_a_device_before_its_load_has_paid(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.calls(9, context="a").ready(load_s=30.0).call("b1", context="b").wait(25)
    assert c.library(context="a").state is LibraryState.READY
    c.wait(10)
    assert c.library(context="a").state is LibraryState.STOPPING

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from core.builders import Cluster, Make, devices, recipe

from benchmarks.baselines.loading import policy
from stoker.manager.core.events import AdviceArrived, ContextAdvice, OfPace, PaceAdvice
from stoker.manager.core.nouns import LibraryState
from stoker.manager.core.seams import Policies
from stoker.manager.policies import SHIPPED, default_policies
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.manager.policies.reactions import SLOWDOWN_LIMIT
from stoker.manager.policies.slinfer import slinfer
from stoker.manager.policies.where_to_load import MOST_FAILED_LOADS_PER_PILOT
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, ProvisioningRule, Source
from stoker.protocol.calls import CallProgress, FailureKind, Features, Objective
from stoker.protocol.show_status import render


def test_another_library_is_loaded_only_if_waiting_takes_longer(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a")
    c.hot(context="a", run_s=1.0, load_s=9.9).join("p2").forget()
    c.calls(10, context="a").wait(5)  # 10 calls of 1 s on one library: the last call waits 9 s, and a load takes 10 s
    assert c.lives_on("a") == ["p1"]
    c.calls(5, context="a").wait(5)
    assert c.lives_on("a") == ["p1", "p2"]


def test_recorded_times_are_used_until_the_first_measurement(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a"))
    c.advise("a", {"cpu": ContextAdvice(load_s=20.0, run_s=1.0, resident_bytes=10**9, peak_bytes=2 * 10**9)})
    c.calls(30, context="a")
    assert c.lives_on("a") == ["p1", "p2"]  # the calls take 30 s on one library or 15 s on two libraries
    assert c.library(context="a").promised_bytes == 2.2 * 10**9


def test_least_recently_used_idle_libraries_are_evicted_first(cluster: Make) -> None:
    c = cluster(pilots=1, memory="8 GB").define(*(recipe(x, memory="3 GB") for x in "abc"))
    for at, name in enumerate("ab"):
        c.wait(at).call(name, context=name).ready().end(name)
    c.wait(100).call("a2", context="a").end("a2")  # b has been idle longer than a
    assert (c.lives_on("a"), c.lives_on("b")) == (["p1"], ["p1"])
    c.forget().call("c", context="c")
    assert c.hears("p1", to_pilot.StopLibrary).library == c.library(context="b").id
    assert c.hears("p1", to_pilot.StartLibrary).recipe.key == "c", "in the same plan: the pilot waits for the memory"
    c.nothing_else_was_said()
    c.die(c.library(context="b"), failure=None)
    assert c.lives_on("c") == ["p1"]


def test_eviction_is_minimal_and_busy_libraries_stay(cluster: Make) -> None:
    c = cluster(pilots=1, memory="9 GB").define(*(recipe(x, memory="3 GB") for x in "abd"), recipe("c", memory="5 GB"))
    for name in "abd":
        c.call(name, context=name).ready()
    c.end("b", "d").call("c", context="c").wait(0.1)
    stopping = {x.context.recipe.key for x in c.core.state.libraries.values() if x.state is LibraryState.STOPPING}
    assert stopping == {"b", "d"}


def test_recipe_that_fits_no_device_fails_and_names_the_devices(cluster: Make) -> None:
    c = cluster(pilots=2, devices_each=3, memory="12 GB").define(recipe("big", memory="17.2 GB"))
    c.call("c1", context="big")
    failure = c.ended["c1"].failure
    assert failure.kind is FailureKind.NO_DEVICE
    assert failure.message == (
        "context big can be loaded nowhere: it needs 17.2 GB of memory; devices seen: cpu 12.0 GB x 6\n"
        '  the CPU devices of one pilot have 36.0 GB together: set [pilot] devices = "cpu:2" in the site file'
    )


BIGGER = "the CPU devices of one pilot have 4.0 GB together: ask for more in the site file ([provider] memory)"


@pytest.mark.parametrize(
    ("wants", "kind", "memory", "said"),
    [
        ({"memory": "5 GB"}, "cpu", "2 GB", BIGGER),
        ({"device_memory_bytes": 30 * 10**9}, "NVIDIA A10", "24 GB", "GPUs with more memory in the site file"),
        ({"kinds": ("a100",)}, "cpu", "8 GB", "kind a100"),
        ({"devices": 3}, "cpu", "8 GB", '"cpu:3" in the site file, or load it over fewer devices (devices=2)'),
        ({"devices": 3}, "NVIDIA A10", "24 GB", "needs 3 devices of one kind on one pilot"),
    ],
)  # fmt: skip
def test_error_names_what_pilots_lack_for_a_context(
    cluster: Make, wants: dict[str, Any], kind: str, memory: str, said: str
) -> None:
    c = cluster().define(recipe("big", **wants)).join("p1", of=devices(2, kind=kind, memory=memory))
    assert said in c.call("c1", context="big").failure("c1").message


def test_gpu_context_is_placed_by_device_memory_alone(cluster: Make) -> None:
    c = cluster().join("p1", of=devices(1, kind="NVIDIA A10", memory="24 GB"))
    c.define(recipe("a", memory="60 GB", device_memory_bytes=7 * 10**9)).call("1", context="a")
    start = c.hears("p1", to_pilot.StartLibrary)
    assert (start.memory_bytes, start.device_memory_bytes) == (60 * 10**9, 7 * 10**9)


def test_context_with_most_devices_gives_one_to_a_starving_context(cluster: Make) -> None:
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


def test_multi_device_context_gets_nearby_devices_of_one_kind(cluster: Make) -> None:
    kinds, islands = ("A10", "H100", "A10", "H100", "H100"), (1, 1, 2, 2, 1)
    there = tuple(
        msgspec.structs.replace(one, kind=kind, island=island)
        for one, kind, island in zip(devices(5, kind="GPU", memory="8 GB"), kinds, islands, strict=True)
    )
    c = cluster().join("p1", of=there).define(recipe("wide", memory="8 GB", devices=2)).call("1", context="wide")
    assert places(c, "wide") == ["cuda:1", "cuda:4"]
    c.define(recipe("other", memory="8 GB", devices=2)).call("2", context="other")
    assert places(c, "other") == ["cuda:0", "cuda:2"]  # no island has two free devices of one kind
    c.define(recipe("wider", devices=3, kinds=("A10",))).call("3", context="wider")
    assert "3 devices of one kind on one pilot" in c.ended["3"].failure.message


def test_library_ends_if_one_of_its_devices_fails(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=4).define(recipe("wide", memory="8 GB", devices=2)).call("1", context="wide")
    library = c.ready().library(context="wide")
    lost, _ = library.devices
    c.report("p1", say.DeviceFault(lost.id, "ECC"))
    assert library.state is LibraryState.STOPPING
    c.die(library, failure=None).ready().end("1")
    assert c.ended["1"].ok
    assert lost.promised_bytes == 0
    assert lost not in c.library(context="wide").devices


@pytest.mark.parametrize("policies", [default_policies, prompt_tuner])
def test_no_library_is_evicted_on_a_pilot_that_ends_before_the_load(
    cluster: Make, policies: Callable[[], Policies]
) -> None:
    c = cluster(policies=policies).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.join("p1", of=devices(1), ends_in_s=60.0).call("x", context="a").ready().end("x")
    c.advise("b", {"cpu": ContextAdvice(50.0, 10**9, 10**9)})
    c.forget().call("y", context="b", gang=(1, 2)).wait(15)
    assert not [said for said in c.mail.get("p1", ()) if isinstance(said, to_pilot.StopLibrary)]
    assert c.lives_on("a") == ["p1"]
    c.join("p2", of=devices(1), ends_in_s=600.0).wait(1)
    assert c.lives_on("b") == ["p2"]


def test_library_keeps_its_device_for_at_least_its_load_time(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", memory="8 GB"), recipe("b", memory="8 GB"))
    c.calls(9, context="a").ready(load_s=30.0).call("b1", context="b").wait(25)
    assert c.library(context="a").state is LibraryState.READY
    c.wait(10)
    assert c.library(context="a").state is LibraryState.STOPPING


@pytest.mark.parametrize("name", SHIPPED)
def test_pilot_with_two_failed_loads_is_avoided(cluster: Make, name: str) -> None:
    c = cluster(pilots=1, policies=policy(name).make).define(recipe("a", memory="8 GB"))
    # the context is loaded on p1, so failed loads on other pilots do not fail its calls
    c.call("x", context="a").ready().end("x").join("p2")
    c.call("gang", context="a", gang=(2, 2), due_in_s=10_000.0)
    for _ in range(MOST_FAILED_LOADS_PER_PILOT):
        c.wait(0.5).fail_load(c.library("p2", "a"))
    c.join("p3").wait(0.5)
    assert c.lives_on("a") == ["p1", "p3"]
    c.ready().wait(0.5)
    assert sorted(library.pilot.id for library in c.holders("gang")) == ["p1", "p3"]


@pytest.mark.parametrize("name", SHIPPED)
def test_failed_load_is_retried_on_one_other_pilot_at_a_time(cluster: Make, name: str) -> None:
    c = cluster(pilots=1, policies=policy(name).make).define(recipe("a", memory="8 GB"))
    c.call("x", context="a").ready().end("x").join("p2").call("gang", context="a", gang=(4, 4), due_in_s=10_000.0)
    c.wait(0.5).fail_load(c.library("p2", "a")).join("p3", "p4", "p5").wait(0.5)
    tried = [pilot for pilot in c.lives_on("a") if pilot != "p1"]
    assert len(tried) == 1
    c.ready().wait(0.5)
    assert len(c.lives_on("a")) == 4


def test_failed_load_is_retried_on_the_only_pilot(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a").ready().end("x").join("p2")
    c.call("gang", context="a", gang=(2, 2))
    for _ in range(MOST_FAILED_LOADS_PER_PILOT):
        c.fail_load(c.library("p2", "a"))
    assert c.lives_on("a") == ["p1"]
    c.lose("p1").wait(5)
    assert c.lives_on("a") == ["p2"]


GB = 10**9


def mixed(gpus: int = 1, cpus: int = 1, *, host: str = "100 GB") -> tuple[say.DeviceFacts, ...]:
    cores = (msgspec.structs.replace(one, spare=True) for one in devices(cpus, memory=host))
    return (*devices(gpus, kind="NVIDIA A10", memory="24 GB"), *cores)


def places(c: Cluster, context: str) -> list[str]:
    return sorted(device.id for x in c.context(context).libraries.values() for device in x.devices)


@pytest.mark.parametrize("policies", [default_policies, prompt_tuner])
def test_context_is_loaded_on_spare_cores_only_if_it_names_cpus(
    cluster: Make, policies: Callable[[], Policies]
) -> None:
    c = cluster(policies=policies).join("p1", of=mixed())
    c.define(recipe("m", memory="2 GB", device_memory_bytes=20 * GB), recipe("n", device_memory_bytes=20 * GB))
    c.define(recipe("host", memory="2 GB", kinds=("cpu",)))
    c.call("1", context="m").call("2", context="n").call("3", context="host").wait(1)
    assert places(c, "m") == ["cuda:0"]
    assert places(c, "n") == []  # context n waits for the GPU
    assert places(c, "host") == ["cpu:0"]


@pytest.mark.parametrize(("kinds", "first"), [(("NVIDIA", "cpu"), "cuda:0"), (("cpu", "NVIDIA"), "cpu:0")])
def test_devices_are_tried_in_the_order_that_the_context_names(
    cluster: Make, kinds: tuple[str, ...], first: str
) -> None:
    c = cluster().join("p1", of=mixed(host="20 GB")).define(recipe("a", memory="2 GB", kinds=kinds))
    c.call("1", context="a")
    assert places(c, "a") == [first]
    c.call("2", context="a").wait(1)
    assert places(c, "a") == ["cpu:0", "cuda:0"]


def test_multi_device_context_is_not_split_between_gpus_and_cpus(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed(1, 2)).define(recipe("a", devices=2, memory="2 GB", kinds=("NVIDIA", "cpu")))
    c.define(recipe("b", devices=2, kinds=("NVIDIA",))).call("1", context="a").call("2", context="b")
    assert places(c, "a") == ["cpu:0", "cpu:1"]
    assert c.ended["2"].failure.kind is FailureKind.NO_DEVICE
    assert "ask for 2 GPUs a node ([provider] gpus)" in c.ended["2"].failure.message


@pytest.mark.parametrize(("kinds", "where"), [((), "cpu:0"), (("NVIDIA",), "cuda:0")])
def test_slinfer_uses_spare_cores_by_default(kinds: tuple[str, ...], where: str) -> None:
    c = Cluster(policies=lambda: slinfer(provisioning=ExternalPilots())).join("p1", of=mixed())
    c.define(recipe("a", slots=64, device_memory_bytes=5 * GB, token_bytes=10**6, cache_tokens=1000, kinds=kinds))
    c.call("1", context="a", features=Features(1, 100, 100, 0.0), objective=Objective(ttft_s=1.0, tpot_s=0.25))
    c.advise("a", {kind: ContextAdvice() for kind in ("cpu", "NVIDIA A10")})
    assert places(c, "a") == [where]


def test_number_of_requested_blocks_depends_on_gpus_alone(cluster: Make) -> None:
    c = cluster().sources(Source("lab", ProvisioningRule.DEMAND, first=0, most=10, finish_within_s=60.0))
    c.define(recipe("a", device_memory_bytes=20 * GB)).call("w", context="a")
    assert c.asked() == ["b1"]
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=mixed(1, 7)).ready().end("w", run_s=6.0)
    c.calls(51, context="a")
    assert len(c.asked()) == 4  # 50 calls of 6 s in 60 s need 5 GPUs: b1 and 4 more blocks


def test_gang_on_cpus_waits_until_a_pilot_reports_its_spare_cores(cluster: Make) -> None:
    c = cluster().sources(Source("gpus", first=1, most=1, slots=1), Source("small", first=1, most=1, slots=1))
    c.join("p1", block="b2").define(recipe("host", memory="1 GB", kinds=("cpu",)), recipe("a", kinds=("NVIDIA",)))
    c.call("g", context="host", gang=(4, 4)).call("no", context="a", gang=(4, 4)).wait(5)
    assert set(c.ended) == {"no"}
    c.block("b1", phase=BlockPhase.RUNNING).join("p2", block="b1", of=mixed(1, 8)).ready().wait(5).ready()
    assert len(c.holders("g")) == 4


def test_status_shows_gpus_and_spare_cores(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed()).define(recipe("host", memory="2 GB", kinds=("cpu",)))
    c.call("1", context="host").hot(context="host")
    lines = list(render(c.status()))
    assert any("1 here (1 NVIDIA A10, 1 cpu)" in line for line in lines)
    assert any("cuda:0 NVIDIA A10" in line and "24.0 GB" in line for line in lines)
    assert any("cpu:0" in line and "host" in line and "2.0 GB of 100 GB" in line for line in lines)


SMALL = 1 << 30


@pytest.fixture
def packed(cluster: Make) -> Cluster:
    """Run a call of `a` and a later call of `b` on one device; then a second pilot with a free device joins."""
    c = cluster(pilots=1).define(recipe("a", device_memory_bytes=SMALL), recipe("b", device_memory_bytes=SMALL))
    c.call("1", context="a").ready().wait(30.0).call("2", context="b").ready()
    assert c.library(context="a").devices == c.library(context="b").devices
    c.join("p2", of=devices(1))
    keeps(c, "2")
    return c.wait(40.0).forget()


def keeps(c: Cluster, name: str) -> None:
    c.progress(name, 9.0, state=b"saved")


def slows(c: Cluster, name: str, share: float, *, best_ago_s: float = 50.0) -> Cluster:
    library = c.holders(name)[0]
    pace = PaceAdvice(50.0, 100.0, "step", 1.0, 50.0, share, best_ago_s)
    c.event(AdviceArrived(OfPace(library.id, c.ids[name]), pace))
    if name == "1":  # only call 1 reports its progress here
        assert c.hears("ana", to_client.ProgressReports).reports[0].done == 50.0
    return c


def ordered(c: Cluster, pilot: str) -> list[str]:
    return [type(message).__name__ for message in c.mail.get(pilot, ())]


def test_call_that_slows_its_neighbour_moves_to_a_free_device(packed: Cluster) -> None:
    c = slows(packed, "1", SLOWDOWN_LIMIT + 0.01)
    old = c.library("p1", "b")
    assert ordered(c, "p2") == ["StartLibrary"]
    assert ordered(c, "p1") == ["EvictCall", "StopLibrary"]
    assert c.hears("p1", to_pilot.EvictCall).call == c.ids["2"]
    c.report("p1", say.CallEvicted(old.id, CallProgress(c.ids["2"], 3.0, state=b"saved")))
    c.report("p1", say.LibraryGone(old.id, None, False, (), ()))
    c.ready(only="p2")
    assert c.held("p2", "b") == ["2"]
    assert c.held("p1", "a") == ["1"]
    assert "it slows lib-1 on the same device by 36%; its call runs elsewhere" in c.story(f"lib-{old.id}")
    c.end("1", "2")
    assert c.core.state.failures == 0


@pytest.mark.parametrize(
    ("slow", "share", "best_ago_s"),
    [("2", 0.9, 50.0), ("1", SLOWDOWN_LIMIT, 50.0), ("1", 0.9, 5.0)],
    ids=["the newcomer is slow", "a small slowdown", "it ran during the best pace"],
)
def test_call_is_not_evicted_unless_it_causes_a_large_slowdown(
    packed: Cluster, slow: str, share: float, best_ago_s: float
) -> None:
    slows(packed, slow, share, best_ago_s=best_ago_s).nothing_else_was_said()


@pytest.mark.parametrize("lacks", ["progress", "a free device"])
def test_slowing_call_stays_without_saved_progress_or_a_free_device(cluster: Make, lacks: str) -> None:
    c = cluster(pilots=1).define(recipe("a", device_memory_bytes=SMALL), recipe("b", device_memory_bytes=SMALL))
    c.call("1", context="a").ready().wait(30.0).call("2", context="b").ready()
    if lacks == "progress":
        c.join("p2", of=devices(1)).wait(40.0)
    else:
        keeps(c, "2")
    slows(c.forget(), "1", 0.9).nothing_else_was_said()


def test_call_that_slows_its_neighbour_is_moved_only_once(packed: Cluster) -> None:
    slows(packed, "1", 0.5).forget()
    slows(packed, "1", 0.5).nothing_else_was_said()

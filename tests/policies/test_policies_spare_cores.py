"""Contexts on a pilot that has GPUs and spare cores: who is loaded where."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from core.builders import Cluster, devices, recipe

from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.seams import Policies
from stoker.manager.policies import default_policies
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.slinfer import slinfer
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, Rule, Source
from stoker.protocol.calls import FailureKind, Features, Objective
from stoker.protocol.ids import RecipeKey
from stoker.protocol.show_status import render

Make = Callable[..., Cluster]
GB = 10**9


def mixed(gpus: int = 1, cpus: int = 1, *, host: str = "100 GB") -> tuple[say.DeviceFacts, ...]:
    cores = (msgspec.structs.replace(one, spare=True) for one in devices(cpus, memory=host))
    return (*devices(gpus, kind="NVIDIA A10", memory="24 GB"), *cores)


def places(c: Cluster, context: str) -> list[str]:
    return sorted(device.id for x in c.context(context).libraries.values() for device in x.devices)


@pytest.mark.parametrize("policies", [default_policies, prompt_tuner])
def test_only_contexts_that_name_spare_cores_are_loaded_there(cluster: Make, policies: Callable[[], Policies]) -> None:
    c = cluster(policies=policies).join("p1", of=mixed())
    c.define(recipe("m", memory="2 GB", device_memory_bytes=20 * GB), recipe("n", device_memory_bytes=20 * GB))
    c.define(recipe("host", memory="2 GB", kinds=("cpu",)))
    c.call("1", context="m").call("2", context="n").call("3", context="host").wait(1)
    assert places(c, "m") == ["cuda:0"]
    assert places(c, "n") == []  # it waits for the GPU
    assert places(c, "host") == ["cpu:0"]


def test_a_context_without_words_on_kinds_never_goes_there_however_long_it_waits(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed()).define(recipe("a", device_memory_bytes=20 * GB)).call("first", context="a")
    c.hot(context="a", run_s=60.0, load_s=1.0).calls(40, context="a").wait(600).call("bare").wait(600)
    assert places(c, "a") == ["cuda:0"]
    assert not any(x.devices[0].facts.spare for x in c.core.state.libraries.values())


@pytest.mark.parametrize(("kinds", "first"), [(("NVIDIA", "cpu"), "cuda:0"), (("cpu", "NVIDIA"), "cpu:0")])
def test_kinds_have_the_best_first(cluster: Make, kinds: tuple[str, ...], first: str) -> None:
    c = cluster().join("p1", of=mixed(host="20 GB")).define(recipe("a", memory="2 GB", kinds=kinds))
    c.call("1", context="a")
    assert places(c, "a") == [first]
    c.call("2", context="a").wait(1)
    assert places(c, "a") == ["cpu:0", "cuda:0"]


def test_a_context_over_several_devices_is_not_split_between_gpus_and_cores(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed(1, 2)).define(recipe("a", devices=2, kinds=("NVIDIA", "cpu")))
    c.define(recipe("b", devices=2, memory="2 GB", kinds=("cpu",))).call("1", context="a").call("2", context="b")
    assert c.ended["1"].failure is not None
    assert c.ended["1"].failure.kind is FailureKind.NO_DEVICE
    assert "cpu 100 GB (spare cores, for kinds that name them) x 2" in c.ended["1"].failure.message
    assert places(c, "b") == ["cpu:0", "cpu:1"]


def test_room_is_not_made_on_spare_cores_for_who_may_not_go_there(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed(host="8 GB")).define(recipe("host", memory="8 GB", kinds=("cpu",)))
    c.call("1", context="host").hot(context="host", run_s=1.0)
    c.define(recipe("m", device_memory_bytes=20 * GB), recipe("n", device_memory_bytes=20 * GB))
    c.call("2", context="m").hot(context="m", run_s=50.0).calls(9, context="m").call("3", context="n").wait(300)
    assert places(c, "host") == ["cpu:0"]


@pytest.mark.parametrize(("kinds", "where"), [((), "cpu:0"), (("NVIDIA",), "cuda:0")])
def test_slinfer_uses_spare_cores_unasked_unless_kinds_name_others(kinds: tuple[str, ...], where: str) -> None:
    c = Cluster(policies=lambda: slinfer(provisioning=TakeWhatComes())).join("p1", of=mixed())
    c.define(recipe("a", slots=64, device_memory_bytes=5 * GB, token_bytes=10**6, cache_tokens=1000, kinds=kinds))
    c.call("1", context="a", features=Features(1, 100, 100, 0.0), objective=Objective(ttft_s=1.0, tpot_s=0.25))
    c.event(
        AdviceArrived(OfContext(RecipeKey("a")), CostAdvice({kind: ContextAdvice() for kind in ("cpu", "NVIDIA A10")}))
    )
    assert places(c, "a") == [where]


def test_blocks_are_reckoned_from_gpus_alone(cluster: Make) -> None:
    c = cluster().sources(Source("lab", Rule.DEMAND, first=0, most=10, finish_within_s=60.0))
    c.define(recipe("a", device_memory_bytes=20 * GB)).call("w", context="a")
    assert c.asked() == ["b1"]
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=mixed(1, 7)).ready().end("w", run_s=6.0)
    c.calls(51, context="a")
    assert len(c.asked()) == 4  # beside b1, as with one GPU a block: fifty wait, 300 s of work, in 60 s


def test_blocks_for_contexts_on_cores_alone_are_reckoned_from_these(cluster: Make) -> None:
    c = cluster().sources(Source("lab", Rule.OPPORTUNISTIC, first=0, most=10, keep_pending=10))
    c.define(recipe("host", memory="1 GB", kinds=("cpu",)), recipe("a", device_memory_bytes=20 * GB))
    c.call("w", context="host").asked()
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=mixed(1, 8)).ready().end("w")
    c.calls(16, context="host")
    assert len(c.asked()) == 1, "eight run on b1, and eight on another block"
    c.calls(3, context="a")
    assert len(c.asked()) > 1, "GPUs count where others wait as well"


def test_a_gang_on_cores_waits_for_a_pilot_that_shows_how_many_there_are(cluster: Make) -> None:
    c = cluster().sources(Source("gpus", first=1, most=1, slots=1), Source("small", first=1, most=1, slots=1))
    c.join("p1", block="b2").define(recipe("host", memory="1 GB", kinds=("cpu",)), recipe("a", kinds=("NVIDIA",)))
    c.call("g", context="host", gang=(4, 4)).call("no", context="a", gang=(4, 4)).wait(5)
    assert set(c.ended) == {"no"}
    c.block("b1", phase=BlockPhase.RUNNING).join("p2", block="b1", of=mixed(1, 8)).ready().wait(5).ready()
    assert len(c.holders("g")) == 4


def test_status_shows_both(cluster: Make) -> None:
    c = cluster().join("p1", of=mixed()).define(recipe("host", memory="2 GB", kinds=("cpu",)))
    c.call("1", context="host").hot(context="host")
    lines = list(render(c.status()))
    assert any("1 here (1 NVIDIA A10, 1 cpu)" in line for line in lines)
    assert any("cuda:0 NVIDIA A10" in line and "24.0 GB" in line for line in lines)
    assert any("cpu:0" in line and "host" in line and "2.0 GB of 100 GB" in line for line in lines)

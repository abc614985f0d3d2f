from __future__ import annotations

import msgspec
import pytest
from core.builders import Cluster, devices, recipe

from stoker.contexts.recipe import LibraryLimits, Recipe
from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import Failure, FailureKind

GB = 10**9


def on_gpu(*names: str, gpus: int = 1, memory: str = "10 GB", sleepers: str = "20 GB", **more: str) -> Cluster:
    """Return a cluster with one pilot. Each context needs 6 GB of a GPU and serves one call at a time."""
    facts = tuple(msgspec.structs.replace(one, process_bytes=GB) for one in devices(gpus, kind="A10", memory=memory))
    cluster = Cluster().join("p1", of=facts, sleepers=sleepers)
    cluster.define(*(recipe(name, device_memory_bytes=5 * GB) for name in names))
    return cluster


def serve(cluster: Cluster, *names: str, load_s: float = 10.0, **ready: object) -> Cluster:
    for name in names:
        cluster.call(f"first of {name}", context=name)
        cluster.ready(load_s=load_s, memory="6 GB", sleeps=True, **ready).end(f"first of {name}").wait(1).forget()
    return cluster


def of(cluster: Cluster, name: str) -> Library:
    return cluster.library(context=name)


def test_idle_library_sleeps_if_another_needs_its_gpu() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b")
    assert c.hears("p1", to_pilot.SleepLibrary) == to_pilot.SleepLibrary(of(c, "a").id, GB, 5 * GB)
    assert c.hears("p1", to_pilot.StartLibrary).recipe.key == "b", "in the same plan"
    assert of(c, "a").state is LibraryState.ASLEEP
    assert c.pilot().free_host_bytes_for_sleep == 15 * GB


def test_sleeping_model_wakes_instead_of_loading() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("b1").forget()
    c.call("a2", context="a")
    assert c.hears("p1", to_pilot.SleepLibrary).library == of(c, "b").id
    assert c.hears("p1", to_pilot.WakeLibrary) == to_pilot.WakeLibrary(of(c, "a").id, 6 * GB)
    assert of(c, "a").state is LibraryState.LOADING
    c.asleep(of(c, "b"), keeps="1 GB", host="5 GB").awake(of(c, "a"), wake_s=0.4)
    assert c.runs("p1") == ["a2"]
    assert (c.context("a").wake_s, c.context("a").loads) == (0.4, 1)


@pytest.mark.parametrize("lacks", ["host memory", "sleep", "time", "an order"])
def test_idle_library_ends_if_it_cannot_or_should_not_sleep(lacks: str) -> None:
    c = on_gpu("a", "b", memory="7 GB", sleepers="1 GB" if lacks == "host memory" else "20 GB")
    serve(c, "a")
    library = of(c, "a")
    if lacks == "sleep":
        library.can_sleep = False
    elif lacks == "time":
        library.context.wake_s = 20.0  # a load takes 10 s
    elif lacks == "an order":
        library.context.sleep_failure = "it raised"
    c.call("b1", context="b")
    assert c.hears("p1", to_pilot.StopLibrary).library == library.id


def test_longest_unused_sleeping_library_ends_for_host_memory() -> None:
    c = serve(on_gpu("a", "b", "c", memory="8 GB", sleepers="6 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("b1").forget()
    c.call("c1", context="c")
    heard = [type(message) for message in c.mail["p1"]]
    assert heard == [to_pilot.StopLibrary, to_pilot.SleepLibrary, to_pilot.StartLibrary]
    assert c.hears("p1", to_pilot.StopLibrary).library == of(c, "a").id
    assert c.hears("p1", to_pilot.SleepLibrary).library == of(c, "b").id


def test_sleeping_library_ends_if_its_device_has_no_room_for_it() -> None:
    c = serve(on_gpu("a", "b", "c", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("b1").forget()
    c.call("c1", context="c")
    assert c.hears("p1", to_pilot.SleepLibrary).library == of(c, "b").id
    assert c.hears("p1", to_pilot.StopLibrary).library == of(c, "a").id, "both would keep 2 GB, and c needs 6 of 7"
    assert c.hears("p1", to_pilot.StartLibrary).recipe.key == "c"


def test_load_on_a_free_gpu_beats_a_slow_wake() -> None:
    c = serve(on_gpu("a", "b", "c", gpus=2, memory="7 GB"), "a", "b")
    c.call("c1", context="c").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("c1")
    c.context("a").wake_s, c.context("a").load_s = 6.0, 10.0  # a wake would require another library to sleep first
    free = devices(1, kind="A10", memory="7 GB")
    c.join("p2", of=free).forget().call("a2", context="a")
    assert c.hears("p2", to_pilot.StartLibrary).recipe.key == "a"


def test_cpu_library_sleeps_if_its_freed_caches_make_enough_room() -> None:
    c = Cluster().join("p1", of=devices(1, memory="10 GB"))
    c.define(recipe("a", memory="8 GB"), recipe("b", memory="7 GB"))
    c.call("a1", context="a").ready(memory="2 GB", sleeps=True).end("a1").forget()
    c.call("b1", context="b")
    assert c.hears("p1", to_pilot.SleepLibrary) == to_pilot.SleepLibrary(of(c, "a").id, int(2.2 * GB), 0)
    assert c.hears("p1", to_pilot.StartLibrary).device_memory_bytes == 7 * GB


def test_next_sleep_reserves_the_memory_measured_in_the_last_sleep() -> None:
    c = Cluster().join("p1", of=devices(1, memory="10 GB"))
    c.define(recipe("a", memory="8 GB"), recipe("b", memory="7 GB"))
    c.call("a1", context="a").ready(memory="2 GB", sleeps=True).end("a1")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="3 GB").ready().end("b1").wait(1)
    c.call("a2", context="a").die(of(c, "b"), failure=None).awake(of(c, "a")).end("a2").forget()
    c.call("b2", context="b")
    assert c.hears("p1", to_pilot.SleepLibrary).device_memory_bytes == 3 * GB


def test_starved_context_wakes_in_place_of_a_busy_library() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).forget()
    c.call("a2", context="a").wait(30)
    assert c.hears("p1", to_pilot.StopLibrary).library == of(c, "b").id
    c.hears("p1", to_pilot.WakeLibrary)


def test_sleeping_library_is_not_hot_and_counts_for_the_limit() -> None:
    c = serve(on_gpu("a", "b", gpus=1, memory="7 GB"), "a")
    c.tell("ana", say.DefineRecipe(limited(c, "a", most=1)))
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True)
    c.join("p2", of=devices(1, kind="A10", memory="7 GB")).forget()
    facts = next(x for x in c.status().contexts if x.name == "a")
    assert (facts.hot, facts.asleep) == (0, 1)
    c.call("a2", context="a").wait(5)
    assert c.lives_on("a") == ["p1"], "max_libraries = 1: it waits for a wake and is not loaded on p2"


def limited(cluster: Cluster, name: str, *, most: int = 0, least: int = 0, keep_alive_s: float | None = None) -> Recipe:
    recipe = cluster.context(name).recipe
    return msgspec.structs.replace(recipe, limits=LibraryLimits(most=most, least=least, keep_alive_s=keep_alive_s))


def test_gpu_library_sleeps_after_its_keep_alive() -> None:
    c = on_gpu("a")
    c.tell("ana", say.DefineRecipe(limited(c, "a", keep_alive_s=5.0)))
    serve(c, "a").wait(5)
    c.hears("p1", to_pilot.SleepLibrary)


def test_context_that_failed_to_wake_is_not_put_to_sleep_again() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("b1")
    c.call("a2", context="a").asleep(of(c, "b"), keeps="1 GB", host="5 GB").forget()
    c.die(of(c, "a"), failure=Failure(FailureKind.CONTEXT, "wake() of the context a raised OSError: no"))
    c.ready(sleeps=True).end("a2").forget()  # the context loads again to serve call a2
    assert "its libraries no longer sleep: wake() of the context a raised OSError: no" in c.story("a")
    c.call("b2", context="b")
    assert c.hears("p1", to_pilot.StopLibrary).library == of(c, "a").id


def test_policy_that_cannot_wake_libraries_ends_idle_libraries() -> None:
    c = Cluster(policies=prompt_tuner).join("p1", of=devices(1, kind="A10", memory="7 GB"), sleepers="20 GB")
    c.define(*(recipe(name, device_memory_bytes=6 * GB) for name in "ab"))
    c.call("a1", context="a").ready(memory="6 GB", sleeps=True).end("a1").forget()
    c.call("b1", context="b").wait(1)
    c.hears("p1", to_pilot.StopLibrary)


def test_sleeping_library_is_not_woken_on_a_pilot_about_to_end() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB").ready(sleeps=True).end("b1").forget()
    c.report("p1", say.WalltimeUpdate(1.0))
    c.call("a2", context="a").wait(2)
    assert of(c, "a").state is LibraryState.ASLEEP, "its pilot ends it when it drains"
    assert not [m for m in c.mail["p1"] if isinstance(m, to_pilot.WakeLibrary)]


def test_status_and_stories_report_sleep_and_wakes() -> None:
    c = serve(on_gpu("a", "b", memory="7 GB"), "a")
    c.call("b1", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB", sleep_s=0.5).ready(sleeps=True).end("b1")
    shown = str(c.status())
    assert "0 hot, 1 asleep   6.0 GB each" in shown
    assert "a (asleep)" in shown
    assert "asleep: keeps 1.0 GB of its device and 5.0 GB of host memory, 0.5 s to fall asleep" in c.story("a")
    c.call("a2", context="a").asleep(of(c, "b"), keeps="1 GB", host="5 GB").awake(of(c, "a"), wake_s=0.2).end("a2")
    c.call("b2", context="b").asleep(of(c, "a"), keeps="1 GB", host="5 GB")
    assert "1 asleep (the last one took 0.2 s to wake)" in str(c.status())
    assert "awake: 0.2 s to wake" in c.story(f"lib-{of(c, 'a').id}")
    assert "a wake took 0.2 s" in c.the_story("a").headline

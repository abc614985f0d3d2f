from __future__ import annotations

import msgspec
from core.builders import Cluster, Make, devices, recipe

from stoker.contexts.recipe import Recipe
from stoker.manager.core.events import ContextAdvice, RecordLoad
from stoker.manager.core.nouns import LibraryState, PilotState
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.blocks import BlockPhase, ProvisioningRule, Source
from stoker.protocol.ids import DeviceId
from stoker.protocol.show_status import render


def ready(c: Cluster, slots: int, *, pilot: str = "p1") -> Cluster:
    """Report a ready library on this pilot, with its number of slots."""
    start = c.hears(pilot, to_pilot.StartLibrary)
    return c.report(pilot, say.LibraryReady(start.library, 0.1, 1.0, 10**9, 10**9, slots=slots))


def test_library_gets_as_many_calls_as_it_has_slots(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(5, context="a")
    assert c.library(context="a").slots == 1
    ready(c, 3)
    assert c.runs("p1") == ["1", "2", "3"]
    assert (c.library(context="a").slots, c.context("a").slots) == (3, 3)
    assert list(c.context("a").idle) == []
    c.end("1", "2", "3", run_s=50.0)
    assert c.runs("p1") == ["4", "5"]
    assert list(c.context("a").idle) == [1]  # the library with number 1 has a free slot
    assert [x.slots for x in c.commands(RecordLoad)] == [3]


def test_status_and_explain_show_the_number_of_used_slots(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(3, context="a")
    ready(c, 32)
    assert "a (3 of 32 slots)" in "\n".join(render(c.status()))
    (library,) = c.status().libraries
    assert (library.running, library.slots) == (3, 32)
    story = c.story("lib-1")
    assert "3 of 32 slots taken" in story
    assert "runs 32 calls at once" in story


def test_measured_slots_count_until_a_library_reports_them(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a", slots=0), recipe("b", slots=2))
    for name in ("a", "b"):
        c.advise(name, {"cpu": ContextAdvice(load_s=1.0, slots=16), "a10": ContextAdvice(slots=20)})
    assert (c.context("a").slots, c.context("b").slots) == (16, 2)
    c.calls(16, context="a")
    assert len(c.lives_on("a")) == 1
    ready(c, 6, pilot=c.lives_on("a")[0])
    c.advise("a", {"cpu": ContextAdvice(slots=16)})
    assert c.context("a").slots == 6


def test_returning_pilot_reports_slots_again(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(6, context="a")
    start = c.hears("p1", to_pilot.StartLibrary)
    c.cut("p1")
    facts = say.LibraryFacts(start.library, "a", start.devices, True, slots=4)
    c.hello("p1", libraries=(facts,)).hears("p1", to_pilot.PilotWelcome)
    assert c.library(context="a").slots == 4
    assert c.runs("p1") == ["1", "2", "3", "4"]


GB = 10**9
LACKS = "the job requested 1 GPU, but the pilot found none (NVML missing)"


def gpus(count: int = 1, **facts: object) -> tuple[say.DeviceFacts, ...]:
    made = devices(count, kind="NVIDIA A10", memory="24 GB")
    return tuple(msgspec.structs.replace(one, **facts) for one in made)


def model(name: str, size: int = 0) -> Recipe:
    return recipe(name, device_memory_bytes=size)


def started(c: Cluster, pilot: str = "p1") -> to_pilot.StartLibrary:
    return c.hears(pilot, to_pilot.StartLibrary)


# ---- memory of a process
def test_context_that_declares_all_memory_of_a_gpu_gets_it(cluster: Make) -> None:
    c = cluster().join("p1", of=gpus(process_bytes=600_000_000)).define(model("m", 24 * GB), model("n", 25 * GB))
    assert started(c.call("a", context="m")).device_memory_bytes == 24 * GB
    c.call("b", context="n")
    assert not c.ended["b"].ok


def test_host_memory_of_a_library_is_not_counted_as_gpu_memory(cluster: Make) -> None:
    c = cluster().join("p1", of=gpus()).define(model("m")).call("a", context="m")
    promised = started(c).device_memory_bytes
    c.report("p1", say.LibraryReady(c.library(context="m").id, 0.1, 1.0, resident_bytes=2 * GB, peak_bytes=3 * GB))
    assert c.library(context="m").promised_bytes == promised  # the report has no device memory: the reservation stays
    assert c.context("m").advice["NVIDIA A10"].peak_bytes == 0
    assert c.context("m").resident_bytes == 0


# ---- measured memory
def test_second_load_does_not_get_memory_in_use(cluster: Make) -> None:
    """The framework reports no device memory, but 18 of 24 GB are used."""
    c = cluster().join("p1", of=gpus()).define(model("m"), model("n", 10 * GB)).call("a", context="m")
    started(c)
    library = c.library(context="m")
    c.report("p1", say.LibraryReady(library.id, 0.1, 1.0, resident_bytes=2 * GB, peak_bytes=2 * GB))
    c.report("p1", say.LibraryResized(library.id, 18 * GB, measured=True))
    assert library.promised_bytes == 18 * GB
    assert c.pilot().devices[DeviceId("cuda:0")].free_bytes == 6 * GB
    c.forget().call("b", context="n")
    assert "b" in c.waiting("n")


def test_memory_grant_grows_within_free_memory_and_reports_excess(cluster: Make) -> None:
    c = cluster().join("p1", of=gpus()).define(model("m", 10 * GB), model("n", 8 * GB))
    c.call("a", context="m").call("b", context="n").ready()
    library = c.library(context="m")
    c.report("p1", say.LibraryResized(library.id, 12 * GB, measured=True))
    assert library.promised_bytes == 12 * GB
    c.report("p1", say.LibraryResized(library.id, 20 * GB, measured=True))
    assert library.promised_bytes == 16 * GB
    assert "uses 20.0 GB of its device, more than is free" in c.story(f"lib-{library.id}")


# ---- one process a device
def test_exclusive_device_has_one_library_at_a_time(cluster: Make) -> None:
    c = cluster().join("p1", of=gpus(processes=1)).define(model("m", 2 * GB), model("n"))
    c.call("a", context="m").call("b", context="n")
    assert started(c).device_memory_bytes == 24 * GB
    c.report("p1", say.LibraryReady(1, 0.1, 1.0, device_bytes=2 * GB))
    assert c.library(context="m").promised_bytes == 24 * GB
    assert list(c.pilot().libraries) == [1]
    c.end("a").forget().wait(2.0)
    assert c.library(context="m").state is LibraryState.STOPPING  # the library is idle, and the other context waits
    assert c.hears("p1", to_pilot.StopLibrary).library == 1
    assert started(c).device_memory_bytes == 24 * GB
    assert c.library(context="n").state is LibraryState.LOADING  # the pilot starts n when the process of m has ended
    c.die(c.library(context="m"), failure=None).wait(2.0)
    assert list(c.pilot().libraries) == [2]


# ---- missing or broken devices
def test_excluded_devices_are_shown_in_status_and_explain(cluster: Make) -> None:
    c = cluster()
    c.hello("p1", devices=gpus(), troubles=("GPU 1 was left out: GPU is lost",))
    assert "p1: GPU 1 was left out: GPU is lost" in "\n".join(render(c.status()))
    assert "GPU 1 was left out: GPU is lost" in c.story("p1")


SOURCE = Source("gpus", ProvisioningRule.OPPORTUNISTIC, first=0, most=4, keep_pending=1, idle_s=100.0)


def without_gpus(c: Cluster, pilot: str, *, block: str) -> Cluster:
    c.block(block, phase=BlockPhase.RUNNING)
    faulty = tuple(msgspec.structs.replace(one, fault=LACKS) for one in devices(2))
    return c.hello(pilot, devices=faulty, block=block, lacks=LACKS)


def test_pilot_without_the_gpus_of_its_site_is_released(cluster: Make) -> None:
    c = cluster().sources(SOURCE).call("a")
    assert c.asked() == ["b1"]
    without_gpus(c, "p1", block="b1")
    assert c.hears("p1", to_pilot.Exit).reason == LACKS
    assert c.pilot().state is PilotState.DRAINING
    status = c.status()
    assert status.trouble["gpus"] == f"the pilots of its last block were not usable: {LACKS}"
    assert LACKS in "\n".join(render(status))
    assert LACKS in status.contexts[0].waits_for
    assert LACKS in c.story("p1")
    assert c.waiting() == ["a"]

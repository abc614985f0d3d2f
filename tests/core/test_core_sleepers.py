from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.builders import Cluster, devices, recipe

from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.core.seams import PolicyError, Sleep, Wake
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import Failure, FailureKind

GB = 10**9


@pytest.fixture
def c() -> Cluster:
    """A GPU of 24 GB with one idle library of 8 GB that can sleep."""
    facts = tuple(msgspec.structs.replace(one, process_bytes=GB) for one in devices(1, kind="A10", memory="24 GB"))
    cluster = Cluster().join("p1", of=facts, sleepers="10 GB")
    cluster.define(recipe("a", device_memory_bytes=7 * GB))
    return cluster.call("a1", context="a").ready(memory="6 GB", sleeps=True).end("a1").forget()


def order(c: Cluster, *wanted: Any) -> Cluster:
    c.apply(wanted, seam="residency")
    orders, c.core.manager.commands = c.core.manager.commands, []
    c._post(orders)
    return c


def lib(c: Cluster) -> Library:
    return c.library(context="a")


def sleeps(c: Cluster) -> Cluster:
    return order(c, Sleep(lib(c).id)).asleep(lib(c), keeps="1 GB", host="5 GB")


def hello(c: Cluster, number: int = 1, **facts: Any) -> Cluster:
    there = {"ready": False, "reserved_bytes": GB, "sleeps": True, "awake_bytes": 8 * GB, **facts}
    library = say.LibraryFacts(number, "a", ("cuda:0",), **there)
    return c.hello("p1", libraries=(library,), sleeper_bytes=10 * GB, acknowledged=c.taken("p1"))


def heard(c: Cluster, kind: type[Any]) -> list[Any]:
    return [message for message in c.mail["p1"] if isinstance(message, kind)]


def test_sleeping_library_frees_the_device_and_uses_host_memory(c: Cluster) -> None:
    order(c, Sleep(lib(c).id))
    device, pilot = lib(c).devices[0], c.pilot()
    assert (device.free_bytes, pilot.free_host_bytes_for_sleep) == (23 * GB, 5 * GB), "as estimated"
    assert device.tier == "cold"
    c.asleep(lib(c), keeps="2 GB", host="6 GB")
    assert (device.free_bytes, pilot.free_host_bytes_for_sleep) == (22 * GB, 4 * GB), "as measured"
    order(c, Wake(lib(c).id))
    assert (device.free_bytes, pilot.free_host_bytes_for_sleep) == (16 * GB, 4 * GB)
    c.awake(lib(c))
    assert (device.free_bytes, pilot.free_host_bytes_for_sleep) == (16 * GB, 10 * GB)
    assert (device.tier, lib(c).state) == ("warm", LibraryState.READY)


@pytest.mark.parametrize("wrong", ["busy", "resized", "asleep", "incapable", "no host memory"])
def test_impossible_sleep_changes_nothing(c: Cluster, wrong: str) -> None:
    library = lib(c)
    if wrong == "busy":
        c.call("a2", context="a")
    elif wrong == "resized":
        library.unanswered_resizes.append(GB)
    elif wrong == "asleep":
        sleeps(c)
    elif wrong == "incapable":
        library.can_sleep = False
    else:
        c.pilot().sleeper_bytes = 4 * GB
    before = library.state, library.promised_bytes
    with pytest.raises(PolicyError):
        order(c, Sleep(library.id))
    assert (library.state, library.promised_bytes) == before


def test_library_is_woken_only_after_it_fell_asleep(c: Cluster) -> None:
    with pytest.raises(PolicyError, match="only a sleeping library"):
        order(c, Wake(lib(c).id))
    order(c, Sleep(lib(c).id))
    with pytest.raises(PolicyError, match="only a sleeping library"):
        order(c, Wake(lib(c).id))


def test_refused_sleep_makes_the_library_usable_again(c: Cluster) -> None:
    order(c, Sleep(lib(c).id)).awake(lib(c), refused="lib-1 is not put to sleep: it holds 1 calls")
    assert (lib(c).state, lib(c).promised_bytes, c.pilot().free_host_bytes_for_sleep) == (
        LibraryState.READY, 8 * GB, 10 * GB,
    )  # fmt: skip
    assert c.call("a2", context="a").held(context="a") == ["a2"]


def test_ended_sleeping_library_frees_its_memory_and_loads_again(c: Cluster) -> None:
    order(c, Sleep(lib(c).id)).forget().call("a2", context="a")
    c.nothing_else_was_said()
    c.asleep(lib(c), keeps="1 GB", host="5 GB")
    assert len(heard(c, to_pilot.WakeLibrary)) == 1
    c.awake(lib(c))
    assert c.held(context="a") == ["a2"]


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.CONTEXT, None])
def test_sleeping_library_that_ends_frees_all_and_reloads(c: Cluster, kind: FailureKind | None) -> None:
    sleeps(c).die(lib(c), failure=None if kind is None else Failure(kind, "it ended"))
    assert (c.pilot().devices["cuda:0"].free_bytes, c.pilot().free_host_bytes_for_sleep) == (24 * GB, 10 * GB)
    assert c.context("a").sleep_failure == ("it ended" if kind is FailureKind.CONTEXT else "")
    assert c.context("a").load_failures == 0
    c.forget().call("a2", context="a")
    assert len(heard(c, to_pilot.StartLibrary)) == 1


def test_lost_sleep_and_wake_orders_are_repeated_after_a_reconnect(c: Cluster) -> None:
    order(c, Sleep(lib(c).id)).forget()
    hello(c.cut("p1"), ready=True, reserved_bytes=8 * GB)
    assert len(heard(c, to_pilot.SleepLibrary)) == 1
    c.asleep(lib(c), keeps="1 GB", host="5 GB")
    order(c, Wake(lib(c).id)).forget()
    hello(c.cut("p1"), asleep=True, host_bytes=5 * GB)
    assert len(heard(c, to_pilot.WakeLibrary)) == 1
    c.awake(lib(c))
    assert lib(c).state is LibraryState.READY


def test_library_found_asleep_after_a_reconnect_counts_as_asleep(c: Cluster) -> None:
    hello(c.cut("p1"), asleep=True, host_bytes=5 * GB)
    assert lib(c).state is LibraryState.ASLEEP
    assert len(heard(c, to_pilot.SleepLibrary)) == 1, "the pilot repeats its answer"
    c.asleep(lib(c), keeps="1 GB", host="5 GB")
    assert (lib(c).has_confirmed_sleep, lib(c).promised_bytes, lib(c).awake_bytes) == (True, GB, 8 * GB)


def test_library_that_woke_while_disconnected_keeps_its_calls(c: Cluster) -> None:
    sleeps(c).call("a2", context="a").forget()
    hello(c.cut("p1"), ready=True, reserved_bytes=8 * GB, calls=(c.ids["a2"],))
    assert (lib(c).state, lib(c).host_bytes) == (LibraryState.READY, 0)
    assert c.held(context="a") == ["a2"]
    assert heard(c, to_pilot.WakeLibrary) == []


def test_calls_of_a_library_that_unexpectedly_slept_are_requeued(c: Cluster) -> None:
    c.call("a2", context="a").asleep(lib(c), keeps="1 GB", host="5 GB")
    assert lib(c).held == {}
    assert c.the_call("a2").holder is None
    assert len(heard(c, to_pilot.WakeLibrary)) == 1


def test_hello_with_impossible_host_memory_is_limited() -> None:
    c = Cluster().join("p1", of=devices(1, kind="A10", memory="24 GB"), sleepers="10 GB")
    c.define(recipe("a", device_memory_bytes=7 * GB)).cut("p1")
    hello(c, 9, asleep=True, host_bytes=99 * GB)
    assert (lib(c).host_bytes, c.pilot().free_host_bytes_for_sleep) == (10 * GB, 0)


def test_unknown_sleeping_library_is_adopted_and_wakes() -> None:
    c = Cluster().join("p1", of=devices(1, kind="A10", memory="24 GB")).define(recipe("a", device_memory_bytes=7 * GB))
    hello(c.cut("p1"), 9, asleep=True).asleep(lib(c), keeps="1 GB").forget()
    c.call("a1", context="a")
    (woken,) = heard(c, to_pilot.WakeLibrary)
    assert woken.device_memory_bytes == 8 * GB


def test_reconnecting_pilot_restores_its_sleeping_libraries(c: Cluster) -> None:
    sleeps(c).lose("p1")
    kept = c.core.state.gone_pilots["p1"].restorable_libraries
    assert kept is not None
    (number,) = kept
    hello(c, number, asleep=True, host_bytes=5 * GB)
    assert (lib(c).state, lib(c).promised_bytes, c.pilot().free_host_bytes_for_sleep) == (
        LibraryState.ASLEEP, GB, 5 * GB,
    )  # fmt: skip
    c.call("a2", context="a").awake(lib(c))
    assert c.held(context="a") == ["a2"]


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (say.LibraryAsleep(1, -1), "device_memory_bytes"),
        (say.LibraryAsleep(1, 1, sleep_s=float("nan")), "sleep_s"),
        (say.LibraryAwake(1, 1, wake_s=-2.0), "wake_s"),
    ],
)
def test_impossible_numbers_end_the_connection(c: Cluster, message: Any, wrong: str) -> None:
    c.report("p1", message)
    assert wrong in heard(c, to_pilot.PilotRefused)[0].reason


def test_waking_library_does_not_count_as_a_cut_off_load(c: Cluster) -> None:
    sleeps(c)
    order(c, Wake(lib(c).id))
    context = c.context("a")
    c.report("p1", say.WalltimeUpdate(0.5)).wait(1)
    assert context.loads_cut_by_walltime == 0

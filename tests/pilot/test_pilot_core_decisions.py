from __future__ import annotations

import pytest
from core.pilot_shell import GIB, CoreShell

from stoker.contexts.recipe import Needs, ObjectRef, Recipe
from stoker.pilot.core import commands, events, infrastructure, limits, presence
from stoker.pilot.core.state import NEXT_STAGES, Stage
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import CallProgress, FailureKind
from stoker.protocol.ids import CallId, DeviceId, LibraryId, PilotId
from stoker.protocol.to_manager import DeviceFacts

WEIGHTS = ObjectRef("weights", GIB, "/models/weights")
MODEL = Recipe(key="m", name="model", objects=(WEIGHTS,))


@pytest.fixture
def pilot() -> CoreShell:
    return CoreShell().join().forget()


# ---- from order to context


def test_repeated_message_of_a_library_does_not_change_its_stage(pilot: CoreShell) -> None:
    pilot.ready()
    assert pilot.library().stage is Stage.READY
    pilot.say(1, to_agent.Loaded(1.0, 1, 1)).say(1, to_agent.Hello(1, 7))
    assert pilot.library().stage is Stage.READY, "a process's repeated message changes nothing"
    assert all(Stage.GONE in after for stage, after in NEXT_STAGES.items() if stage is not Stage.GONE)


# ---- memory


def test_load_that_no_device_can_hold_is_refused_at_once(pilot: CoreShell) -> None:
    pilot.start(1, device_memory_bytes=25 * GIB)
    refused = pilot.take(told.LibraryGone).failure
    assert (refused.kind, refused.message) == (FailureKind.CONTEXT, "gpu:0 has 25.8 GB in all, 26.8 GB are needed")
    pilot.start(2, device="gpu:7")
    refused = pilot.take(told.LibraryGone).failure
    assert "has no device gpu:7" in refused.message


def test_fetch_time_excludes_the_wait_for_device_memory(pilot: CoreShell) -> None:
    pilot.ready(1, device_memory_bytes=20 * GIB).forget()
    pilot.start(2, MODEL, device_memory_bytes=5 * GIB).hear(order.StopLibrary(LibraryId(1), "room is needed"))
    assert pilot.take(told.WantObjects).objects == (WEIGHTS,)
    pilot.wait(3).cache.add("weights")
    pilot.give(events.ObjectArrived("weights", GIB))
    assert pilot.library(2).stage is Stage.WAITING
    pilot.wait(50).die(1).load(2)
    assert pilot.take(told.LibraryReady).fetch_s == 3.0, "the wait for memory is not the context's"


def test_later_library_that_fits_does_not_wait_for_an_earlier_library(pilot: CoreShell) -> None:
    pilot.ready(1, device_memory_bytes=20 * GIB).hear(order.StopLibrary(LibraryId(1), "room is needed"))
    pilot.start(2, device_memory_bytes=20 * GIB).start(3, device_memory_bytes=4 * GIB)
    assert (pilot.library(2).stage, pilot.library(3).stage) == (Stage.WAITING, Stage.STARTING)
    pilot.die(1)
    assert pilot.library(2).stage is Stage.STARTING


def test_library_waits_for_memory_of_a_library_that_is_draining(pilot: CoreShell) -> None:
    pilot.ready(1, device_memory_bytes=20 * GIB).run(1).hear(order.StopLibrary(LibraryId(1), "room is needed"))
    pilot.start(2, device_memory_bytes=20 * GIB)
    for _ in range(3):
        pilot.wait(1.0).give(events.TimerFired(pilot.take(commands.SetTimer).key))
    assert pilot.library(2).stage is Stage.WAITING
    pilot.end(1).die(1)
    assert pilot.library(2).stage is Stage.STARTING


def test_second_library_waits_on_an_exclusive_device() -> None:
    shell = CoreShell((DeviceFacts(DeviceId("gpu:0"), "A10", 24 * GIB, processes=1),)).join().forget()
    shell.ready(1).start(2)
    assert shell.library(2).stage is Stage.WAITING
    shell.hear(order.StopLibrary(LibraryId(1), "room is needed")).die(1)
    assert shell.library(2).stage is Stage.STARTING


def test_library_resized_while_loading_continues_loading(pilot: CoreShell) -> None:
    pilot.ready(1, device_memory_bytes=20 * GIB).start(2, device_memory_bytes=4 * GIB).forget()
    pilot.hear(order.ResizeLibrary(LibraryId(2), 10 * GIB)).die(1)
    assert pilot.take(to_library.Resize).device_memory_bytes == 10 * GIB
    assert pilot.load(2).library(2).stage is Stage.READY


def test_later_resize_order_replaces_a_pending_order(pilot: CoreShell) -> None:
    pilot.ready(1, device_memory_bytes=12 * GIB).ready(2, device_memory_bytes=10 * GIB).forget()
    pilot.hear(order.ResizeLibrary(LibraryId(2), 20 * GIB)).hear(order.ResizeLibrary(LibraryId(2), 8 * GIB))
    pilot.hear(order.StopLibrary(LibraryId(1), "not wanted")).die(1)
    assert [each.device_memory_bytes for each in pilot.all(to_library.Resize)] == [8 * GIB]


# ---- objects


def test_object_with_a_planned_source_is_not_requested(pilot: CoreShell) -> None:
    pilot.start(recipe=MODEL, planned=("weights",))
    assert not pilot.all(told.WantObjects)
    pilot.hear(order.FetchObject(WEIGHTS, peers=(order.ServingPeer(PilotId("p2"), "h:1"),)))
    assert pilot.take(commands.StartFetch).order.peers[0].pilot == "p2"


def test_cached_object_is_not_fetched_though_its_transfer_was_planned(pilot: CoreShell) -> None:
    pilot.cache.add("weights")
    pilot.start(recipe=MODEL, planned=("weights",)).hear(order.FetchObject(WEIGHTS, origin=True))
    assert {each.name for here in pilot.all(told.ObjectsCached) for each in here.arrivals} == {"weights"}
    assert not pilot.all(commands.StartFetch)
    assert not pilot.all(told.ObjectsGone)
    assert pilot.take(commands.StartProcess)


def test_library_that_cannot_start_releases_its_planned_objects(pilot: CoreShell) -> None:
    greedy = Recipe(key="m", name="model", objects=(WEIGHTS,), needs=Needs(disk_bytes=9 * GIB))
    pilot.start(recipe=greedy, planned=("weights",))
    assert pilot.take(told.ObjectsGone).names == ("weights",)
    pilot.hear(order.FetchObject(WEIGHTS, origin=True))
    assert not pilot.all(commands.StartFetch)


def test_cache_is_checked_before_a_fetch(pilot: CoreShell) -> None:
    pilot.is_slow = True
    pilot.start(recipe=MODEL, planned=("weights",)).hear(order.FetchObject(WEIGHTS, origin=True))
    pilot.give(events.LibraryPrepared(LibraryId(1), free_disk_bytes=GIB))
    assert not pilot.all(commands.StartFetch)
    pilot.give(events.ObjectsPinned(LibraryId(1), {}))
    assert pilot.take(commands.StartFetch).order.origin
    assert not pilot.all(told.WantObjects)


def test_planned_object_without_source_is_requested_again(pilot: CoreShell) -> None:
    pilot.is_slow = True
    pilot.start(recipe=MODEL, planned=("weights",)).hear(order.FetchObject(WEIGHTS))
    pilot.give(events.LibraryPrepared(LibraryId(1), free_disk_bytes=GIB)).give(events.ObjectsPinned(LibraryId(1), {}))
    assert pilot.take(told.WantObjects).objects == (WEIGHTS,)
    pilot.hear(order.FetchObject(WEIGHTS))
    assert pilot.take(told.LibraryGone).failure is not None


def test_object_evicted_before_its_pin_is_requested_again(pilot: CoreShell) -> None:
    pilot.start(recipe=MODEL).forget()
    pilot.give(events.ObjectArrived("weights", GIB))
    assert pilot.take(told.WantObjects).objects == (WEIGHTS,)
    assert pilot.library().stage is Stage.FETCHING


def test_library_starts_with_the_path_of_a_cached_snapshot(pilot: CoreShell) -> None:
    pilot.cache.add("snap")
    pilot.start(snapshots={"bf16": ObjectRef("snap", GIB)}, snapshot_wait_s=4.0)
    assert pilot.take(commands.StartProcess).objects == {"bf16": "/cache/snap"}


# ---- calls


def test_suspended_time_does_not_count_for_time_limits_of_calls(pilot: CoreShell) -> None:
    pilot.ready().run(1, limit_s=2.0).run(2, limit_s=2.0).wait(1.0).wait(20.0).give(events.WasSuspended(20.0))
    pilot.observe(c1=21.0)
    # the time limit of the second call started when the stopped library continued
    pilot.wait(5.0).give(events.WasSuspended(4.5)).observe(c1=26.0, c2=4.9)
    assert not pilot.all(to_library.Evict)
    pilot.wait(0.6).observe(c1=26.6, c2=5.5)
    assert pilot.take(to_library.Evict).call == 1
    pilot.wait(60.0).give(events.WasSuspended(60.0)).observe(c1=86.6, c2=65.5)
    assert not pilot.all(told.CallsEnded), "a stopped process could not react"
    pilot.say(1, to_agent.RunEvicted(CallProgress(CallId(1))))
    (end,) = pilot.take(told.CallsEnded).ends
    assert (end.call, "the call ran for 2.1 s" in end.failure.message) == (1, True)


# ---- failing libraries


def test_unreadable_bytes_end_the_library_and_name_all_its_calls(pilot: CoreShell) -> None:
    pilot.ready().run(1, 2).give(events.LibraryBytesInvalid(LibraryId(1), "not MessagePack"))
    assert pilot.take(commands.KillProcess)
    pilot.die(signal=9)
    gone = pilot.take(told.LibraryGone)
    assert (gone.failure.kind, gone.running) == (FailureKind.DIED, (1, 2))


def test_load_that_has_no_process_at_its_limit_kills_the_zygote(pilot: CoreShell) -> None:
    slow = Recipe(key="s", name="slow", needs=Needs(load_limit_s=5.0))
    pilot.start(recipe=slow).wait(60.0).give(events.WasSuspended(58.0)).observe()
    assert not pilot.all(commands.KillZygote), "suspended time does not count"
    pilot.wait(3.1).observe()
    assert pilot.take(commands.KillZygote).library == 1
    pilot.die(cause="the zygote died")
    assert "did not load within 5.0 s" in pilot.take(told.LibraryGone).failure.message


# ---- the manager


def test_orders_from_before_the_last_hello_are_not_carried_out(pilot: CoreShell) -> None:
    pilot.ready().forget()
    pilot.give(events.HelloDue(events.UnacknowledgedFacts(), 0, ())).run(1).start(2)
    assert not pilot.all(told.CallsReturned)
    assert 2 not in pilot.core.state.libraries
    pilot.hear(order.PilotWelcome("s", 5.0, 60.0, hello=1)).run(1)
    assert not pilot.library().held_calls, "that welcome answers an earlier hello"
    pilot.hear(order.PilotWelcome("s", 5.0, 60.0, hello=2)).run(1)
    assert list(pilot.library().held_calls) == [1]


def test_cache_changes_by_other_pilots_are_reported(pilot: CoreShell) -> None:
    pilot.give(events.CacheListed({"a": 1, "b": 2}))
    assert [one.name for one in pilot.take(told.ObjectsCached).arrivals] == ["a", "b"]
    pilot.give(events.CacheListed({"b": 2}))
    assert pilot.take(told.ObjectsGone).names == ("a",)
    assert pilot.take(commands.RemoveEvictedSnapshots)


@pytest.mark.parametrize("planned", [(), ("weights",)])
def test_damaged_object_is_requested_and_not_reported_as_removed(pilot: CoreShell, planned: tuple[str, ...]) -> None:
    """The pilot sends no `ObjectsGone`: after `WantObjects`, that would cancel the transfer plan of the manager."""
    pilot.give(events.CacheListed({"weights": WEIGHTS.size_bytes})).forget()
    pilot.start(recipe=MODEL, planned=planned)
    assert pilot.take(told.WantObjects).objects == (WEIGHTS,)
    pilot.forget().give(events.CacheListed({}))
    assert not pilot.all(told.ObjectsGone)
    pilot.hear(order.FetchObject(WEIGHTS, origin=True))
    assert pilot.take(commands.StartFetch)


# ---- the end


def test_pilot_told_to_exit_gives_calls_a_short_grace_time(pilot: CoreShell) -> None:
    pilot.ready().run(1).forget().give(events.SignalReceived("it got SIGTERM"))
    assert pilot.take(to_library.Stop)
    pilot.wait(2.1).give(events.Tick())
    assert pilot.take(commands.KillProcess)
    pilot.wait(2).give(events.Tick())
    assert pilot.take(commands.ExitPilot), "the pilot leaves even if the process does not end"


def test_pilot_sets_no_tick_deadline_after_its_exit_deadline(pilot: CoreShell) -> None:
    """With such a deadline the pilot would loop without pause until its last process ends."""
    state = pilot.ready().run(1).give(events.SignalReceived("it got SIGTERM")).core.state
    assert presence.next_tick_deadline(state) == pilot.now + state.facts.exit_grace_s
    pilot.wait(state.facts.exit_grace_s).give(events.Tick())
    assert presence.next_tick_deadline(state) == float("inf")


def test_pilot_reads_only_acknowledgements_after_its_farewell(pilot: CoreShell) -> None:
    pilot.give(events.Farewell()).forget().start(1).run(1).hear(order.Ack(7))
    assert [type(command) for command in pilot.wanted] == [commands.DropAcknowledgedFrames]


def test_pilot_stays_while_other_pilots_fetch_from_it(pilot: CoreShell) -> None:
    pilot.hear(order.Exit("bye", drain=True, hand_on_s=30.0)).wait(29).give(events.Tick())
    assert not pilot.all(commands.ExitPilot), "others may fetch its only copies"
    pilot.wait(2).give(events.Tick(serves_peers=True))
    assert not pilot.all(commands.ExitPilot), "a transfer is under way"
    pilot.give(events.Tick())
    assert pilot.take(commands.ExitPilot)


# ---- devices, and sessions whose files are not seen


def test_device_that_failed_in_a_call_is_probed_at_once_and_blamed() -> None:
    both = frozenset({DeviceId("gpu:0"), DeviceId("gpu:1")})
    pilot = CoreShell(probed=both).join().ready(1).start(2)
    pilot.forget().give(events.ProcessEnded(LibraryId(1), exit_code=infrastructure.DEVICE_FAILED)).give(events.Tick())
    gone = pilot.take(told.LibraryGone)
    assert (gone.failure.kind, gone.loading, gone.running) == (FailureKind.PILOT, False, ())
    assert [probe.device for probe in pilot.all(commands.ProbeDevice)].count(DeviceId("gpu:0")) == 1
    for _ in range(2):
        pilot.give(
            events.DeviceProbed(DeviceId("gpu:0"), events.ProbeVerdict.FAILED, "gpu:0 failed: it fell off the bus")
        )
        pilot.wait(3).give(events.Tick())
    assert "fell off the bus, twice" in pilot.take(told.DeviceFault).reason


@pytest.mark.parametrize(
    ("declared", "room", "others", "signal", "kind"),
    [
        # without other processes the library would get its declared memory
        (2 * GIB, 1 * GIB, 5 * GIB, 9, FailureKind.PILOT),
        # the declared memory would not fit even without other processes
        (2 * GIB, 1 * GIB, GIB // 2, 9, FailureKind.DIED),
        (2 * GIB, 3 * GIB, 5 * GIB, 9, FailureKind.DIED),  # the declared memory fits: the library used more
        (0, 1 * GIB, 5 * GIB, 9, FailureKind.DIED),  # the context declares no memory
        (2 * GIB, 1 * GIB, 5 * GIB, 11, FailureKind.DIED),  # the library crashed (SIGSEGV)
    ],
)
def test_library_crowded_out_of_memory_by_others_is_not_blamed(
    pilot: CoreShell, declared: int, room: int, others: int, signal: int, kind: FailureKind
) -> None:
    pilot.ready(1, Recipe(key="k", name="model", needs=Needs(memory_bytes=declared))).run(1).forget()
    pilot.die(1, signal=signal, running=(CallId(1),), shortage=events.MemoryShortage(room, others))
    gone = pilot.take(told.LibraryGone)
    assert gone.failure.kind is kind
    assert ("processes outside the pilot use" in gone.failure.message) is (kind is FailureKind.PILOT)


@pytest.mark.parametrize(("signal", "name"), [(11, "SIGSEGV"), (40, "signal 40")])
def test_library_killed_by_a_signal_is_reported_with_its_name(pilot: CoreShell, signal: int, name: str) -> None:
    pilot.ready().forget().die(1, signal=signal)
    assert f"was killed by {name}" in pilot.take(told.LibraryGone).failure.message


@pytest.mark.parametrize("every_s", [300.0, 0.0])
def test_free_device_is_probed_at_the_interval_or_only_at_the_start(every_s: float) -> None:
    pilot = CoreShell(probed=frozenset({DeviceId("gpu:0")}), probe_every_s=every_s).join().give(events.Tick())
    assert pilot.take(commands.ProbeDevice).device == "gpu:0"
    pilot.give(events.DeviceProbed(DeviceId("gpu:0"), events.ProbeVerdict.SOUND, "")).wait(299).give(events.Tick())
    assert not pilot.all(commands.ProbeDevice)
    assert len(pilot.wait(2).give(events.Tick()).all(commands.ProbeDevice)) == (every_s > 0)


def test_passed_probe_ends_the_suspicion_against_a_device() -> None:
    pilot = CoreShell(probed=frozenset({DeviceId("gpu:0")})).join().ready(1).start(2).forget()
    pilot.give(events.ProcessEnded(LibraryId(1), exit_code=infrastructure.DEVICE_FAILED)).give(events.Tick())
    assert pilot.take(commands.ProbeDevice).device == "gpu:0"
    pilot.give(events.DeviceProbed(DeviceId("gpu:0"), events.ProbeVerdict.SOUND, "")).wait(1000).give(events.Tick())
    assert not pilot.all(commands.ProbeDevice), "another library is at work there"
    assert not pilot.all(told.DeviceFault)


def test_large_arguments_are_fetched_first_without_a_shared_folder() -> None:
    pilot = CoreShell(is_carried=True).join().ready()
    ref = ObjectRef("argument-1", 2_000_000)
    pilot.forget().run(1, 2, 3, payload=ref)
    brought = pilot.take(commands.FetchArguments)
    assert not pilot.all(to_library.Run)
    pilot.hear(order.CancelCalls(LibraryId(1), (3,)))  # type: ignore[arg-type]
    assert pilot.take(told.CallsReturned).calls == (3,)
    pilot.give(
        events.ArgumentsFetched(
            LibraryId(1), brought.ticket, {1: "/cache/a", 3: "/cache/a"}, {2: events.FetchFailure("no seed")}  # type: ignore[dict-item]
        )
    )  # fmt: skip
    run = pilot.take(to_library.Run)
    assert ([spec.call for spec in run.calls], run.objects) == ([1], {"argument-1": "/cache/a"})
    (end,) = pilot.take(told.CallsEnded).ends
    assert (end.call, end.failure.kind) == (2, FailureKind.SERIALIZATION)
    assert pilot.take(commands.ReleaseArguments).calls == (3,)


GPU = DeviceId("gpu:0")
HOST = (DeviceFacts(DeviceId("cpu:0"), "cpu", 24 * GIB),)
SMALL = Recipe("k", "model", needs=Needs(device_memory_bytes=4 * GIB))


def measure(pilot: CoreShell, *used: int, taken: int) -> CoreShell:
    """Report the GiB that libraries 1, 2, ... use, and the GiB that all processes take of the GPU."""
    sizes = {LibraryId(number): {GPU: size * GIB} for number, size in enumerate(used, start=1)}
    return pilot.wait(1).give(events.DevicesMeasured(sizes, {GPU: taken * GIB}, {GPU: pilot.now}))


# ---- host memory


def test_library_told_to_grow_may_take_more_than_its_recipe_declares() -> None:
    pilot = CoreShell(HOST).join().ready(1, SMALL, device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 4 * GIB
    for size, limit in ((10, 10), (2, 4)):
        pilot.hear(order.ResizeLibrary(LibraryId(1), size * GIB)).say(1, to_agent.Resized(size * GIB))
        assert limits.memory_limit(pilot.core.state, pilot.library(1)) == limit * GIB
    pilot.ready(2, device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(2)) == 0, "it declares no memory"


def test_library_resized_twice_gets_the_last_size() -> None:
    pilot = CoreShell(HOST).join().ready(1, device="cpu:0", device_memory_bytes=20 * GIB)
    pilot.hear(order.ResizeLibrary(LibraryId(1), 4 * GIB)).hear(order.ResizeLibrary(LibraryId(1), 18 * GIB))
    pilot.say(1, to_agent.Resized(4 * GIB))
    pilot.start(2, device="cpu:0", device_memory_bytes=10 * GIB)
    assert pilot.core.state.ledger.free_bytes(HOST[0].device) == 6 * GIB
    pilot.say(1, to_agent.Resized(18 * GIB))
    assert pilot.core.state.ledger.reserved_bytes(LibraryId(1)) == 18 * GIB
    assert not pilot.library(2).has_process


# ---- device memory


def test_reservation_grows_with_the_measured_use(pilot: CoreShell) -> None:
    measure(pilot.ready(1, SMALL, device_memory_bytes=5 * GIB).forget(), 20, taken=20)
    resized = pilot.take(told.LibraryResized)
    assert resized.measured
    assert 20 * GIB <= resized.device_memory_bytes < 21 * GIB
    assert not pilot.all(commands.KillProcess), "a library alone on its GPU may exceed its declaration"
    pilot.start(2, device_memory_bytes=4 * GIB)
    assert pilot.library(2).stage is Stage.WAITING


def test_library_ends_only_if_it_takes_memory_that_others_reserved(pilot: CoreShell) -> None:
    other = Recipe("o", "other", needs=Needs(device_memory_bytes=12 * GIB))
    pilot.ready(1, SMALL, device_memory_bytes=4 * GIB).ready(2, other, device_memory_bytes=12 * GIB).forget()
    measure(pilot, 5, 1, taken=6)  # NCCL and cuBLAS use memory too
    measure(pilot, 12, 1, taken=13)
    assert not pilot.all(commands.KillProcess), "the other library still fits"
    measure(pilot, 13, 1, taken=14)
    assert pilot.take(commands.KillProcess).library == 1
    failure = pilot.die(1, signal=9).take(told.LibraryGone).failure
    assert failure.kind is FailureKind.MEMORY
    assert "took 14.0 GB of memory of gpu:0 and declares 4.3 GB" in failure.message


def test_exclusive_gpu_is_granted_completely() -> None:
    pilot = CoreShell((DeviceFacts(GPU, "A10", 24 * GIB, processes=1),)).join()
    measure(pilot.ready(1, device_memory_bytes=24 * GIB).forget(), 5, taken=5)
    assert not pilot.all(told.LibraryResized)


# ---- calls


def test_unstarted_calls_of_an_unresponsive_library_are_returned(pilot: CoreShell) -> None:
    pilot.ready().run(1, 2, 3).hear(order.TakeBack(LibraryId(1), 1)).forget()
    pilot.wait(limits.NO_ANSWER_LIMIT_S + 1).observe(c1=11.0)
    assert pilot.take(told.CallsReturned).calls == (2, 3)
    late = pilot.take(to_library.GiveBack)
    pilot.run(2)
    pilot.say(1, to_agent.GivenBack((2,), order=late.order))  # type: ignore[arg-type]
    assert not pilot.all(told.CallsReturned), "the answer is for the order before the call was repeated"


def test_library_that_starts_none_of_its_calls_ends(pilot: CoreShell) -> None:
    """The process of the library is stopped, or a thread of an earlier call holds the interpreter lock."""
    times = int(limits.NO_CALL_BEGUN_LIMIT_S / limits.OBSERVATION_INTERVAL_S)
    pilot.ready().run(1, 2).forget()
    for _ in range(times - 1):
        pilot.observe()
    pilot.observe(c1=3600.0)  # a running call is no reason to end the library, however long it runs
    for _ in range(times):
        assert not pilot.all(commands.KillProcess)
        pilot.observe()
    assert pilot.take(commands.KillProcess)
    pilot.die(signal=9, tail="last words")
    gone = pilot.take(told.LibraryGone)
    assert "has not begun any of its calls" in gone.failure.message
    assert (gone.failure.tail, gone.running, gone.unstarted) == ("last words", (), (1, 2))


def test_library_ends_after_its_maximum_number_of_calls(pilot: CoreShell) -> None:
    pilot.ready(recipe=Recipe("k", "model", calls_per_library=2)).run(1, 2, 3).forget()
    pilot.hear(order.TakeBack(LibraryId(1), 1)).say(1, to_agent.GivenBack((3,))).end(1)  # type: ignore[arg-type]
    assert pilot.library().served == 1, "a returned call does not count"
    pilot.end(2).die()
    assert pilot.take(told.LibraryGone).failure is None

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.pilot_shell import DEVICES, GIB, CoreShell

from stoker.contexts.recipe import Needs, Recipe
from stoker.pilot.core import commands, events, limits
from stoker.pilot.core.memory import CLAIM_CHECK_INTERVAL_S
from stoker.pilot.core.sleeping import SLEEP_OR_WAKE_LIMIT_S
from stoker.pilot.core.state import Stage
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts

GPUS = tuple(msgspec.structs.replace(device, process_bytes=GIB) for device in DEVICES)
MODEL = Recipe(key="k", name="model", needs=Needs(memory_bytes=4 * GIB, device_memory_bytes=15 * GIB))


@pytest.fixture
def pilot() -> CoreShell:
    return CoreShell(GPUS, sleeper_bytes=20 * GIB).join().forget()


def ready(pilot: CoreShell, number: int = 1, *, size: int = 16, sleeps: bool = True, **more: Any) -> CoreShell:
    """Start a library with `size` GiB of its device."""
    pilot.start(number, MODEL, device_memory_bytes=size * GIB, **more)
    pilot.give(events.ProcessMade(LibraryId(number), number)).say(number, to_agent.Hello(number, number))
    return pilot.say(number, to_agent.Loaded(1.0, GIB, GIB, 15 * GIB, sleeps=sleeps)).forget()


def sleep(pilot: CoreShell, number: int = 1, *, host: int = 12) -> CoreShell:
    return pilot.hear(order.SleepLibrary(LibraryId(number), GIB, host * GIB))


def slept(pilot: CoreShell, number: int = 1, *, more: int = 12) -> CoreShell:
    return pilot.say(number, to_agent.Slept((more + 1) * GIB, more * GIB, 0, 0.5)).wait(1)


def wake(pilot: CoreShell, number: int = 1, *, size: int = 16) -> CoreShell:
    return pilot.hear(order.WakeLibrary(LibraryId(number), size * GIB))


def free(pilot: CoreShell) -> tuple[int, int]:
    """Return the free GiB of the first device and of the host memory for sleeping libraries."""
    state = pilot.core.state
    return state.ledger.free_bytes(next(iter(state.devices))) // GIB, state.host_memory.free_bytes(
        DeviceId("host memory")
    ) // GIB


def test_library_sleeps_and_wakes(pilot: CoreShell) -> None:
    sleep(ready(pilot))
    assert isinstance(pilot.take(to_library.Sleep), to_library.Sleep)
    assert free(pilot) == (8, 8), "its device is freed once it sleeps"
    slept(pilot, more=13)
    assert pilot.take(told.LibraryAsleep) == told.LibraryAsleep(LibraryId(1), GIB, 13 * GIB, 0.5)
    assert free(pilot) == (23, 7)
    wake(pilot).take(to_library.Wake)
    assert free(pilot) == (8, 7), "its host memory is freed once it is awake"
    pilot.say(1, to_agent.Woke(0.4))
    assert pilot.take(told.LibraryAwake) == told.LibraryAwake(LibraryId(1), 16 * GIB, 0.4)
    assert free(pilot) == (8, 20)
    assert pilot.run(1).take(to_library.Run).calls[0].call == 1


def test_load_waits_until_the_other_library_sleeps(pilot: CoreShell) -> None:
    sleep(ready(pilot)).start(2, MODEL, device_memory_bytes=16 * GIB)
    assert pilot.library(2).stage is Stage.WAITING
    pilot.wait(CLAIM_CHECK_INTERVAL_S).give(events.TimerFired("memory/2"))
    assert pilot.library(2).stage is Stage.WAITING, "the memory is about to become free"
    slept(pilot).take(commands.StartProcess)


def test_wake_waits_until_its_device_has_memory(pilot: CoreShell) -> None:
    ready(slept(sleep(ready(pilot))), 2).forget()
    wake(pilot)
    assert not pilot.all(to_library.Wake)
    sleep(pilot, 2, host=8)
    slept(pilot, 2, more=8).take(to_library.Wake)


def test_wake_without_memory_ends_as_a_failure_of_the_pilot(pilot: CoreShell) -> None:
    ready(slept(sleep(ready(pilot))), 2).forget()
    wake(pilot).wait(CLAIM_CHECK_INTERVAL_S).give(events.TimerFired("memory/1"))
    assert pilot.take(commands.KillProcess).library == 1
    gone = pilot.die(1, signal=9).take(told.LibraryGone)
    assert gone.failure is not None
    assert (gone.failure.kind, gone.loading) == (FailureKind.PILOT, False)
    assert "lib-1 (model) cannot wake: gpu:0 has 7.5 GB of 25.8 GB free, 16.1 GB are needed" in gone.failure.message


def test_longest_unused_sleeping_library_ends_for_host_memory(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot)))
    slept(sleep(ready(pilot, 2, size=4), 2, host=6), 2, more=6).forget()
    sleep(ready(pilot, 3, size=4), 3, host=9)
    assert pilot.take(commands.KillProcess).library == 1, "lib-2 has slept for a shorter time"
    assert not pilot.all(to_library.Sleep), "the host memory is not free yet"
    pilot.die(1, signal=9)
    gone = pilot.take(told.LibraryGone)
    assert (gone.failure, gone.loading) == (None, False)
    pilot.take(to_library.Sleep)


def test_library_too_large_for_host_memory_ends_instead_of_sleeping(pilot: CoreShell) -> None:
    sleep(ready(pilot), host=21)
    assert pilot.take(commands.KillProcess).library == 1


def test_sleeping_library_that_exceeds_host_memory_ends(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot)), more=25)
    assert pilot.take(told.LibraryAsleep).host_bytes == 25 * GIB, "the manager learns it"
    assert pilot.take(commands.KillProcess).library == 1
    assert free(pilot)[1] == 8


def test_sleeping_library_ends_if_another_needs_its_device_memory() -> None:
    cpu = DeviceFacts(DeviceId("cpu:0"), "cpu", 20 * GIB)
    pilot = CoreShell((cpu,)).join()
    ready(pilot, size=12, device="cpu:0")
    sleep(pilot, host=0).say(1, to_agent.Slept(9 * GIB, 0, 0, 0.1))
    assert pilot.take(told.LibraryAsleep).device_memory_bytes == 9 * GIB, "it was to keep 1 GiB"
    pilot.start(2, MODEL, device="cpu:0", device_memory_bytes=12 * GIB)
    pilot.wait(CLAIM_CHECK_INTERVAL_S).give(events.TimerFired("memory/2"))
    assert pilot.take(commands.KillProcess).library == 1
    pilot.die(1, signal=9).take(commands.StartProcess)


@pytest.mark.parametrize("why", ["calls", "resize", "cannot"])
def test_library_that_cannot_sleep_now_reports_the_reason(pilot: CoreShell, why: str) -> None:
    ready(pilot, sleeps=why != "cannot")
    if why == "calls":
        pilot.run(1)
    elif why == "resize":
        pilot.hear(order.ResizeLibrary(LibraryId(1), 12 * GIB))
    refused = sleep(pilot).take(told.LibraryAwake)
    expected = {"calls": "holds 1 calls", "resize": "size is being changed", "cannot": "context cannot sleep"}
    assert expected[why] in refused.refused
    assert pilot.library().stage is Stage.READY


def test_calls_for_a_sleeping_library_are_refused(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot))).run(1)
    assert pilot.take(told.CallsReturned) == told.CallsReturned(LibraryId(1), (1,), refused="lib-1 is asleep")


def test_repeated_orders_are_answered_and_change_nothing(pilot: CoreShell) -> None:
    sleep(sleep(ready(pilot)))
    assert len(pilot.all(to_library.Sleep)) == 1
    slept(pilot).take(told.LibraryAsleep)
    assert sleep(pilot).take(told.LibraryAsleep).host_bytes == 12 * GIB
    wake(wake(pilot))
    assert len(pilot.all(to_library.Wake)) == 1
    pilot.say(1, to_agent.Woke(0.1)).take(told.LibraryAwake)
    assert wake(pilot).take(told.LibraryAwake).device_memory_bytes == 16 * GIB


def test_library_ordered_to_wake_while_falling_asleep_wakes(pilot: CoreShell) -> None:
    wake(sleep(ready(pilot)))
    assert not pilot.all(to_library.Wake)
    slept(pilot).take(to_library.Wake)


@pytest.mark.parametrize("stage", [Stage.SLEEPING, Stage.ASLEEP, Stage.WAKING])
def test_library_that_dies_while_sleeping_frees_all_its_memory(pilot: CoreShell, stage: Stage) -> None:
    sleep(ready(pilot))
    if stage is not Stage.SLEEPING:
        slept(pilot)
    if stage is Stage.WAKING:
        wake(pilot)
    assert pilot.library().stage is stage
    pilot.die(signal=9)
    gone = pilot.take(told.LibraryGone)
    assert gone.failure is not None
    assert (gone.failure.kind, gone.loading) == (FailureKind.DIED, False)
    assert f"while model was {stage.value}" in gone.failure.message
    assert free(pilot) == (24, 20)


def test_exception_of_the_context_is_reported(pilot: CoreShell) -> None:
    raised = Failure(FailureKind.CONTEXT, "sleep() of the context model raised OSError: no")
    sleep(ready(pilot)).say(1, to_agent.SleepFailed(raised)).die(exit_code=1)
    assert pilot.take(told.LibraryGone).failure == raised


def test_context_that_does_not_fall_asleep_in_time_ends(pilot: CoreShell) -> None:
    sleep(ready(pilot)).wait(SLEEP_OR_WAKE_LIMIT_S + 1).observe()
    assert pilot.take(commands.KillProcess).library == 1
    failure = pilot.die(signal=9).take(told.LibraryGone).failure
    assert failure is not None
    assert failure.message.startswith("model was falling asleep for 2 min")


def test_memory_limit_of_a_library_includes_its_sleep_reservation(pilot: CoreShell) -> None:
    sleep(ready(pilot))
    assert limits.memory_limit(pilot.core.state, pilot.library()) == (4 + 12) * GIB


def test_device_measurement_from_before_the_sleep_is_ignored(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot))).forget()
    gpu, library = DeviceId("gpu:0"), LibraryId(1)
    pilot.give(events.DevicesMeasured({library: {gpu: 15 * GIB}}, {gpu: 15 * GIB}, {gpu: pilot.now - 5}))
    assert not pilot.all(told.LibraryResized)
    pilot.give(events.DevicesMeasured({library: {gpu: 2 * GIB}}, {gpu: 2 * GIB}, {gpu: pilot.now + 1}))
    assert pilot.take(told.LibraryResized).device_memory_bytes >= 2 * GIB


def test_hello_names_the_sleeping_libraries(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot))).forget().give(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))
    hello = pilot.take(commands.SendHello).hello
    (facts,) = hello.libraries
    assert hello.sleeper_bytes == 20 * GIB
    assert (facts.ready, facts.asleep, facts.sleeps) == (False, True, True)
    assert (facts.reserved_bytes, facts.awake_bytes, facts.host_bytes) == (GIB, 16 * GIB, 12 * GIB)


def test_sleeping_libraries_end_when_their_pilot_drains(pilot: CoreShell) -> None:
    slept(sleep(ready(pilot))).hear(order.Exit("enough", drain=True))
    assert pilot.take(commands.KillProcess).library == 1

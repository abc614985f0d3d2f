"""Limits of memory and of calls, and reservations that follow the measured device memory."""

from __future__ import annotations

import pytest
from core.pilot_shell import GIB, CoreShell

from stoker.contexts.recipe import Needs, Recipe
from stoker.pilot.core import commands, events, limits
from stoker.pilot.core.state import Stage
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import ResizeLibrary, TakeBack

GPU = DeviceId("gpu:0")
HOST = (DeviceFacts(DeviceId("cpu:0"), "cpu", 24 * GIB),)
SMALL = Recipe("k", "model", needs=Needs(device_memory_bytes=4 * GIB))


@pytest.fixture
def pilot() -> CoreShell:
    return CoreShell().join().forget()


def measure(pilot: CoreShell, *used: int, taken: int) -> CoreShell:
    """Report the GiB that libraries 1, 2, ... use, and the GiB that all processes take of the GPU."""
    sizes = {LibraryId(number): {GPU: size * GIB} for number, size in enumerate(used, start=1)}
    return pilot.wait(1).give(events.DevicesMeasured(sizes, {GPU: taken * GIB}, {GPU: pilot.now}))


# ---- host memory


def test_library_told_to_grow_may_take_more_than_its_recipe_declares() -> None:
    pilot = CoreShell(HOST).join().ready(1, SMALL, device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 4 * GIB
    for size, limit in ((10, 10), (2, 4)):
        pilot.hear(ResizeLibrary(LibraryId(1), size * GIB)).say(1, to_agent.Resized(size * GIB))
        assert limits.memory_limit(pilot.core.state, pilot.library(1)) == limit * GIB
    pilot.ready(2, device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(2)) == 0, "it declares no memory"


def test_library_that_shrinks_and_grows_keeps_its_last_size() -> None:
    pilot = CoreShell(HOST).join().ready(1, device="cpu:0", device_memory_bytes=20 * GIB)
    pilot.hear(ResizeLibrary(LibraryId(1), 4 * GIB)).hear(ResizeLibrary(LibraryId(1), 18 * GIB))
    pilot.say(1, to_agent.Resized(4 * GIB))
    pilot.start(2, device="cpu:0", device_memory_bytes=10 * GIB)
    assert pilot.core.state.ledger.free(HOST[0].device) == 6 * GIB
    pilot.say(1, to_agent.Resized(18 * GIB))
    assert pilot.core.state.ledger.held(LibraryId(1)) == 18 * GIB
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


def test_workspaces_end_no_library_but_memory_of_others_does(pilot: CoreShell) -> None:
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
    pilot.ready().run(1, 2, 3).hear(TakeBack(LibraryId(1), 1)).forget()
    pilot.wait(limits.NO_ANSWER_LIMIT_S + 1).observe(c1=11.0)
    assert pilot.take(told.CallsReturned).calls == (2, 3)
    late = pilot.take(to_library.GiveBack)
    pilot.run(2)
    pilot.say(1, to_agent.GivenBack((2,), order=late.order))  # type: ignore[arg-type]
    assert not pilot.all(told.CallsReturned), "the answer is for the order before the call was repeated"


def test_library_that_starts_none_of_its_calls_ends(pilot: CoreShell) -> None:
    """Its process is stopped, or a thread of an earlier call holds the interpreter lock."""
    times = int(limits.NO_CALL_STARTED_LIMIT_S / limits.EVERY_S)
    pilot.ready().run(1, 2).forget()
    for _ in range(times - 1):
        pilot.observe()
    pilot.observe(c1=3600.0)  # a call that runs is no reason, however long it takes
    for _ in range(times):
        assert not pilot.all(commands.KillProcess)
        pilot.observe()
    assert pilot.take(commands.KillProcess)
    pilot.die(signal=9, tail="last words")
    gone = pilot.take(told.LibraryGone)
    assert "has not begun any of its calls" in gone.failure.message
    assert (gone.failure.tail, gone.running, gone.unstarted) == ("last words", (), (1, 2))


def test_library_ends_after_its_number_of_calls(pilot: CoreShell) -> None:
    pilot.ready(recipe=Recipe("k", "model", calls_per_library=2)).run(1, 2, 3).forget()
    pilot.hear(TakeBack(LibraryId(1), 1)).say(1, to_agent.GivenBack((3,))).end(1)  # type: ignore[arg-type]
    assert not pilot.library().retires, "a returned call does not count"
    pilot.end(2).die()
    assert pilot.take(told.LibraryGone).failure is None

from __future__ import annotations

from core.pilot_shell import GIB, CoreShell

from stoker.contexts.recipe import Needs, Recipe
from stoker.pilot.core import limits
from stoker.protocol import to_agent
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import ResizeLibrary

HOST = (DeviceFacts(DeviceId("cpu:0"), "cpu", 24 * GIB),)


def test_library_told_to_grow_may_take_more_than_its_recipe_declares() -> None:
    recipe = Recipe("k", "model", needs=Needs(device_memory_bytes=4 * GIB))
    pilot = CoreShell(HOST).join().ready(1, recipe, device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 4 * GIB
    pilot.hear(ResizeLibrary(LibraryId(1), 10 * GIB)).say(1, to_agent.Resized(10 * GIB))
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 10 * GIB
    pilot.hear(ResizeLibrary(LibraryId(1), 2 * GIB)).say(1, to_agent.Resized(2 * GIB))
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 4 * GIB


def test_library_without_declared_memory_has_no_limit() -> None:
    pilot = CoreShell(HOST).join().ready(1, Recipe("k", "model"), device="cpu:0", device_memory_bytes=4 * GIB)
    assert limits.memory_limit(pilot.core.state, pilot.library(1)) == 0


def test_library_that_shrinks_and_grows_keeps_its_last_size() -> None:
    pilot = CoreShell(HOST).join().ready(1, device="cpu:0", device_memory_bytes=20 * GIB)
    pilot.hear(ResizeLibrary(LibraryId(1), 4 * GIB)).hear(ResizeLibrary(LibraryId(1), 18 * GIB))
    pilot.say(1, to_agent.Resized(4 * GIB))
    pilot.start(2, device="cpu:0", device_memory_bytes=10 * GIB)
    assert pilot.core.state.ledger.free(HOST[0].device) == 6 * GIB
    pilot.say(1, to_agent.Resized(18 * GIB))
    assert pilot.core.state.ledger.held(LibraryId(1)) == 18 * GIB
    assert not pilot.library(2).has_process

from __future__ import annotations

import msgspec
import pytest
from sim.worlds import GPU, model, source, world

from stoker.contexts.recipe import Needs, Recipe
from stoker.manager.policies import default_policies
from stoker.manager.sim.pilot import SimPilot
from stoker.manager.sim.run import Simulation
from stoker.pilot.core.state import StoppingCall
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import CallOptions, CallSpec, Features
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.site import Duration, Size

LIBRARY = LibraryId(1)


@pytest.fixture
def pilot(monkeypatch: pytest.MonkeyPatch) -> SimPilot:
    sim = Simulation(world(source(1), model()), [], default_policies())
    monkeypatch.setattr(sim, "handle", lambda _event: None)  # the manager ignores every event
    made = SimPilot(sim, source(1), block="", number=0, ends_at=0.0)
    sim.pilots[made.id] = made
    made.connect()
    made.handle_message(order.PilotWelcome("simulated", 5.0, 60.0))
    recipe = Recipe(key="llm", name="llm", slots=2)
    made.handle_message(
        order.StartLibrary(LIBRARY, recipe, (DeviceId("gpu:0"),), device_memory_bytes=int(GPU.memory_bytes))
    )
    sim.agenda.schedule_at(100.0, lambda: None)
    while sim.agenda.run_entries(1):
        pass
    return made


def run(pilot: SimPilot, call: int, *, limit_s: float) -> None:
    spec = CallSpec(CallId(call), b"", Features(items=50))
    pilot.handle_message(order.RunCalls(LIBRARY, FunctionKey("f"), [spec], CallOptions(limit_s=limit_s)))


def test_timer_of_a_cancelled_call_does_not_end_another_call(pilot: SimPilot) -> None:
    run(pilot, 1, limit_s=60.0)
    assert list(pilot.core.state.libraries[LIBRARY].held_calls) == [1]
    pilot.core.state.libraries[LIBRARY].stopping_calls[CallId(9)] = StoppingCall(0.0)
    pilot._handle_fired_timer(f"cancel/{LIBRARY}")
    assert list(pilot.core.state.libraries[LIBRARY].held_calls) == [1]
    assert LIBRARY in pilot.libraries


# ---- memory


def world_of(**more: object) -> SimPilot:
    made = msgspec.structs.replace(model(), device_memory_bytes=Size(10**9), **more)
    sim = Simulation(world(source(1), made), [], default_policies())
    sim.handle = lambda _event: None  # no manager
    pilot = SimPilot(sim, source(1), block="", number=0, ends_at=0.0)
    sim.pilots[pilot.id] = pilot
    pilot.connect()
    pilot.handle_message(order.PilotWelcome("simulated", 5.0, 60.0))
    return pilot


def load(pilot: SimPilot, number: int, *, size: int) -> None:
    recipe = Recipe(key="llm", name="llm", slots=2, needs=Needs(device_memory_bytes=10**9))
    pilot.handle_message(order.StartLibrary(LibraryId(number), recipe, (DeviceId("gpu:0"),), device_memory_bytes=size))


def step(pilot: SimPilot, until: float) -> None:
    pilot.sim.agenda.schedule_at(until, lambda: None)
    while pilot.sim.agenda.now < until and pilot.sim.agenda.run_entries(1):
        pass


def test_library_that_ends_during_a_resize_frees_its_device() -> None:
    pilot, half = world_of(resize_s=Duration(1.0)), int(GPU.memory_bytes) // 2
    load(pilot, 1, size=half)
    step(pilot, 100.0)
    pilot.handle_message(order.ResizeLibrary(LibraryId(1), 2 * 10**9))
    pilot.handle_message(order.StopLibrary(LibraryId(1), "for a test", drain=False))
    step(pilot, 200.0)
    assert pilot.core.state.ledger.free_bytes(DeviceId("gpu:0")) == int(GPU.memory_bytes)
    assert pilot.busy_s(200.0) == 0.0

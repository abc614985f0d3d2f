"""A simulated pilot without its manager: what its shell tells the core."""

from __future__ import annotations

import pytest
from sim.worlds import GPU, model, source, world

from stoker.contexts.recipe import Recipe
from stoker.manager.policies import default_policies
from stoker.manager.protocol import to_pilot as order
from stoker.manager.protocol.calls import CallOptions, CallSpec, Features
from stoker.manager.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.manager.sim.pilot import SimPilot
from stoker.manager.sim.run import Simulation

LIBRARY = LibraryId(1)


@pytest.fixture
def pilot(monkeypatch: pytest.MonkeyPatch) -> SimPilot:
    """A pilot with a hot library of two slots, 100 s after it was ordered."""
    sim = Simulation(world(source(1), model()), [], default_policies())
    monkeypatch.setattr(sim, "handle", lambda _event: None)  # no manager
    made = SimPilot(sim, source(1), block="", number=0, ends_at=0.0)
    sim.pilots[made.id] = made
    made.join()
    made.hear(order.PilotWelcome("simulated", 5.0, 60.0))
    recipe = Recipe(key="llm", name="llm", slots=2)
    made.hear(order.StartLibrary(LIBRARY, recipe, (DeviceId("gpu:0"),), device_memory_bytes=int(GPU.memory_bytes)))
    sim.agenda.at(100.0, lambda: None)
    while sim.agenda.step():
        pass
    return made


def run(pilot: SimPilot, call: int, *, limit_s: float) -> None:
    spec = CallSpec(CallId(call), b"", Features(items=50))
    pilot.hear(order.RunCalls(LIBRARY, FunctionKey("f"), [spec], CallOptions(limit_s=limit_s)))


def test_a_cancelled_call_ends_no_other_by_a_time_limit(pilot: SimPilot) -> None:
    """Limits of time are not simulated: what is told of a library for a cancel must not look like a call too long."""
    run(pilot, 1, limit_s=60.0)
    assert list(pilot.core.state.libraries[LIBRARY].held) == [1]
    pilot.core.state.libraries[LIBRARY].cancelling[CallId(9)] = 0.0
    pilot._fired(f"cancel/{LIBRARY}")
    assert list(pilot.core.state.libraries[LIBRARY].held) == [1]
    assert LIBRARY in pilot.libraries

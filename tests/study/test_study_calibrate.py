from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from sim.worlds import calls, model, source, world

import stoker
from stoker.errors import SessionError
from stoker.manager.core.events import Event
from stoker.manager.live import journal
from stoker.manager.live.replay import verify_replay
from stoker.manager.policies import default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import Delays, World
from stoker.manager.study.calibrate import (
    CalibratedSession,
    RecordedSession,
    calibrate_world,
    compare_makespans,
    read_recorded_session,
)
from stoker.protocol.blocks import ProvisioningRule
from stoker.site import Duration

LONGEST_S = 0.4
"""Maximum seconds of an undisturbed call in the live session."""
SLOW = Delays(message_s=Duration(0.01), back_s=Duration(1.0), poll_s=Duration(0.0))


class Watched(Simulation):
    """A simulation that records events like a journal."""

    recorded: RecordedSession

    def handle(self, event: Event) -> None:
        self.recorded.record_event(self.agenda.now, event)
        super().handle(event)

    def _carry_out(self, commands: Iterable[object]) -> None:
        said = list(commands)
        self.recorded.record_commands(self.agenda.now, said)  # type: ignore[arg-type]
        super()._carry_out(said)


def simulated(world: World, arrivals: list[Arrival], *, seed: int = 0) -> tuple[RecordedSession, float]:
    run = Watched(world, arrivals, default_policies(), seed=seed)
    run.recorded = RecordedSession()
    return run.recorded, run.run().ended_at


def again(found: CalibratedSession) -> float:
    return compare_makespans(found, policies=default_policies, seeds=range(3)).error


def test_calibration_recovers_the_world_of_a_session() -> None:
    there = world(source(3), model(load_s=20.0, item_s=2.0), delays=SLOW)
    recorded, ended_at = simulated(there, calls(60, items=3))
    found = calibrate_world(recorded)
    context = found.world.contexts["llm"]
    assert found.makespan_s == pytest.approx(ended_at, abs=0.1)
    assert found.world.delays.message_s == pytest.approx(0.01, rel=0.05)
    assert context.load_s["gpu"] + context.start_s == pytest.approx(20.0, abs=0.05)
    assert context.call_s["gpu"] == pytest.approx(6.0, rel=1e-3)
    assert context.item_cv == pytest.approx(0.0, abs=1e-6)
    assert [(pool.max_blocks, pool.steps[-1][1]) for pool in found.world.sources] == [(3, 3)]
    assert again(found) == pytest.approx(0.0, abs=0.005)


def test_calls_of_different_sizes_give_a_fixed_and_a_per_item_time() -> None:
    sizes = [Arrival(0.0, "llm", items=1 + n % 7) for n in range(70)]
    there = world(source(2), model(load_s=5.0, item_s=0.5, call_s={"": Duration(3.0)}, item_cv=0.05))
    found = calibrate_world(simulated(there, sizes)[0])
    context = found.world.contexts["llm"]
    assert context.item_s["gpu"] == pytest.approx(0.5, rel=0.1)
    assert context.call_s["gpu"] == pytest.approx(3.0, rel=0.1)
    assert 0.02 < context.item_cv < 0.09
    assert abs(again(found)) < 0.03


def test_spread_loads_and_warm_up_are_measured() -> None:
    warm = model(load_s=30.0, load_cv=0.3, item_s=1.0, warm_items=1, warm_item_s=Duration(4.0))
    found = calibrate_world(simulated(world(source(12), warm), calls(400))[0])
    context = found.world.contexts["llm"]
    assert 0.15 < context.load_cv < 0.5
    assert (context.warm_items, context.warm_item_s) == (1, pytest.approx(4.0, rel=0.05))
    assert abs(again(found)) < 0.08


def test_calibrated_pilots_start_and_end_as_in_the_session() -> None:
    steps = ((0.0, 4), (60.0, 1), (200.0, 3))
    there = world(
        source(steps, rule=ProvisioningRule.FIXED, init_blocks=4, max_blocks=4), model(load_s=10.0, item_s=1.0)
    )
    found = calibrate_world(simulated(there, calls(500))[0])
    assert abs(again(found)) < 0.02


def test_session_without_calls_gives_no_calibration(tmp_path: Path) -> None:
    book = journal.Journal(tmp_path / "journal")
    book.close()
    with pytest.raises(SessionError, match="no call of session test ended"):
        read_recorded_session(tmp_path / "journal", session="test", policies=default_policies())


# ---- live


@pytest.mark.long
def test_live_session_lasts_as_long_as_its_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "two.toml"
    site.write_text('name = "two"\n[pilot]\ndevices = "cpu:2"\n')

    @stoker.context(memory="200 MB")
    def slow(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @stoker.app(context=slow(2.0))
    def work(_: float, number: int) -> int:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:  # the call uses the processor for 0.02 s, then sleeps
            pass
        time.sleep(LONGEST_S - 0.05 - 0.05 * (number % 3))
        return number

    with stoker.load(site, progress=False) as session:
        assert sorted(stoker.map(work, range(60))) == list(range(60))
        folder = session.folder
    recorded = read_recorded_session(folder / "journal", session=session.id, policies=default_policies())
    found = compare_makespans(calibrate_world(recorded), policies=default_policies, seeds=range(5))
    assert len(recorded.calls) == 60
    # A busy machine delays single calls. If it delays the last call, the session is longer than forecast.
    held_up_s = max(run.run_s for run in recorded.runs) - LONGEST_S
    assert abs(found.error) < 0.10 + max(0.0, held_up_s) / found.live_s, found
    lived = verify_replay(folder / "journal", session=session.id, policies=default_policies())
    assert lived.difference is None
    assert lived.checked == lived.events

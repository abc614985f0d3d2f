"""Calls that are counted, against the same calls with a row for everything that happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from sim.worlds import NOW, calls, model, source, world

from stoker.manager.policies import default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.manager.sim.world import Delays, World
from stoker.manager.study.log_files import read_log, write_log
from stoker.manager.study.measures import Measures, measure
from stoker.site import Duration

FRAMES = Delays(message_s=Duration(0.0005), frame_s=Duration(0.01), back_s=Duration(1.0), poll_s=Duration(0.0))


def run(place: World, arrivals: list[Arrival], *, counted: bool) -> tuple[Simulation, RunOutcome, Measures]:
    simulation = Simulation(place, arrivals, default_policies(), seed=3, counted=counted)
    outcome = simulation.run()
    return simulation, outcome, measure(simulation.log, until_s=outcome.ended_at)


def test_counts_say_what_the_rows_say() -> None:
    losing = world(source([(0.0, 3), (40.5, 1), (80.0, 2)]), model(item_cv=0.5, load_cv=0.2))
    arrivals = calls(300, every_s=0.1)
    rows, outcome, each = run(losing, arrivals, counted=False)
    sums, same_outcome, counted = run(losing, arrivals, counted=True)
    assert outcome.rerun_calls, "nothing was lost, so that half of this test says nothing"
    assert (outcome.ended_at, outcome.calls, outcome.items) == (
        same_outcome.ended_at, same_outcome.calls, same_outcome.items,
    )  # fmt: skip
    for name in ("began_at", "ended_at", "calls", "failed", "unfinished", "items", "useful_s", "lost_s", "held_s"):
        assert getattr(counted, name) == pytest.approx(getattr(each, name)), name
    for name in ("waits_s", "turnarounds_s"):
        mine, exact = getattr(counted, name), getattr(each, name)
        assert list(mine) == pytest.approx(list(exact), rel=0.006, abs=1e-6), name
    for at_s in (30.0, 60.0, 110.0):  # counts are a second old at most, and a second brings few
        assert counted.queue.value(at_s) == pytest.approx(each.queue.value(at_s), abs=6)
        assert counted.completed.value(at_s) == pytest.approx(each.completed.value(at_s), abs=6)
    assert len(sums.log) < len(rows.log)


def test_counts_say_what_the_rows_say_of_gangs_and_of_libraries_of_several_devices() -> None:
    talks = replace(NOW, progress_s=Duration(2.0))
    pool = source([(0.0, 3), (40.5, 1), (80.0, 3)], devices=4, init_blocks=3, min_blocks=3)
    losing = world(pool, model(item_cv=0.5, load_cv=0.2, devices=2), delays=talks)
    arrivals = [Arrival(0.0, "llm", items=20 + number, gang=(2, 4), items_done=20) for number in range(20)]
    _, outcome, each = run(losing, arrivals, counted=False)
    _, _, counted = run(losing, arrivals, counted=True)
    assert outcome.lost_pilots
    assert each.lost_s
    assert each.items == 20 * 20
    for name in ("ended_at", "calls", "unfinished", "items", "useful_s", "lost_s", "loading_s"):
        assert getattr(counted, name) == pytest.approx(getattr(each, name)), name


def test_what_was_cut_off_is_counted_as_unfinished() -> None:
    simulation = Simulation(world(source(1), model()), calls(100), default_policies(), counted=True)
    outcome = simulation.run(until_s=60.5)
    measured = measure(simulation.log, until_s=outcome.ended_at)
    assert (measured.calls, measured.items, measured.unfinished) == (100, 50, 50)


def test_frames_save_the_manager_events_and_change_nothing_else() -> None:
    arrivals = [Arrival(20.0 + n * 0.0005, "llm") for n in range(4000)]
    quick = model(load_s=1.0, item_s=0.004)
    _, alone, _ = run(world(source(4), quick, delays=NOW), arrivals, counted=True)
    _, together, measured = run(world(source(4), quick, delays=FRAMES), arrivals, counted=True)
    assert together.calls == alone.calls == 4000
    assert together.core_events < alone.core_events / 3
    assert measured.turnarounds_s[0] >= 0.004 + 0.01  # what was gathered has waited for it


def test_a_counted_log_is_written_and_read(tmp_path: Path) -> None:
    simulation, _, measured = run(world(source(2), model()), calls(50), counted=True)
    write_log(tmp_path / "log.parquet", simulation.log, {"seed": 3})
    again = measure(read_log(tmp_path / "log.parquet")[0])
    assert (again.calls, again.items, list(again.waits_s)) == (measured.calls, measured.items, list(measured.waits_s))

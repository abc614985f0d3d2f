from __future__ import annotations

import math

import pytest
from sim.worlds import NOW, calls, model, simulate, source, world
from study.small_runs import small_run

from stoker.manager.policies import default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.manager.sim.world import Delays, World
from stoker.manager.study.measures import Measures, compute_token_figures, measure_run
from stoker.manager.study.statistics import estimate_difference, estimate_mean, quantile, t_quantile
from stoker.site import Duration


@pytest.mark.parametrize(
    ("degrees", "known"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (10, 2.22814), (120, 1.97993)]
)
def test_student_t_quantiles_equal_published_tables(degrees: int, known: float) -> None:
    assert t_quantile(0.975, degrees=degrees) == pytest.approx(known, abs=1e-5)
    assert t_quantile(0.5, degrees=degrees) == pytest.approx(0.0, abs=1e-9)


def test_mean_has_a_confidence_interval_from_its_runs() -> None:
    ten = estimate_mean([float(number) for number in range(10)])
    assert (ten.mean, ten.runs) == (4.5, 10)
    assert ten.half_width == pytest.approx(2.26216 * 3.02765 / math.sqrt(10), rel=1e-5)
    assert (ten.low, ten.high) == (pytest.approx(2.33415, abs=1e-4), pytest.approx(6.66585, abs=1e-4))
    one = estimate_mean([3.0])
    assert (one.mean, one.half_width, one.low, one.high) == (3.0, None, 3.0, 3.0)
    for none in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(ValueError, match="mean of"):
            estimate_mean(none)


def test_difference_is_computed_seed_by_seed() -> None:
    seeds = [10.0, 200.0, 3000.0]
    paired = estimate_difference([value + 5.0 + 0.1 * value / 3000 for value in seeds], seeds)
    assert paired.mean == pytest.approx(5.04, abs=0.01)
    assert paired.half_width is not None
    assert paired.half_width < 0.2  # the runs of different seeds differ by thousands
    with pytest.raises(ValueError, match="seed by seed"):
        estimate_difference([1.0, 2.0], [1.0])


def test_quantiles_are_interpolated_between_neighbours() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert [quantile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 3.0, 8.0]
    assert quantile(values, 0.9) == pytest.approx(6.8)
    with pytest.raises(ValueError, match="is not defined"):
        quantile([], 0.5)


# ---- measures


def test_measures_of_a_small_run_equal_hand_computed_values() -> None:
    run, outcome = simulate(world(source(1), model()), calls(100))
    measured = measure_run(run.log)
    assert (measured.calls, measured.items, measured.failed, measured.unfinished) == (100, 100.0, 0, 0)
    assert measured.ended_at == pytest.approx(outcome.ended_at)
    assert measured.ended_at - measured.began_at == pytest.approx(110.0)
    assert measured.waits_s.tolist() == pytest.approx([10.0 + number for number in range(100)])
    assert measured.turnarounds_s.tolist() == pytest.approx([11.0 + number for number in range(100)])
    assert (measured.queue.value_at(5.0), measured.queue.value_at(60.5), measured.queue.value_at(110.0)) == (100, 49, 0)
    assert (measured.completed.value_at(10.9), measured.completed.value_at(60.5)) == (0.0, 50.0)
    assert [measured.held_s, measured.useful_s, measured.loading_s, measured.lost_s] == pytest.approx([110, 100, 10, 0])


def test_work_of_a_preempted_pilot_is_lost_and_waits_again() -> None:
    measured = measure_run(small_run())
    assert (measured.items, measured.unfinished, measured.queue.values[-1]) == (100.0, 0, 0.0)
    assert measured.lost_s == pytest.approx(0.5)  # the call started at 30 s and lost its device at 30.5 s
    assert measured.useful_s == pytest.approx(100.0)
    assert (measured.devices.value_at(20.0), measured.devices.value_at(40.0)) == (2.0, 1.0)
    assert measured.held_s == pytest.approx(30.5 + measured.ended_at)
    assert len(measured.waits_s) == len(measured.turnarounds_s) == 100


def test_run_that_is_cut_off_leaves_calls() -> None:
    run, _ = simulate(world(source(1), model()), calls(100), until_s=50.5)
    measured = measure_run(run.log, until_s=50.5)
    assert (measured.items, measured.unfinished, measured.ended_at) == (40.0, 60, 50.5)
    assert measured.held_s == pytest.approx(50.5)
    assert len(measured.waits_s) == 100  # 59 of 60 unfinished calls waited since the start; one call runs
    assert measured.waits_s[-59:].tolist() == [50.5] * 59


def test_repeated_call_end_counts_once_and_failed_items_do_not() -> None:
    log = EventLog()
    log.add_row(0.0, LoggedEvent.CALL_CAME, call=0, value=5.0)
    log.add_row(0.0, LoggedEvent.CALL_CAME, call=1, value=5.0)
    log.add_row(1.0, LoggedEvent.PILOT_CAME, pilot=0, value=2.0)
    log.add_row(1.5, LoggedEvent.PILOT_WENT, pilot=1, value=4.0)  # the job ended before its pilot connected
    log.add_row(2.0, LoggedEvent.CALL_BEGAN, call=0, library=1, pilot=0, value=5.0)
    # This end never reaches the manager.
    log.add_row(3.0, LoggedEvent.CALL_ENDED, call=0, library=1, pilot=0, value=5.0)
    log.add_row(3.0, LoggedEvent.LIBRARY_ENDED, library=1, pilot=0)
    log.add_row(3.0, LoggedEvent.PILOT_WENT, pilot=0, value=2.0)
    log.add_row(5.0, LoggedEvent.CALL_BEGAN, call=0, library=2, pilot=2, value=5.0)
    log.add_row(7.0, LoggedEvent.CALL_ENDED, call=0, library=2, pilot=2, value=5.0)
    log.add_row(8.0, LoggedEvent.CALL_FAILED, call=1, value=5.0)
    log.add_row(9.0, LoggedEvent.CALL_CAME, call=2, value=1.0)
    log.add_row(9.0, LoggedEvent.CALL_BEGAN, call=2, library=2, pilot=2, value=1.0)
    log.add_row(10.0, LoggedEvent.CALL_FAILED, call=2, value=1.0)
    measured = measure_run(log)
    assert (measured.calls, measured.items, measured.failed, measured.unfinished) == (3, 5.0, 2, 0)
    assert (measured.useful_s, measured.lost_s) == (1.0, 3.0)
    assert measured.waits_s.tolist() == [0.0, 2.0]
    assert measured.turnarounds_s.tolist() == [3.0]
    assert (min(measured.queue.values), measured.queue.values[-1]) == (0.0, 0.0)
    assert (max(measured.devices.values), measured.held_s, measured.ended_at) == (2.0, 4.0, 10.0)


def test_gang_is_measured_as_one_call_on_all_of_its_devices() -> None:
    log = EventLog()
    log.add_row(0.0, LoggedEvent.PILOT_CAME, pilot=0, value=8.0)
    for library in (1, 2):
        log.add_row(0.0, LoggedEvent.LIBRARY_STARTED, library=library, pilot=0, value=4.0)
        log.add_row(2.0, LoggedEvent.LIBRARY_READY, library=library, pilot=0, value=2.0)
    log.add_row(2.0, LoggedEvent.CALL_CAME, call=0, value=90.0)
    for at_s, ends in ((2.0, False), (22.0, True)):
        log.add_row(at_s, LoggedEvent.CALL_BEGAN, call=0, library=1, pilot=0, value=90.0)
        log.add_row(at_s, LoggedEvent.PART_BEGAN, call=0, library=2, pilot=0, value=1.0)
        if ends:
            log.add_row(27.0, LoggedEvent.CALL_ENDED, call=0, library=1, pilot=0, value=40.0)
            log.add_row(27.0, LoggedEvent.PART_ENDED, call=0, library=2, pilot=0, value=1.0)
        else:  # the checkpoint was taken at 8 s
            log.add_row(10.0, LoggedEvent.CALL_LEFT, call=0, library=1, pilot=0, value=6.0)
            log.add_row(11.0, LoggedEvent.PART_LEFT, call=0, library=2, pilot=0, value=6.0)
    measured = measure_run(log)
    assert (measured.calls, measured.items, measured.turnarounds_s.tolist()) == (1, 40.0, [25.0])
    assert measured.useful_s == 2 * 4 * (6.0 + 5.0)
    assert measured.lost_s == 4 * (2.0 + 3.0)
    assert measured.loading_s == 2 * 4 * 2.0
    assert [measured.queue.value_at(at_s) for at_s in (5.0, 15.0, 25.0)] == [0.0, 1.0, 0.0]


def test_deadlines_are_met_missed_or_open() -> None:
    log = EventLog()
    for call, due_at in enumerate((5.0, 5.0, 5.0, 50.0, 5.0)):
        log.add_row(0.0, LoggedEvent.CALL_CAME, call=call, value=1.0)
        log.add_row(0.0, LoggedEvent.CALL_DUE, call=call, value=due_at)
    log.add_row(0.0, LoggedEvent.CALL_CAME, call=5, value=1.0)
    for call, ended_at in ((0, 5.0), (1, 5.5)):
        log.add_row(1.0, LoggedEvent.CALL_BEGAN, call=call, library=call, pilot=0, value=1.0)
        log.add_row(ended_at, LoggedEvent.CALL_ENDED, call=call, library=call, pilot=0, value=1.0)
    log.add_row(6.0, LoggedEvent.CALL_FAILED, call=2, value=1.0)
    measured = measure_run(log, until_s=20.0)
    assert (measured.deadlines, measured.late, measured.violation_share) == (4, (1, 2, 4), 0.75)
    assert measure_run(EventLog()).violation_share is None


def test_token_figures_are_computed_from_the_log() -> None:
    log = EventLog()
    for call, (first, late) in enumerate([(0.1, -0.4), (0.2, 0.0), (0.9, 0.4)]):
        log.add_row(1.0, LoggedEvent.TOKEN_FIRST, call=call, value=first)
        log.add_row(1.0, LoggedEvent.TOKEN_LATE, call=call, value=late)
    log.add_row(2.0, LoggedEvent.TOKEN_LATE, call=3, value=float("inf"))  # the call failed, so its lateness is infinite
    found = compute_token_figures(log)
    assert (found.objectives, found.met, found.met_objective_share, found.ttft_p50_s) == (4, 2, 0.5, 0.2)


FRAMES = Delays(message_s=Duration(0.0005), frame_s=Duration(0.01), back_s=Duration(1.0), poll_s=Duration(0.0))


def run(place: World, arrivals: list[Arrival], *, counted: bool) -> tuple[Simulation, RunOutcome, Measures]:
    simulation = Simulation(place, arrivals, default_policies(), seed=3, counted=counted)
    outcome = simulation.run()
    return simulation, outcome, measure_run(simulation.log, until_s=outcome.ended_at)


def test_counted_log_gives_the_measures_of_the_full_log() -> None:
    losing = world(source([(0.0, 3), (40.5, 1), (80.0, 2)]), model(item_cv=0.5, load_cv=0.2))
    arrivals = calls(300, every_s=0.1)
    rows, outcome, each = run(losing, arrivals, counted=False)
    sums, same_outcome, counted = run(losing, arrivals, counted=True)
    assert outcome.rerun_calls, "no loss occurred, so half of this test checks nothing"
    assert (outcome.ended_at, outcome.calls, outcome.items) == (
        same_outcome.ended_at, same_outcome.calls, same_outcome.items,
    )  # fmt: skip
    for name in ("began_at", "ended_at", "calls", "failed", "unfinished", "items", "useful_s", "lost_s", "held_s"):
        assert getattr(counted, name) == pytest.approx(getattr(each, name)), name
    for name in ("waits_s", "turnarounds_s"):
        mine, exact = getattr(counted, name), getattr(each, name)
        assert list(mine) == pytest.approx(list(exact), rel=0.006, abs=1e-6), name
    for at_s in (30.0, 60.0, 110.0):  # counts are at most a second old, and few calls arrive per second
        assert counted.queue.value_at(at_s) == pytest.approx(each.queue.value_at(at_s), abs=6)
        assert counted.completed.value_at(at_s) == pytest.approx(each.completed.value_at(at_s), abs=6)
    assert len(sums.log) < len(rows.log)


def test_message_frames_reduce_manager_events_without_losing_calls() -> None:
    arrivals = [Arrival(20.0 + n * 0.0005, "llm") for n in range(4000)]
    quick = model(load_s=1.0, item_s=0.004)
    _, alone, _ = run(world(source(4), quick, delays=NOW), arrivals, counted=True)
    _, together, measured = run(world(source(4), quick, delays=FRAMES), arrivals, counted=True)
    assert together.calls == alone.calls == 4000
    assert together.core_events < alone.core_events / 3
    assert measured.turnarounds_s[0] >= 0.004 + 0.01  # each result waits for the other results of its frame

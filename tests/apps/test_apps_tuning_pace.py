import math

import pytest

from stoker.tuning.pace import IterationPace, Part, PartClock, TimeLeft, communication_share


def test_rest_is_bounded_by_the_longest_iteration_and_evaluation():
    pace = IterationPace(batch=16, evaluate_every=10)
    assert pace.time_left(100, devices=1) is None
    for seconds in (0.5, 0.75, 0.25):
        pace.add(seconds, devices=1)
    assert pace.time_left(100, devices=1) == TimeLeft(75.0, measured=True)
    pace.add_evaluation(2.0)
    pace.add_evaluation(3.0)
    assert pace.time_left(95, devices=1, allocation_s=7.0) == TimeLeft(7.0 + 10 * 3.0 + 95 * 0.75, measured=True)
    assert pace.time_left(0, devices=1) == TimeLeft(0.0, measured=True)


def test_other_device_counts_scale_by_the_largest_batch_share():
    pace = IterationPace(batch=16, evaluate_every=10)
    pace.add(1.0, devices=2, communication_s=0.2)
    four, three = pace.time_left(10, devices=4), pace.time_left(10, devices=3)
    assert four is not None
    assert three is not None
    assert not four.measured
    assert four.seconds == pytest.approx(10 * (0.8 * 4 / 8 + 0.2))
    assert three.seconds == pytest.approx(10 * (0.8 * 6 / 8 + 0.2))
    pace.add(2.0, devices=4)
    assert pace.time_left(10, devices=4) == TimeLeft(20.0, measured=True)


def test_single_slow_iteration_is_forgotten():
    pace = IterationPace(batch=1, evaluate_every=1)
    pace.add(60.0, devices=1)
    assert pace.longest_s(devices=1) == 60.0
    for _ in range(50):
        pace.add(1.0, devices=1)
    assert pace.longest_s(devices=1) == 1.0


def test_clock_continues_from_earlier_runs():
    clock = PartClock()
    with clock.time(Part.COMPUTE):
        sum(range(100_000))
    spent_s = clock.spent_s()
    assert spent_s["compute"] > 0
    assert math.isclose(sum(spent_s.values()), spent_s["compute"])
    later = PartClock()
    later.add_earlier_seconds({"compute": 3.0, "communication": 1.0, "of another version": 9.0})
    assert later.spent_s()["compute"] == 3.0
    assert communication_share(later.spent_s()) == 0.25
    assert communication_share({}) == 0.0

from __future__ import annotations

import pytest

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.fleet import Agenda, Fleet, Headroom, TargetTracking
from benchmarks.papers.arlo.queues import Served, serve
from benchmarks.papers.arlo.runtime_queues import RuntimeQueues
from benchmarks.papers.arlo.workload import Trace

SLO_S = 0.1


def fleet_of(short: int, long: int, agenda: Agenda) -> Fleet:
    fleet = Fleet(RuntimeQueues[int]([(100, 10), (200, 5)]), [[0.010] * 201, [0.020] * 201], agenda)
    fleet.start([short, long])
    return fleet


def every(period_s: float, *, until: float, tokens: int = 50) -> Trace:
    times = [period_s * number for number in range(int(until / period_s))]
    return Trace(times, [tokens] * len(times), [])


def test_headroom_adds_for_recent_work_and_releases_late() -> None:
    """200 requests/s keep four long instances busy, so the headroom needs five."""
    agenda, served = Agenda(), Served()
    fleet = fleet_of(0, 1, agenda)
    Headroom(fleet, agenda, least=1)
    busy = every(0.005, until=20.0)
    counts: list[int] = []
    for at in (0.5, 8.0, 15.0 + settings.HEADROOM_STAYS_S, 40.0 + 4 * settings.HEADROOM_STAYS_S):
        agenda.schedule(at, lambda _: counts.append(fleet.devices))
    quiet = [20.0 + number for number in range(200)]
    serve(Trace([*busy.times, *quiet], [150] * len(busy.times) + [50] * 200, []), fleet, agenda, served)
    assert counts == [1, 5, 5, 1]
    assert served.lost == 0


@pytest.mark.parametrize(("period_s", "grows"), [(0.018, True), (0.025, False)])
def test_target_tracking_adds_to_the_longest_runtime_near_the_goal(period_s: float, grows: bool) -> None:
    """An instance of the longest runtime answers 50 requests/s, so its queue grows at 55/s but not at 40/s."""
    agenda, served = Agenda(), Served()
    fleet = fleet_of(1, 1, agenda)
    trace = every(period_s, until=30.0, tokens=150)
    TargetTracking(trace, fleet, agenda, served.latencies, SLO_S, 2)
    serve(trace, fleet, agenda, served)
    assert fleet.counts[0] == 1
    assert (fleet.counts[1] > 1) == grows
    assert fleet.counts[1] <= 1 + 30 / settings.RECENT_S, "one in each window at most"


def test_target_tracking_releases_one_per_minute_at_a_low_tail() -> None:
    agenda, served = Agenda(), Served()
    fleet = fleet_of(3, 2, agenda)
    trace = every(0.1, until=400.0)
    TargetTracking(trace, fleet, agenda, served.latencies, SLO_S, 2)
    serve(trace, fleet, agenda, served)
    assert fleet.devices == 2
    assert fleet.device_s(400.0) == pytest.approx(5 * 60 + 4 * 60 + 3 * 60 + 2 * 220, abs=1.0)

from __future__ import annotations

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.fleet import Agenda, Fleet, Headroom
from benchmarks.papers.arlo.queues import Served, serve
from benchmarks.papers.arlo.runtime_queues import RuntimeQueues
from benchmarks.papers.arlo.workload import Trace


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

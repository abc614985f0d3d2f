from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import SYSTEMS, Case, Measures, simulate
from benchmarks.papers.arlo.dispatch import runtime_queues
from benchmarks.papers.arlo.fleet import Fleet, serve
from benchmarks.papers.arlo.workload import LatencyProfile, Trace, Workload, make_trace

SHORT_S, LONG_S = 0.010, 0.040


def fleet_of(counts: Sequence[int]) -> Fleet:
    """Return a fleet with these numbers of instances for runtimes of 100 and 200 tokens."""
    rows = [[SHORT_S] * 201, [LONG_S] * 201]
    fleet = Fleet(runtime_queues([(100, 40), (200, 10)]), rows)
    fleet.start(counts)
    return fleet


def milliseconds(
    times: list[float], lengths: list[int], counts: Sequence[int], *, occupies: bool = False
) -> list[float]:
    fleet = fleet_of(counts)
    assert serve(Trace(times, lengths, []), fleet, occupies=occupies) == 0
    return [round(1000 * latency, 3) for latency in fleet.latencies]


def test_requests_queue_at_the_least_busy_instance() -> None:
    """Two instances serve short requests, so request 3 waits for request 1; the long request has its own instance."""
    assert milliseconds([0.0, 0.001, 0.002, 0.003, 0.050], [50, 50, 50, 150, 50], [2, 1]) == [
        10.8, 10.8, 18.8, 40.8, 10.8
    ]  # fmt: skip


def test_replaced_instance_drains_and_returns_a_second_later() -> None:
    fleet = fleet_of([1, 1])
    fleet.agenda.schedule(0.005, lambda now: fleet.replace(0, 1, now, then=lambda at: back.append(at)))
    back: list[float] = []
    lost = serve(Trace([0.0, 0.0, 0.006, 2.0], [50, 50, 50, 150], []), fleet)
    assert [round(1000 * each, 1) for each in fleet.latencies] == [10.8, 20.8, 40.8, 40.8], "then only the long one"
    assert back == [pytest.approx(0.020 + settings.REPLACEMENT_S)]
    assert (lost, fleet.serving(0), len(fleet.serving(1))) == (0, [], 2)


def small(system: str, *, seed: int = 7, least: int = 0, for_s: float = 2.0) -> Measures:
    """Run six devices under a load that keeps the devices of Arlo mostly busy."""
    workload = Workload(1200.0, for_s, seed, "bursty")
    trace = make_trace(workload, [30, 60, 90, 100, 120, 500], [100, 200, 300, 400])
    return simulate(Case(system, LatencyProfile("base"), 6, workload, least=least), trace)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_loses_requests_or_replaces_two_instances_at_once(system: str) -> None:
    for least in (0, 3):
        found = small(system, least=least)
        assert found.requests > 1500
        assert found.lost == 0
        assert found.most_out <= found.at_once == 1
        assert found.p98_ms >= found.p50_ms > 1000 * (LatencyProfile("base").static_s(64) + settings.OVERHEAD_S) - 1e-6
        assert found.devices == pytest.approx(6.0) if not least else found.devices >= 3


def test_padding_to_the_maximum_length_gives_the_published_latency() -> None:
    workload = Workload(100.0, 20.0, 1)
    trace = make_trace(workload, [10], [10])
    found = simulate(Case("st", LatencyProfile("base"), 6, workload), trace)
    assert found.p50_ms == pytest.approx(4.86 + 0.8)
    assert simulate(Case("arlo", LatencyProfile("base"), 6, workload), trace).p50_ms == pytest.approx(
        4.86 / 4.22 + 0.8, abs=1e-4
    )
    assert small("st").late > 0.1 > 0 == small("arlo").late


def test_arlo_shifts_devices_to_the_requested_lengths() -> None:
    """Earlier requests have 500 tokens; requests of this run have 60."""
    workload = Workload(1200.0, 20.0, 1)
    trace = make_trace(workload, [60], [60])
    moved = Trace(trace.times, trace.lengths, [500] * 100)
    found = simulate(Case("arlo", LatencyProfile("base"), 6, workload), moved)
    assert found.replaced >= 3
    assert simulate(Case("arlo", LatencyProfile("base"), 6, workload), trace).replaced == 0

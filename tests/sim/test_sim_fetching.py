"""Objects that reach simulated pilots: from whom they came, and that nobody gives what he has not got."""

from __future__ import annotations

import pytest
from sim.worlds import calls, model, simulate, source, world

from stoker.manager.sim.log import Happened
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import Files, Links, Preempt, Rate
from stoker.site import Size

GB = 1_000_000_000
FILES = (Files("weights", Size(10 * GB)),)


def moved(run: Simulation) -> tuple[float, float]:
    """Gigabytes out of the shared storage, and from peers."""
    return tuple(
        sum(value for each, value in zip(run.log.what, run.log.value, strict=True) if each == what) / GB
        for what in (Happened.BYTES_SHARED, Happened.BYTES_PEER)
    )  # type: ignore[return-value]


def test_one_who_follows_is_done_when_the_one_who_reads_is() -> None:
    links = Links(shared=Rate(1.0 * GB), network=Rate(10.0 * GB))
    run, outcome = simulate(world(source(2), model(load_s=0.0, files=FILES), links=links), calls(2, items=5))
    assert outcome.ended_at == pytest.approx(10.0 + 5.0)
    assert moved(run) == pytest.approx((10.0, 10.0))


def test_what_a_lost_reader_had_not_read_yet_must_come_from_elsewhere() -> None:
    links = Links(shared=Rate(1.0 * GB), network=Rate(10.0 * GB))
    pool = source([(0.0, 2), (4.0, 1)], preempt=Preempt.OLDEST)
    run, outcome = simulate(world(pool, model(load_s=0.0, files=FILES), links=links), calls(2, items=5))
    assert run.client.done
    # The first had read 4 GB of 10 and given them on; the other one reads what is left.
    assert outcome.ended_at == pytest.approx(4.0 + 6.0 + 2 * 5.0)
    assert moved(run) == pytest.approx((4.0 + 6.0, 4.0))


def test_one_who_follows_and_is_lost_costs_nobody_anything() -> None:
    links = Links(shared=Rate(1.0 * GB), network=Rate(10.0 * GB))
    pool = source([(0.0, 2), (4.0, 1)], preempt=Preempt.NEWEST)
    run, outcome = simulate(world(pool, model(load_s=0.0, files=FILES), links=links), calls(2, items=5))
    assert outcome.ended_at == pytest.approx(10.0 + 2 * 5.0)
    assert moved(run)[0] == pytest.approx(10.0)


def test_bytes_over_links_that_cost_nothing_are_counted_where_they_came_from() -> None:
    links = Links(shared=Rate(1.0 * GB))
    run, _ = simulate(world(source(3), model(load_s=0.0, files=FILES), links=links), calls(3, items=5))
    assert moved(run) == pytest.approx((10.0, 20.0))

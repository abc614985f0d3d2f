from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.worlds import calls, model, simulate, source, world

from stoker.manager.sim.agenda import Agenda
from stoker.manager.sim.flows import Network, SharedLink, Transfer
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import Files, Links, Preempt, Rate
from stoker.site import Size


class Clock:
    """A simulated network that records the arrival time of each transfer."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.arrived: dict[str, float] = {}

    def send(self, name: str, size: float, *paths: tuple[SharedLink, ...], at: float = 0.0) -> None:
        def done() -> None:
            self.arrived[name] = self.agenda.now

        self.agenda.schedule_at(at, lambda: self.network.start(size, paths, done))

    def run(self) -> dict[str, float]:
        while self.agenda.run_entries(1):
            pass
        return self.arrived


def test_two_transfers_share_a_link_and_the_longer_gets_the_excess() -> None:
    clock, link = Clock(), SharedLink("a", 10.0)
    clock.send("short", 50, (link,))
    clock.send("long", 100, (link,))
    assert clock.run() == pytest.approx({"short": 10.0, "long": 15.0})


def test_transfer_limited_elsewhere_leaves_bandwidth_to_others() -> None:
    clock, wide, narrow = Clock(), SharedLink("wide", 10.0), SharedLink("narrow", 2.0)
    clock.send("held", 20, (wide, narrow))
    clock.send("free", 80, (wide,))
    assert clock.run() == pytest.approx({"held": 10.0, "free": 10.0})


def test_rerouted_transfer_keeps_its_received_bytes() -> None:
    clock, slow, fast = Clock(), SharedLink("slow", 1.0), SharedLink("fast", 9.0)
    arrived: list[float] = []
    transfer = clock.network.start(100, [(slow,)], lambda: arrived.append(clock.agenda.now))
    clock.agenda.schedule_at(10.0, lambda: clock.network.reroute(transfer, [(fast,)]))
    clock.run()
    assert arrived == [pytest.approx(20.0)]
    assert transfer.moved == {0: pytest.approx(90.0)}


def test_stopped_transfer_never_arrives_and_uses_no_bandwidth() -> None:
    clock, link = Clock(), SharedLink("a", 10.0)
    clock.send("stays", 100, (link,))
    stopped = clock.network.start(1000, [(link,)], lambda: pytest.fail("it was stopped"))
    clock.agenda.schedule_at(4.0, lambda: clock.network.stop(stopped))
    assert clock.run() == pytest.approx({"stays": 12.0})


@given(
    rates=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=5),
    paths=st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_no_link_is_overfull_and_each_flow_crosses_a_full_link(rates: list[float], paths: list[set[int]]) -> None:
    agenda = Agenda()
    network, links = Network(agenda), [SharedLink(str(n), rate) for n, rate in enumerate(rates)]
    sent: list[tuple[Transfer, list[SharedLink]]] = []
    for path in paths:
        mine = [links[n % len(links)] for n in sorted({n % len(links) for n in path})]
        sent.append((network.start(1e9, [mine], lambda: None), mine))
    agenda.run_entries(1)  # the network computes the share of each flow
    rate = {transfer: sum(flow.rate for flow in transfer.flows) for transfer, _ in sent}
    used = {link: sum(rate[transfer] for transfer, mine in sent if link in mine) for link in links}
    for link in links:
        assert used[link] <= link.rate * (1 + 1e-9)
    for transfer, mine in sent:  # a share is fair if no other flow on a full link of the path has a larger share
        assert any(
            used[link] >= link.rate * (1 - 1e-9)
            and rate[transfer] >= max(rate[other] for other, theirs in sent if link in theirs) * (1 - 1e-9)
            for link in mine
        )


GB = 1_000_000_000
FILES = (Files("weights", Size(10 * GB)),)


def moved(run: Simulation) -> tuple[float, float]:
    return tuple(
        sum(value for each, value in zip(run.log.what, run.log.value, strict=True) if each == what) / GB
        for what in (LoggedEvent.BYTES_SHARED, LoggedEvent.BYTES_PEER)
    )


def test_pilot_that_copies_from_a_reading_pilot_finishes_with_it() -> None:
    links = Links(shared=Rate(1.0 * GB), network=Rate(10.0 * GB))
    run, outcome = simulate(world(source(2), model(load_s=0.0, files=FILES), links=links), calls(2, items=5))
    assert outcome.ended_at == pytest.approx(10.0 + 5.0)
    assert moved(run) == pytest.approx((10.0, 10.0))


def test_bytes_unread_by_a_lost_pilot_are_read_by_another_pilot() -> None:
    links = Links(shared=Rate(1.0 * GB), network=Rate(10.0 * GB))
    pool = source([(0.0, 2), (4.0, 1)], preempt=Preempt.OLDEST)
    run, outcome = simulate(world(pool, model(load_s=0.0, files=FILES), links=links), calls(2, items=5))
    assert run.client.is_done
    # The lost pilot had read 4 of 10 GB and forwarded them; the other pilot reads the remaining 6 GB.
    assert outcome.ended_at == pytest.approx(4.0 + 6.0 + 2 * 5.0)
    assert moved(run) == pytest.approx((4.0 + 6.0, 4.0))


def test_bytes_over_free_links_are_counted_by_source() -> None:
    links = Links(shared=Rate(1.0 * GB))
    run, _ = simulate(world(source(3), model(load_s=0.0, files=FILES), links=links), calls(3, items=5))
    assert moved(run) == pytest.approx((10.0, 20.0))

"""Arlo's allocation against integer programs that HiGHS solves (`scipy.optimize.milp`).

The problem is not linear, so it is written in two other ways, each with costs of its own by equations 1, 5 and 6:

- *Paths.* A node is a runtime, the devices that the shorter ones have had, and what they have demoted; an arc is a
  number of instances. The program finds the cheapest flow of one unit. It is exact with demotion, for problems whose
  nodes can be listed.
- *Choices.* One binary variable for each runtime and number of instances, where no runtime may demote. It is exact
  where the optimum demotes nothing, and never below it else. It covers the sizes of Table 2.
"""

from __future__ import annotations

import random
from math import ceil, inf

import pytest

from stoker.manager.policies.arlo.allocation import LatencyTable, RuntimeDemand, allocate

numpy = pytest.importorskip("numpy", reason="numpy is not installed: pip install stoker[test]")
optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed: pip install stoker[test]")

Problem = list[tuple[int, int, float]]
"""Of each runtime: its requests in one period, the capacity of an instance, the seconds of one request."""


def problem(rng: random.Random, *, devices: int, runtimes: int, load: float, least: float = 0.0) -> Problem:
    """Requests for so much of the devices, in runtimes that get slower as they get longer; a runtime's share of the
    work may be small, but not below `least` in relation to the largest."""
    objective_s = 0.15
    shares = [least + (1 - least) * rng.random() ** 3 for _ in range(runtimes)]
    found = []
    for number, share in enumerate(shares):
        request_s = objective_s * (number + 2) / (runtimes + 1) / 20
        requests = int(load * devices * objective_s / request_s * share / sum(shares))
        found.append((requests, int(objective_s / request_s), request_s))
    return found


def demands(of: Problem) -> list[RuntimeDemand]:
    return [RuntimeDemand(q, m, LatencyTable.one_by_one(s, capacity=m)) for q, m, s in of]


def cost(served: int, count: int, request_s: float) -> float:
    """What `served` requests wait and take at so many instances, which answer one after the other (eqs 1 and 6)."""
    if served == 0:
        return 0.0
    return inf if count == 0 else served * request_s * (max(1.0, served / count) + 1) / 2


def cheapest_path(devices: int, of: Problem) -> float:
    """The least cost over all paths: HiGHS sends one unit from the first node to the last."""
    nodes: dict[tuple[int, int, int], int] = {(0, 0, 0): 0}
    arcs: list[tuple[int, int, float]] = []
    layer = [(0, 0, 0)]
    for number, (requests, capacity, request_s) in enumerate(of):
        is_last = number == len(of) - 1
        following: dict[tuple[int, int, int], None] = {}
        for node in layer:
            _, used, demoted = node
            wanted = demoted + requests
            for count in range(max(requests // capacity, int(is_last)), devices - used + 1):
                served = wanted if is_last else min(wanted, count * capacity)
                if (is_last and used + count != devices) or cost(served, count, request_s) == inf:
                    continue
                to = (number + 1, used + count, wanted - served)
                nodes.setdefault(to, len(nodes))
                arcs.append((nodes[node], nodes[to], cost(served, count, request_s)))
                following[to] = None
        layer = list(following)
    return flow(len(nodes), arcs, nodes[len(of), devices, 0])


def flow(nodes: int, arcs: list[tuple[int, int, float]], sink: int) -> float:
    balance = numpy.zeros((nodes, len(arcs)))
    for at, (tail, head, _) in enumerate(arcs):
        balance[tail, at] += 1
        balance[head, at] -= 1
    wanted = numpy.zeros(nodes)
    wanted[0], wanted[sink] = 1, -1
    found = optimize.milp(
        [each for _, _, each in arcs],
        constraints=optimize.LinearConstraint(balance, wanted, wanted),
        integrality=numpy.ones(len(arcs)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(found.fun)


def without_demotion(devices: int, of: Problem) -> float:
    """The least cost where each runtime has the instances that its own requests need in time."""
    choices = [
        (number, count, cost(requests, count, request_s))
        for number, (requests, capacity, request_s) in enumerate(of)
        for count in range(max(ceil(requests / capacity), int(number == len(of) - 1)), devices + 1)
    ]
    one_each = numpy.array([[float(number == row) for number, _, _ in choices] for row in range(len(of))])
    counts = numpy.array([[float(count) for _, count, _ in choices]])
    found = optimize.milp(
        [each for _, _, each in choices],
        constraints=[optimize.LinearConstraint(one_each, 1, 1), optimize.LinearConstraint(counts, devices, devices)],
        integrality=numpy.ones(len(choices)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.success, found.message
    return float(found.fun)


def demotes(instances: tuple[int, ...], of: Problem) -> bool:
    shorter = list(zip(instances, of, strict=True))[:-1]
    return any(requests > count * capacity for count, (requests, capacity, _) in shorter)


def test_the_cheapest_of_all_paths_costs_as_much_with_demotion_too() -> None:
    rng = random.Random(1)
    demoting = 0
    for _ in range(25):
        devices, runtimes = rng.randint(3, 12), rng.randint(2, 4)
        of = problem(rng, devices=devices, runtimes=runtimes, load=rng.uniform(0.4, 0.95))
        if sum(requests // capacity for requests, capacity, _ in of[:-1]) + max(1, of[-1][0] // of[-1][1]) > devices:
            continue
        found = allocate(devices, demands(of))
        assert found.latency_s == pytest.approx(cheapest_path(devices, of), rel=1e-6)
        demoting += demotes(found.instances, of)
    assert demoting >= 3, "some of the optima demote requests"


@pytest.mark.parametrize(("devices", "runtimes"), [(50, 8), (200, 12)])
def test_choices_without_demotion_cost_as_much_where_the_optimum_demotes_nothing(devices: int, runtimes: int) -> None:
    rng = random.Random(devices)
    equal = 0
    for _ in range(4):
        of = problem(rng, devices=devices, runtimes=runtimes, load=rng.uniform(0.3, 0.6), least=0.3)
        found, restricted = allocate(devices, demands(of)), without_demotion(devices, of)
        if demotes(found.instances, of):
            assert found.latency_s <= restricted * (1 + 1e-6)
        else:
            assert found.latency_s == pytest.approx(restricted, rel=1e-6)
            equal += 1
    assert equal >= 2, "most of these optima demote nothing"

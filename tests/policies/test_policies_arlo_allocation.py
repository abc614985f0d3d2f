"""Arlo's allocation of devices to runtimes against all that there is to choose from. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.manager.policies.arlo.allocation import (
    LatencyTable,
    NotEnoughDevicesError,
    RuntimeDemand,
    allocate,
    cost_of,
)


def demand(requests: float, *, request_s: float, objective_s: float = 0.15) -> RuntimeDemand:
    capacity = max(1, int(objective_s / request_s))
    return RuntimeDemand(requests, capacity, LatencyTable.one_by_one(request_s, capacity=capacity))


def every(devices: int, runtimes: Sequence[RuntimeDemand]) -> list[tuple[int, ...]]:
    """Each allocation that equations 2, 3 and 7 allow."""
    least = [runtime.least for runtime in runtimes]
    least[-1] = max(1, least[-1])
    counts = (range(each, devices + 1) for each in least)
    return [chosen for chosen in itertools.product(*counts) if sum(chosen) == devices]


@st.composite
def curved(draw: st.DrawFn) -> LatencyTable:
    """A table that is not convex, as batches make it."""
    steps = draw(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.0, 0.05)), min_size=1, max_size=4))
    points = [(1.0, draw(st.floats(0.001, 0.02)))]
    for requests, seconds in steps:
        points.append((points[-1][0] + requests, points[-1][1] + seconds))
    return LatencyTable(tuple(points))


@st.composite
def demands(draw: st.DrawFn) -> list[RuntimeDemand]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        request_s = 0.001 * (number + 1) * draw(st.floats(0.8, 1.3))
        plain = demand(draw(st.floats(0, 300)), request_s=request_s)
        table = draw(st.one_of(st.just(plain.latency), curved()))
        found.append(RuntimeDemand(plain.requests, plain.capacity, table))
    return found


@given(st.integers(1, 9), demands())
def test_nothing_that_is_allowed_costs_less(devices: int, runtimes: list[RuntimeDemand]) -> None:
    allowed = every(devices, runtimes)
    if not allowed:
        with pytest.raises(NotEnoughDevicesError):
            allocate(devices, runtimes)
        return
    found = allocate(devices, runtimes)
    assert found.instances in allowed
    assert found.latency_s == pytest.approx(cost_of(found.instances, runtimes))
    assert found.latency_s <= min(cost_of(each, runtimes) for each in allowed) * (1 + 1e-6)


def test_requests_that_fit_nowhere_else_are_demoted() -> None:
    """With an instance of each, what is too much for the short one waits for the long one (eqs 4, 5)."""
    short, long = demand(160, request_s=0.001), demand(0, request_s=0.002)
    assert cost_of((1, 1), [short, long]) == pytest.approx(150 * 0.0755 + 10 * 0.011)
    assert allocate(2, [short, long]).instances == (1, 1)


def test_the_longest_runtime_always_has_an_instance() -> None:
    assert allocate(5, [demand(300, request_s=0.001), demand(0, request_s=0.004)]).instances == (4, 1)


def test_with_too_few_devices_it_says_how_many_are_filled() -> None:
    with pytest.raises(NotEnoughDevicesError, match="fill 3 devices, and there are 2") as raised:
        allocate(2, [demand(320, request_s=0.001), demand(0, request_s=0.004)])
    assert raised.value.needed == 3


def test_a_latency_table_is_linear_between_its_points_and_beyond_them() -> None:
    table = LatencyTable(((1, 1.0), (3, 2.0), (5, 5.0)))
    assert [table.mean_s(requests) for requests in (0, 1, 2, 3, 4, 5, 7)] == [1, 1, 1.5, 2, 3.5, 5, 8]
    assert (table.is_convex, LatencyTable(((1, 1.0), (2, 3.0), (3, 4.0))).is_convex) == (True, False)
    for points in ((), ((1, 2.0), (1, 3.0)), ((1, 2.0), (2, 1.0))):
        with pytest.raises(ValueError, match="rising points"):
            LatencyTable(points)

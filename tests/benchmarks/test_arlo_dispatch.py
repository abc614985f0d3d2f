"""Arlo's evaluation: which instance each strategy takes, on the paper's examples and against a plain search."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.arlo.dispatch import (
    BucketDispatcher,
    Dispatcher,
    LoadBuckets,
    inter_groups_greedy,
    pack_any_runtime,
    pack_shortest_runtime,
)
from stoker.manager.policies.arlo.runtime_queues import RuntimeQueues

FIGURE_4 = ((128, 80, [79, 78]), (256, 40, [28]), (512, 20, [6]))
FIGURE_5 = ((128, 80, [70]), (256, 60, [56, 54]), (384, 48, [30, 28]), (512, 40, [5]))
"""Levels: length, capacity, outstanding requests of each instance."""

Levels = Sequence[tuple[int, int, list[int]]]
STRATEGIES = {"ig": inter_groups_greedy, "any": pack_any_runtime, "shortest": pack_shortest_runtime}


def loaded(strategy: str, levels: Levels) -> Dispatcher:
    """Instances with these loads, numbered in their order from 0 on."""
    runtimes = [(length, capacity) for length, capacity, _ in levels]
    loads = [(runtime, load) for runtime, (_, _, several) in enumerate(levels) for load in several]
    if strategy in STRATEGIES:
        packed = BucketDispatcher(runtimes, STRATEGIES[strategy])
        for instance, (runtime, load) in enumerate(loads):
            packed.add(instance, runtime)
            packed._move(instance, 0, load)
        return packed
    queues = RuntimeQueues[int](runtimes, peeked=1 if strategy == "ilb" else 6)
    for instance, (runtime, load) in enumerate(loads):
        queues.add(instance, runtime)
        queues._levels[runtime].set(instance, load)
    return queues


def late_in_figure_4(queues: Dispatcher) -> int:
    """Eight requests of less than 128 tokens, then 14 of more than 256: those given to an instance that was full."""
    capacities = {0: 80, 1: 80, 2: 40, 3: 20}
    late = 0
    for tokens in [100] * 8 + [400] * 14:
        instance = queues.take(tokens)
        late += queues.load(instance) > capacities[instance]
    return late


def test_figure_4_the_ideal_runtime_and_the_least_busy_instance_are_both_late() -> None:
    assert late_in_figure_4(loaded("ilb", FIGURE_4)) == 5
    assert late_in_figure_4(loaded("ig", FIGURE_4)) == 8


def test_figure_4_with_five_of_the_first_eight_at_the_256_runtime_no_request_is_late() -> None:
    queues = loaded("ilb", FIGURE_4)
    late = 0
    for tokens, capacity in [(100, 80)] * 3 + [(200, 40)] * 5 + [(400, 20)] * 14:
        late += queues.load(queues.take(tokens)) > capacity
    assert late == 0
    assert [queues.load(instance) for instance in range(4)] == [80, 80, 33, 20]


def test_figure_4_algorithm_1_with_the_settings_of_the_paper_demotes_three_and_five() -> None:
    """0.85 x 0.9 x 40 is 30.6, so GPU2 takes three and GPU3 five of the first eight: five of the latecomers are late.
    With a threshold of 0.99 it does what the paper calls interesting: all are in time."""
    queues = loaded("rs", FIGURE_4)
    assert late_in_figure_4(queues) == 5
    assert [queues.load(instance) for instance in range(4)] == [79, 78, 31, 25]
    patient = RuntimeQueues[int]([(128, 80), (256, 40), (512, 20)], threshold=0.99)
    for instance, (runtime, load) in enumerate([(0, 79), (0, 78), (1, 28), (2, 6)]):
        patient.add(instance, runtime)
        patient._levels[runtime].set(instance, load)
    assert late_in_figure_4(patient) == 0
    assert [patient.load(instance) for instance in range(4)] == [80, 80, 33, 20]


@pytest.mark.parametrize(
    ("strategy", "instance"),
    [
        ("rs", 4),  # Q3's head, as the paper says: 28/48 is under 0.765, and 54/60 not under 0.85
        ("ilb", 2),  # the least busy one of Q2
        ("ig", 5),  # five requests
        ("any", 1),  # 56/60 is the fullest that has room
        ("shortest", 5),  # no instance has room for a second request, and 5/40 is the least full
    ],
)
def test_figure_5_what_each_strategy_does_with_a_request_of_length_200(strategy: str, instance: int) -> None:
    assert loaded(strategy, FIGURE_5).take(200) == instance


def test_packing_fills_an_instance_to_its_capacity_and_no_further() -> None:
    full = ((128, 4, [3, 0]), (512, 3, [0]))
    queues = loaded("any", full)
    assert [queues.take(100) for _ in range(8)] == [0, 1, 1, 1, 1, 2, 2, 2]
    short = loaded("shortest", ((128, 4, [1, 0]), (512, 3, [0])))
    assert [short.take(100) for _ in range(6)] == [0, 1, 1, 2, 2, 1]


def test_buckets_find_what_a_plain_search_finds() -> None:
    rng = random.Random(3)
    buckets, loads = LoadBuckets(), dict[int, int]()
    for step in range(3000):
        if not loads or rng.random() < 0.3:
            loads[step] = rng.randrange(12)
            buckets.put(step, loads[step])
        else:
            gone = rng.choice(list(loads))
            buckets.drop(gone, loads.pop(gone))
        limit = rng.randrange(14)
        below = [load for load in loads.values() if load < limit]
        assert buckets.least() == min(loads.values(), default=-1)
        assert buckets.greatest_below(limit) == max(below, default=-1)
        if loads:
            assert loads[buckets.one_of(buckets.least())] == buckets.least()

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.papers.arlo.dispatch import (
    Dispatcher,
    LoadBuckets,
    dispatch_outcome,
    inter_groups_greedy,
    pack_any_runtime,
    pack_shortest_runtime,
    runtime_queues,
    strategies,
)

FIGURE_5 = ((128, 80, [70]), (256, 60, [56, 54]), (384, 48, [30, 28]), (512, 40, [5]))
"""Levels of Figure 5: length in tokens, capacity, outstanding requests of each instance."""

Levels = Sequence[tuple[int, int, list[int]]]
STRATEGIES = {"ig": inter_groups_greedy, "any": pack_any_runtime, "shortest": pack_shortest_runtime}


def loaded(strategy: str, levels: Levels) -> Dispatcher:
    runtimes = [(length, capacity) for length, capacity, _ in levels]
    loads = [(runtime, load) for runtime, (_, _, several) in enumerate(levels) for load in several]
    if strategy in STRATEGIES:
        queues = Dispatcher(runtimes, LoadBuckets, STRATEGIES[strategy])
    else:
        queues = runtime_queues(runtimes, peeked=1 if strategy == "ilb" else 6)
    for instance, (runtime, load) in enumerate(loads):
        queues.add(instance, runtime)
        queues._levels[runtime].set(instance, load)
    return queues


def test_dispatch_strategies_reproduce_figure_4_of_the_paper() -> None:
    """As in the paper, ILB makes five requests late and IG eight requests. Algorithm 1 sends three requests to GPU2,
    whose limit is 0.85 x 0.9 x 40 = 30.6.
    """
    found = {name: dispatch_outcome(each) for name, each in strategies()}
    assert found == {
        "ILB": ([4, 4, 0, 0], 5),
        "IG": ([0, 0, 0, 8], 8),
        "Algorithm 1, threshold 0.85": ([0, 0, 3, 5], 5),
        "Algorithm 1, threshold 0.99": ([2, 1, 5, 0], 0),
    }


@pytest.mark.parametrize(
    ("strategy", "instance"),
    [
        ("rs", 4),  # the head of Q3, as in the paper: 54/60 in Q2 is over 0.85, but 28/48 is below 0.765
        ("ilb", 2),  # the least loaded instance of Q2, the shortest that fits
        ("ig", 5),  # the instance with the fewest requests: 5
        ("any", 1),  # the busiest instance with free capacity: 56/60
        ("shortest", 5),  # every instance has two or more requests, so the lowest load is chosen: 5/40
    ],
)
def test_each_dispatch_strategy_chooses_its_instance_in_figure_5(strategy: str, instance: int) -> None:
    assert loaded(strategy, FIGURE_5).take(200) == instance

"""Figure 4, the paper's example of what is difficult about dispatching, for each strategy.

GPU0 and GPU1 take up to 128 tokens and have 78 and 79 of 80 requests that they answer in time; GPU2 takes up to 256 and
has 28 of 40; GPU3 takes up to 512 and has 6 of 20. Eight requests of less than 128 tokens arrive, and a moment later 14
of more than 256. A request is late if it is given to an instance that was full.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.papers.arlo.dispatch import BucketDispatcher, Dispatcher, inter_groups_greedy
from stoker.manager.policies.arlo.runtime_queues import THRESHOLD, RuntimeQueues

RUNTIMES = ((128, 80), (256, 40), (512, 20))
GPUS = ((1, 0, 79), (0, 0, 78), (2, 1, 28), (3, 2, 6))
"""GPU, runtime, requests that it has. GPU1 comes first, so that the requests before the example fill GPU0 second."""
FIRST, LATER = (100,) * 8, (400,) * 14
PATIENT = 0.99
"""A threshold at which Algorithm 1 demotes as the paper would have it."""


class Outcome(msgspec.Struct, frozen=True):
    """How many of the first eight requests each GPU got, and how many of all requests are late."""

    first: tuple[int, int, int, int]
    late: int


def strategies() -> Iterator[tuple[str, Dispatcher]]:
    """By name."""
    yield "ILB", RuntimeQueues[int](RUNTIMES, peeked=1)
    yield "IG", BucketDispatcher(RUNTIMES, inter_groups_greedy)
    yield f"Algorithm 1, threshold {THRESHOLD}", RuntimeQueues[int](RUNTIMES)
    yield f"Algorithm 1, threshold {PATIENT}", RuntimeQueues[int](RUNTIMES, threshold=PATIENT)


def outcome(dispatcher: Dispatcher) -> Outcome:
    """What comes of the example."""
    for gpu, runtime, has in GPUS:
        dispatcher.add(gpu, runtime)
        taken = {dispatcher.take(RUNTIMES[runtime][0]) for _ in range(has)}
        if taken != {gpu}:
            raise ValueError(f"the requests before the example went to {taken}, not to {gpu} alone")
    capacities = {gpu: RUNTIMES[runtime][1] for gpu, runtime, _ in GPUS}
    got, late = [0, 0, 0, 0], 0
    for number, tokens in enumerate((*FIRST, *LATER)):
        gpu = dispatcher.take(tokens)
        late += dispatcher.load(gpu) > capacities[gpu]
        got[gpu] += number < len(FIRST)
    return Outcome((got[0], got[1], got[2], got[3]), late)

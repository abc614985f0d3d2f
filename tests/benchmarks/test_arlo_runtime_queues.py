from __future__ import annotations

import random

from policies.test_policies_arlo import LENGTHS, Family, warmed

from benchmarks.papers.arlo.dispatch import Dispatcher, runtime_queues


def loaded(*levels: tuple[int, int, list[int]]) -> Dispatcher:
    """Return levels by length, capacity and outstanding requests of each instance (q1a, q1b, q2a, ...)."""
    queues = runtime_queues([(length, capacity) for length, capacity, _ in levels])
    for number, (_, _, loads) in enumerate(levels):
        for letter, load in zip("abcdef", loads, strict=False):
            queues.add(f"q{number + 1}{letter}", number)
            queues._levels[number].set(f"q{number + 1}{letter}", load)
    return queues


def test_at_most_six_runtime_queues_are_examined_for_a_request() -> None:
    levels = [(64 * (number + 1), 10, [10]) for number in range(6)]
    assert loaded(*levels, (448, 10, [0])).take(10) == "q1a"
    assert loaded(*levels[1:], (448, 10, [0])).take(10) == "q6a"


def test_session_and_evaluation_choose_the_same_runtime() -> None:
    t, demoted = warmed(Family(), devices=7), 0
    for seed in range(10):
        chance = random.Random(seed)
        runtime_of = {x.id: LENGTHS.index(x.context.recipe.longest_input) for x in t.core.state.libraries.values()}
        queues = runtime_queues([(64, 40), (128, 20), (256, 10)])
        for id, runtime in runtime_of.items():
            queues.add(id, runtime)
        weights = [chance.random() for _ in LENGTHS]
        for number in range(200):
            tokens = chance.choices(LENGTHS, weights)[0]
            t.ask(f"{seed}-{number}", tokens=tokens)
            holder = t.core.state.calls[t.ids[f"{seed}-{number}"]].holder
            if holder is None:
                break  # A session lets a call wait if all levels are full.
            chosen = runtime_of[queues.take(tokens)]
            assert LENGTHS[chosen] == holder.context.recipe.longest_input
            level = [id for id, runtime in runtime_of.items() if runtime == chosen]
            assert sorted(t.core.state.libraries[id].load for id in level) == sorted(map(queues.load, level))
            demoted += LENGTHS[chosen] > tokens
        t.run()
        t.run(until=t.now + 200.0)
    assert demoted > 20
    t.check()

from __future__ import annotations

from benchmarks.tuning.prompt_bank import judge_lookup


def test_regret_is_measured_against_the_best_prompt() -> None:
    losses = [1.0, 1.5, 2.0, 3.0, 4.0]
    assert judge_lookup([1.5, 2.0], losses, scores=3) == {"scores": 3, "regret": 0.75, "part": 0.75, "rank": 2.5}
    assert judge_lookup([1.0], losses, scores=2)["regret"] == 0.0

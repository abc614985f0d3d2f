from __future__ import annotations

import pytest

from benchmarks.tuning.prompt_bank import judge_lookup, table_of


def found(scores: list[int]) -> dict[str, object]:
    def of(count: int) -> dict[str, float]:
        return {"scores": count, "regret": 0.1, "part": 0.05, "rank": 7}

    return {
        "machine": "here", "candidates": 3000, "clusters": 50, "largest": 500, "samples": 4, "tasks": ["claims"],
        "kinds": {
            "two layers (the paper's)": [of(500)],
            "best bin first, the default limit": [of(count) for count in scores],
        },
        "read_s": 1.0, "group_s": 1.0, "score_s": 0.1, "two_layers_mean": 200.0, "two_layers_worst": 549,
    }  # fmt: skip


def test_counts_are_a_limit_and_have_no_bar() -> None:
    table = table_of(found([250, 300]))
    assert all(line.bar is None for line in table.lines)
    times = {line.what: line.cells["times fewer"] for line in table.lines if "limit of the search" in line.what}
    assert list(times.values()) == [[pytest.approx(3000 / 275)], [10.0]]
    assert any("a setting and not a finding" in note for note in table.notes)


def test_regret_is_measured_against_the_best_prompt() -> None:
    losses = [1.0, 1.5, 2.0, 3.0, 4.0]
    assert judge_lookup([1.5, 2.0], losses, scores=3) == {"scores": 3, "regret": 0.75, "part": 0.75, "rank": 2.5}
    assert judge_lookup([1.0], losses, scores=2)["regret"] == 0.0

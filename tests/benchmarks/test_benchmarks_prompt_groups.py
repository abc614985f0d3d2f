from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.tuning.prompt_bank import CLUSTER_COUNTS, groupings, groups_table, similarities
from stoker.tuning.bank.candidates import Candidate


def test_prompts_in_pairs_resemble_only_their_partner() -> None:
    """Each of ten directions has two prompts, so only the nearest prompt of a prompt is similar."""
    features = np.repeat(np.eye(10, dtype=np.float32), 2, axis=0)
    raw = similarities(features)["raw"]
    assert raw["top-1"] == [1.0, 1.0, 1.0]
    assert raw["top-5"] == pytest.approx([0.2, 0.2, 0.2])
    assert raw["any two"] == [0.0, 0.0, 0.0]


def test_scaled_features_remove_the_common_part_of_all_prompts() -> None:
    features = np.random.default_rng(1).normal(size=(50, 20)).astype(np.float32) + 100.0
    found = similarities(features)
    assert found["raw"]["any two"][0] > 0.99
    assert abs(found["scaled"]["any two"][1]) < 0.1


def test_each_cluster_count_is_judged_against_all_scores() -> None:
    """The loss of a prompt is its first feature."""
    features = np.random.default_rng(2).normal(size=(60, 5)).astype(np.float32)
    candidates = [Candidate(text=f"prompt {number}") for number in range(60)]
    loss = {one.text: float(feature[0]) for one, feature in zip(candidates, features, strict=True)}

    def score(texts: Sequence[str]) -> list[float]:
        return [loss[text] for text in texts]

    found = groupings(candidates, features, {"task": score})
    assert list(found) == [k for k in CLUSTER_COUNTS if k < 60]
    for k, (of_task,) in found.items():
        assert k <= of_task["scores"] <= 60
        assert of_task["regret"] >= 0.0
    table = groups_table({"groups": found, "similarity": similarities(features), "candidates": 60}, score_s=0.5)
    first = table.lines[0]
    assert first.cells["latency, s"] == [found[10][0]["scores"] * 0.5]
    assert "scoring all of them 30 s" in table.notes[-1]

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.tuning.prompt_groups import CLUSTER_COUNTS, groupings, similarities, table_of
from stoker.tuning.bank.candidates import Candidate


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
    table = table_of({"groups": found, "similarity": similarities(features), "candidates": 60}, score_s=0.5)
    first = table.lines[0]
    assert first.cells["latency, s"] == [found[10][0]["scores"] * 0.5]
    assert "scoring all of them 30 s" in table.notes[-1]

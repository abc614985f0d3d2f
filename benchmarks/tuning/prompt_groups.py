"""Measure the similarity of prompts in a bank, and the lookup cost by number of clusters (PromptTuner, Figure 10).

10a: cosine similarity of the feature of a prompt with the nearest, the five nearest, and any other prompt.
10b: the two-layer lookup by number of clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.tables import Line, Table
from benchmarks.tuning.prompt_bank import SETTING, scored
from stoker.tuning.bank.candidates import Candidate
from stoker.tuning.bank.layers import Array, build, compute_feature_scale
from stoker.tuning.bank.lookup import Score, score_all_candidates, two_layers

CLUSTER_COUNTS = (10, 25, 50, 100, 200, 400)
NEAREST = 5
NAME, TITLE = (
    "prompt_groups",
    "the Prompt Bank's two layers: how alike prompts are, and what the number of clusters costs",
)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    found = scored(say, quick=quick)
    if isinstance(found, str):
        return Table(name=NAME, title=TITLE, skipped=found)
    return table_of(found, score_s=found["score_s"])


def similarities(features: Array) -> dict[str, dict[str, list[float]]]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return {
        "raw": _similarities_of(features / lengths),
        "scaled": _similarities_of(compute_feature_scale(features).unit(features)),
    }


def _similarities_of(units: Array) -> dict[str, list[float]]:
    cosines = units @ units.T
    pairs = cosines[np.triu_indices(len(units), k=1)]
    np.fill_diagonal(cosines, -np.inf)
    nearest = -np.sort(-cosines, axis=1)[:, :NEAREST]
    found = {"top-1": nearest[:, 0], "top-5": nearest.mean(axis=1), "any two": pairs}
    return {name: [float(np.percentile(values, part)) for part in (10, 50, 90)] for name, values in found.items()}


def groupings(
    candidates: Sequence[Candidate], features: Array, scores: Mapping[str, Score]
) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {}
    for k in CLUSTER_COUNTS:
        if k >= len(candidates):
            continue
        layers = build(candidates, features, k=k, capacity=len(candidates))
        for score in scores.values():
            looked, best = two_layers(layers, score), score_all_candidates(layers, score).loss
            found.setdefault(k, []).append({"scores": looked.scores, "regret": looked.loss - best})
    return found


def table_of(found: dict[str, Any], *, score_s: float) -> Table:
    lines = []
    for k, of_tasks in found["groups"].items():
        cells = {"scores": [one["scores"] for one in of_tasks], "regret, nats": [one["regret"] for one in of_tasks]}
        if score_s:
            cells = {"latency, s": [one["scores"] * score_s for one in of_tasks], **cells}
        lines.append(Line(what=f"two layers, K = {k}, {len(of_tasks)} tasks", cells=cells, digits=1, last_digits=3))
    notes = [SETTING] + [
        f"Cosine similarity of {kind} features, the median over {found['candidates']:,} prompts (10th to 90th"
        " percentile): " + ", ".join(f"{name} {at[1]:.2f} ({at[0]:.2f} to {at[2]:.2f})" for name, at in of_kind.items())
        for kind, of_kind in found["similarity"].items()
    ]
    if score_s:
        whole = score_s * found["candidates"]
        notes.append(
            "Latency was not timed: it is the number of scores times the mean time of a score, which was measured. A"
            f" score takes {score_s * 1e3:.1f} ms there, and scoring all of them {whole:,.0f} s."
        )
    return Table(name=NAME, title=TITLE, lines=lines, notes=notes)

"""Measure the lookup of an initial prompt among 3,067 prompts: the number of computed scores, and the regret of the
result.

The bank of candidates uses features of SmolLM2-135M (K = 50). Each task scores *all* candidates once (equation 1 of
PromptTuner §4.3.2), so counts and regret are exact. Regret is the score of the found prompt minus the lowest score, in
nats per target token, and as a share of the distance between median and best score.

Kinds of lookup: two layers as in the paper; best bin first (`lookup.py`) within limits; equally many random candidates.

`prompt_groups` measures the similarity of prompts in the bank, and the lookup cost by number of clusters (Figure 10).
Figure 10a: cosine similarity of a prompt's feature to the nearest prompt, the five nearest prompts, and any other
prompt. Figure 10b: the two-layer lookup by number of clusters.

Data are in `../shared/data`. A task takes half an hour on one core with four samples, or minutes on a GPU with sixteen
samples. A stopped run resumes from `$STOKER_HOME/prompt-bank-benchmark`.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MODEL, machine, need, run_side
from benchmarks.tables import Line, Table
from benchmarks.tuning.prompt_tasks import PROMPTS, TASKS, need_prompts
from stoker.chance import Stream
from stoker.contexts import ambient
from stoker.contexts.causal_lm import default_model, load_causal_lm
from stoker.contexts.folders import state_folder
from stoker.run_folder import RecordLog
from stoker.tuning.bank import build
from stoker.tuning.bank.build import StoredFeatures, ensure_bank
from stoker.tuning.bank.candidates import Candidate, read_candidates
from stoker.tuning.bank.layers import CLUSTERS, Array, Layers, build_layers, compute_feature_scale
from stoker.tuning.bank.lookup import LIMIT_DIVISOR, Score, look_up, two_layers

SAMPLE_SEED = 0
SETTING = f"Model: SmolLM2-135M-Instruct; the samples of a task are drawn with seed {SAMPLE_SEED}."
tell = partial(print, file=sys.stderr, flush=True)
CLUSTER_COUNTS, NEAREST = (10, 25, 50, 100, 200, 400), 5


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    return table_of(scored(say, quick=quick))


def groups(say: Callable[[str], None], *, quick: bool = False) -> Table:
    return groups_table(scored(say, quick=quick))


def scored(say: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    need(*MODEL)
    need_prompts()
    small: dict[str, Any] = {"candidates": 60, "samples": 2, "tasks": ["claims"], "clusters": 8} if quick else {}
    found: dict[str, Any] = run_side(side, timeout_s=12 * 3600, **small)
    say(found["machine"])
    return found


def table_of(found: dict[str, Any]) -> Table:
    whole = found["candidates"]
    lines = []
    for kind, of_tasks in found["kinds"].items():
        names = {"scores": "scores", "regret, nats": "regret", "of the best's lead": "part", "rank": "rank"}
        cells = {heading: [one[name] for one in of_tasks] for heading, name in names.items()}
        cells["times fewer"] = [whole / one["scores"] for one in of_tasks]
        lines.append(Line(what=kind, cells=cells, digits=3, last_digits=1))
    ours = [one["scores"] for one in found["kinds"]["best bin first, the default limit"]]
    for what, times in (
        ("two layers, a task's best cluster drawn by size: on average", whole / found["two_layers_mean"]),
        ("two layers: at worst", whole / found["two_layers_worst"]),
        ("best bin first, a limit of the search: on average", whole / statistics.mean(ours)),
        ("best bin first, a limit of the search: at worst", whole / max(ours)),
    ):
        lines.append(Line(what=what, cells={"times fewer": [times]}, last_digits=1))
    notes = [
        SETTING,
        f"Best bin first stops when it has scored a {LIMIT_DIVISOR}th of the bank. That it scores {LIMIT_DIVISOR} times"
        " fewer is"
        " therefore a setting and not a finding; the regret says what it costs.",
        f"{whole:,} candidates in {found['clusters']} clusters, the largest of {found['largest']:,};"
        f" {found['samples']} samples a task; tasks: {', '.join(found['tasks'])}",
        f"reading all features took {found['read_s']:,.0f} s, grouping {found['group_s']:.1f} s, a score"
        f" {found['score_s'] * 1000:.0f} ms",
    ]
    return Table(lines=lines, notes=notes)


def groups_table(found: dict[str, Any]) -> Table:
    lines, score_s = [], found["score_s"]
    for k, of_tasks in found["groups"].items():
        scores = [one["scores"] for one in of_tasks]
        cells = {
            "latency, s": [count * score_s for count in scores], "scores": scores,
            "regret, nats": [one["regret"] for one in of_tasks],
        }  # fmt: skip
        lines.append(Line(what=f"two layers, K = {k}, {len(of_tasks)} tasks", cells=cells, digits=1, last_digits=3))
    notes = [SETTING] + [
        f"Cosine similarity of {kind} features, the median over {found['candidates']:,} prompts (10th to 90th"
        " percentile): " + ", ".join(f"{name} {at[1]:.2f} ({at[0]:.2f} to {at[2]:.2f})" for name, at in of_kind.items())
        for kind, of_kind in found["similarity"].items()
    ]
    notes.append(
        "Latency was not timed: it is the number of scores times the mean time of a score, which was measured. A score"
        f" takes {score_s * 1e3:.1f} ms there, and scoring all of them {score_s * found['candidates']:,.0f} s."
    )
    return Table(lines=lines, notes=notes)


FIRST = ("claims", "statements", "climate", "evidence", "sums", "steps", "programs")
LONGEST = 600
"""Maximum characters of a sample."""


class Scores:
    """Losses by task and prompt, cached in a file. `of`: key of the cache (model, samples, end token)."""

    def __init__(self, folder: Path, task: str, samples: int, score: Score, *, of: object) -> None:
        digest = hashlib.sha256(repr(of).encode()).hexdigest()[:8]
        self._log = RecordLog(folder / f"scores-{samples}-{digest}.jsonl", key=("task", "prompt"))
        self._task, self._score = task, score
        self.spent_s, self.scored = 0.0, 0
        for record in self._log:
            self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        self.spent_s += record["spent_s"]
        self.scored += 1

    def __call__(self, texts: Sequence[str]) -> list[float]:
        keys = [Candidate(text=text).key for text in texts]
        fresh = [(key, text) for key, text in zip(keys, texts, strict=True) if (self._task, key) not in self._log]
        for start in range(0, len(fresh), 16):
            some, begun = fresh[start : start + 16], time.perf_counter()
            losses = self._score([text for _, text in some])
            each_s = round((time.perf_counter() - begun) / len(some), 6)
            records = [
                {"task": self._task, "prompt": key, "loss": loss, "spent_s": each_s}
                for (key, _), loss in zip(some, losses, strict=True)
            ]
            self._log.append(records)
            for record in records:
                self._count(record)
            if start % 160 == 0:
                tell(f"{self._task}: {start + len(some):,} of {len(fresh):,} scored, {self.spent_s:.0f} s")
        return [self._log.get((self._task, key))["loss"] for key in keys]  # type: ignore[index]


def lookup_kinds(layers: Layers, score: Score) -> dict[str, tuple[int, list[float]]]:
    """For each kind of lookup, return the number of computed scores and the losses of the found prompts."""
    size = len(layers)
    default = look_up(layers, score)
    looked = {"two layers (the paper's)": two_layers(layers, score), "best bin first, the default limit": default}
    for part in (30, 20, 10, 6):
        looked[f"best bin first, a {part}th of the bank"] = look_up(layers, score, limit=size // part)
    losses = np.array(score([candidate.text for candidate in layers.candidates.values()]))
    draws = [sorted(range(size), key=Stream(turn, "random lookup").uniform)[: default.scores] for turn in range(100)]
    best = [float(np.nanmin(losses[draw])) for draw in draws]  # nan: the text cannot be tuned
    found = {kind: (one.scores, [one.loss]) for kind, one in looked.items()}
    return {**found, "as many at random (mean of 100)": (default.scores, best)}


def judge_lookup(scores: int, found: list[float], losses: list[float]) -> dict[str, float]:
    best, middle = losses[0], statistics.median(losses)
    regret = statistics.mean(loss - best for loss in found)
    return {
        "scores": scores, "regret": regret, "part": regret / max(middle - best, 1e-9),
        "rank": statistics.mean(1 + sum(other < loss for other in losses) for loss in found),
    }  # fmt: skip


def similarities(features: Array) -> dict[str, dict[str, list[float]]]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return {
        "raw": _similarities_of(features / lengths),
        "scaled": _similarities_of(compute_feature_scale(features).scale_to_unit(features)),
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
        layers = build_layers(candidates, features, k=k, capacity=len(candidates))
        for score in scores.values():
            looked, best = two_layers(layers, score), look_up(layers, score, limit=len(layers)).loss
            found.setdefault(k, []).append({"scores": looked.scores, "regret": looked.loss - best})
    return found


def side(candidates: int = 0, clusters: int = CLUSTERS, samples: int = 0, tasks: Sequence[str] = ()) -> dict[str, Any]:
    """Score candidates that are spread evenly over the file (0: all). Each task has `samples` samples (0: 16 on a GPU,
    else 4).

    By default, a GPU runs all tasks and a CPU the first 4.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    ambient.enter_library(device="cuda:0" if on_gpu else "cpu")
    model = load_causal_lm(default_model(), dtype="float32", engine="transformers")
    every = read_candidates(PROMPTS)
    wanted = candidates or len(every)
    some = [every[place * len(every) // wanted] for place in range(wanted)]
    samples, tasks = samples or (16 if on_gpu else 4), tasks or FIRST[: None if on_gpu else 4]
    records = state_folder() / "prompt-bank-benchmark"
    records.mkdir(parents=True, exist_ok=True)
    bank_folder = records / f"{len(some)}-of-{len(every)}"
    read_s = 0.0

    def read(texts: Sequence[str]) -> Any:
        nonlocal read_s
        begun = time.perf_counter()
        features = build.reader(model)(texts)
        read_s += time.perf_counter() - begun
        return features

    begun = time.perf_counter()
    bank = ensure_bank(
        bank_folder, some, model=Path(default_model()).name, read=read, again=True,
        k=clusters, capacity=len(some), progress=lambda done, of: tell(f"features: {done:,} of {of:,}"),
    )  # fmt: skip
    layers, group_s = bank.layers, time.perf_counter() - begun - read_s
    found: dict[str, list[dict[str, float]]] = {}
    spent_s, scored = 0.0, 0
    of_task: dict[str, Scores] = {}
    for task in tasks:
        pairs = [pair for pair in TASKS[task]() if len("".join(pair)) <= LONGEST]
        chosen = build.evaluation_samples(pairs, count=samples, seed=SAMPLE_SEED)
        ends = model.tokenizer.eos_token_id
        of = (Path(default_model()).name, str(model.model.dtype), task, chosen, ends)
        score = Scores(records, task, samples, build.scorer(model, chosen, batch_size=16 if on_gpu else 1), of=of)
        of_task[task] = score
        every_loss = look_up(layers, score, limit=len(layers)).losses.values()
        losses = sorted(loss for loss in every_loss if not math.isnan(loss))
        for kind, looked in lookup_kinds(layers, score).items():
            found.setdefault(kind, []).append(judge_lookup(*looked, losses))
        spent_s, scored = spent_s + score.spent_s, scored + score.scored
    sizes = [len(members) for members in layers.clusters]
    readings = StoredFeatures(bank_folder, model=Path(default_model()).name)
    features = readings.features(some)
    return {
        "machine": f"{machine()}, {torch.cuda.get_device_name() if on_gpu else 'no GPU'}",
        "candidates": len(layers), "clusters": len(sizes), "largest": max(sizes), "samples": samples,
        "tasks": tasks, "kinds": found, "read_s": read_s, "group_s": group_s,
        "score_s": spent_s / scored,
        "two_layers_mean": len(sizes) - 1 + sum(size * size for size in sizes) / sum(sizes),
        "two_layers_worst": len(sizes) - 1 + max(sizes),
        "similarity": similarities(features), "groups": groupings(some, features, of_task),
    }  # fmt: skip

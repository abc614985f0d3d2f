"""Compute the answers, the rows of the results file, the accuracy of each prompt and the report from the scores.

Answers are computed at the end from all scores of a prompt, so a resumed run returns the same rows.

**Answers.** A small model prefers one word: without calibration, SmolLM2-135M gives the same answer to 90 % of the
claims. *Batch calibration* (Zhou et al., "Batch Calibration: Rethinking Calibration for In-Context Learning", 2024)
subtracts the mean score of each label over all claims of a prompt. It then chooses the label with the best score.

**Interval.** Wilson's score interval is accurate near 0 and 1 and for few claims.

**Comparison.** McNemar's exact test counts only the claims that exactly one of two prompts answers correctly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.command_line import format_count
from stoker.apps.common.runner import RunAttempt, find_result
from stoker.apps.fact_verification.functions import Scores
from stoker.apps.fact_verification.options import LABELS, Claim, PromptTemplate
from stoker.datafile import write_rows
from stoker.run_folder import Record, RecordLog
from stoker.units import show_seconds

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's score interval of the ratio `right` / `total`, or (0, 1) if `total` is 0."""
    if total == 0:
        return 0.0, 1.0
    share, square = right / total, Z_95 * Z_95
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    # If no answer or every answer is right, set the exact bound, because rounding errors change it.
    low = 0.0 if right == 0 else max(0.0, middle - half)
    high = 1.0 if right == total else min(1.0, middle + half)
    return low, high


def choose_calibrated_labels(scores: Sequence[Sequence[float]]) -> list[int]:
    """Return the index of the label with the highest score in each row, after batch calibration.

    Each row is first normalized over the labels, so that rows with unlikely words weigh no more.
    """
    if not scores:
        return []
    shares = [_log_softmax(row) for row in scores]
    means = [math.fsum(column) / len(shares) for column in zip(*shares, strict=True)]
    return [_index_of_maximum([score - mean for score, mean in zip(row, means, strict=True)]) for row in shares]


def count_confusions(truth: Sequence[int], answers: Sequence[int], *, labels: int) -> list[list[int]]:
    """Count claims by true label (row) and answer (column)."""
    counts = [[0] * labels for _ in range(labels)]
    for true, answer in zip(truth, answers, strict=True):
        counts[true][answer] += 1
    return counts


def mcnemar_p_value(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return the probability of at least this difference between equally good prompts (two-sided exact p-value)."""
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    total, fewer = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    # Use logarithms, because `2 ** total` overflows a float above 1023, and exact integers are slow.
    whole = math.lgamma(total + 1) - total * math.log(2)
    tail = math.fsum(
        math.exp(whole - math.lgamma(count + 1) - math.lgamma(total - count + 1)) for count in range(fewer + 1)
    )
    return min(1.0, 2 * tail)


def _index_of_maximum(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda index: row[index])


def _log_softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    whole = top + math.log(math.fsum(math.exp(score - top) for score in row))
    return [score - whole for score in row]


KEY = ("prompt", "id")
"""Fields that identify a result: the digest of the template and the id of the claim."""


class ResultRow(msgspec.Struct, frozen=True):
    """A row of the results file. Scores are log-probabilities; `infer_s`: mean seconds per claim of the call."""

    prompt: str
    prompt_digest: str
    claim_id: str
    claim: str
    label: str
    answer: str
    correct: bool
    raw_answer: str
    score_supports: float
    score_refutes: float
    score_not_enough_info: float
    infer_s: float
    started_at: float
    worker: str


class PromptFigures(msgspec.Struct, frozen=True):
    """Accuracy and speed of a prompt. `low`, `high`: 95 % bounds of the accuracy; `matrix`: see `count_confusions`."""

    name: str
    claims: int
    right: int
    accuracy: float
    low: float
    high: float
    raw_right: int
    matrix: list[list[int]]
    infer_s: float

    @property
    def recall_by_label(self) -> list[float | None]:
        """Share of correct answers per label; None for a label without claims."""
        return [row[index] / sum(row) if sum(row) else None for index, row in enumerate(self.matrix)]

    @property
    def claims_per_second(self) -> float:
        """Claims per second of inference on one device."""
        return self.claims / self.infer_s if self.infer_s else 0.0


def make_log_records(prompt: PromptTemplate, claims: Sequence[Claim], scores: Scores) -> list[Record]:
    """Return one log record per claim of a call."""
    return [
        {
            "prompt": prompt.digest, "id": claim.id, "scores": [round(score, 6) for score in row],
            "infer_s": round(scores.infer_s / len(claims), 6), "started_at": round(scores.started_at, 3),
            "worker": scores.worker,
        }
        for claim, row in zip(claims, scores.rows, strict=True)
    ]  # fmt: skip


def make_result_rows(
    prompts: Sequence[PromptTemplate], claims: Sequence[Claim], log: RecordLog, *, calibrate: bool
) -> list[ResultRow]:
    """Return the rows of the results file, sorted by prompt and then by claim. The log must be complete."""
    rows: list[ResultRow] = []
    for prompt in prompts:
        records = [
            find_result((prompt.digest, claim.id), log, what=f"claim {claim.id} with {prompt.name}") for claim in claims
        ]
        scores = [record["scores"] for record in records]
        raw = [_index_of_maximum(row) for row in scores]
        answers = choose_calibrated_labels(scores) if calibrate else raw
        for claim, record, answer, raw_answer in zip(claims, records, answers, raw, strict=True):
            supports, refutes, not_enough_info = record["scores"]
            rows.append(
                ResultRow(
                    prompt=prompt.name, prompt_digest=prompt.digest, claim_id=claim.id, claim=claim.claim,
                    label=claim.label.value, answer=LABELS[answer].value, correct=LABELS[answer] is claim.label,
                    raw_answer=LABELS[raw_answer].value, score_supports=supports, score_refutes=refutes,
                    score_not_enough_info=not_enough_info, infer_s=record["infer_s"],
                    started_at=record["started_at"], worker=record["worker"],
                )
            )  # fmt: skip
    return rows


def compute_prompt_figures(rows: Sequence[ResultRow]) -> list[PromptFigures]:
    index = {label.value: number for number, label in enumerate(LABELS)}
    by_prompt: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt, []).append(row)
    made = []
    for name, mine in by_prompt.items():
        right = sum(row.correct for row in mine)
        low, high = wilson_interval(right, len(mine))
        truth, answers = [index[row.label] for row in mine], [index[row.answer] for row in mine]
        made.append(
            PromptFigures(
                name=name, claims=len(mine), right=right, accuracy=right / len(mine), low=low, high=high,
                raw_right=sum(row.raw_answer == row.label for row in mine),
                matrix=count_confusions(truth, answers, labels=len(LABELS)), infer_s=sum(row.infer_s for row in mine),
            )
        )  # fmt: skip
    return made


def find_best_prompt(made: Sequence[PromptFigures]) -> PromptFigures:
    return max(made, key=lambda one: (one.right, one.claims_per_second))


def compare_prompts(rows: Sequence[ResultRow], first: str, second: str) -> float:
    right = {name: [row.correct for row in rows if row.prompt == name] for name in (first, second)}
    return mcnemar_p_value(right[first], right[second])


def write_results(rows: Sequence[ResultRow], path: Path, *, kind: str) -> None:
    write_rows([msgspec.structs.asdict(row) for row in rows], path, kind=kind)


def write_timeline(rows: Iterable[ResultRow], path: Path) -> None:
    """Write the calls as a Chrome trace for ui.perfetto.dev, with a row per worker and a bar per call."""
    calls: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        call = calls.setdefault(
            (row.worker, row.started_at),
            {"name": row.prompt, "ph": "X", "pid": 0, "tid": 0, "ts": round(row.started_at * 1e6), "dur": 0.0,
             "args": {"claims": 0, "worker": row.worker}},
        )  # fmt: skip
        call["dur"] += row.infer_s * 1e6
        call["args"]["claims"] += 1
    workers = sorted({worker for worker, _ in calls})
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": worker}}
        for number, worker in enumerate(workers)
    ]
    for (worker, _), call in sorted(calls.items(), key=lambda item: item[0][1]):
        events.append({**call, "tid": workers.index(worker), "dur": round(call["dur"])})
    path.write_text(json.dumps({"traceEvents": events}, ensure_ascii=False) + "\n", encoding="utf-8")


SHORT = ("supports", "refutes", "not enough")


def format_results_table(made: Sequence[PromptFigures]) -> list[str]:
    wide = max(len("prompt"), *(len(one.name) for one in made))
    best = find_best_prompt(made)
    heads = "".join(f"{name:>12}" for name in SHORT)
    lines = [
        f"  {'':{wide}}   {'':22}{'right, in % of the claims that are':>{12 * len(SHORT)}}",
        f"  {'prompt':{wide}}   {'accuracy (95 %)':22}{heads}   claims/s a device",
    ]
    for one in made:
        shares = "".join(f"{'–':>12}" if share is None else f"{share * 100:12.1f}" for share in one.recall_by_label)
        accuracy = f"{one.accuracy * 100:5.1f} %  ({one.low * 100:.1f}-{one.high * 100:.1f})"
        mark = "   best" if one is best and len(made) > 1 else ""
        lines.append(f"  {one.name:{wide}}   {accuracy:22}{shares}   {one.claims_per_second:17.1f}{mark}")
    return lines


def format_confusion_tables(made: Sequence[PromptFigures]) -> list[str]:
    lines: list[str] = []
    for one in made:
        lines.append(f"  {'answers of ' + one.name:28}" + "  ".join(f"{'said ' + name:>15}" for name in SHORT))
        for label, row in zip(LABELS, one.matrix, strict=True):
            lines.append(f"    {'is ' + label.value.lower():26}" + "  ".join(f"{count:15d}" for count in row))
    return lines


def format_verdict(
    rows: Sequence[ResultRow], made: Sequence[PromptFigures], *, calibrated: bool, demo: bool = False
) -> list[str]:
    """Return sentences on the best prompt and the limits of the result. `demo`: True for shipped model and claims."""
    best, total = find_best_prompt(made), made[0].claims
    lines = []
    others = [one for one in made if one is not best]
    if others:
        second = find_best_prompt(others)
        chance = compare_prompts(rows, best.name, second.name)
        p = f"(McNemar p = {chance:.2g})" if chance >= 0.001 else "(McNemar p < 0.001)"
        if best.right == second.right:
            lines.append(f"best: {best.name}, but {second.name} has as many right answers")
        elif chance < 0.05:
            lines.append(f"best: {best.name}; ahead of {second.name} by more than chance {p}")
        else:
            lines.append(f"best: {best.name}, but its lead over {second.name} may be chance {p}; use more claims")
    common = max(sum(row) for row in best.matrix)
    constant = LABELS[[sum(row) for row in best.matrix].index(common)].value
    if best.low <= common / total:
        lines.append(f"not shown to be better than the constant answer {constant} ({common / total * 100:.1f} %)")
        if demo:
            lines.append("this small model cannot judge claims without evidence: its accuracy only checks the program")
    if calibrated:
        raw = ", ".join(f"{one.raw_right / total * 100:.1f}" for one in made)
        lines.append(f"answers are calibrated per prompt (batch calibration); uncalibrated {raw} %")
    return lines


def format_cost(attempt: RunAttempt) -> list[str]:
    facts = attempt.facts
    kept = f" ({attempt.kept} more from an earlier run)" if attempt.kept else ""
    if not attempt.made:
        return [f"nothing was left to infer{kept}"]
    hot = f", {format_count(facts.found_hot, 'call')} found it hot" if facts.found_hot else ""
    lines = [
        f"{attempt.made} inferences{kept} in {show_seconds(attempt.wall_s)}, {attempt.results_per_second:.1f}/s on"
        f" {format_count(facts.devices, 'device')}: device time {show_seconds(attempt.infer_s)} inferring,"
        f" {show_seconds(facts.load_total_s)} loading ({format_count(facts.loads, 'load')}{hot})"
    ]
    if attempt.origin:
        lines.append(f"the model was loaded from: {attempt.origin}")
    if facts.loads and facts.found_hot:
        lines.append(
            f"if each of the {attempt.calls} calls had loaded its context, the loads would have taken"
            f" {show_seconds(facts.load_s * attempt.calls)} of device time"
        )
    return lines


def make_summary(
    rows: Sequence[ResultRow], attempt: RunAttempt, *, prompts: Sequence[PromptTemplate], calibrated: bool
) -> dict[str, object]:
    made = compute_prompt_figures(rows)
    digests = {prompt.name: prompt.digest for prompt in prompts}
    facts = attempt.facts
    return {
        "inferences": len(rows), "calibrated": calibrated, "best": find_best_prompt(made).name,
        "prompts": [
            {
                "name": one.name, "digest": digests[one.name], "claims": one.claims, "right": one.right,
                "accuracy": one.accuracy, "accuracy_low": one.low, "accuracy_high": one.high,
                "accuracy_uncalibrated": one.raw_right / one.claims, "labels": [label.value for label in LABELS],
                "confusion": one.matrix, "infer_s": one.infer_s, "claims_per_device_s": one.claims_per_second,
            }
            for one in made
        ],
        "attempt": {
            "wall_s": attempt.wall_s, "inferences": attempt.made, "kept": attempt.kept, "calls": attempt.calls,
            "inferences_per_s": attempt.results_per_second, "infer_device_s": attempt.infer_s,
            "load_device_s": facts.load_total_s,
            "loads": facts.loads, "origin": attempt.origin, "calls_found_hot": facts.found_hot,
            "devices": facts.devices, "pilots": facts.pilots,
        },
    }  # fmt: skip

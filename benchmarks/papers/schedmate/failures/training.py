"""Train the scorer (logistic regression over facts of failures) on the training part of the corpus.

`validate` holds out each fault type of the training part in turn; settings are chosen only by validation.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.papers.schedmate.failures.corpus import FailedJob, corpus
from benchmarks.papers.schedmate.failures.fault_types import INFRASTRUCTURE
from stoker.manager.advice.logs.classifier import KindScorer, classify, features, scaled
from stoker.manager.advice.logs.failures import ROWS, Fault, FaultKind, FaultRule, Located, matching_rules
from stoker.manager.advice.logs.locator import locate
from stoker.whole_files import write_whole

SCORER = Path(__file__).resolve().parents[3] / "manager" / "advice" / "logs" / "scorer.json"
FOLDS = 6
PARTITIONS = 3
LEAST_TYPES = 2
"""Minimum number of fault types with a fact, because facts of one type do not generalise."""
RIDGE = 1e-3
_ROUNDS = 600
_RATE = 4.0
_KINDS = list(FaultKind)


NEAR_LINES = 3


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Percentages. F1, precision and recall are for `infrastructure`. `accuracy`: infrastructure or not, as in the
    paper. `component`: accuracy among detected infrastructure failures.
    """

    logs: int
    infrastructure: int
    f1: float
    precision: float
    recall: float
    accuracy: float
    accuracy_of_three: float
    component: float
    located: float
    confusion: dict[str, dict[str, int]]
    by_type: dict[str, str]


def scores_of(verdicts: Sequence[tuple[FailedJob, Located | None, Fault | None]]) -> Scores:
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    by_type: dict[str, Counter[bool]] = defaultdict(Counter)
    components = near = 0
    for job, located, fault in verdicts:
        said = fault.kind.value if fault is not None else "none"
        confusion[job.kind][said] += 1
        by_type[job.fault][said == job.kind] += 1
        components += job.kind == said == INFRASTRUCTURE and fault is not None and fault.component == job.component
        near += located is not None and abs(located.first.number - job.truth) <= NEAR_LINES
    right = confusion[INFRASTRUCTURE][INFRASTRUCTURE]
    called = sum(row[INFRASTRUCTURE] for row in confusion.values())
    true = sum(confusion[INFRASTRUCTURE].values())
    precision, recall = right / max(1, called), right / max(1, true)
    total = len(verdicts)
    return Scores(
        logs=total, infrastructure=true, f1=_percent(2 * precision * recall / max(1e-9, precision + recall)),
        precision=_percent(precision), recall=_percent(recall),
        accuracy=_percent((total - (called - right) - (true - right)) / max(1, total)),
        accuracy_of_three=_percent(sum(row[kind] for kind, row in confusion.items()) / max(1, total)),
        component=_percent(components / max(1, right)), located=_percent(near / max(1, total)),
        confusion={kind: dict(row) for kind, row in sorted(confusion.items())},
        by_type={name: f"{row[True]} of {row.total()}" for name, row in sorted(by_type.items())},
    )  # fmt: skip


def _percent(part: float) -> float:
    return round(100 * part, 1)


def without_knowledge_of(jobs: Collection[FailedJob], rules: Sequence[FaultRule] = ROWS) -> tuple[FaultRule, ...]:
    known: set[int] = set()
    for line in {line for job in jobs for line in job.own}:
        known |= {id(rule) for rule in matching_rules(line, tuple(rules))}
    return tuple(rule for rule in rules if id(rule) not in known)


def train_scorer(examples: Sequence[tuple[FailedJob, Located]], *, made_of: str, ridge: float = RIDGE) -> KindScorer:
    counts = [features(located) for _, located in examples]
    types: dict[str, set[str]] = {}
    for (job, _), found in zip(examples, counts, strict=True):
        for fact in found:
            types.setdefault(fact, set()).add(job.fault)
    facts = sorted(fact for fact, having in types.items() if len(having) >= LEAST_TYPES)
    place = {fact: at for at, fact in enumerate(facts)}
    inputs = np.zeros((len(examples), len(facts)))
    for row, found in enumerate(counts):
        for fact, value in scaled({fact: count for fact, count in found.items() if fact in place}).items():
            inputs[row, place[fact]] = value
    wanted = np.array([[kind.value == job.kind for kind in _KINDS] for job, _ in examples], float)
    each = {job.fault: sum(other.fault == job.fault for other, _ in examples) for job, _ in examples}
    share = np.array([1.0 / each[job.fault] for job, _ in examples])
    share /= share.sum()
    weights, bias = np.zeros((len(facts), len(_KINDS))), np.zeros(len(_KINDS))
    speed_w, speed_b = np.zeros_like(weights), np.zeros_like(bias)
    for _ in range(_ROUNDS):
        scores = inputs @ weights + bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        wrong = (chances - wanted) * share[:, None]
        speed_w = 0.9 * speed_w + inputs.T @ wrong + ridge * weights
        speed_b = 0.9 * speed_b + wrong.sum(axis=0)
        weights -= _RATE * speed_w
        bias -= _RATE * speed_b
    learned = {
        kind: {fact: round(float(weights[place[fact], at]), 3) for fact in facts} for at, kind in enumerate(_KINDS)
    }
    return KindScorer(made_of, learned, {kind: round(float(bias[at]), 3) for at, kind in enumerate(_KINDS)})


def located_examples(jobs: Collection[FailedJob]) -> Iterator[tuple[FailedJob, Located]]:
    for job in jobs:
        located = locate(job.lines)
        if located is not None:
            yield job, located


def validate(*, ridge: float = RIDGE) -> list[Scores]:
    jobs = list(corpus(test=False))
    examples = list(located_examples(jobs))
    found = []
    for partition in range(PARTITIONS):
        names = sorted({job.fault for job in jobs})
        random.Random(FOLDS + partition).shuffle(names)
        verdicts = []
        for fold in range(FOLDS):
            out = frozenset(names[fold::FOLDS])
            held = [job for job in jobs if job.fault in out]
            rules = without_knowledge_of(held)
            scorer = train_scorer(
                [each for each in examples if each[0].fault not in out], made_of="a fold", ridge=ridge
            )
            for job in held:
                located = locate(job.lines, rules=rules)
                verdicts.append((job, located, classify(located, rules=rules, scorer=scorer) if located else None))
        found.append(scores_of(verdicts))
        print("held out of the training part:", found[-1], flush=True)
    return found


def train() -> None:
    examples = list(located_examples(list(corpus(test=False))))
    made_of = f"{len(examples)} logs of {len({job.fault for job, _ in examples})} fault types, by python -m benchmarks.papers.schedmate train"
    data = msgspec.json.encode(train_scorer(examples, made_of=made_of))
    write_whole(SCORER, msgspec.json.format(data, indent=0).replace(b"\n\n", b"\n"), mode=0o644)

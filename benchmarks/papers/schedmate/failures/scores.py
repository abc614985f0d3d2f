"""How good verdicts are: the paper's measures (Table 4), and how near the located line is to the true one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from benchmarks.papers.schedmate.failures.corpus import FailedJob
from benchmarks.papers.schedmate.failures.injections import INFRASTRUCTURE
from stoker.manager.advice.logs.failures import Fault, Located

NEAR_LINES = 3


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """In percent. F1, precision and recall are those of `infrastructure`; `accuracy` is that of infrastructure or not, as the
    paper's, `accuracy_of_three` that of all kinds; `component`: of the infrastructure's that were found. `confusion`: how
    often each true kind was called each kind; `by_type`: of each fault type, how often it was judged right."""

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
        logs=total,
        infrastructure=true,
        f1=_percent(2 * precision * recall / max(1e-9, precision + recall)),
        precision=_percent(precision),
        recall=_percent(recall),
        accuracy=_percent((total - (called - right) - (true - right)) / max(1, total)),
        accuracy_of_three=_percent(sum(row[kind] for kind, row in confusion.items()) / max(1, total)),
        component=_percent(components / max(1, right)),
        located=_percent(near / max(1, total)),
        confusion={kind: dict(row) for kind, row in sorted(confusion.items())},
        by_type={name: f"{row[True]} of {row.total()}" for name, row in sorted(by_type.items())},
    )


def _percent(part: float) -> float:
    return round(100 * part, 1)

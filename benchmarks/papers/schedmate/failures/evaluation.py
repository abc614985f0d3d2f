"""Evaluate locator and classifier on the test part, whose fault types are not in training (SchedMate, Table 4).

Three rule tables are compared: the shipped table; for each type, the table without rows that match lines of this type;
and the table without rows that match lines of any test failure. Another comparison classifies the last 500 lines.
`train` fits the scorer (logistic regression over facts of failures) to the training part of the corpus.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import ROOT, Clock
from benchmarks.papers.schedmate.failures import corpus as logs
from benchmarks.papers.schedmate.failures.corpus import INFRASTRUCTURE, FailedJob, corpus
from stoker.manager.advice.logs.classifier import FaultKindScorer, classify_failure, extract_features, scale_counts
from stoker.manager.advice.logs.failures import (
    LOG_RULES,
    Fault,
    FaultKind,
    FaultRule,
    LocatedFailure,
    LogLine,
    find_matching_rules,
)
from stoker.manager.advice.logs.locator import ErrorEpisode, locate_failure
from stoker.manager.advice.logs.opinion import OPINION_BELOW
from stoker.manager.advice.logs.reading import TRACEBACK, LogSeverity, assess_severity, remove_digits
from stoker.whole_files import write_whole

SCORER = ROOT / "manager" / "advice" / "logs" / "scorer.json"
BARS = {"f1": 68.0, "precision": 76.0, "lines_per_s": 50_000}
NEAR_LINES = 3
LAST_LINES = 500
_GIGABYTE = 1 << 30
Opinion = Callable[[FailedJob, LocatedFailure, Fault], Fault]
Rules = dict[str, tuple[FaultRule, ...]]


def evaluate() -> None:
    clock, jobs = Clock("python -m benchmarks.papers.schedmate failures"), list(corpus(test=True))
    found: dict[str, Any] = {}
    for name, rules in tables(jobs).items():
        found[name] = {"rows": sorted({len(rules[job.fault]) for job in jobs})}
        for side, on_last_lines in (("located", False), ("last 500 lines", True)):
            scores = found[name][side] = score_verdicts(jobs, rules, on_last_lines=on_last_lines)
            print(f"{name}, {side}: F1 {scores['f1']}, precision {scores['precision']}, {scores}", flush=True)
    injected = [job for job in jobs if job.fault in logs.held_out(logs.INJECTED, logs.SPLIT_SEED)]
    first = found["the types of the first draw"] = {
        name: score_verdicts(injected, rules) for name, rules in tables(injected).items()
    }
    print("the types of the first draw:", {name: (scores["f1"], scores["precision"]) for name, scores in first.items()})
    took_s = time.process_time()
    near = [_is_near(job, locate_failure(job.lines)) for job in jobs]
    took_s = time.process_time() - took_s
    training = [_is_near(job, locate_failure(job.lines)) for job in corpus(test=False)]
    lines = {"test": _percent(sum(near) / len(near)), "training": _percent(sum(training) / len(training))}
    speed = {"training log": _lines_per_second(), "corpus": round(sum(len(job.lines) for job in jobs) / took_s)}
    memory = _memory_use()
    print("line found:", lines, "lines/s:", speed, "1 GiB log:", memory)
    clock.write("schedmate-failures", {
        "split": [logs.SPLIT_SEED, logs.CLUSTERS_SEED], "test_types": sorted(logs.TEST), "bars": BARS,
        "logs": len(jobs), "scores": found, "line_found": lines, "lines_per_cpu_s": speed, "one_gibibyte": memory,
    })  # fmt: skip


def tables(jobs: list[FailedJob]) -> dict[str, Rules]:
    types = {job.fault for job in jobs}
    own = {fault: without_knowledge_of([job for job in jobs if job.fault == fault]) for fault in types}
    return {
        "shipped table": dict.fromkeys(types, LOG_RULES), "each type without the rows that know it": own,
        "without rows that know the test's texts": dict.fromkeys(types, without_knowledge_of(jobs)),
    }  # fmt: skip


def without_knowledge_of(jobs: Collection[FailedJob]) -> tuple[FaultRule, ...]:
    lines = {line for job in jobs for line in job.own}
    known = {id(rule) for line in lines for rule in find_matching_rules(line, LOG_RULES)}
    return tuple(rule for rule in LOG_RULES if id(rule) not in known)


def score_verdicts(
    jobs: list[FailedJob], rules: Rules, *, on_last_lines: bool = False, opinion: Opinion | None = None
) -> Scores:
    """`opinion`: language model for verdicts of low confidence."""
    verdicts = []
    for job in jobs:
        found = last_lines(job.lines) if on_last_lines else locate_failure(job.lines, rules=rules[job.fault])
        fault = classify_failure(found, rules=rules[job.fault]) if found else None
        if opinion is not None and found is not None and fault is not None and fault.sure < OPINION_BELOW:
            fault = opinion(job, found, fault)
        verdicts.append((job, found, fault))
    return scores_of(verdicts)


def _is_near(job: FailedJob, located: LocatedFailure | None) -> bool:
    return located is not None and abs(located.first.number - job.truth) <= NEAR_LINES


def last_lines(lines: list[str]) -> LocatedFailure:
    skipped = max(0, len(lines) - LAST_LINES)
    numbered = [LogLine(at, line) for at, line in enumerate(lines[skipped:], skipped + 1)]
    spell = ErrorEpisode(())
    for line in numbered:
        if spell.open_tracebacks and spell.add_line_to_traceback(line.number, line.text):
            continue
        if TRACEBACK in line.text:
            spell.begin_traceback(line.number, line.text)
        elif (grade := assess_severity(line.text)) >= LogSeverity.ERROR:
            spell.record_error(hash(remove_digits(line.text.encode())), line.number, line.text, grade)
    signs = tuple(LogLine(sign.number, sign.text) for sign in spell.errors_in_order())
    traceback = spell.tracebacks[0].lines if spell.tracebacks else []
    return LocatedFailure(signs[0] if signs else numbered[0], after=tuple(numbered[1:]), error_lines=signs or tuple(numbered[:1]),
                   traceback=tuple(LogLine(at, text) for at, text in traceback), lines=len(lines))  # fmt: skip


def _lines_per_second() -> int:
    good = (run.lines for run in logs.read_recorded_runs() if not run.fault and run.program == "vision")
    lines = next(good)
    text = ("\n".join(lines) + "\n") * (1_000_000 // len(lines))
    began = time.process_time()
    locate_failure(text)
    return round(text.count("\n") / (time.process_time() - began))


def _memory_use() -> dict[str, float]:
    with tempfile.NamedTemporaryFile() as file:
        size = number = 0
        while size < _GIGABYTE:
            size += file.write(b"".join(
                b"step %d loss %.5f lr 0.001 tokens/s %.1f seen %x\n" % (at, 1 / (at + 1), at * 3.1, at)
                for at in range(number, number + 20_000)
            ))  # fmt: skip
            number += 20_000
        file.write(
            b"Traceback (most recent call last):\n  File \"/home/ada/train.py\", line 1, in <module>\nKeyError: 'label'\n"
        )
        file.flush()
        code = ("import sys, time; from pathlib import Path; from stoker.manager.advice.logs import locate_failure;"
                "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); before = peak(); began = time.process_time(); found = locate_failure(Path(sys.argv[1]));"
                "print(time.process_time() - began, found.lines, found.first.number, before, peak())")  # fmt: skip
        command = [sys.executable, "-c", code, file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    seconds, lines, first, before, peak = map(float, out)
    return {
        "lines": lines, "first": first, "s": round(seconds, 1), "lines_per_cpu_s": round(lines / seconds),
        "grew_mib": round((peak - before) / 1024, 1), "peak_mib": round(peak / 1024, 1),
    }  # fmt: skip


Scores = dict[str, Any]
"""Percentages. F1, precision and recall are for `infrastructure`. `accuracy`: share of right verdicts (infrastructure
or not), as in the paper. `component`: accuracy among detected infrastructure failures.
"""


def scores_of(verdicts: Sequence[tuple[FailedJob, LocatedFailure | None, Fault | None]]) -> Scores:
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    by_type: dict[str, Counter[bool]] = defaultdict(Counter)
    components = near = 0
    for job, located, fault in verdicts:
        said = fault.kind.value if fault is not None else "none"
        confusion[job.kind][said] += 1
        by_type[job.fault][said == job.kind] += 1
        components += job.kind == said == INFRASTRUCTURE and fault is not None and fault.component == job.component
        near += _is_near(job, located)
    right = confusion[INFRASTRUCTURE][INFRASTRUCTURE]
    called = sum(row[INFRASTRUCTURE] for row in confusion.values())
    true = sum(confusion[INFRASTRUCTURE].values())
    precision, recall = right / max(1, called), right / max(1, true)
    total = len(verdicts)
    return {
        "logs": total, "infrastructure": true, "f1": _percent(2 * precision * recall / max(1e-9, precision + recall)),
        "precision": _percent(precision), "recall": _percent(recall),
        "accuracy": _percent((total - (called - right) - (true - right)) / max(1, total)),
        "accuracy_of_three": _percent(sum(row[kind] for kind, row in confusion.items()) / max(1, total)),
        "component": _percent(components / max(1, right)), "located": _percent(near / max(1, total)),
        "confusion": {kind: dict(row) for kind, row in sorted(confusion.items())},
        "by_type": {name: f"{row[True]} of {row.total()}" for name, row in sorted(by_type.items())},
    }  # fmt: skip


def _percent(part: float) -> float:
    return round(100 * part, 1)


LEAST_TYPES = 2
"""Minimum fault types with a fact, because a fact of one type does not generalise."""
RIDGE, _ROUNDS, _RATE = 1e-3, 600, 4.0
_KINDS = list(FaultKind)


def train() -> None:
    examples = [(job, located) for job in corpus(test=False) if (located := locate_failure(job.lines)) is not None]
    made_of = f"{len(examples)} logs of {len({job.fault for job, _ in examples})} fault types, by python -m benchmarks.papers.schedmate train"
    counts = [extract_features(located) for _, located in examples]
    types: dict[str, set[str]] = defaultdict(set)
    for (job, _), found in zip(examples, counts, strict=True):
        for fact in found:
            types[fact].add(job.fault)
    facts = sorted(fact for fact, having in types.items() if len(having) >= LEAST_TYPES)
    place = {fact: at for at, fact in enumerate(facts)}
    inputs = np.zeros((len(examples), len(facts)))
    for row, found in enumerate(counts):
        for fact, value in scale_counts({fact: count for fact, count in found.items() if fact in place}).items():
            inputs[row, place[fact]] = value
    wanted = np.array([[kind.value == job.kind for kind in _KINDS] for job, _ in examples], float)
    each = Counter(job.fault for job, _ in examples)
    share = np.array([1.0 / each[job.fault] for job, _ in examples])
    share /= share.sum()
    weights, bias = np.zeros((len(facts), len(_KINDS))), np.zeros(len(_KINDS))
    speed_w, speed_b = np.zeros_like(weights), np.zeros_like(bias)
    for _ in range(_ROUNDS):
        scores = inputs @ weights + bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        wrong = (chances - wanted) * share[:, None]
        speed_w = 0.9 * speed_w + inputs.T @ wrong + RIDGE * weights
        speed_b = 0.9 * speed_b + wrong.sum(axis=0)
        weights -= _RATE * speed_w
        bias -= _RATE * speed_b
    learned = {
        kind: {fact: round(float(weights[place[fact], at]), 3) for fact in facts} for at, kind in enumerate(_KINDS)
    }
    scorer = FaultKindScorer(made_of, learned, {kind: round(float(bias[at]), 3) for at, kind in enumerate(_KINDS)})
    write_whole(SCORER, msgspec.json.format(msgspec.json.encode(scorer), indent=0).replace(b"\n\n", b"\n"), mode=0o644)

"""Evaluate locator and classifier on the test part, whose fault types are not in training (SchedMate, Table 4).

Three rule tables are compared: the shipped table; for each type a table without rows that match its lines; a table
without rows that match lines of any test failure. Another comparison classifies the last 500 lines.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import ROOT, commit, machine
from benchmarks.papers.schedmate.failures.corpus import FailedJob, corpus, good_runs
from benchmarks.papers.schedmate.failures.fault_types import CLUSTERS_SEED, INJECTED, SPLIT_SEED, TEST, held_out
from benchmarks.papers.schedmate.failures.training import NEAR_LINES, Scores, scores_of, without_knowledge_of
from stoker.manager.advice.logs.classifier import classify
from stoker.manager.advice.logs.failures import ROWS, Fault, FaultRule, Located, LogLine
from stoker.manager.advice.logs.locator import Episode, locate
from stoker.manager.advice.logs.opinion import DOUBTED
from stoker.manager.advice.logs.reading import TRACEBACK, Gravity, gravity, remove_digits
from stoker.whole_files import write_whole

RECORD = ROOT / "benchmarks" / "records" / "schedmate-failures.json"
LAST_LINES = 500
BARS = {"f1": 68.0, "precision": 76.0, "lines_per_s": 50_000}
_GIGABYTE = 1 << 30


def evaluate() -> None:
    jobs = list(corpus(test=True))
    found: dict[str, Any] = {}
    for name, rules in tables(jobs).items():
        found[name] = {
            "rows": sorted({len(rules[job.fault]) for job in jobs}),
            "located": score_verdicts(jobs, rules),
            "last 500 lines": score_verdicts(jobs, rules, on_last_lines=True),
        }
        for side in ("located", "last 500 lines"):
            scores = found[name][side]
            print(f"{name}, {side}: F1 {scores.f1}, precision {scores.precision}, recall {scores.recall}, accuracy {scores.accuracy}, of three "
                  f"{scores.accuracy_of_three}, line found {scores.located}\n  {scores.confusion}", flush=True)  # fmt: skip
    injected = [job for job in jobs if job.fault in held_out(INJECTED, SPLIT_SEED)]
    found["the types of the first draw"] = {
        name: score_verdicts(injected, rules) for name, rules in tables(injected).items()
    }
    for name, scores in found["the types of the first draw"].items():
        print(f"the types of the first draw, {name}: F1 {scores.f1}, precision {scores.precision}")
    lines = {part: _located_share(each) for part, each in (("test", jobs), ("training", list(corpus(test=False))))}
    print("line found:", lines)
    speed = {"training log": _lines_per_second(), "corpus": _corpus_speed(jobs)}
    print("lines/s:", speed, "load:", os.getloadavg())
    memory = _memory_use()
    print("1 GiB log:", memory)
    record = {"command": "python -m benchmarks.papers.schedmate failures", "machine": machine(), "at": str(datetime.date.today()), "commit": commit(),
              "split": [SPLIT_SEED, CLUSTERS_SEED], "test_types": sorted(TEST), "bars": BARS, "load": [round(load, 1) for load in os.getloadavg()], "logs": len(jobs), "scores": found, "line_found": lines, "lines_per_cpu_s": speed, "one_gibibyte": memory}  # fmt: skip
    write_whole(RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1), mode=0o644)


Opinion = Callable[[FailedJob, Located, Fault], Fault]


def tables(jobs: list[FailedJob]) -> dict[str, dict[str, tuple[FaultRule, ...]]]:
    types = {job.fault for job in jobs}
    own = {fault: without_knowledge_of([job for job in jobs if job.fault == fault]) for fault in types}
    return {
        "shipped table": dict.fromkeys(types, ROWS),
        "each type without the rows that know it": own,
        "without rows that know the test's texts": dict.fromkeys(types, without_knowledge_of(jobs)),
    }


def score_verdicts(
    jobs: list[FailedJob],
    rules: dict[str, tuple[FaultRule, ...]],
    *,
    on_last_lines: bool = False,
    opinion: Opinion | None = None,
) -> Scores:
    """Return scores of the verdicts. `opinion`: language model for verdicts of low confidence."""
    verdicts = []
    for job in jobs:
        found = last_lines(job.lines) if on_last_lines else locate(job.lines, rules=rules[job.fault])
        fault = classify(found, rules=rules[job.fault]) if found else None
        if opinion is not None and found is not None and fault is not None and fault.sure < DOUBTED:
            fault = opinion(job, found, fault)
        verdicts.append((job, found, fault))
    return scores_of(verdicts)


def _located_share(jobs: list[FailedJob]) -> float:
    near = 0
    for job in jobs:
        located = locate(job.lines)
        near += located is not None and abs(located.first.number - job.truth) <= NEAR_LINES
    return round(100 * near / len(jobs), 1)


def last_lines(lines: list[str], count: int = LAST_LINES) -> Located:
    """Return the last lines of a log as a located failure."""
    skipped = max(0, len(lines) - count)
    numbered = [LogLine(at, line) for at, line in enumerate(lines[skipped:], skipped + 1)]
    spell = Episode(skipped + 1, ())
    for line in numbered:
        if spell.has_open_traceback and spell.add_line_to_traceback(line.number, line.text):
            continue
        if TRACEBACK in line.text:
            spell.begin_traceback(line.number, line.text)
        elif (grade := gravity(line.text)) >= Gravity.ERROR:
            spell.sign(hash(remove_digits(line.text.encode())), line.number, line.text, grade)
    signs = tuple(LogLine(sign.number, sign.text) for sign in spell.ordered())
    traceback = spell.tracebacks[0].lines if spell.tracebacks else []
    return Located(signs[0] if signs else numbered[0], after=tuple(numbered[1:]), signs=signs or tuple(numbered[:1]),
                   traceback=tuple(LogLine(at, text) for at, text in traceback), lines=len(lines))  # fmt: skip


def _lines_per_second() -> int:
    lines = good_runs()["vision"][0]
    text = ("\n".join(lines) + "\n") * (1_000_000 // len(lines))
    began = time.process_time()
    locate(text)
    return round(text.count("\n") / (time.process_time() - began))


def _corpus_speed(jobs: list[FailedJob]) -> int:
    began = time.process_time()
    for job in jobs:
        locate(job.lines)
    return round(sum(len(job.lines) for job in jobs) / (time.process_time() - began))


def _memory_use() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        with path.open("wb") as file:
            size = number = 0
            while size < _GIGABYTE:
                block = b"".join(
                    b"step %d loss %.5f lr 0.001 tokens/s %.1f seen %x\n" % (at, 1 / (at + 1), at * 3.1, at)
                    for at in range(number, number + 20_000)
                )
                size, number = size + file.write(block), number + 20_000
            file.write(
                b"Traceback (most recent call last):\n  File \"/home/ada/train.py\", line 1, in <module>\nKeyError: 'label'\n"
            )
        code = ("import sys, time; from pathlib import Path; from stoker.manager.advice.logs import locate;"
                "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); before = peak(); began = time.process_time(); found = locate(Path(sys.argv[1]));"
                "print(time.process_time() - began, found.lines, found.first.number, before, peak())")  # fmt: skip
        out = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        ).stdout.split()
    seconds, lines, first, before, peak = map(float, out)
    return {"lines": lines, "first": first, "s": round(seconds, 1), "lines_per_cpu_s": round(lines / seconds), "grew_mib": round((peak - before) / 1024, 1),
            "peak_mib": round(peak / 1024, 1)}  # fmt: skip

"""`python -m benchmarks.papers.schedmate.metrics`: test SchedMate's metric tracker (§3.2, §5) on known values.

Every log is read in the middle and at the end. Half of the logs have many lines without progress. A metric is *found*
if it has a value, and *right* within a tenth of the true value. RMSRE is the root mean squared relative error of found
values. The paper reports 84.3 % found, and an RMSRE of 0.42 for step times. Held-out formats are judged separately.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import corpora
from benchmarks.harness import Clock, side_options
from benchmarks.papers.schedmate import metric_formats
from benchmarks.papers.schedmate.metric_formats import HELD_OUT, HELD_OUT_SECOND, START, Formats
from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.metrics import FollowedLog, LineFormats, LoggedProgress, read_metrics

LOGS = "metric_logs"
SEEDS = range(1, 7)
RIGHT = 0.1
_AT_0 = START.timestamp()


@dataclass
class Case:
    """A log, size and time of the first read, end time, and true values at the end."""

    form: str
    name: str
    content: bytes
    look_bytes: int
    look_s: float
    end_s: float
    truth: dict[str, float]


def made_cases(formats: Formats) -> Iterator[Case]:
    for (form, (lines_of, asked)), seed in product(formats.items(), SEEDS):
        log = metric_formats.run(form, seed, lines_of)
        chance, look_at = random.Random(f"noise-{form}-{seed}"), len(log.lines) * 6 // 10
        content, look_bytes = b"", 0
        for at, (_, line) in enumerate(log.lines):
            if at == look_at:
                look_bytes = len(content)
            if seed % 2 == 0 and chance.random() < 0.3:
                content += "".join(f"{each}\n" for each in metric_formats.noise(chance)).encode()
            content += (line + "\n").encode()
        truth = {name: _true_value(log.values, name) for name in asked.split()}
        look_s, end_s = (_AT_0 + log.lines[at][0] for at in (look_at - 1, -1))
        yield Case(form, f"{form}-{seed}", content, look_bytes, look_s, end_s, truth)


def _true_value(values: dict[str, float], name: str) -> float:
    name_of_one = {"samples_done": "step", "samples_of_steps_per_s": "steps_per_s"}.get(name)
    return values[name_of_one] * values["batch"] if name_of_one else values[name]


def _real_cases() -> Iterator[Case]:
    logs = corpora.members(LOGS)
    for name in sorted(file.removesuffix(".json") for file in logs if file.endswith(".json")):
        told = json.loads(logs[f"{name}.json"])
        content, look = logs[f"{name}.log"], int(told["look"]["bytes"])
        form, _, seed = name.rpartition("-")
        if int(seed) % 2 == 0:
            chance = random.Random(f"noise-{name}")
            before, look_length, original = b"", 0, 0
            for line in content.splitlines(keepends=True):
                if original + len(line) > look and not look_length:
                    look_length = len(before) + look - original
                original += len(line)
                if line.endswith(b"\n") and not line.endswith(b"\r\n") and chance.random() < 0.3:
                    line += "".join(f"{each}\n" for each in metric_formats.noise(chance)).encode()
                before += line
            content, look = before, look_length
        truth = told["values"]
        if form in ("xgboost", "lightgbm", "lightning"):  # These logs do not tell the total.
            truth.pop("fraction")
        yield Case(form, name, content, look, told["look"]["at_s"], told["end_s"], truth)


def _tracked_value(progress: LoggedProgress | None, name: str) -> float | None:
    if progress is None:
        return None
    if name == "fraction":
        return progress.done / progress.total if progress.total and progress.whole else None
    of_other = {"overall_step": "step", "samples_done": "step", "samples_of_steps_per_s": "steps_per_s"}
    value: float | None = getattr(progress, of_other.get(name, name))
    return value


def _errors_of_case(case: Case, folder: Path, learned: Learned | None) -> list[tuple[str, float | None]]:
    path = folder / case.name
    path.write_bytes(case.content[: case.look_bytes])
    log = FollowedLog(path, formats=learned.formats if learned is not None else None)
    _track_until(log, case.look_s, learned)
    with path.open("ab") as more:
        more.write(case.content[case.look_bytes :])
    progress = _track_until(log, case.end_s, learned)
    found: list[tuple[str, float | None]] = []
    for name, true in case.truth.items():
        given, error = _tracked_value(progress, name), None
        if given is not None and math.isfinite(given):
            is_near = name in ("step", "overall_step", "epoch") and abs(given - true) <= 1
            error = 0.0 if is_near else abs(given - true) / max(abs(true), 1e-9)
        found.append((name, error))
    return found


class Learned(NamedTuple):
    """Formats explained by a language model while logs are read."""

    formats: LineFormats
    endpoint: ModelEndpoint


def _track_until(log: FollowedLog, at_s: float, learned: Learned | None) -> LoggedProgress | None:
    tracked = log.track(at_s=at_s)
    if learned is None:
        return tracked
    learned.formats.learn_formats(learned.formats.take_unread_formats(), learned.endpoint)
    return log.track(at_s=at_s)


def rows_of(cases: list[Case], learned: Learned | None = None) -> dict[str, dict[str, float]]:
    judged: dict[str, list[tuple[str, float | None]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            judged[case.form] += _errors_of_case(case, Path(folder), learned)
    logs = Counter(case.form for case in cases)
    rows = {form: _row(each, logs[form]) for form, each in judged.items()}
    rows["all"] = _row([one for each in judged.values() for one in each], logs.total())
    return rows


def _row(judged: list[tuple[str, float | None]], logs: int) -> dict[str, float]:
    rates = [error for name, error in judged if name.endswith("steps_per_s")]
    errors = [error for _, error in judged]
    return {
        "logs": logs, "metrics": len(judged), "found": _share(errors, math.inf), "right": _share(errors, RIGHT),
        "rmsre": _rmsre(errors), "rates_found": _share(rates, math.inf), "rates_rmsre": _rmsre(rates),
    }  # fmt: skip


def _share(errors: list[float | None], most: float) -> float:
    return sum(error is not None and error <= most for error in errors) / len(errors) if errors else 0.0


def _rmsre(errors: list[float | None]) -> float:
    found = [error for error in errors if error is not None]
    return math.sqrt(sum(error * error for error in found) / len(found)) if found else 0.0


def _speed(cases: list[Case]) -> dict[str, float]:
    lines = [line for case in cases for line in case.content.decode(errors="replace").replace("\r", "\n").split("\n")]
    began = time.process_time()
    for line in lines:
        read_metrics(line)
    took = time.process_time() - began
    with tempfile.NamedTemporaryFile() as file:
        file.write(max((case.content for case in cases), key=len))
        file.flush()
        looks = 20
        began = time.process_time()
        for _ in range(looks):
            FollowedLog(file.name).track(at_s=0.0)
        look_ms = 1000 * (time.process_time() - began) / looks
    return {"lines_per_s": len(lines) / took, "look_ms": look_ms}


def main() -> int:
    given, clock = side_options(__doc__, held_out=False), Clock("python -m benchmarks.papers.schedmate.metrics")
    cases = [*_real_cases(), *made_cases(metric_formats.FORMATS)]
    parts = {"written_for": cases}
    if given.held_out:
        parts |= {"held_out": list(made_cases(HELD_OUT)), "held_out_second": list(made_cases(HELD_OUT_SECOND))}
    record: dict[str, Any] = {"right": f"within {RIGHT:.0%} of the truth"}
    for part, several in parts.items():
        record[part] = rows_of(several)
        print(f"{part}:")
        for name, row in record[part].items():
            print(f"  {name:16}", {what: round(value, 3) for what, value in row.items()})
    record |= _speed(cases)
    print(f"{record['lines_per_s']:,.0f} lines a second, {record['look_ms']:.1f} ms a look")
    if not given.held_out:
        clock.write("schedmate-metrics", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

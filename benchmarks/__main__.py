"""`python -m benchmarks [NAME ...]`: run benchmarks and report if every bar is met.

Exit status: 0 = every measured bar is met, 1 = a bar is missed, 2 = a benchmark failed or nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from benchmarks import page
from benchmarks.harness import Clock, Facts
from benchmarks.tables import Table, passes, show

SUBJECTS = {
    "engine": "noop taskvine fact_batches awareness zygote concurrent_requests transfers core_events memory_per_call\
 streams turns",
    "serving": "embeddings model_switch openai_batch step_times gateway_objectives gateway_objectives_paced\
 slinfer_decisions json_schemas adapters gateway_cost gateway_rate dashboard lm_eval",
    "tuning": "prompt_bank prompt_groups prompt_quality tune_start tuning_times",
    "reliability": "preemption many_pilots restart lost_pilot journal journal_sync vanishing",
    "scale": "fidelity simulator scheduling_rounds",
}
ELSEWHERE = {
    "fact_batches": ("engine.awareness", "batches", "BATCHES_TITLE"),
    "core_events": ("engine.core_events", "events", "EVENTS_TITLE"),
    "memory_per_call": ("engine.core_events", "memory", "MEMORY_TITLE"),
    "lm_eval": ("serving.lm_eval_scores", "measure", "TITLE"),
    "slinfer_decisions": ("papers.slinfer.decisions", "measure", "TITLE"),
    "prompt_groups": ("tuning.prompt_bank", "groups", "GROUPS_TITLE"),
    "tune_start": ("tuning.tuning_times", "start", "START_TITLE"),
    "many_pilots": ("reliability.recovery", "many_pilots", "MANY_TITLE"),
    "restart": ("reliability.recovery", "restart", "RESTART_TITLE"),
    "lost_pilot": ("reliability.recovery", "lost_pilot", "LOST_TITLE"),
    "journal": ("reliability.journal", "coming_back", "BACK_TITLE"),
    "journal_sync": ("reliability.journal", "group_sync", "SYNC_TITLE"),
}
"""Module, function and title of benchmarks in shared modules."""
BENCHMARKS = {
    name: ELSEWHERE.get(name, (f"{subject}.{name}", "measure", "TITLE"))
    for subject, names in SUBJECTS.items()
    for name in names.split()
}
PAGE = "page.html"


class Measured(msgspec.Struct, frozen=True):
    facts: Facts
    quick: bool
    failed: tuple[str, ...]
    tables: tuple[Table, ...]


def main(arguments: list[str] | None = None) -> int:
    about = f"Run benchmarks; without a NAME, all of them:\n\n{_benchmark_list()}"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run [all]")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="check in a minute that they run; judge no bars")
    parser.add_argument("--json", metavar="FILE", type=Path, help="file for all numbers [record.json next to the page]")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the page [%(default)s]")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(_benchmark_list())
        return 0
    if unknown := [name for name in asked.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    say = partial(print, " ", file=sys.stderr, flush=True)
    clock = Clock(" ".join(["python -m benchmarks", *asked.names, *(["--quick"] if asked.quick else [])]))
    print(clock.facts().line().replace("`", ""), flush=True)
    tables, failed = [], []
    for name in asked.names or BENCHMARKS:
        begun = time.perf_counter()
        try:
            module, function, _ = BENCHMARKS[name]
            table: Table = getattr(import_module(f"benchmarks.{module}"), function)(say, quick=asked.quick)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        table = msgspec.structs.replace(table, seconds=round(time.perf_counter() - begun, 1))
        tables.append(table)
        shown = "\n".join(show(table, quick=asked.quick))
        print(f"\n{shown}\n{table.seconds:.0f} s, load after {os.getloadavg()[0]:.1f}", flush=True)
    facts = clock.facts()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = msgspec.json.encode(Measured(facts, asked.quick, tuple(failed), tuple(tables)))
    (asked.json or asked.out / "record.json").write_bytes(msgspec.json.format(record, indent=1) + b"\n")
    (asked.out / PAGE).write_text(page.write(tables, failed, facts, quick=asked.quick))
    status = print_outcome(tables, failed, quick=asked.quick)
    print(f"the bars as a picture: {asked.out / PAGE}")
    return status


def print_outcome(tables: list[Table], failed: list[str], *, quick: bool) -> int:
    missed = [table.name for table in tables if not passes(table, quick=quick)]
    skipped = [table.name for table in tables if table.skipped]
    for what, names in (("failed", failed), ("not every bar is met", missed), ("skipped", skipped)):
        if names:
            print(f"{what}: {', '.join(names)}")
    if failed:
        return 2
    if missed:
        return 1
    if len(skipped) == len(tables):
        print("nothing was measured")
        return 2
    print("quick: the benchmarks run; no bar was judged" if quick else "every bar that was measured is met")
    return 0


def _benchmark_list() -> str:
    lines = []
    for subject, names in SUBJECTS.items():
        lines.append(f"{subject}:")
        for name in names.split():
            module, _, title = BENCHMARKS[name]
            lines.append(f"  {name:20} {getattr(import_module(f'benchmarks.{module}'), title)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

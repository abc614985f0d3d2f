"""`python -m benchmarks [NAME ...]`: measures, and says of every bar whether it is met.

Exit status: 0 when every bar that was measured is met, 1 when one is missed, 2 when a benchmark failed or nothing was
measured. A benchmark that cannot run here is skipped with its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks import page
from benchmarks.engine import (
    awareness,
    concurrent_requests,
    fact_batches,
    manager_core,
    noop,
    streams,
    taskvine,
    transfers,
    turns,
    zygote,
)
from benchmarks.harness import Clock, Facts
from benchmarks.papers.slinfer import decisions
from benchmarks.reliability import journal, preemption, recovery, vanishing
from benchmarks.scale import fidelity, scheduling_rounds, simulator
from benchmarks.serving import embeddings, live_models, model_switch, openai_batch, step_times
from benchmarks.tables import Table, passes, show
from benchmarks.tuning import prompt_bank, prompt_groups, prompt_quality, tune_start, tuning_times

BENCHMARKS: dict[str, tuple[str, Callable[..., Table]]] = {
    noop.NAME: (noop.TITLE, noop.measure),
    taskvine.NAME: (taskvine.TITLE, taskvine.measure),
    fact_batches.NAME: (fact_batches.TITLE, fact_batches.measure),
    awareness.NAME: (awareness.TITLE, awareness.measure),
    zygote.NAME: (zygote.TITLE, zygote.measure),
    concurrent_requests.NAME: (concurrent_requests.TITLE, concurrent_requests.measure),
    embeddings.NAME: (embeddings.TITLE, embeddings.measure),
    model_switch.NAME: (model_switch.TITLE, model_switch.measure),
    transfers.NAME: (transfers.TITLE, transfers.measure),
    preemption.NAME: (preemption.TITLE, preemption.measure),
    openai_batch.NAME: (openai_batch.TITLE, openai_batch.measure),
    manager_core.EVENTS: (manager_core.EVENTS_TITLE, manager_core.events),
    manager_core.MEMORY: (manager_core.MEMORY_TITLE, manager_core.memory),
    step_times.NAME: (step_times.TITLE, step_times.measure),
    streams.NAME: (streams.TITLE, streams.measure),
    turns.NAME: (turns.TITLE, turns.measure),
    recovery.MANY: (recovery.MANY_TITLE, recovery.many_pilots),
    recovery.RESTART: (recovery.RESTART_TITLE, recovery.restart),
    recovery.LOST: (recovery.LOST_TITLE, recovery.lost_pilot),
    journal.BACK: (journal.BACK_TITLE, journal.coming_back),
    journal.SYNC: (journal.SYNC_TITLE, journal.group_sync),
    vanishing.NAME: (vanishing.TITLE, vanishing.measure),
    fidelity.NAME: (fidelity.TITLE, fidelity.measure),
    live_models.NAME: (live_models.TITLE, live_models.measure),
    simulator.NAME: (simulator.TITLE, simulator.measure),
    scheduling_rounds.NAME: (scheduling_rounds.TITLE, scheduling_rounds.measure),
    decisions.NAME: (decisions.TITLE, decisions.measure),
    prompt_bank.NAME: (prompt_bank.TITLE, prompt_bank.measure),
    prompt_groups.NAME: (prompt_groups.TITLE, prompt_groups.measure),
    prompt_quality.NAME: (prompt_quality.TITLE, prompt_quality.measure),
    tune_start.NAME: (tune_start.TITLE, tune_start.measure),
    tuning_times.NAME: (tuning_times.TITLE, tuning_times.measure),
}


PAGE = "page.html"


class Measured(msgspec.Struct, frozen=True):
    """A record: what was measured, and where."""

    facts: Facts
    quick: bool
    failed: tuple[str, ...]
    tables: tuple[Table, ...]


def main(arguments: list[str] | None = None) -> int:
    listed = "\n".join(f"  {name:16} {title}" for name, (title, _) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measures; without a NAME, everything:\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run [all]")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--quick", action="store_true", help="a minute's check that they run; bars are not judged")
    parser.add_argument("--json", metavar="FILE", type=Path, help="every number, into this file [beside the page]")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where the page goes [%(default)s]")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(listed)
        return 0
    if unknown := [name for name in asked.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    clock = Clock(" ".join(["python -m benchmarks", *asked.names, *(["--quick"] if asked.quick else [])]))
    print(clock.facts().line().replace("`", ""), flush=True)
    tables, failed = [], []
    for name in asked.names or BENCHMARKS:
        begun = time.perf_counter()
        try:
            table = BENCHMARKS[name][1](_say, quick=asked.quick)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        table = msgspec.structs.replace(table, seconds=round(time.perf_counter() - begun, 1))
        tables.append(table)
        print(
            "\n".join(["", *show(table, quick=asked.quick), f"{table.seconds:.0f} s, load after {_load()}"]), flush=True
        )
    facts = clock.facts()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Measured(facts, asked.quick, tuple(failed), tuple(tables))
    (asked.json or asked.out / "record.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    )
    (asked.out / PAGE).write_text(page.write(tables, failed, facts, quick=asked.quick))
    status = conclude(tables, failed, quick=asked.quick)
    print(f"the bars as a picture, what is met and what is missed: {asked.out / PAGE}")
    return status


def conclude(tables: list[Table], failed: list[str], *, quick: bool) -> int:
    """Say what it came to; the exit status."""
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
    print("quick: they run; no bar was judged" if quick else "every bar that was measured is met")
    return 0


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())

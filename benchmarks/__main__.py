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
from pathlib import Path
from pkgutil import resolve_name

import msgspec

from benchmarks.harness import Clock, Facts, Skipped
from benchmarks.tables import Table, passes, show

BENCHMARKS = {
    "noop": ("engine.noop:measure", "no-op calls on a hot context against Parsl's HighThroughputExecutor (HTEX)"),
    "taskvine": ("engine.taskvine:measure", "no-op calls against TaskVine's FunctionCall"),
    "fact_batches": ("engine.awareness:batches", "fact verification in calls of 1, 16 and 256 claims, without loads"),
    "awareness": ("engine.awareness:measure", "fact verification at the three levels of awareness"),
    "zygote": ("engine.zygote:measure", "from the request until a loader that uses torch and transformers can load"),
    "concurrent_requests": ("engine.concurrent_requests:measure", "ms in Stoker a request, 32 slots"),
    "transfers": ("engine.transfers:measure", "an object to pilots on separate hosts"),
    "core_events": ("engine.core_events:events", "events a second of the pure core at 1,000 pilots"),
    "memory_per_call": ("engine.core_events:memory", "the manager's memory for each queued call of 64 bytes"),
    "streams": ("engine.streams:measure", "from `yield` in a library until its program has the piece"),
    "turns": ("engine.turns:measure", "libraries on one device take turns: time beside iterations, in %"),
    "embeddings": ("serving.embeddings:measure", "embedding tweets: Stoker, a script that sorts them, padding to 512"),
    "model_switch": ("serving.model_switch:measure", "from the request for another model until its first token"),
    "openai_batch": ("serving.openai_batch:measure", "an OpenAI batch while manager and pilots are killed once"),
    "step_times": ("serving.step_times:measure", "seconds of a model's steps against the profiler's table: error in %"),
    "gateway_objectives": ("serving.gateway_objectives:measure", "three models behind the gateway: objectives met"),
    "slinfer_decisions": ("papers.slinfer.decisions:measure", "what it costs to place a call of a language model"),
    "json_schemas": ("serving.json_schemas:measure", "answers that follow JSON schemas, and their cost per token"),
    "adapters": ("serving.adapters:measure", "tokens/s of 8 LoRA adapters in one batch, and of their base"),
    "gateway_cost": ("serving.gateway_cost:measure", "time per token, and to the first token, that a gateway adds"),
    "gateway_rate": ("serving.gateway_rate:measure", "tokens/s of clients behind one gateway and four workers"),
    "dashboard": ("serving.dashboard:measure", "the page of a session with 200 pilots and 100,000 calls"),
    "lm_eval": ("serving.lm_eval_scores:measure", "scores of lm-eval through a gateway, and by its `hf` backend"),
    "prompt_bank": ("tuning.prompt_bank:measure", "the Prompt Bank: scores computed a lookup, and the regret"),
    "prompt_groups": ("tuning.prompt_bank:groups", "how alike prompts are, and what the number of clusters costs"),
    "prompt_quality": ("tuning.prompt_quality:measure", "the prompt chosen by score: iterations to accuracy"),
    "tune_start": ("tuning.tuning_times:start", "a prompt-tuning job: from its submission to its first optimizer step"),
    "tuning_times": ("tuning.tuning_times:measure", "a prompt-tuning job: its time, and a forecast for two devices"),
    "preemption": ("reliability.preemption:measure", "calls on pilots of a real Slurm that are preempted in turn"),
    "many_pilots": ("reliability.recovery:many_pilots", "one live manager with 2,000 pilots against one pilot"),
    "restart": ("reliability.recovery:restart", "kill -9 of the manager with 100,000 calls queued and 200 running"),
    "lost_pilot": ("reliability.recovery:lost_pilot", "from the loss of a pilot until its call runs on another"),
    "journal": ("reliability.journal:coming_back", "a manager comes back after a day, and after millions of calls"),
    "journal_sync": ("reliability.journal:group_sync", "calls/s with the journal synced in groups against no sync"),
    "vanishing": ("reliability.vanishing:measure", "calls done when 20 pilots have been killed one by one"),
    "fidelity": ("scale.fidelity:measure", "fact verification against its simulation: makespan"),
    "simulator": ("scale.simulator:measure", "the simulator: whole runs of the deployed cores in virtual time"),
    "scheduling_rounds": ("scale.scheduling_rounds:measure", "rounds of the scheduler for jobs with deadlines"),
}
"""Function and title of each benchmark, sorted by subject."""


class Measured(msgspec.Struct, frozen=True):
    facts: Facts
    quick: bool
    failed: tuple[str, ...]
    tables: tuple[Table, ...]


def main(arguments: list[str] | None = None) -> int:
    every = "\n".join(f"  {name:24} {title}" for name, (_, title) in BENCHMARKS.items())
    about = f"Run benchmarks; without a NAME, all of them:\n\n{every}"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run [all]")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="check in a minute that they run; judge no bars")
    parser.add_argument("--json", metavar="FILE", type=Path, help="file for all numbers [record.json next to the page]")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the page [%(default)s]")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(every)
        return 0
    if unknown := [name for name in asked.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    say = partial(print, " ", file=sys.stderr, flush=True)
    clock = Clock(" ".join(["python -m benchmarks", *asked.names, *(["--quick"] if asked.quick else [])]))
    print(clock.facts().line().replace("`", ""), flush=True)
    tables, failed, shown = [], [], list[str]()
    for name in asked.names or BENCHMARKS:
        begun = time.perf_counter()
        function, title = BENCHMARKS[name]
        try:
            table: Table = resolve_name(f"benchmarks.{function}")(say, quick=asked.quick)
        except Skipped as reason:
            table = Table(skipped=str(reason))
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        seconds = round(time.perf_counter() - begun, 1)
        tables.append(msgspec.structs.replace(table, name=name, title=title, seconds=seconds))
        shown += (lines := show(tables[-1], quick=asked.quick))
        print("", *lines, f"{seconds:.0f} s, load after {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
    facts = clock.facts()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = msgspec.json.encode(Measured(facts, asked.quick, tuple(failed), tuple(tables)))
    (asked.json or asked.out / "record.json").write_bytes(msgspec.json.format(record, indent=1) + b"\n")
    (asked.out / "page.md").write_text("\n".join([facts.line(), "", *shown]))
    return print_outcome(tables, failed, quick=asked.quick)


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


if __name__ == "__main__":
    sys.exit(main())

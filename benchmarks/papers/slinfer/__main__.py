"""`python -m benchmarks.papers.slinfer`: run SLINFER's evaluation table by table, and write the page; or one run of it.

`--table III` runs what a table needs and writes the page anew; `--table all` runs everything. Without `--table` one
system serves one workload, and what came of it is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.papers.common import exit_status, number, say
from benchmarks.papers.slinfer import report
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, Case, Records, is_there, run
from benchmarks.papers.slinfer.data import missing
from benchmarks.papers.slinfer.tables import QUICK_S, TABLES
from stoker.whole_files import draft_of

PAGE, RECORDS = "slinfer.md", "slinfer.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when something fails, 2 where the data is not there or what cannot be asked, 130 after
    Ctrl-C."""
    asked = _asked(arguments)
    return exit_status(
        lambda: _reproduce(asked) if asked.table else _run_one(asked),
        what="SLINFER's evaluation", kept=asked.out / RECORDS, missing=missing(), skip=asked.skip,
    )  # fmt: skip


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.slinfer", description=__doc__)
    ask.add_argument("--table", choices=[*TABLES, "all"], help="what to run; the page is written anew")
    ask.add_argument("--only", action="append", choices=[*BASELINES, SLINFER], help="of a table; repeat for several")
    ask.add_argument("--out", type=Path, help="where page and records go [docs/reproduction]")
    ask.add_argument("--quick", action="store_true", help=f"{QUICK_S:.0f} s of each workload, for a look; wants --out")
    ask.add_argument("--skip", action="store_true", help="exit with 0 where the data is not there")
    ask.add_argument("--system", choices=[*BASELINES, SLINFER], default=SLLM, help="of one run [%(default)s]")
    ask.add_argument("--models", type=number(most=128), default=32, help="[%(default)s]")
    ask.add_argument("--size", default="llama-2-7b", help="[%(default)s]")
    ask.add_argument("--workload", default="AzureConv", help="[%(default)s]")
    asked = ask.parse_args(arguments)
    if asked.table and asked.quick and asked.out is None:
        ask.error("--quick wants --out: what it writes must not replace the whole page")
    if not asked.table and not is_there(asked.system):
        ask.error(f"--system {asked.system}: it does not ship yet")
    asked.out = asked.out or Path("docs/reproduction")
    return asked


def _reproduce(asked: argparse.Namespace) -> int:
    records, for_s = Records(asked.out / RECORDS), QUICK_S if asked.quick else 0.0
    wanted = TABLES.values() if asked.table == "all" else [TABLES[asked.table]]
    every = [case for cases in wanted for case in cases()]
    cases = [report.shortened(case, for_s) for case in every if not asked.only or case.system in asked.only]
    records.bring(cases, tell=say)
    asked.out.mkdir(parents=True, exist_ok=True)
    with draft_of(asked.out / PAGE) as draft:
        draft.write_text(report.write(records, for_s=for_s))
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


def _run_one(asked: argparse.Namespace) -> int:
    case = Case(asked.system, asked.models, (asked.size,), asked.workload, for_s=QUICK_S if asked.quick else 0.0)
    result = run(case)
    of = result.measures
    lines = [
        f"{case.system}, {case.models} x {asked.size}, {asked.workload}: {of.requests:,} requests",
        f"objectives met: {report.met(result)} %; dropped: {100 * of.dropped:.1f} %; loads: {of.loads:,}",
        *(
            f"{kind}: {use.nodes:.2f} nodes and {use.instances:.2f} instances on the mean, "
            f"{use.tokens_per_s:.0f} tokens/s a node, {use.running:.1f} requests at once"
            for kind, use in of.kinds.items()
        ),
        f"simulated in {result.took_s:.1f} s of one core: {result.engine_steps:,} steps of engines",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.papers.slinfer`: run SLINFER's evaluation table by table and write the page, or run one case.

`--table III` runs one table; `--table all` runs everything. Without `--table` one system serves one workload.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.papers import common
from benchmarks.papers.slinfer import report
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, Case, records, run
from benchmarks.papers.slinfer.data import missing
from benchmarks.papers.slinfer.tables import QUICK_S, TABLES

PAGE, RECORDS = "slinfer.md", "slinfer.json"


def main(arguments: list[str] | None = None) -> int:
    systems = [*BASELINES, SLINFER]
    ask = common.options(
        "slinfer", __doc__,
        table={"choices": [*TABLES, "all"], "help": "what to run; the page is written again"},
        only={"action": "append", "choices": systems, "help": "of a table; repeat for several"},
        out=None, quick=None, skip=None,
        system={"choices": systems, "default": SLLM, "help": "of one run [%(default)s]"},
        models={"type": common.number(most=128), "default": 32, "help": "[%(default)s]"},
        size={"default": "llama-2-7b", "help": "[%(default)s]"},
        workload={"default": "AzureConv", "help": "[%(default)s]"},
    )  # fmt: skip
    asked = common.parsed(ask, arguments)
    return common.exit_status(
        lambda: _reproduce(asked) if asked.table else _run_one(asked),
        stopped=f"the same again goes on with {asked.out / RECORDS}", missing=missing(), skip=asked.skip,
    )  # fmt: skip


def _reproduce(asked: argparse.Namespace) -> int:
    store, for_s = records(asked.out / RECORDS), QUICK_S if asked.quick else 0.0
    wanted = TABLES.values() if asked.table == "all" else [TABLES[asked.table]]
    every = [case for cases in wanted for case in cases()]
    cases = [report.shortened(case, for_s) for case in every if not asked.only or case.system in asked.only]
    store.bring(cases, run, tell=common.say)
    common.write_page(asked.out / PAGE, report.write(store, for_s=for_s))
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

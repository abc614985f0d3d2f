"""The options of `stoker run inference_sweep`."""

from __future__ import annotations

from typing import Any

import click

from stoker.apps.common.command_line import WIDE, RunChoice, add_run_options
from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.plan import SweepOptions
from stoker.console import WholeNumber

_DEFAULT = SweepOptions()


@click.command(APP, short_help="Run models x prompts x parameters over a data file.", context_settings=WIDE)
@click.option("--sweep", metavar="FILE", help="The sweep: a TOML file. [a small example, shipped]")
@click.option(
    "--data",
    metavar="FILE",
    help="A data file that replaces the sweep file's: .jsonl, .csv, .parquet, .arrow or a saved data set.",
)
@click.option("--limit", metavar="N", type=WholeNumber(), help="The first N rows only.")
@click.option("--batch-size", type=WholeNumber(), help=f"Rows per call. [{_DEFAULT.batch_size}]")
@click.option(
    "--tensor-batch", type=WholeNumber(), help="Maximum number of rows that the model processes at a time. [all]"
)
@add_run_options(prefix="sweep", formats=["parquet", "jsonl"])
@click.pass_context
def command(context: click.Context, /, *, choice: RunChoice, **given: Any) -> None:
    """Run every combination of models, prompts and generation parameters over a data file.

    Models that fit on one device together stay loaded there. A run with the same options resumes a stopped sweep.

    If a model refuses a row (an empty prompt, too many tokens), the other rows still get results. The column `error`
    has the reason, the exit status is 1, and --resume retries these rows.
    """
    from stoker.apps.inference_sweep.run import run_sweep  # here, because Parsl would slow down --help

    context.exit(run_sweep(given, choice))

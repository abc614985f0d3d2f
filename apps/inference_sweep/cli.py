"""`stoker run inference_sweep`: the options, checked, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.options import SweepOptions
from stoker.console import Screen, WholeNumber

_DEFAULT = SweepOptions()
_FOLDER = click.Path(path_type=Path)


@click.command(
    APP, short_help="Models x prompts x parameters over a data file.", context_settings={"max_content_width": 120}
)
@click.option("--sweep", metavar="FILE", help="What to sweep: a TOML file. [a small example, shipped]")
@click.option(
    "--data",
    metavar="FILE",
    help="Rows instead of the sweep file's: .jsonl, .csv, .parquet, .arrow or a saved data set.",
)
@click.option("--limit", metavar="N", type=WholeNumber(), help="The first N rows only.")
@click.option("--batch-size", type=WholeNumber(), help=f"Rows a call. [{_DEFAULT.batch_size}]")
@click.option("--tensor-batch", type=WholeNumber(), help="Rows of a call that are written at a time, at most. [all]")
@click.option("--site", metavar="FILE", help="Where to run: a site file. [this machine]")
@click.option("--out", metavar="DIR", type=_FOLDER, help="The run folder. [runs/sweep-DATE-TIME]")
@click.option("--resume", metavar="DIR", type=_FOLDER, help="Go on with this run, with its options.")
@click.option("--fresh", is_flag=True, help="Start anew, even when an unfinished run of the same is there.")
@click.option("--format", type=click.Choice(["parquet", "jsonl"]), help="Of the results file. [parquet]")
@click.option("--json", "json_", is_flag=True, help="The summary as JSON on stdout; everything else goes to stderr.")
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    out: Path | None,
    resume: Path | None,
    fresh: bool,
    json_: bool,
    **others: Any,
) -> None:
    """Models x prompts x generation parameters over a data file.

    Models that fit a device together stay hot on it side by side. A sweep that was stopped is gone on with by the next
    run that asks for the same.

    A row that a model cannot take (an empty prompt, too many tokens) costs no other row: the results say why in the
    column `error`, the exit status is 1, and --resume tries such rows again.
    """
    from stoker.apps.inference_sweep.run import run  # it imports Parsl, for which --help does not wait

    if resume and (out or fresh):
        raise click.UsageError("--resume names the run to go on with; leave --out and --fresh away")
    given = {name: value for name, value in others.items() if value is not None}
    code = run(given, resume=resume, out=out, fresh=fresh, screen=Screen(json_only=json_), json=json_)
    context.exit(code)

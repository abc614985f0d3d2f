"""The options of `stoker run fact_verification`."""

from __future__ import annotations

from typing import Any

import click

from stoker.apps.common.command_line import WIDE, RunChoice, add_run_options
from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.console import WholeNumber

_DEFAULT = VerificationOptions()


@click.command(APP, context_settings=WIDE)
@click.option("--model", metavar="PATH", help="A model folder, a GGUF file or a hub name. [SmolLM2-135M-Instruct]")
@click.option("--claims", metavar="FILE", help="Claims with labels: .jsonl, .csv or .parquet. [999 of FEVER, shipped]")
@click.option("--prompts", metavar="FILE", help="Templates with {claim}: .toml or .jsonl. [three, shipped]")
@click.option(
    "--limit", metavar="N", type=WholeNumber(), help=f"Verify N claims of the file, drawn at random. [{_DEFAULT.limit}]"
)
@click.option("--all", "everything", is_flag=True, help="Verify every claim of the file.")
@click.option("--seed", type=int, help=f"The seed with which --limit draws. [{_DEFAULT.seed}]")
@click.option("--batch-size", type=WholeNumber(), help=f"Claims per call. [{_DEFAULT.batch_size}]")
@click.option(
    "--tensor-batch", type=WholeNumber(), help=f"Claims in one tensor inside a call. [{_DEFAULT.tensor_batch}]"
)
@click.option(
    "--awareness", type=click.Choice(["none", "disk", "full"]),
    help="What a library keeps between calls: nothing, the model's files, or the loaded model. [full]",
)  # fmt: skip
@click.option("--snapshot/--no-snapshot", default=None, help="Keep a copy of the model that loads faster. [on]")
@click.option("--calibrate/--no-calibrate", default=None, help="Correct a prompt's preference for one answer. [on]")
@add_run_options(prefix="fact", formats=["parquet", "jsonl"])
@click.pass_context
def command(
    context: click.Context, /, *, choice: RunChoice, everything: bool, limit: int | None = None, **given: Any
) -> None:
    """Find the prompt with which a model checks claims best.

    For every template and every claim, the model chooses the best of three words. A run with the same options resumes a
    stopped run (Ctrl-C, a crash).

    A claim file has the columns claim and label (SUPPORTS, REFUTES, NOT ENOUGH INFO), and may have id and evidence. A
    template is a text with {claim}, and perhaps {evidence}, that ends where the answer begins.
    """
    from stoker.apps.fact_verification.run import run_verification  # here, because Parsl would slow down --help

    if everything and limit is not None:
        raise click.UsageError("--all and --limit exclude each other; give one")
    if everything or limit is not None:
        given["limit"] = 0 if everything else limit
    context.exit(run_verification(given, choice))

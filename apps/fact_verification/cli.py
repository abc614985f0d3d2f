"""`stoker run fact_verification`: its options, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stoker.apps.common.command_line import WIDE, check_resume, given_options, run_options
from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.console import Screen, WholeNumber

_DEFAULT = VerificationOptions()


@click.command(APP, context_settings=WIDE)
@click.option("--model", metavar="PATH", help="A model folder, a GGUF file or a hub name. [SmolLM2-135M-Instruct]")
@click.option("--claims", metavar="FILE", help="Claims with labels: .jsonl, .csv or .parquet. [999 of FEVER, shipped]")
@click.option("--prompts", metavar="FILE", help="Templates with {claim}: .toml or .jsonl. [three, shipped]")
@click.option(
    "--limit", metavar="N", type=WholeNumber(), help=f"N claims of the file, drawn by chance. [{_DEFAULT.limit}]"
)
@click.option("--all", "everything", is_flag=True, help="Verify every claim of the file.")
@click.option("--seed", type=int, help=f"Which claims --limit draws. [{_DEFAULT.seed}]")
@click.option("--batch-size", type=WholeNumber(), help=f"Claims a call. [{_DEFAULT.batch_size}]")
@click.option(
    "--tensor-batch", type=WholeNumber(), help=f"Claims in one tensor inside a call. [{_DEFAULT.tensor_batch}]"
)
@click.option(
    "--awareness", type=click.Choice(["none", "disk", "full"]),
    help="What stays between calls: nothing, the model's files, or the loaded model. [full]",
)  # fmt: skip
@click.option("--snapshot/--no-snapshot", default=None, help="Keep a copy of the model that loads faster. [on]")
@click.option(
    "--calibrate/--no-calibrate", default=None, help="Take a prompt's favourite answer out of the count. [on]"
)
@run_options(prefix="fact", formats=["parquet", "jsonl"])
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    everything: bool,
    out: Path | None,
    resume: Path | None,
    fresh: bool,
    json_: bool,
    limit: int | None,
    **others: Any,
) -> None:
    """Find the prompt with which a model checks claims best.

    Every template is put to every claim; the model says which of three words answers best. A run that was stopped
    (Ctrl-C, a crash) is gone on with by the next one that asks for the same.

    A claim file has the columns claim and label (SUPPORTS, REFUTES, NOT ENOUGH INFO), and may have id and evidence. A
    template is a text with {claim}, and perhaps {evidence}, that ends where the answer begins.
    """
    from stoker.apps.fact_verification.run import run  # it imports Parsl, for which --help does not wait

    if everything and limit is not None:
        raise click.UsageError("--all and --limit say different things; give one")
    check_resume(resume, out=out, fresh=fresh)
    given = given_options(others)
    if everything or limit is not None:
        given["limit"] = 0 if everything else limit
    context.exit(run(given, resume=resume, out=out, fresh=fresh, screen=Screen(json_only=json_), json=json_))

"""`stoker run fact_verification`: the options, checked, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.console import Screen, WholeNumber

_DEFAULT = VerificationOptions()
_FOLDER = click.Path(path_type=Path)


@click.command(APP, context_settings={"max_content_width": 120})
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
    help="What outlives a call: nothing, the model's files, or the loaded model. [full]",
)  # fmt: skip
@click.option("--snapshot/--no-snapshot", default=None, help="Keep a copy of the model that loads faster. [on]")
@click.option(
    "--calibrate/--no-calibrate", default=None, help="Take a prompt's favourite answer out of the count. [on]"
)
@click.option("--site", metavar="FILE", help="Where to run: a site file. [this machine]")
@click.option("--out", metavar="DIR", type=_FOLDER, help="The run folder. [runs/fact-DATE-TIME]")
@click.option("--resume", metavar="DIR", type=_FOLDER, help="Go on with this run, with its options.")
@click.option("--fresh", is_flag=True, help="Start anew, even when an unfinished run of the same is there.")
@click.option("--format", type=click.Choice(["parquet", "jsonl"]), help="Of the results file. [parquet]")
@click.option("--json", "json_", is_flag=True, help="The summary as JSON on stdout; everything else goes to stderr.")
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
    if resume and (out or fresh):
        raise click.UsageError("--resume names the run to go on with; leave --out and --fresh away")
    given = {name: value for name, value in others.items() if value is not None}
    if everything or limit is not None:
        given["limit"] = 0 if everything else limit
    code = run(given, resume=resume, out=out, fresh=fresh, screen=Screen(json_only=json_), json=json_)
    context.exit(code)

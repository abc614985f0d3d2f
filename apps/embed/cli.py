"""The options of `stoker run embed`."""

from __future__ import annotations

from typing import Any

import click

from stoker.apps.common.command_line import WIDE, RunChoice, add_dtype_option, add_run_options
from stoker.apps.embed import APP
from stoker.apps.embed.options import EmbedOptions
from stoker.console import WholeNumber

_DEFAULT = EmbedOptions()


@click.command(APP, short_help="Compute a vector for each text of a data file.", context_settings=WIDE)
@click.argument("data", metavar="[FILE]", required=False)
@click.option("--model", metavar="PATH", help="The encoder: a folder, or a name on the model hub.")
@click.option("--text", metavar="COLUMN", help=f"The column of the texts. [{_DEFAULT.text}]")
@click.option("--id", metavar="COLUMN", help="The column that names the rows. [the row's number]")
@click.option(
    "--pooling", type=click.Choice(["mean", "cls", "last"]),
    help="How token vectors become one vector. [as the model's files say]",
)  # fmt: skip
@click.option("--no-normalize", is_flag=True, help="Leave vectors as they are, instead of scaling them to length 1.")
@click.option("--truncate", is_flag=True, help="Use only the beginning of a text that is too long for the model.")
@add_dtype_option("encoder")
@click.option("--limit", metavar="N", type=WholeNumber(), help="The first N rows only.")
@click.option("--batch-size", type=WholeNumber(), help=f"Texts per call. [{_DEFAULT.batch_size}]")
@click.option("--tensor-batch", type=WholeNumber(), help=f"Texts computed at a time. [{_DEFAULT.tensor_batch}]")
@add_run_options(prefix="embed", formats=["parquet", "npy"])
@click.pass_context
def command(context: click.Context, /, *, choice: RunChoice, no_normalize: bool, truncate: bool, **given: Any) -> None:
    """Compute a vector for each text of FILE (.jsonl, .csv, .parquet, .arrow, or a saved data set) with an encoder.

    Texts of similar length are computed together, to reduce padding. A run with the same options resumes a stopped run.
    The results have a row for each text, in the order of the file: Parquet with `id`, `embedding` and `error`, or a
    NumPy array.

    If the model refuses a text (because it is empty or too long), the other texts still get their vectors. The exit
    status is then 1, and --resume retries these texts.
    """
    from stoker.apps.embed.run import run_embedding  # here, because Parsl would slow down --help

    if choice.resume and "data" in given:
        raise click.UsageError("--resume names the run to continue; leave FILE out")
    given |= {"normalize": False} if no_normalize else {}
    given |= {"truncate": True} if truncate else {}
    context.exit(run_embedding(given, choice))

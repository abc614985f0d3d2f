"""`stoker run embed`: its options, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stoker.apps.common.command_line import WIDE, check_resume, given_options, run_options
from stoker.apps.embed import APP
from stoker.apps.embed.options import EmbedOptions
from stoker.console import Screen, WholeNumber

_DEFAULT = EmbedOptions()


@click.command(APP, short_help="A vector for each text of a data file.", context_settings=WIDE)
@click.argument("data", metavar="[FILE]", required=False)
@click.option("--model", metavar="PATH", help="The encoder: a folder, or a name on the model hub.")
@click.option("--text", metavar="COLUMN", help=f"The column of the texts. [{_DEFAULT.text}]")
@click.option("--id", metavar="COLUMN", help="The column that names the rows. [their numbers]")
@click.option("--pooling", type=click.Choice(["mean", "cls", "last"]), help="[what the model was made for]")
@click.option("--no-normalize", is_flag=True, help="Vectors of any length, not of length 1.")
@click.option("--truncate", is_flag=True, help="Of a text that is too long for the model, take the beginning.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="As in encoder. [auto]")
@click.option("--limit", metavar="N", type=WholeNumber(), help="The first N rows only.")
@click.option("--batch-size", type=WholeNumber(), help=f"Texts a call. [{_DEFAULT.batch_size}]")
@click.option("--tensor-batch", type=WholeNumber(), help=f"Texts computed at a time. [{_DEFAULT.tensor_batch}]")
@run_options(prefix="embed", formats=["parquet", "npy"])
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    no_normalize: bool,
    truncate: bool,
    out: Path | None,
    resume: Path | None,
    fresh: bool,
    json_: bool,
    **others: Any,
) -> None:
    """A vector for each text of FILE (.jsonl, .csv, .parquet, .arrow, or a saved data set), by an encoder.

    Texts of like length are computed together, so little is padded. A run that was stopped is gone on with by the next
    one that asks for the same. The results have a row for each text, in the order of the file: Parquet with `id`,
    `embedding` and `error`, or a NumPy array.

    A text that the model cannot take (an empty one, or one that is too long) costs no other its vector: the exit
    status is 1, and --resume tries such texts again.
    """
    from stoker.apps.embed.run import run  # it imports Parsl, for which --help does not wait

    check_resume(resume, FILE=others["data"], out=out, fresh=fresh)
    given = given_options(others)
    given |= {"normalize": False} if no_normalize else {}
    given |= {"truncate": True} if truncate else {}
    context.exit(run(given, resume=resume, out=out, fresh=fresh, screen=Screen(json_only=json_), json=json_))

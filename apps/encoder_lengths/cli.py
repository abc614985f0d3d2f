"""The options of `stoker run encoder_lengths`."""

from __future__ import annotations

from typing import Any

import click

from stoker.apps.common.command_line import WIDE, add_dtype_option, drop_unset_options
from stoker.apps.encoder_lengths import APP
from stoker.console import WholeNumber


@click.command(
    APP,
    short_help="Measure an encoder at each text length, and choose the lengths that get a runtime.",
    context_settings=WIDE,
)
@click.option("--model", metavar="PATH", help="The encoder: a folder, or a name on the model hub.")
@click.option("--texts", metavar="FILE", help="A file of typical texts; lengths are chosen for them.")
@click.option("--text", metavar="COLUMN", help="The column of the texts. [text]")
@add_dtype_option("encoder")
@click.option(
    "--compiled", type=click.Choice(["auto", "yes", "no"]),
    help="Compile, as in encoder(compiled=...). [auto: on a GPU]",
)  # fmt: skip
@click.option("--step", metavar="N", type=WholeNumber(), help="Tokens between two lengths. [16, at most 32 lengths]")
@click.option("--site", metavar="FILE", help="Where to run: a site file. [this machine]")
@click.option("--json", "json_", is_flag=True, help="The profile as JSON on stdout; everything else goes to stderr.")
@click.pass_context
def command(context: click.Context, /, *, json_: bool, **others: Any) -> None:
    """Measure how long an encoder takes for a text of each length, on a device of a session. Each text is padded to its
    length.

    Where latency rises in steps, a runtime for each step serves short texts faster. The profile is kept on this
    machine: encoder_family(MODEL) finds it, and creates runtimes for the lengths that reduce latency. With --texts, the
    lengths are chosen for the lengths of your texts.
    """
    from stoker.apps.encoder_lengths.run import measure_encoder  # here, because Parsl would slow down --help

    if others["text"] is not None and others["texts"] is None:
        raise click.UsageError("--text names a column of --texts FILE, which is missing")
    context.exit(measure_encoder(**drop_unset_options(others), json=json_))

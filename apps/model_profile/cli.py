"""The options of `stoker profile`."""

from __future__ import annotations

import click

from stoker.apps.common.command_line import WIDE, add_dtype_option, add_site_and_session_options


@click.command("profile", short_help="Measure the time of a model's steps on a device.", context_settings=WIDE)
@click.argument("model", required=False, default="", metavar="[MODEL]")
@add_dtype_option("causal_lm", default="auto")
@click.option(
    "--quick", is_flag=True, help="Measure every second power of two, up to 1,024 prompt tokens: about a minute."
)
@add_site_and_session_options
@click.option("--json", "json_", is_flag=True, help="The profile as JSON on stdout; everything else goes to stderr.")
@click.pass_context
def command(
    context: click.Context, /, *, model: str, dtype: str, quick: bool, site: str, session: str, json_: bool
) -> None:
    """Measure how long the steps of MODEL take on a device of a session: prefill by the tokens that a step reads,
    decode by the requests and their mean length. Then compare 100 random workloads with the table, and report the
    error. The measurement takes minutes at most. MODEL is a folder, a .gguf file or a name on the hub. The default is a
    small model.

    The results are kept with the other measurements, for this model and kind of device. Ordinary calls also measure
    their steps; a profile covers all sizes.
    """
    from stoker.apps.model_profile.run import measure_model  # here, because Parsl would slow down --help

    context.exit(measure_model(model, dtype=dtype, quick=quick, site=site, session=session, json=json_))

"""The options of `stoker batch`."""

from __future__ import annotations

from typing import Any

import click

from stoker.apps.batch_inference.options import BatchOptions
from stoker.apps.common.command_line import WIDE, add_site_and_session_options
from stoker.console import WholeNumber


@click.command("batch", short_help="Answer an OpenAI batch file with your own models.", context_settings=WIDE)
@click.argument("file", required=False, default="", metavar="[FILE]")
@click.option(
    "--model", "models", multiple=True, metavar="PATH or NAME=PATH",
    help="A model for all requests, or for the requests that name NAME; may be given several times.",
)  # fmt: skip
@click.option(
    "--models", "models_file", metavar="FILE", default="", help="The models file, as for `stoker serve` (TOML)."
)
@click.option("--check", is_flag=True, help="Check every line of the file without running requests.")
@click.option(
    "--max-tokens", metavar="N", type=WholeNumber(),
    help="Maximum tokens of an answer if the request sets no limit. [OpenAI's default]",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["auto", "continuous", "static", "vllm"]), default="auto", show_default=True,
    help="The engine, as in causal_lm(engine=...).",
)  # fmt: skip
@add_site_and_session_options
@click.option("--out", metavar="DIR", default="", help="The run folder. [runs/batch-DATE-TIME]")
@click.option("--fresh", is_flag=True, help="Start a new run, even if an unfinished run with the same options exists.")
@click.option("--permits", metavar="FILE", default="", hidden=True)  # set by a gateway to enforce an API key's limits
@click.option("--json", "json_", is_flag=True, help="The summary as JSON on stdout; everything else goes to stderr.")
@click.pass_context
def command(context: click.Context, /, *, max_tokens: int | None, check: bool, json_: bool, **given: Any) -> None:
    """Answer the requests of FILE with models of your own. FILE is an OpenAI batch file: one JSON object a line, with
    custom_id, method, url (/v1/chat/completions, /v1/completions or /v1/embeddings) and body. Without FILE, run a small
    example.

    The run folder gets responses.jsonl and errors.jsonl, in OpenAI's form and in the order of FILE. Each custom_id
    appears once, in one of the two files. The same command resumes a batch that was stopped or killed. The exit status
    is 1 if a request has no answer.
    """
    from stoker.apps.batch_inference.run import (
        check_batch,
        run_batch,  # here, because Parsl would slow down --help
    )

    options = BatchOptions(max_tokens=max_tokens or 0, **given)
    context.exit((check_batch if check else run_batch)(options, json=json_))

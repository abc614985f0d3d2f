"""`stoker init`: find the batch system and write a site file for it."""

from __future__ import annotations

from pathlib import Path

import click

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.cli import console
from stoker.manager.cli.site_draft import Draft, draft
from stoker.manager.cli.surroundings import inspect_host


@click.command(short_help="Write a site file for the batch system that is here.")
@click.option(
    "--output", metavar="FILE", default="site.toml", type=click.Path(path_type=Path), help="[site.toml]; - for stdout"
)
@click.option("--partition", metavar="NAME", default="", help="Use this partition or queue.")
def init(*, output: Path, partition: str) -> None:
    """Find the scheduler, its partitions, accounts and GPUs, and write a site file of a dozen lines for them.

    Nothing is submitted and nothing is overwritten. It says what it chose, and why.
    """
    to_stdout = str(output) == "-"
    if output.exists() and not to_stdout:
        raise ConfigError(f"{output} is there already; name another file: stoker init --output FILE", file=str(output))
    made = draft(inspect_host(), partition=partition)
    parse_site(made.text, file=str(output))  # what we write must be what we read
    if to_stdout:
        console.raw(made.text.encode())
        return
    try:
        output.write_text(made.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}", file=str(output)) from None
    console.lines(render(made, output=output))


def render(made: Draft, *, output: Path) -> list[str]:
    """What was found and chosen, and what to do next."""
    out = [f"wrote {output}: {made.headline}", ""]
    out += [f"  {why}" for why in made.reasons]
    out += [
        "",
        f"next: stoker up {output} --dry-run    the exact script that would be submitted",
        f"      stoker doctor {output}          whether it fits; --probe submits a one-minute pilot",
        f"      stoker up {output}",
    ]
    return out

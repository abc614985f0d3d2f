"""The options of `stoker simulate`, without importing the slow module `simulating`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stoker.manager.cli.console import WholeNumber


@click.command(
    short_help="Simulate a scenario, and compare policies in it.", context_settings={"max_content_width": 110}
)
@click.argument("scenario", required=False)
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    help="Use this policy instead of the scenario's policies; may be repeated.",
)
@click.option("--seeds", type=WholeNumber(1, 10_000), help="Run N seeds. [the scenario's]")
@click.option("--set", "changes", metavar="KEY=VALUE", multiple=True, help="Change a setting; may be repeated.")
@click.option("--jobs", type=WholeNumber(1, 1_000), help="Run N simulations at the same time. [all cores]")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write into DIR. [runs/NAME-DATE-TIME]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def simulate(*, scenario: str | None, as_json: bool, **asked: Any) -> None:
    """Simulate SCENARIO, a TOML file or the name of a shipped scenario, and compare policies in it.

    The manager's own code runs in virtual time, against simulated batch systems, links and GPUs. Without SCENARIO: list
    the shipped scenarios. Ctrl-C keeps the finished runs.
    """
    from stoker.manager.cli import simulating

    if scenario is None:
        simulating.print_scenarios_and_policies(as_json=as_json)
        return
    code = simulating.simulate(scenario, as_json=as_json, **asked)
    if code:
        raise click.exceptions.Exit(code)

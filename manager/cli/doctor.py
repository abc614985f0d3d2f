"""`stoker doctor`: what is here, what is missing, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from stoker.manager.cli import console, leftovers, machine, software
from stoker.manager.cli.finding import Finding, Level, render

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    software.python,
    software.packages,
    software.models,
    software.schedulers,
    machine.devices,
    machine.torch_and_driver,
    machine.disks,
    machine.limits,
    machine.sockets,
    machine.clock,
    leftovers.store,
    leftovers.sessions,
    leftovers.processes,
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def doctor(as_json: bool) -> None:
    """What is here and what is missing, each with its fix. Exit code 1 if something needed is missing."""
    findings = list(examine())
    if as_json:
        console.json({"findings": findings})
    else:
        console.lines(render(findings))
    if any(finding.level is Level.NEED for finding in findings):
        raise click.exceptions.Exit(1)


def examine() -> Iterator[Finding]:
    """Every finding. A check that fails itself is a finding too: a doctor that falls over helps nobody."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            yield Finding(
                check.__name__, Level.WARN, f"{check.__name__} could not be checked: {type(error).__name__}: {error}"
            )

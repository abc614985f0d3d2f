"""`stoker doctor`: what is here, what is missing, and what to do about each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from stoker.manager.cli import cluster, console, leftovers, machine, orphans, site_page, site_suite, software
from stoker.manager.cli.finding import Finding, Level, render
from stoker.manager.cli.numbers import Seconds
from stoker.manager.executor import detached

Check = Callable[[], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    software.python,
    software.packages,
    software.models,
    cluster.batch_system,
    machine.devices,
    machine.torch_and_driver,
    machine.disks,
    machine.limits,
    machine.sockets,
    machine.clock,
    leftovers.store,
    leftovers.sessions,
    orphans.processes,
    orphans.jobs,
)


_PROBE_S = 300.0


@click.command(short_help="Check this machine and site files; say what to do.")
@click.argument("sites", nargs=-1, metavar="[SITE]...", type=click.Path(path_type=Path))
@click.option("--probe", is_flag=True, help="Submit a one-minute pilot to each SITE: do compute nodes reach this host?")
@click.option("--tests", is_flag=True, help="Run the site suite on each SITE: a page of what holds there.")
@click.option("-k", "chosen", metavar="EXPR", default="", help="With --tests: the tests to run, as for pytest -k.")
@click.option(
    "--wait",
    "wait_s",
    metavar="S",
    type=Seconds(),
    help="Wait this many seconds for a pilot of --probe or --tests. [300]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def doctor(
    *, sites: tuple[Path, ...], probe: bool, tests: bool, chosen: str, wait_s: float | None, as_json: bool
) -> None:
    """Check this machine: what is here, what is missing, and how to mend it. The exit code is 1 if something is missing
    that Stoker needs.

    With SITE files: check too that they fit this cluster. With --tests: start pilots there and try what Stoker
    promises; the exit code is 1 if a promise does not hold.
    """
    if (probe or tests) and not sites:
        option = "--tests" if tests else "--probe"
        raise click.UsageError(f"{option} wants a site file to take the job from: stoker doctor site.toml {option}")
    if probe and tests:
        raise click.UsageError("--probe and --tests: give one of them; the site suite starts pilots, too")
    if wait_s is not None and not (probe or tests):
        raise click.UsageError("--wait is for --probe and --tests: stoker doctor site.toml --probe --wait 600")
    if chosen and not tests:
        raise click.UsageError("-k is for --tests: stoker doctor site.toml --tests -k peer")
    wanted = detached.collect(sites) if sites else ()
    if tests:
        _prove(sites, wait_s=wait_s, chosen=chosen, as_json=as_json)
        return
    wait_s = _PROBE_S if wait_s is None else wait_s
    checks: list[Check] = [*CHECKS, *(functools.partial(cluster.site_fits, site) for site in wanted)]
    if probe:
        checks += [functools.partial(cluster.probe, site, wait_s=wait_s, say=console.note) for site in wanted]
    findings = list(examine(checks))
    if as_json:
        console.json({"findings": findings})
    else:
        console.lines(render(findings, sites=[str(path) for path in sites]))
    if any(finding.level is Level.NEED for finding in findings):
        raise click.exceptions.Exit(1)


def _prove(sites: Iterable[Path], *, wait_s: float | None, chosen: str, as_json: bool) -> None:
    """Run the site suite on each site and show its pages. Raise Exit with 1 if something does not hold."""
    reports = []
    for site in sites:
        reports.append(site_suite.run(site, wait_s=wait_s, chosen=chosen))
        if not as_json:
            console.lines(["", *site_page.render(reports[-1])])
        if reports[-1].interrupted:
            break
    if as_json:
        console.json({"sites": reports})
    if not all(report.sound for report in reports):
        raise click.exceptions.Exit(1)


def examine(checks: Iterable[Check] | None = None) -> Iterator[Finding]:
    """Every finding. A check that fails itself is a finding too: a doctor that falls over helps nobody."""
    for check in CHECKS if checks is None else checks:
        name = getattr(check, "__name__", "") or getattr(check, "func", check).__name__
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, Level.WARN, f"{name} could not be checked: {type(error).__name__}: {error}")

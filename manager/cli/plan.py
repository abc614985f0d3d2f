"""`stoker plan`: forecast how a run on a site would go."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stoker.config import load_site
from stoker.config_errors import suggest_similar_name
from stoker.errors import ConfigError
from stoker.manager.cli import apps, console
from stoker.manager.cli.console import WholeNumber
from stoker.manager.live.advisor import open_availability_store, open_performance_store
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.contexts.performance import PerformanceStore
    from stoker.manager.advice.estimating import EstimatedFunction
    from stoker.manager.study.evidence import Work
    from stoker.manager.study.plan import Percentiles, PlanForecast, RunPlan

FUNCTION_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_][\w.]*)")
_SIGNS = {"good": "ok", "fair": "warn", "poor": "warn"}


@click.command(short_help="Forecast when a run would be finished on a site.")
@click.argument("site")
@click.argument("app")
@click.option("--inputs", metavar="N", type=WholeNumber(), help="Plan for N inputs. [the application's]")
@click.option("--per-call", metavar="N", type=WholeNumber(), help="N inputs per call. [the application's]")
@click.option("--kind", default="", metavar="KIND", help="Use the measurements of this kind of device.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def plan(*, site: str, app: str, inputs: int | None, per_call: int | None, kind: str, as_json: bool) -> None:
    """Forecast the end of a run of APP on SITE, its cost, and the best number of pilots.

    APP is an application (fact_verification), or one of your own functions (score; program.py:score if several programs
    have a function score). The plan uses measurements of earlier runs on SITE, or on a site with equal devices; a short
    run is enough. If a function never ran, name its file, and the plan uses measurements of similar functions.
    --per-call sets the inputs per call (default: as measured).
    """
    from stoker.manager.study.evidence import gather_evidence
    from stoker.manager.study.plan import make_plan

    where = load_site(site)
    with contextlib.closing(open_performance_store()) as known, contextlib.closing(open_availability_store()) as seen:
        work = make_work(app, known, inputs=inputs, per_call=per_call)
        of_a_file = FUNCTION_IN_FILE.fullmatch(app)
        guess = estimate_function(app, of_a_file, known) if of_a_file and ":" not in work.function else None
        evidence = gather_evidence(
            where, work, performance=guess or known, availability=seen.availability_of_source(where.name), kind=kind,
            similar=guess.similar if guess is not None else (),
        )  # fmt: skip
    with console.redrawn() as place:

        def show_progress(what: str) -> None:
            if console.is_terminal() and not as_json:
                place.show([f"simulating {work.calls:,} calls · {what}"])

        found = make_plan(where, work, evidence, tell=show_progress)
    if as_json:
        console.json(found)
    else:
        console.lines(render_plan(found))


def make_work(app: str, known: PerformanceStore, *, inputs: int | None, per_call: int | None) -> Work:
    from stoker.manager.study.evidence import Work

    declared = apps.find_entry_point_name(apps.FORECASTS, app)
    if declared:
        work: Work = apps.load_entry_point(apps.FORECASTS, declared)
    else:
        function = _find_measured_function(app, known.list_functions())
        if inputs is None:
            hint = f"stoker plan SITE {app} --inputs 10000"
            raise ConfigError(f"the number of inputs of {app} is not known; set this number: {hint}")
        work = Work(app, function, inputs, inputs_per_call=known.items_per_call(function))
    given = {"inputs": inputs, "inputs_per_call": per_call, "measured_per_call": per_call and work.inputs_per_call}
    return msgspec.structs.replace(work, **{name: value for name, value in given.items() if value is not None})


def _find_measured_function(app: str, measured: Sequence[str]) -> str:
    of_a_file = FUNCTION_IN_FILE.fullmatch(app)
    if of_a_file is not None:
        named = f"{os.path.realpath(os.path.expanduser(of_a_file['file']))}:{of_a_file['function']}"
        return named if named in measured else of_a_file["function"]
    if ":" in app and app in measured:
        return app
    found = [each for each in measured if each.rpartition(":")[2] == app]
    if len(found) == 1:
        return found[0]
    if found:
        here = f"{os.path.realpath('.')}/"
        offered = [each.removeprefix(here) for each in found[:_MOST_SUGGESTIONS]]
        offered += [f"and {len(found) - _MOST_SUGGESTIONS} more"] if len(found) > _MOST_SUGGESTIONS else []
        why = f"several programs have a function {app}; name one of them; the most recent first:"
        raise ConfigError("\n  ".join([why, *offered]))
    names = [*dict.fromkeys(each.rpartition(":")[2] for each in measured), *apps.list_entry_point_names(apps.FORECASTS)]
    hint = suggest_similar_name(app, names, cutoff=0.5, otherwise=f"there are {', '.join(names[:_MOST_SUGGESTIONS])}")
    raise ConfigError(f"{app} is neither an application nor a function whose calls were measured here; {hint}")


_MOST_SUGGESTIONS = 12


def estimate_function(app: str, named: re.Match[str], known: PerformanceStore) -> EstimatedFunction:
    try:
        from stoker.manager.advice.estimating import estimate_unmeasured_function, open_history
    except ImportError as error:
        raise ConfigError(f"{app} cannot be estimated: {error}; install it: pip install 'stoker[advice]'") from error
    return estimate_unmeasured_function(Path(named["file"]), named["function"], known, open_history())


# ---- in words


def render_plan(found: RunPlan) -> list[str]:
    work, written = found.work, found.as_written
    devices = f"{found.devices} x {found.kind}"
    out = [
        f"plan · {work.app} on {found.site} · {work.inputs:,} inputs in {work.calls:,} calls · up to {written.blocks:,}"
        f" block{'s' * (written.blocks != 1)}, {devices} a pilot",
        "",
        f"  finish        {_format_range(written.finish_s, _format_time, ' in 8 of 10 cases')}",
        f"  device-hours  {_format_range(written.device_hours, _format_hours)}",
    ]
    if found.price:
        price, hours = found.price, written.device_hours
        cost = _format_range(hours, lambda number: _format_hours(number * price))
        out.append(f"  cost          {cost}, at {price:g} a device-hour")
    out.append(f"  policy        {found.policy}")
    if math.isinf(written.finish_s.p90):
        out.append("  the run may never finish with these settings; the reasons are below")
    if len(found.by_blocks) > 1:
        out += ["", *_format_table("blocks", found.by_blocks, best=found.best_blocks)]
    if len(found.by_walltime) > 1:
        out += ["", *_format_table("walltime", found.by_walltime, best=found.best_walltime_s)]
    out += ["", f"how sure this is: {found.sureness.value}"]
    out += [f"  {_SIGNS[reason.sureness.value]:<5} {reason.text}" for reason in found.reasons]
    return out


def _format_table(what: str, rows: tuple[PlanForecast, ...], *, best: float) -> list[str]:
    out = [f"  {what:<12}  {'finish':>12}  {'device-hours':>12}"]
    for row in rows:
        value = row.blocks if what == "blocks" else row.walltime_s
        said = f"{value:,}" if what == "blocks" else show_seconds(value)
        note = "  best" if row is rows[-1] else "  enough: a higher value hardly helps"
        finish = f"{_format_time(row.finish_s.p50):>12}  {row.device_hours.p50:>12,.2f}"
        out.append(f"  {said:<12}  {finish}{note if value == best else ''}")
    return out


def _format_range(found: Percentiles, show: Callable[[float], str], cases: str = "") -> str:
    return f"{show(found.p50)}  ({show(found.p10)} to {show(found.p90)}{cases})"


def _format_hours(number: float) -> str:
    return f"{number:,.2f}"


def _format_time(seconds: float) -> str:
    return "never" if math.isinf(seconds) else show_seconds(seconds)

"""Policies beside each other: means over seeds with 95 % intervals, and what the differences are worth.

Two policies see the same world under the same seed, so they are compared seed by seed (`statistics.difference`): what
a seed does to both falls out of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from stoker.manager.sim.workload import Sweep
from stoker.manager.study.running import Finished
from stoker.manager.study.scenario import Scenario, label
from stoker.manager.study.statistics import Estimate, difference, estimate


class Column(msgspec.Struct, frozen=True):
    """A number of each run, and how it is called: by programs, and by people. None where a run has no such number; a
    mean over the others is then worth something, or (`of_all`) nothing."""

    key: str
    title: str
    value: Callable[[Finished], float | None]
    of_all: bool = True


class Row(msgspec.Struct, frozen=True):
    """A policy: its runs, those of them that were cut off, the calls that failed, and an estimate a column, where there
    can be one."""

    policy: str
    runs: int
    cut_off: int
    failed_calls: int
    estimates: dict[str, Estimate | None]


DONE_AFTER, ITEMS_PER_S, SPEED = "done_after_s", "items_per_s", "speed"


def columns_for(scenario: Scenario) -> tuple[Column, ...]:
    """What is worth comparing: how much was done, where runs are cut off; how long calls waited, where they do not all
    come at once."""
    items = Column("items", "items", lambda run: float(run.outcome.items))
    waits = (
        Column("wait_p50_s", "wait, median (s)", lambda run: run.figures.wait_p50_s),
        Column("wait_p95_s", "wait, p95 (s)", lambda run: run.figures.wait_p95_s),
    )
    return (
        Column(DONE_AFTER, "done after (s)", _done_after_s),
        Column("of_bound", "x bound", _of_bound, of_all=False),
        *((items,) if scenario.until_s else ()),
        Column(ITEMS_PER_S, "items/s", lambda run: run.figures.items_per_s),
        *(() if isinstance(scenario.workload, Sweep) else waits),
        Column("device_hours", "device-hours", lambda run: run.figures.held_s / 3600),
        Column("busy", "busy (%)", lambda run: run.figures.busy * 100),
        Column("loads", "loads", lambda run: float(run.figures.loads)),
        Column("shared_bytes", "shared (GB)", lambda run: run.figures.shared_bytes / 1e9),
        Column("rerun_calls", "run again", lambda run: float(run.outcome.rerun_calls)),
    )


def with_bounds(runs: Sequence[Finished]) -> list[Finished]:
    """The runs, with the bound of their seed in all of them: only the first policy's bring it."""
    known = {run.seed: run.figures.bound_s for run in runs if run.figures.bound_s is not None}
    return [replace(run, figures=replace(run.figures, bound_s=known.get(run.seed))) for run in runs]


def compare(runs: Sequence[Finished], columns: Sequence[Column], *, policies: Sequence[str]) -> list[Row]:
    """A row a policy that has a run, in the order of `policies`. With several policies the rows also say the speed
    (items a second) against the first row's, over the seeds that both have."""
    rows: list[Row] = []
    there = [policy for policy in policies if any(run.policy == policy for run in runs)]
    for policy in there:
        mine = [run for run in runs if run.policy == policy]
        estimates = {
            column.key: _estimate([column.value(run) for run in mine], of_all=column.of_all) for column in columns
        }
        if len(there) > 1:
            speeds = [one / other for one, other in _paired(runs, policy, there[0]) if other]
            estimates[SPEED] = _estimate(speeds, of_all=True)
        cut_off = sum(not run.outcome.complete for run in mine)
        failed = sum(sum(run.outcome.failed.values()) for run in mine)
        rows.append(Row(policy, len(mine), cut_off, failed, estimates))
    return rows


def verdict(runs: Sequence[Finished], rows: Sequence[Row]) -> str:
    """What the table does and does not show, in a sentence; empty for one policy."""
    rates = {row.policy: found.mean for row in rows if (found := row.estimates[ITEMS_PER_S]) is not None}
    if len(rates) < 2:
        return ""
    best, second = sorted(rates, key=lambda policy: -rates[policy])[:2]
    pairs = [(one, other) for one, other in _paired(runs, best, second) if other]
    ahead = f"{label(best)} is ahead of {label(second)}"
    if len(pairs) < 2:
        return f"{ahead}; one seed says little about it, more tell more: --seeds 5"
    lead = difference([100 * one / other for one, other in pairs], [100.0] * len(pairs))
    if lead.low > 0:
        return f"{ahead} by {lead.mean:.1f} ± {lead.half_width or 0.0:.1f} %, seed by seed"
    return f"{ahead} by {lead.mean:.1f} %, which may be chance over {len(pairs)} seeds"


def _paired(runs: Sequence[Finished], policy: str, other: str) -> list[tuple[float, float]]:
    """Items a second of two policies under the same seeds."""
    rates = {(run.policy, run.seed): run.figures.items_per_s for run in runs}
    seeds = sorted({run.seed for run in runs})
    return [
        (rates[policy, seed], rates[other, seed])
        for seed in seeds
        if (policy, seed) in rates and (other, seed) in rates
    ]


def _estimate(values: Sequence[float | None], *, of_all: bool) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known and (len(known) == len(values) or not of_all) else None


def _done_after_s(run: Finished) -> float | None:
    return run.outcome.ended_at if run.outcome.complete else None


def _of_bound(run: Finished) -> float | None:
    bound_s = run.figures.bound_s
    return run.outcome.ended_at / bound_s if run.outcome.complete and bound_s else None

"""Compare policies: means over seeds with 95 % intervals, and sentences (verdicts) that name the better policy.

Two policies are compared by their runs with equal seeds (`statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec
from msgspec.structs import replace

from stoker.manager.sim.workload import SweepCalls, has_deadlines
from stoker.manager.study.running import FinishedRun
from stoker.manager.study.scenario import Scenario, policy_label
from stoker.manager.study.statistics import MeanEstimate, estimate_mean


class Column(msgspec.Struct, frozen=True):
    """A column of a table: one number per run. `needs_all_runs`: show no mean if a run lacks the number. `hides_zeros`:
    hide the column if all its values are 0.
    """

    key: str
    title: str
    value: Callable[[FinishedRun], float | None]
    needs_all_runs: bool = True
    scale: float = 1.0
    hides_zeros: bool = False


class PolicyRow(msgspec.Struct, frozen=True):
    policy: str
    runs: int
    cut_off: int
    failed_calls: int
    estimates: dict[str, MeanEstimate | None]


DONE_AFTER, ITEMS_PER_S, WAIT_P95_S, SPEED = "done_after_s", "items_per_s", "wait_p95_s", "speed"


def choose_columns(scenario: Scenario) -> tuple[Column, ...]:
    items = Column("items", "items", lambda run: float(run.outcome.items))
    in_time = (
        Column("in_time", "in time (%)", lambda run: run.figures.in_time, scale=100.0),
        Column("violations", "violations (%)", lambda run: run.figures.violation_share, scale=100.0),
    )
    warm = Column("warm_hours", "warm device-hours", lambda run: run.figures.warm_s / 3600)
    dated = has_deadlines(scenario.workload)
    waits = (
        Column("wait_p50_s", "wait, median (s)", lambda run: run.figures.wait_p50_s),
        Column(WAIT_P95_S, "wait, p95 (s)", lambda run: run.figures.wait_p95_s),
    )
    tokens = (
        Column("objectives_met", "objectives met (%)", _token_figure_reader("met_objective_share"), scale=100.0),
        Column("ttft_p50_s", "first token, median (s)", _token_figure_reader("ttft_p50_s")),
        Column("ttft_p99_s", "first token, p99 (s)", _token_figure_reader("ttft_p99_s")),
        Column("tpot_p50_s", "a token, median (ms)", _token_figure_reader("tpot_p50_s"), scale=1000.0),
    )
    return (
        Column(DONE_AFTER, "done after (s)", lambda run: run.outcome.ended_at if run.outcome.complete else None),
        Column("of_bound", "x bound", _ratio_to_lower_bound, needs_all_runs=False),
        *((items,) if scenario.until_s else ()),
        Column(ITEMS_PER_S, "items/s", lambda run: run.figures.items_per_s),
        *(() if isinstance(scenario.workload, SweepCalls) else waits),
        *(in_time if dated else ()),
        *(tokens if any(model.engine for model in scenario.world.contexts.values()) else ()),
        Column("device_hours", "device-hours", lambda run: run.figures.held_s / 3600),
        *((warm,) if dated else ()),
        Column("busy", "busy (%)", lambda run: run.figures.busy, scale=100.0),
        Column("loads", "loads", lambda run: float(run.figures.loads)),
        Column("shared_bytes", "shared (GB)", lambda run: run.figures.shared_bytes, scale=1e-9, hides_zeros=True),
        Column("rerun_calls", "run again", lambda run: float(run.outcome.rerun_calls), hides_zeros=True),
    )


def _token_figure_reader(name: str) -> Callable[[FinishedRun], float | None]:
    return lambda run: getattr(run.figures.tokens, name, None)


def copy_bounds_to_all_runs(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    known = {run.seed: run.figures.bound_s for run in runs if run.figures.bound_s is not None}
    return [replace(run, figures=replace(run.figures, bound_s=known.get(run.seed))) for run in runs]


def compare_policies(
    runs: Sequence[FinishedRun], columns: Sequence[Column], *, policies: Sequence[str], compares_speeds: bool = True
) -> list[PolicyRow]:
    """Return one row for each policy that has runs. `compares_speeds`: also compare speeds with the first policy."""
    rows: list[PolicyRow] = []
    there = [policy for policy in policies if any(run.policy == policy for run in runs)]
    for policy in there:
        mine = [run for run in runs if run.policy == policy]
        estimates = {
            column.key: _estimate_mean_if_known(
                [column.value(run) for run in mine], needs_all_runs=column.needs_all_runs
            )
            for column in columns
        }
        if len(there) > 1 and compares_speeds:
            estimates[SPEED] = _estimate_mean_if_known(
                _compare_runs_by_seed(runs, policy, there[0], _relative_speed), needs_all_runs=True
            )
        cut_off = sum(not run.outcome.complete for run in mine)
        failed = sum(sum(run.outcome.failed.values()) for run in mine)
        rows.append(PolicyRow(policy, len(mine), cut_off, failed, estimates))
    return rows


class RankingCriterion(msgspec.Struct, frozen=True):
    """The number that ranks two policies. `lead`: how much better the first run is. `shown`: template of a sentence."""

    key: str
    lead: Callable[[FinishedRun, FinishedRun], float | None]
    shown: str


_IN_TIME = RankingCriterion(
    "in_time",
    lambda a, b: _percentage_points_more(a.figures.in_time, b.figures.in_time),
    "of every 100 deadlines it meets {lead} more",
)
_WAITS = RankingCriterion(
    WAIT_P95_S, lambda a, b: b.figures.wait_p95_s - a.figures.wait_p95_s,
    "at the 95th percentile a call waits {lead} s less",
)  # fmt: skip
_ITEMS = RankingCriterion(
    ITEMS_PER_S,
    lambda a, b: _percent_more(a.figures.items_per_s, b.figures.items_per_s),
    "it does {lead} % more items a second",
)
_TIME = RankingCriterion(
    DONE_AFTER, lambda a, b: _percent_more(b.outcome.ended_at, a.outcome.ended_at), "{other} takes {lead} % longer"
)


def choose_ranking_criterion(scenario: Scenario, runs: Sequence[FinishedRun]) -> RankingCriterion:
    """Return the first criterion that applies: met deadlines if calls have deadlines; items per second if calls failed;
    wait times if calls arrive separately; the end of the run if all runs completed; else items per second.
    """
    if any(run.figures.in_time is not None for run in runs):
        return _IN_TIME
    if any(run.outcome.failed for run in runs):
        return _ITEMS
    if not isinstance(scenario.workload, SweepCalls):
        return _WAITS
    return _TIME if all(run.outcome.complete for run in runs) else _ITEMS


def write_verdicts(runs: Sequence[FinishedRun], rows: Sequence[PolicyRow], *, scenario: Scenario) -> list[str]:
    worth = choose_ranking_criterion(scenario, runs)
    first, *others = [row.policy for row in rows] or [""]
    found = (_write_verdict_on_pair(runs, other, first, worth) for other in others)
    return [sentence for sentence in found if sentence]


def _write_verdict_on_pair(runs: Sequence[FinishedRun], policy: str, first: str, worth: RankingCriterion) -> str:
    leads = _compare_runs_by_seed(runs, policy, first, worth.lead)
    if not leads:
        return ""
    if not any(leads):
        return f"{policy_label(first)} and {policy_label(policy)}: neither is ahead of the other"
    best, second = (policy, first) if fmean(leads) > 0 else (first, policy)
    leads = _compare_runs_by_seed(runs, best, second, worth.lead)
    ahead = f"{policy_label(best)} is ahead of {policy_label(second)}"
    if len(leads) < 2:
        return f"{ahead}; one seed proves little, run more: --seeds 5"
    lead = estimate_mean(leads)
    sure, chance = f"{lead.mean:.1f} ± {lead.half_width or 0.0:.1f}", f", which may be chance over {len(leads)} seeds"
    shown = worth.shown.format(other=policy_label(second), lead=sure if lead.low > 0 else f"{lead.mean:.1f}")
    return f"{ahead}: {shown}{', seed by seed' if lead.low > 0 else chance}"


def _compare_runs_by_seed(
    runs: Sequence[FinishedRun],
    policy: str,
    other: str,
    compare_runs: Callable[[FinishedRun, FinishedRun], float | None],
) -> list[float]:
    runs_of = {(run.policy, run.seed): run for run in runs}
    pairs = [(runs_of.get((policy, seed)), runs_of.get((other, seed))) for seed in sorted({run.seed for run in runs})]
    found = [compare_runs(one, against) for one, against in pairs if one is not None and against is not None]
    return [number for number in found if number is not None]


def _relative_speed(run: FinishedRun, against: FinishedRun) -> float | None:
    return run.figures.items_per_s / against.figures.items_per_s if against.figures.items_per_s else None


def _percent_more(one: float, other: float) -> float | None:
    return 100.0 * (one / other - 1.0) if other else None


def _percentage_points_more(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else 100.0 * (one - other)


def _estimate_mean_if_known(values: Sequence[float | None], *, needs_all_runs: bool) -> MeanEstimate | None:
    known = [value for value in values if value is not None]
    return estimate_mean(known) if known and (len(known) == len(values) or not needs_all_runs) else None


def _ratio_to_lower_bound(run: FinishedRun) -> float | None:
    bound_s = run.figures.bound_s
    return run.outcome.ended_at / bound_s if run.outcome.complete and bound_s else None

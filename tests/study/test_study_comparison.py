from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stoker.manager.cli.simulating import format_estimate, format_table, summarize_simulation_results
from stoker.manager.sim.run import RunOutcome
from stoker.manager.study.comparison import (
    PolicyRow,
    choose_columns,
    compare_policies,
    copy_bounds_to_all_runs,
    write_verdicts,
)
from stoker.manager.study.measures import RunFigures, StepCurve
from stoker.manager.study.plots import Curves
from stoker.manager.study.running import FinishedRun
from stoker.manager.study.scenario import Scenario, load_scenario, shipped_scenarios
from stoker.manager.study.statistics import MeanEstimate, estimate_mean


def run(
    policy: str, seed: int, *, ended_at: float, items: int = 1000, bound_s: float | None = None, **more: Any
) -> FinishedRun:
    outcome = RunOutcome(
        complete=more.get("complete", True), ended_at=ended_at, calls=items, items=items,
        failed=more.get("failed", {}), core_events=1, device_s={}, lost_pilots=0, rerun_calls=more.get("rerun", 0),
    )  # fmt: skip
    figures = RunFigures(
        items / ended_at, 3600.0, 0.5, 0.0, more.get("loads", 4), 1.0, more.get("wait_p95_s", 2.0), 3e9, 0.0, bound_s,
        more.get("in_time"),
    )  # fmt: skip
    curves = Curves(ended_at, StepCurve(), StepCurve(), StepCurve(), (), ())
    return FinishedRun(policy, seed, outcome, f"{policy}-{seed}.parquet", figures, curves, 0.1)


def scenario(name: str = "static-pool", *changes: str) -> Scenario:
    return load_scenario(shipped_scenarios()[name], changes=changes)


def compared(runs: list[FinishedRun], **more: Any) -> list[PolicyRow]:
    policies = tuple(dict.fromkeys(each.policy for each in runs))
    return compare_policies(
        copy_bounds_to_all_runs(runs), choose_columns(more.get("of", scenario())), policies=policies
    )


def test_means_have_student_intervals_over_seeds() -> None:
    [row] = compared([run("a", seed, ended_at=at) for seed, at in enumerate((100.0, 110.0, 120.0))])
    found = row.estimates["done_after_s"]
    assert (row.runs, found.mean) == (3, 110.0)
    assert found.half_width == pytest.approx(4.302653 * 10.0 / math.sqrt(3), rel=1e-6)
    assert row.estimates["device_hours"] == MeanEstimate(1.0, 0.0, 3)


def test_bound_of_a_seed_is_shared_by_all_policies() -> None:
    runs = [run("a", 0, ended_at=100.0, bound_s=50.0), run("b", 0, ended_at=150.0), run("b", 1, ended_at=150.0)]
    a, b = compared(runs)
    assert a.estimates["of_bound"] == estimate_mean([2.0])
    assert b.estimates["of_bound"] == estimate_mean([3.0])  # the bound is known for one seed only


def test_policy_whose_runs_were_cut_off_has_no_end_time() -> None:
    cut = scenario("static-pool", "until=100 s")
    runs = [run("a", 0, ended_at=90.0), run("a", 1, ended_at=100.0, items=700, complete=False, failed={"walltime": 3})]
    [row] = compared(runs, of=cut)
    assert row.estimates["done_after_s"] is None
    assert row.estimates["items"] == estimate_mean([1000.0, 700.0])
    assert (row.cut_off, row.failed_calls) == (1, 3)
    said = summarize_simulation_results(runs, [row], cut)
    assert said == [
        "a: 1 of 2 runs were cut off after 1 min 40 s (until)",
        "a: 3 calls failed, most of them because: walltime",
    ]


def test_policies_are_compared_seed_by_seed() -> None:
    times = [100.0, 200.0, 400.0, 800.0]
    runs = [
        run(policy, seed, ended_at=at * f) for policy, f in (("a", 1.0), ("b", 1.25)) for seed, at in enumerate(times)
    ]
    a, b = compared(runs)
    slower = b.estimates["speed"]
    assert (slower.low, slower.high) == pytest.approx((0.8, 0.8))
    assert a.estimates["speed"] == estimate_mean([1.0] * 4)
    assert write_verdicts(runs, [a, b], scenario=scenario()) == [
        "a is ahead of b: b takes 25.0 ± 0.0 % longer, seed by seed"
    ]


def test_lead_that_may_be_chance_is_marked() -> None:
    runs = [run("a", seed, ended_at=at) for seed, at in enumerate((100.0, 130.0))]
    runs += [run("b", seed, ended_at=at) for seed, at in enumerate((120.0, 115.0))]
    assert "which may be chance over 2 seeds" in write_verdicts(runs, compared(runs), scenario=scenario())[0]
    assert "one seed proves little" in write_verdicts(runs[::2], compared(runs[::2]), scenario=scenario())[0]
    assert write_verdicts(runs[:2], compared(runs[:2]), scenario=scenario()) == []


@pytest.mark.parametrize("seeds", [1, 3])
def test_policies_with_equal_results_do_not_lead_each_other(seeds: int) -> None:
    runs = [run(policy, seed, ended_at=100.0) for policy in "ab" for seed in range(seeds)]
    assert write_verdicts(runs, compared(runs), scenario=scenario()) == ["a and b: neither is ahead of the other"]


def test_throughput_is_compared_if_runs_are_cut_off_or_calls_fail() -> None:
    cut = scenario("static-pool", "until=100 s")
    runs = [
        run(policy, seed, ended_at=100.0, items=items, complete=False)
        for policy, items in (("a", 500), ("b", 1000))
        for seed in range(3)
    ]
    said = "b is ahead of a: it does 100.0 ± 0.0 % more items a second, seed by seed"
    assert write_verdicts(runs, compared(runs), scenario=cut) == [said]
    runs = [run("quick", seed, ended_at=10.0, items=1, failed={"no memory": 999}) for seed in range(3)]
    runs += [run("slow", seed, ended_at=100.0) for seed in range(3)]
    assert write_verdicts(runs, compared(runs), scenario=scenario())[0].startswith(
        "slow is ahead of quick: it does 9900.0"
    )


def test_calls_that_arrive_one_by_one_are_judged_by_their_wait() -> None:
    runs = [run("a", seed, ended_at=100.0 + seed, wait_p95_s=9.0 + seed) for seed in range(3)]
    runs += [run("b", seed, ended_at=100.5 + seed, wait_p95_s=2.0 + seed) for seed in range(3)]
    of = scenario("two-kinds")
    rows = compare_policies(
        copy_bounds_to_all_runs(runs), choose_columns(of), policies=("a", "b"), compares_speeds=False
    )
    said = "b is ahead of a: at the 95th percentile a call waits 7.0 ± 0.0 s less, seed by seed"
    assert write_verdicts(runs, rows, scenario=of) == [said]
    assert all("speed" not in row.estimates for row in rows)


def test_met_deadlines_are_compared_if_calls_have_deadlines() -> None:
    of = scenario("two-kinds", "workload.deadline=60 s")
    runs = [run("a", seed, ended_at=100.0, wait_p95_s=1.0, in_time=0.5) for seed in range(3)]
    runs += [run("b", seed, ended_at=100.0, wait_p95_s=9.0, in_time=0.75) for seed in range(3)]
    rows = compare_policies(
        copy_bounds_to_all_runs(runs), choose_columns(of), policies=("a", "b"), compares_speeds=False
    )
    said = "b is ahead of a: of every 100 deadlines it meets 25.0 ± 0.0 more, seed by seed"
    assert write_verdicts(runs, rows, scenario=of) == [said]
    assert rows[1].estimates["in_time"] == estimate_mean([0.75] * 3)
    head, a, b = format_table(rows, choose_columns(of))
    at = head.index("in time (%)") + len("in time (%)")
    assert (a[:at].split()[-1], b[:at].split()[-1]) == ("50", "75")


def test_every_column_is_explained_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
    cut = scenario("two-kinds", "workload.deadline=60 s", "until=1 h")
    titles = {column.title for of in (scenario(), cut) for column in choose_columns(of)}
    assert {"in time (%)", "items", "busy (%)"} <= titles
    assert [title for title in titles if f"`{title}`" not in page] == []


def test_table_is_aligned_and_leaves_out_zero_columns() -> None:
    runs = [run("a", seed, ended_at=at) for seed, at in enumerate((100.0, 110.0, 120.0))]
    runs += [run("longer", seed, ended_at=2000.0) for seed in range(3)]
    rows = compared(runs)
    head, first, second = format_table(rows, choose_columns(scenario()))
    assert head.split("   ")[0].strip() == "policy"
    assert "done after (s)" in head
    assert head.endswith("speed (x a)")
    assert "run again" not in head
    assert "x bound" not in head
    assert "110 ± 25" in first
    assert "2,000" in second
    assert "±" not in second.split("0.5")[0]
    assert head.index("done after (s)") + len("done after (s)") == first.index("110 ± 25") + len("110 ± 25")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "–"), (MeanEstimate(578.2, 12.3, 5), "578 ± 12"), (MeanEstimate(34.56, 0.71, 5), "34.6 ± 0.7"),
        (MeanEstimate(1.084, 0.011, 5), "1.08 ± 0.01"), (MeanEstimate(0.0831, 0.002, 5), "0.083 ± 0.002"),
        (MeanEstimate(12345.0, None, 1), "12,345"),
        (MeanEstimate(4.0, 0.0, 3), "4"),
    ],
)  # fmt: skip
def test_means_are_shown_with_their_significant_digits(found: MeanEstimate | None, text: str) -> None:
    assert format_estimate(found) == text

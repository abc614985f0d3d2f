from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.manager.cli.plan import plan, render_plan
from stoker.manager.cli.replay import render_replay_result as render_replay
from stoker.manager.cli.replay import replay
from stoker.manager.live.replay import ReplayResult
from stoker.manager.study import evidence
from stoker.manager.study.evidence import Reason, Sureness, Work
from stoker.manager.study.plan import MANY_SEEDS, Percentiles, PlanForecast, RunPlan

TEXT = (Path(__file__).parents[2] / "docs" / "plan-and-replay.md").read_text()
SAMPLES = [text.splitlines()[1:] for text in re.findall(r"^```\n(\$ .*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
MADE = RunPlan(
    site="pool",
    work=Work("verify", "verify", 2000, 10, 1),
    kind="NVIDIA A10",
    devices=1,
    as_written=PlanForecast(4, 14_400.0, Percentiles(1232.0, 1362.0, 1427.0), Percentiles(1.11, 1.20, 1.29)),
    by_blocks=(),
    by_walltime=(),
    best_blocks=4,
    best_walltime_s=3600.0,
    price=1.5,
    sureness=Sureness.FAIR,
    reasons=(Reason("1 of 4 pilots was lost in 5.0 pilot-hours", Sureness.FAIR),),
    policy="default",
)


def test_options_on_the_page_equal_the_command_options() -> None:
    has = {
        option for command in (plan, replay) for each in command.params for option in each.opts if option[:2] == "--"
    }
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) == has


def test_plan_output_looks_like_the_page() -> None:
    lines = [line for line in render_plan(MADE) if not line.startswith("  cost")]
    assert set(lines) <= set(SAMPLES[0])
    assert "over 20 seeds" in TEXT
    assert MANY_SEEDS == 20


def test_replay_output_looks_like_the_page() -> None:
    assert render_replay(ReplayResult("k3v9", 4812, 4812, 0, 57.0), took_s=0.9) == SAMPLES[1]


@pytest.mark.parametrize(
    ("place", "level"),
    [(0, "good` needs 30 calls, 3 loads and 10"), (1, "fair` needs 5 calls, 1 load and 3")],
)
def test_measurement_counts_on_the_page_match_the_code(place: int, level: str) -> None:
    counts = [levels[place] for levels in (evidence.RUNS, evidence.LOADS, evidence.WAITS)]
    assert [int(number) for number in re.findall(r"\d+", level)] == counts
    assert level in " ".join(TEXT.split())

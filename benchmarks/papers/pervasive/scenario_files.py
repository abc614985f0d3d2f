"""Write runs of the paper as scenarios: `stoker simulate context-paper-8`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.papers.pervasive import paper, predict, worlds
from benchmarks.papers.pervasive.fit import Parameters
from stoker.contexts.recipe import Awareness
from stoker.manager.study import scenario
from stoker.manager.study.scenario import Scenario, scenario_to_toml
from stoker.site import BASELINES, Duration

FOLDER = Path(scenario.__file__).parent / "scenarios"
_HEAD = "# Written by `make reproduce`, which says what of it is known: docs/reproduction/context-paper.md\n"
_LESSER = {"6": (Awareness.DISK, Awareness.NONE), "7": (Awareness.DISK,), "8": (Awareness.DISK,)}
"""Other versions of the paper in each figure."""


def scenario_texts(parameters: Parameters) -> dict[str, str]:
    found = {}
    for figure, about, pools, batch, until_s in _figure_runs():
        scenario = Scenario(
            name=f"context-paper-{figure}", about=f"Figure {figure} of the context paper: {about}",
            world=worlds.world(parameters, pools), workload=worlds.sweep_calls(batch), seeds=1,
            until_s=Duration(until_s),
        )  # fmt: skip
        found[f"{scenario.name}.toml"] = _HEAD + _baseline_comment(figure) + scenario_to_toml(scenario)
    return found


def _baseline_comment(figure: str) -> str:
    lesser = [BASELINES[worlds.POLICIES[level]] for level in _LESSER.get(figure, ())]
    if not lesser:
        return ""
    lines = [f"stoker simulate context-paper-{figure} --policy default", *(f"  --policy {name}" for name in lesser)]
    command = "".join(f"#   {line}" for line in " \\\n".join(lines).splitlines(keepends=True))
    return f"# The paper's lesser versions beside it, in a clone of Stoker's repository:\n{command}\n"


def _figure_runs() -> Iterator[tuple[str, str, worlds.Pools, int, float]]:
    static, batch = worlds.static_pools(), predict.BATCH
    yield "6", "150,000 inferences on twenty GPUs that stay, in calls of 100", static, batch, 0.0
    yield "7", "the same in calls of one; --set workload.items=100 or 1000 for the others", static, 1, 0.0
    vanishing = worlds.vanishing_pools()
    until_s = worlds.last_loss_s(vanishing) + paper.PREEMPTED_EVERY_S
    yield "8", "from 900 s on one GPU is lost every minute, until none is left", vanishing, batch, until_s
    low, high = paper.FIGURE_9A_GPUS
    _, ramp_s, bend, shares = predict.RAMPS_9A[0]
    pools = worlds.growing_pools(shares, first=low, last=high, until_s=ramp_s, bend=bend)
    yield "9a", f"a pool that grows from {low} GPUs to {high}", pools, batch, 0.0
    pools = worlds.growing_pools(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=predict.RAMPS_9B_S[0])
    yield "9b", f"a pool that grows to {paper.FIGURE_9B_GPUS} GPUs of eight kinds", pools, batch, 0.0

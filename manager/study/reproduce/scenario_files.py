"""The paper's runs as scenarios that ship, with the most central parameter set: `stoker simulate context-paper-8`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stoker.contexts.recipe import Awareness
from stoker.manager.study.reproduce import paper, predict, worlds
from stoker.manager.study.reproduce.parameters import Parameters
from stoker.manager.study.scenario import Scenario
from stoker.manager.study.scenario_text import scenario_text
from stoker.site import Duration

FOLDER = Path(__file__).parent.parent / "scenarios"
_HEAD = "# Written by `make reproduce`, which says what of it is known: docs/reproduction/context-paper.md\n"


def texts(parameters: Parameters) -> dict[str, str]:
    """The files, by their names."""
    return {f"{each.name}.toml": _HEAD + scenario_text(each) for each in _scenarios(parameters)}


def _scenarios(parameters: Parameters) -> Iterator[Scenario]:
    static = worlds.static()
    yield _scenario(parameters, "6", "150,000 inferences on twenty GPUs that stay, in calls of 100", static, _levels(3))
    about = "the same in calls of one; --set workload.items=100 or 1000 for the others"
    yield _scenario(parameters, "7", about, static, _levels(2), batch=1)
    vanishing = worlds.vanishing()
    until_s = max(at_s for steps in vanishing.values() for at_s, _ in steps) + paper.PREEMPTED_EVERY_S
    about = "from 900 s on one GPU is lost every minute, until none is left"
    yield _scenario(parameters, "8", about, vanishing, _levels(2), until_s=until_s)
    low, high = paper.FIGURE_9A_GPUS
    _, until_s, bend, shares = predict.RAMPS_9A[0]
    pools = worlds.ramp(shares, first=low, last=high, until_s=until_s, bend=bend)
    yield _scenario(parameters, "9a", f"a pool that grows from {low} GPUs to {high}", pools, _levels(1))
    pools = worlds.ramp(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=predict.RAMPS_9B_S[0])
    about = f"a pool that grows to {paper.FIGURE_9B_GPUS} GPUs of eight kinds"
    yield _scenario(parameters, "9b", about, pools, _levels(1))


def _levels(count: int) -> tuple[str, ...]:
    """So many policies, those that keep most first."""
    return tuple(worlds.POLICIES[level] for level in (Awareness.FULL, Awareness.DISK, Awareness.NONE)[:count])


def _scenario(
    parameters: Parameters,
    figure: str,
    about: str,
    pools: worlds.Pools,
    policies: tuple[str, ...],
    *,
    batch: int = predict.BATCH,
    until_s: float = 0.0,
) -> Scenario:
    return Scenario(
        name=f"context-paper-{figure}",
        about=f"Figure {figure} of the context paper: {about}",
        world=worlds.world(parameters, pools),
        workload=worlds.sweep(batch),
        policies=policies,
        seeds=1,
        until_s=Duration(until_s),
    )

"""What was asked of the reproduction, and whether it holds: each bar with what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

import msgspec

from benchmarks.prompt_tuner import ablations, paper
from benchmarks.prompt_tuner.cases import ELASTIC_FLOW, HEAVY, INFLESS, MAIN, OURS, Group, System, at
from benchmarks.prompt_tuner.summary import Evaluation, show

_FEWER_POINTS = {INFLESS: 10.0, ELASTIC_FLOW: 30.0}
_TIMES_THE_COST = {INFLESS: 1.2, ELASTIC_FLOW: 1.8}
_ROUND_S = 0.002


class Bar(msgspec.Struct, frozen=True):
    """One of them. `wanted` and `came` are text; `holds` goes by the mean. `learned`: the same against baselines that
    learn; None where that makes no difference."""

    what: str
    wanted: str
    came: str
    holds: bool
    learned: tuple[str, bool] | None = None


def bars(of: Evaluation) -> Iterator[Bar]:
    """All of them."""
    ours = of.systems[OURS]
    loaded = [at(load, 1.0) for load in ("medium", "high")]
    for policy, points in _FEWER_POINTS.items():
        for group in loaded:
            fewer, learned = (of.more_violations(group, them[policy], ours) for them in (of.systems, of.learned))
            what, too = f"violations under `{policy}`'s, {group.name}", (show(learned), learned.mean >= points)
            yield Bar(what, f"by {points:.0f} points", show(fewer), fewer.mean >= points, too)
    for policy, times in _TIMES_THE_COST.items():
        for group in loaded:
            dearer, learned = (of.times_the_cost(group, them[policy], ours) for them in (of.systems, of.learned))
            what, too = f"`{policy}`'s cost, {group.name}", (show(learned, digits=2), learned.mean >= times)
            yield Bar(what, f"{times:g} times ours", show(dearer, digits=2), dearer.mean >= times, too)
    worse, worse_too = _worse(of, of.systems), _worse(of, of.learned)
    what = "cases with more violations than a baseline, beyond the interval"
    yield Bar(what, "none", worse or "none", not worse, (worse_too or "none", not worse_too))
    for what, group, system in _ablations():
        more = of.more_violations(group, system, ours)
        yield Bar(f"violations {what}", "rise", f"{show(more, sign=True)} points", more.mean > 0.0)
    large = of.results(HEAVY[-1], ours)
    mean_s = fmean(result.round_s for result in large)
    came = f"{1e3 * mean_s:.2f} ms, at most {1e3 * max(result.round_most_s for result in large):.0f} ms"
    yield Bar(f"a round at {paper.LARGE_GPUS} GPUs", f"under {1e3 * _ROUND_S:.0f} ms", came, mean_s < _ROUND_S)


def _worse(of: Evaluation, baselines: Mapping[str, System]) -> str:
    """Where ours has more violations than a baseline, and its interval does not reach none."""
    ours = of.systems[OURS]
    return ", ".join(
        f"{group.name} ({policy})"
        for group in MAIN
        for policy in (INFLESS, ELASTIC_FLOW)
        if of.more_violations(group, ours, baselines[policy]).low > 0.0
    )


def _ablations() -> Iterator[tuple[str, Group, System]]:
    for name, system in ablations.TABLE_8.items():
        if name != "whole":
            yield ablations.SHOWN[name], at("medium", 1.0), system
    for what, system in (("the bank", ablations.NO_PROMPTS), ("reusing runtimes", ablations.NO_RUNTIMES)):
        yield f"without {what}", at("medium", 1.0), system

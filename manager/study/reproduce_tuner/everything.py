"""Everything that the page is made of: which runs, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from stoker.manager.study.reproduce_tuner import ablations, tuning
from stoker.manager.study.reproduce_tuner.cases import (
    ELASTIC_FLOW,
    HEAVY,
    INFLESS,
    MAIN,
    OURS,
    SENSITIVITY,
    Case,
    Extent,
    Group,
    System,
)
from stoker.manager.study.reproduce_tuner.runs import Runs
from stoker.manager.study.reproduce_tuner.summary import Evaluation


def evaluate(runs: Runs, *, extent: Extent, tell: Callable[[str], Callable[[int, int], None]]) -> Evaluation:
    """Everything. Baselines' settings come first, from seeds of their own. `tell` gives, for what is done, who hears
    how much of it is. Raises SimulationError."""
    tried = {policy: tuning.candidates(policy) for policy in (INFLESS, ELASTIC_FLOW)}
    every = [system for systems in tried.values() for system in systems]
    found = runs.each(tuning.cases(every, extent=extent), tell=tell("settings"))
    searches = {
        policy: [tuning.searched(system, found, extent=extent) for system in systems]
        for policy, systems in tried.items()
    }
    systems = {OURS: ablations.WHOLE} | {policy: tuning.best(tried) for policy, tried in searches.items()}
    found = runs.each(cases_of(systems, extent), tell=tell("runs"))
    return Evaluation(found, systems, tuple(one for some in searches.values() for one in some), extent)


def cases_of(systems: dict[str, System], extent: Extent) -> list[Case]:
    """The runs of the page, with each baseline in its best setting."""
    wanted: list[tuple[Group, System]] = [(group, system) for group in (*MAIN, *HEAVY) for system in systems.values()]
    wanted += ablations.runs()
    each = [group.cases(system, seeds=extent.seeds, smaller=extent.smaller) for group, system in wanted]
    for group in SENSITIVITY:
        each += [group.cases(system, seeds=extent.varied_seeds, smaller=extent.smaller) for system in systems.values()]
    return [case for cases in each for case in cases]

"""Everything that the page is made of: which runs, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from benchmarks.prompt_tuner import ablations, tuning
from benchmarks.prompt_tuner.cases import (
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
from benchmarks.prompt_tuner.runs import Runs
from benchmarks.prompt_tuner.summary import Evaluation, Search


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
    as_told = {policy: _best(some, learn=False) for policy, some in searches.items()}
    learned = {policy: _best(some, learn=True) for policy, some in searches.items()}
    systems = {OURS: ablations.WHOLE} | as_told
    found = runs.each(cases_of(systems, learned, extent), tell=tell("runs"))
    return Evaluation(found, systems, learned, tuple(one for some in searches.values() for one in some), extent)


def _best(searches: Iterable[Search], *, learn: bool) -> System:
    return tuning.best([search for search in searches if tuning.learns(search.system) is learn])


def cases_of(systems: dict[str, System], learned: dict[str, System], extent: Extent) -> list[Case]:
    """The runs of the page, with each baseline in its best setting; also in the best of those that learn."""

    def all_in(groups: Iterable[Group]) -> Iterator[tuple[Group, System]]:
        return product(groups, systems.values())

    wanted = [
        *all_in(MAIN),
        *product(MAIN, learned.values()),
        *ablations.runs(),
        *all_in((*HEAVY[:-1], *SENSITIVITY, HEAVY[-1])),
    ]
    each = [
        group.cases(system, seeds=ablations.seeds_of(group, extent), smaller=extent.smaller) for group, system in wanted
    ]
    return [case for cases in each for case in cases]

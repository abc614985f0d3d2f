"""All runs of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers.prompt_tuner import grid as grids
from benchmarks.papers.prompt_tuner import paper, scenarios, searching
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.papers.prompt_tuner.record import KeptRun, Record
from benchmarks.papers.prompt_tuner.scenarios import (
    APART,
    BOUND,
    FEWER_GPUS,
    HEAVY,
    HIGH,
    MAIN,
    MEDIUM,
    NOBODY,
    POLICIES,
    TUNING_SEEDS,
    VICUNA,
    Chosen,
    Condition,
    Group,
    Reading,
    System,
    at,
    of_bank,
)
from benchmarks.papers.prompt_tuner.searching import Runs, Searched, search
from stoker.manager.sim.run import SimulationError

Wanted = tuple[Group, System]


class RunSelection(msgspec.Struct, frozen=True):
    """Which runs to make. `seeds`, `few`, `large`: seeds of the central set, of other sets, of 96 GPUs. `smaller`
    divides cluster and jobs. `stages`, `sets`: 0 = all.
    """

    seeds: tuple[int, ...]
    few: tuple[int, ...]
    large: tuple[int, ...]
    tuning: tuple[int, ...] = TUNING_SEEDS
    smaller: int = 1
    stages: int = 0
    sets: int = 0


def whole(grid: Grid, *, seeds: int = 0, stages: int = 0, sets: int = 0) -> RunSelection:
    every = grid.report.seeds[: seeds or None]
    return RunSelection(every, every[: grid.report.few], every[:3], stages=stages, sets=sets)


def evaluate(
    runs: Runs, grid: Grid, *, extent: RunSelection, tell: Callable[[str], Callable[[int, int], None]], command: str,
    found: Searched | None = None,
) -> Record:  # fmt: skip
    clock = Clock(command)
    searched = found or search(grid, grids.drawn(grid), runs, tell=tell, most=extent.stages)
    sets = grids.farthest_apart(searched.admitted, grid, most=extent.sets or grid.report.most)
    usual = sets[0].parameters(grid)
    tried = runs.each(searching.cases(usual, seeds=extent.tuning, smaller=extent.smaller), tell=tell("settings"))
    searches = searching.searched(tried, usual, seeds=extent.tuning, smaller=extent.smaller)
    chosen = searching.best(searches)
    kept: list[KeptRun] = []
    for number, choice in enumerate(sets):
        wanted = central(chosen) if not number else others(chosen)
        what = f"set {number + 1} of {len(sets)}"
        kept += _run(runs, choice, choice.parameters(grid), wanted, extent, first=not number, tell=tell(what))
    return Record(clock.facts(), searched, tuple(sets), searches, chosen, extent.seeds, extent.few, tuple(kept))


def again(
    runs: Runs, grid: Grid, record: Record, *, baseline: str, tell: Callable[[str], Callable[[int, int], None]],
    command: str,
) -> Record:  # fmt: skip
    clock, usual = Clock(command), record.sets[0].parameters(grid)
    searches = searching.searched(runs.each(searching.cases(usual), tell=tell("settings")), usual)
    chosen = searching.best(searches)
    others_changed = [one.value for one in Reading if POLICIES[one] != baseline and chosen[one] != record.chosen[one]]
    if others_changed:
        raise SimulationError(f"{', '.join(others_changed)}: another setting is the best one now")
    large = tuple(sorted({run.seed for run in record.runs if run.group == HEAVY[-1].name}))
    extent, before = RunSelection(record.seeds, record.few, large), {run.name: run for run in record.runs}
    kept = [run for run in record.runs if run.system.split(", ")[0] != baseline]
    for number, choice in enumerate(record.sets):
        what = f"{baseline}, set {number + 1} of {len(record.sets)}"
        asked = central(chosen) if not number else others(chosen)
        wanted = [(group, system) for group, system in asked if system.policy == baseline]
        for run in _run(runs, choice, choice.parameters(grid), wanted, extent, first=not number, tell=tell(what)):
            old = before.get(run.name, run)
            if run.came_to != old.came_to:
                raise SimulationError(f"{run.name} came to {run.came_to}, and had come to {old.came_to}")
            kept.append(run)
    return msgspec.structs.replace(
        record, searches=searches, chosen=chosen, runs=tuple(kept), again=clock.facts()
    )  # fmt: skip


def _run(
    runs: Runs, choice: Choice, parameters: Parameters, wanted: Sequence[Wanted], extent: RunSelection, *, first: bool,
    tell: Callable[[int, int], None],
) -> list[KeptRun]:  # fmt: skip
    cases = {}
    for group, system in dict.fromkeys(wanted):
        seeds = extent.large if group == HEAVY[-1] else extent.seeds if first else extent.few
        for case in group.cases(system, parameters, seeds=seeds, smaller=extent.smaller):
            cases[case] = group
    found = runs.each(cases, tell=tell)
    return [KeptRun.of(choice, group, case.system, case.seed, found[case]) for case, group in cases.items()]


def central(chosen: Chosen) -> list[Wanted]:
    text = (NOBODY, chosen[Reading.HOLD], chosen[Reading.RESIZES])
    learning = [scenarios.baseline(chosen, reading, Condition.ALL) for reading in Reading]
    orders = [searching.other_order(chosen[reading]) for reading in (Reading.HOLD, Reading.AT_ONCE)]
    found = [*others(chosen), *product(MAIN, text), *product((MEDIUM, HIGH), (scenarios.LEARNS, *learning))]
    found += product((MEDIUM, HIGH), orders)
    found += [(at("medium", each), system) for each in paper.EMERGENCES for system in scenarios.FIGURE_8_AB.values()]
    found += [(MEDIUM, scenarios.of_window(each, usual_s=paper.WINDOW_S)) for each in paper.WINDOWS_S]
    found += [(of_bank(size), NOBODY) for size in paper.BANK_SIZES]
    found += product((*HEAVY[:-1], BOUND, APART, HEAVY[-1]), text)
    found += product([BOUND], (scenarios.LEARNS, scenarios.baseline(chosen, Reading.HOLD, Condition.ALL)))
    for reading in scenarios.OF_INFLESS:
        found += [*product(VICUNA, [chosen[reading]]), *product([MEDIUM], scenarios.kept(chosen[reading]))]
    return [*found, *product(FEWER_GPUS, (NOBODY, *chosen.values()))]


def others(chosen: Chosen) -> list[Wanted]:
    systems = [NOBODY, *chosen.values()]
    parts = [*scenarios.TABLE_8.values(), scenarios.NO_PROMPTS, scenarios.NO_RUNTIMES]
    return [*((group, system) for group in (MEDIUM, HIGH) for system in systems), *((MEDIUM, one) for one in parts)]

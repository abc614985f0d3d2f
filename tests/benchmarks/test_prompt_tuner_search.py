"""The search for job sets within the paper's text: by anchors, in stages, on separate seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.papers.prompt_tuner import grid as grids
from benchmarks.papers.prompt_tuner.grid import Choice, read_grid
from benchmarks.papers.prompt_tuner.scenarios import NOBODY, at
from benchmarks.papers.prompt_tuner.searching import RESIZES, Runs, search
from benchmarks.papers.prompt_tuner.simulate import Result

GRID = read_grid()
SOME = grids.drawn(GRID)[:4]


def result(*, late: int, held_s: float) -> Result:
    return Result(
        jobs=1000, late=late, refused=0, unfinished=0, banked=0, loads=0, held_s=held_s, busy_s=1.0, all_s=10_000.0,
        ended_at=1200.0, wait_share=0.0, wait_most=0.0,
    )  # fmt: skip


def known(folder: Path, values: dict[Choice, tuple[int, float, float]]) -> Runs:
    """Return finished runs. `values`: late jobs (of 1,000), and device-seconds of ElasticFlow and of our policy."""
    runs = Runs(folder, jobs=1)
    for choice, (late, theirs_s, ours_s) in values.items():
        parameters = choice.parameters(GRID)
        for group in (at("medium", 1.0), at("medium", 1.5)):
            for system, held_s in ((NOBODY, ours_s), (RESIZES, theirs_s)):
                for case in group.cases(system, parameters, seeds=range(1, 11)):
                    runs.keep(case, result(late=late, held_s=held_s))
    return runs


def tell(what: str) -> Callable[[int, int], None]:
    return lambda *_: None


def test_sets_count_that_give_every_anchor_within_the_limit(tmp_path: Path) -> None:
    good, late, full, dear = SOME
    runs = known(tmp_path, {
        good: (124, 5600.0, 3000.0),
        late: (400, 5600.0, 3000.0),  # too many jobs are late
        full: (124, 9000.0, 3000.0),  # ElasticFlow allocates too much
        dear: (124, 5600.0, 9000.0),  # ours costs as much as ElasticFlow
    })  # fmt: skip
    before = set(tmp_path.iterdir())
    found = search(GRID, SOME, runs, tell=tell)
    assert found.admitted == (good,)
    assert found.within == GRID.anchors.within
    assert set(tmp_path.iterdir()) == before
    first = {each.choice: len(each.values) for each in found.stages[0]}
    assert first == {good: 3, late: 1, full: 2, dear: 3}, "one that is off costs no further runs"


@pytest.mark.long
def test_where_too_few_count_the_limit_is_raised_and_told(tmp_path: Path) -> None:
    """23 % fewer jobs are late than in the paper, or 25 %, which exceeds the last stage's limit."""
    wide = msgspec.structs.replace(
        GRID, stages=tuple(msgspec.structs.replace(stage, within=0.5) for stage in GRID.stages)
    )
    for grid, late in ((wide, 96), (GRID, 93)):
        runs = known(tmp_path / f"{late}", dict.fromkeys(SOME, (late, 5600.0, 3000.0)))
        found = search(grid, SOME, runs, tell=tell)
        assert all(len(each.values) == 3 for each in found.stages[-1])
        assert len(found.admitted) == len(SOME)
        assert found.within == 0.25 if grid is wide else found.within > GRID.anchors.within


def test_the_grid_has_its_date_and_is_drawn_the_same_always() -> None:
    assert GRID.fixed_on == "2026-11-26"
    assert grids.drawn(GRID) == grids.drawn(GRID)
    assert len(grids.drawn(GRID)) == GRID.draws < len(grids.every_choice(GRID))
    one = SOME[0].parameters(GRID)
    assert one.replicas in GRID.width.values()
    assert one.widest in GRID.values.widest


def test_sets_are_taken_that_lie_farthest_apart_the_central_one_first() -> None:
    every = grids.every_choice(GRID)
    some = [every[0], every[1], every[-1]]
    picked = grids.farthest_apart(some, GRID, most=2)
    assert picked[0] == every[1]
    assert picked[1] == every[-1]

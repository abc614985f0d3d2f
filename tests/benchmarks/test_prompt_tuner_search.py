from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from benchmarks.papers.prompt_tuner import scenarios as grids
from benchmarks.papers.prompt_tuner.scenarios import OURS, PARTS, Case, Choice, read_grid
from benchmarks.papers.prompt_tuner.searching import Book, Found, search
from benchmarks.papers.prompt_tuner.simulate import Result

SEARCH = msgspec.structs.replace(read_grid().search, looked_at=3, finalists=2)
GRID = msgspec.structs.replace(read_grid(), draws=4, search=SEARCH)
SOME = grids.draw_choices(GRID)
PARTS_RUN = [part.system for part in PARTS]
CHEAP = next(part.system for part in PARTS if not part.dearer)
Late = Callable[[Choice, Case], int]


def found(late: Late, wrong: Mapping[Choice, int]) -> tuple[Found, Book]:
    """`late`: function for the late jobs of 1,000. `wrong`: by set, the number of parts that change no cost."""
    of = {choice.parameters(GRID): choice for choice in SOME}

    def one(case: Case) -> Result:
        choice = of[case.parameters]
        alike = case.system in PARTS_RUN[: wrong.get(choice, 0)]
        held_s = 1000.0 if case.system == OURS or alike else 900.0 if case.system == CHEAP else 1500.0
        return Result(
            jobs=1000, late=late(choice, case), refused=0, unfinished=0, banked=0, loads=0, held_s=held_s, busy_s=1.0,
            all_s=10_000.0, ended_at=1200.0,
        )  # fmt: skip

    book = Book(GRID, simulate=lambda cases: [one(case) for case in cases])
    return search(book), book


def usual(choice: Choice, case: Case) -> int:
    """Return the late jobs of our scheduler: 124, 110, 90 and 600 in the four sets. Other systems have 50 more late
    jobs.
    """
    ours = (124, 110, 90, 600)[SOME.index(choice)]
    return ours if case.system == OURS else ours + 50


def test_parameter_sets_nearest_to_published_results_are_examined() -> None:
    steps, book = found(usual, {})
    assert steps.looked_at == tuple(SOME[:3])
    assert steps.finalists == tuple(SOME[:2])
    assert steps.headline == SOME[0]
    parts = set(map(str, PARTS_RUN))
    assert {run.places for run in book.kept.values() if run.system in parts} == {each.places for each in SOME[:3]}


def test_parameter_sets_with_correct_signs_rank_first() -> None:
    steps, _ = found(usual, {SOME[0]: 2, SOME[1]: 1})
    assert steps.finalists == (SOME[2], SOME[1])
    assert steps.headline == SOME[2], "its late jobs are within the limit"

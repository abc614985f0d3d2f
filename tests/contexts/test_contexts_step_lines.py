"""The seconds of steps that follow each other are the table's, whatever its cells are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.step_times import StepCell, StepModel, StepSeconds, StepTable, StepTimes

GRID = st.builds(
    lambda rows, lengths, seconds: tuple(
        StepCell(row, length, seconds[(i * 7 + j) % len(seconds)])
        for i, row in enumerate(sorted(rows))
        for j, length in enumerate(sorted(lengths))
    ),
    st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1),
    st.sets(st.sampled_from([16, 128, 512, 2048]), min_size=1),
    st.lists(st.floats(0.001, 1.0), min_size=7, max_size=20),
)
ANYWHERE = st.lists(
    st.builds(StepCell, st.floats(1, 40), st.floats(1, 4000), st.floats(0.001, 1.0)), min_size=1, max_size=12
).map(tuple)
PROMPT = (StepCell(8, 4, 0.01),)


@given(st.one_of(GRID, ANYWHERE), st.integers(1, 40), st.floats(1, 3000), st.integers(1, 300))
def test_steps_in_a_row_take_what_each_takes(cells: tuple[StepCell, ...], rows: int, length: float, count: int) -> None:
    times = StepTimes(PROMPT, cells)
    found = StepSeconds(times, factor=2.0).decode_s(rows, length, count=count)
    model = StepModel(times)
    expected = [2.0 * model.step_s(prefill=False, tokens=rows, length=length + number) for number in range(count)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_table_without_steps_says_so() -> None:
    with pytest.raises(LookupError):
        StepSeconds(StepTimes(PROMPT)).decode_s(1, 1.0)
    with pytest.raises(LookupError):
        StepSeconds(StepTimes()).prefill_s(1, 1.0)
    with pytest.raises(LookupError):
        StepTable().floor(length=1.0, most=8)


@given(
    st.one_of(GRID, ANYWHERE), st.integers(1, 64), st.floats(1, 100), st.floats(0, 8000), st.floats(0, 1)
)  # fmt: skip
def test_no_step_takes_less_than_the_floor(
    cells: tuple[StepCell, ...], most: int, length: float, more: float, share: float
) -> None:
    table, tokens = StepTable(cells), 1 + round(share * (most - 1))
    step_s, token_s = table.floor(length=length, most=most)
    seconds = table.seconds(tokens, length + more)
    assert seconds >= step_s * (1 - 1e-9)
    assert seconds >= tokens * token_s * (1 - 1e-9)
    assert step_s > 0 or len(cells) > 0

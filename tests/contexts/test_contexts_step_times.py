from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.batching import Step
from stoker.contexts.inference.profiling import COLD_STEPS, StepCollector
from stoker.contexts.performance import PerformanceStore
from stoker.contexts.step_times import (
    MOST_CELLS,
    MOST_SAMPLES,
    StepCell,
    StepError,
    StepModel,
    StepSample,
    StepSeconds,
    StepTable,
    StepTimes,
    group_samples,
    mean_attended_tokens,
    mean_padded_length,
    powers_of_two_up_to,
)


def decode_s(rows: float, length: float) -> float:
    """Return a step time that depends on the batch size and on all tokens, as in SLINFER."""
    return 0.01 + 0.002 * rows + 1e-6 * rows * length


GRID = [StepSample(False, rows, length, decode_s(rows, length)) for rows in (1, 2, 4, 8) for length in (64, 128, 256)]


def test_decode_time_is_bilinear_between_powers_of_two() -> None:
    model = StepModel(group_samples(GRID))
    for rows, length in [(1, 64), (8, 256), (3, 100), (6, 200), (1, 300), (16, 64), (5, 10)]:
        assert model.step_s(prefill=False, tokens=rows, length=length) == pytest.approx(decode_s(rows, length))
    table = StepTable([StepCell(4, 64, 0.1)])  # one sample is enough for an estimate
    assert table.estimate_seconds(4, 64) == table.estimate_seconds(2, 64) == table.estimate_seconds(4, 900) == 0.1
    assert table.estimate_seconds(8, 64) == pytest.approx(0.2)


def test_later_parts_of_a_long_prompt_take_longer() -> None:
    def read_s(tokens: float, length: float) -> float:
        return 0.005 + 0.001 * tokens + 1e-6 * tokens * length

    samples = [StepSample(True, 512, start + 256, read_s(512, start + 256)) for start in (0, 512, 1024, 2048)]
    samples += [StepSample(True, tokens, tokens / 2, read_s(tokens, tokens / 2)) for tokens in (64, 128, 256)]
    model = StepModel(group_samples(samples))
    assert model.step_s(prefill=True, tokens=512, length=1800) == pytest.approx(read_s(512, 1800))
    # this time is extrapolated from the samples of the longest part
    assert model.step_s(prefill=True, tokens=128, length=2000) == pytest.approx(read_s(128, 2000))


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 8), st.integers(0, 12)), st.floats(1e-5, 10.0), min_size=1, max_size=40,
    )
)  # fmt: skip
def test_estimate_at_a_power_of_two_equals_its_sample(seconds: dict[tuple[int, int], float]) -> None:
    samples = [StepSample(False, 2**rows, 2**length, value) for (rows, length), value in seconds.items()]
    model = StepModel(group_samples(samples))
    for sample in samples:
        assert model.step_s(prefill=False, tokens=sample.tokens, length=sample.length) == pytest.approx(sample.seconds)
    for sample in samples:
        assert model.add_limited_sample(sample)[1] == pytest.approx(0, abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100)), min_size=1, max_size=60),
    st.floats(0, 1e7), st.floats(0, 1e7),
)  # fmt: skip
def test_step_time_estimate_is_never_negative(samples, tokens, length):
    table = StepTable()
    for sample in samples:
        table.add(StepCell(*sample))
    assert 0 <= table.estimate_seconds(tokens, length) < float("inf")


def test_disturbed_step_counts_as_three_times_its_estimate() -> None:
    model = StepModel()
    for _ in range(4):
        model.add(StepSample(False, 4, 64, 0.1))
    used, deviation = model.add_limited_sample(StepSample(False, 4, 64, 30.0))
    assert (used.seconds, deviation) == (pytest.approx(0.3), pytest.approx(29.9 / 30))
    assert model.add_limited_sample(StepSample(False, 4, 2048, 30.0)) == (StepSample(False, 4, 2048, 30.0), None)


def test_step_time_table_is_bounded() -> None:
    table = StepTable()
    for tokens in range(40):
        for length in range(40):
            table.add(StepCell(2.0**tokens, 2.0**length, 0.1, 300))
    assert len(list(table)) == MOST_CELLS
    assert not group_samples([StepSample(True, 2.0**40, 1, 0.1)]).has_plausible_numbers()


def test_two_tables_are_merged_by_their_sample_counts() -> None:
    one = msgspec.structs.replace(
        group_samples([StepSample(True, 8, 4, 0.1)], weight=3), decode_error=StepError(0.5, 2)
    )
    other = msgspec.structs.replace(group_samples([StepSample(True, 8, 4, 0.2)]), decode_error=StepError(0.2, 1))
    assert one.joined_with(other).prefill == (StepCell(8, 4, pytest.approx(0.125), 4),)
    assert one.joined_with(other).decode_error == StepError(pytest.approx(0.4), 3)


def test_step_sizes_attended_tokens_and_padding_are_computed() -> None:
    assert powers_of_two_up_to(12) == [1, 2, 4, 8, 12]
    assert powers_of_two_up_to(64, least=10) == [16, 32, 64]
    assert powers_of_two_up_to(0) == []
    assert mean_attended_tokens([(0, 8)]) == 4
    assert mean_attended_tokens([(0, 8), (100, 24)]) == pytest.approx((8 * 4 + 24 * 112) / 32)
    assert mean_padded_length([(64, 10), (64, 50), (256, 200)]) == 100, "a row has the longest length of its size"
    assert mean_padded_length([]) == 0


def test_step_times_are_collected_during_calls() -> None:
    collector = StepCollector()

    def step(step: Step, length: int, seconds: float) -> None:
        collector.record_step(step, length, seconds)
        collector.add_step(seconds)

    read, write = Step(True, (1, 2), (64, 64), (0, 0)), Step(False, (1, 2), (1, 1), (64, 64))
    for request in range(10, 14):
        # the slow first steps of a kind are left out
        step(Step(True, (request,), (64,), (0,)), 64, 9.0)
    step(read, 128, 0.5)
    for _ in range(2):
        step(write, 65, 0.02)
    step(Step(True, (1,), (64,), (64,)), 64, 0.4)  # 64 tokens have been read before
    times = collector.take_times()
    assert [(cell.tokens, cell.length, cell.seconds) for cell in times.prefill] == [(64, 96, 0.4), (128, 32, 0.5)]
    assert times.decode == (StepCell(2, 65, 0.02, 2),)
    assert times.decode_error == StepError(0, 1)
    assert collector.take_times() == StepTimes()
    assert not collector.urgent
    collector.replace_known_times(group_samples(GRID))
    assert collector.urgent, "a profile is taken at once"
    assert collector.take_times().sample_count == len(GRID)
    assert not collector.urgent


def test_step_time_includes_sending_the_tokens() -> None:
    collector = StepCollector()
    for _ in range(COLD_STEPS + 1):
        collector.record_step(Step(False, (1,), (1,), (64,)), 64, 0.02)
        collector.add_step(0.025)
    collector.add_step(0.5)  # launched a step whose tokens the engine has not read yet
    assert [cell.seconds for cell in collector.take_times().decode] == [0.025]


def test_step_times_of_two_sessions_are_added_in_the_store(tmp_path: Path) -> None:
    times = msgspec.structs.replace(group_samples(GRID, weight=5), decode_error=StepError(0.03, 100))
    for number in (1, 2):
        store = PerformanceStore(tmp_path / "performance.sqlite")
        store.record_step_times("llm", kind="cpu", times=times)
        found = store.step_times("llm")
        store.close()
        assert {cell.count for cell in found["cpu"].decode} == {5 * number}
    assert found["cpu"].decode_error == StepError(0.03, MOST_SAMPLES)
    model = StepModel(found["cpu"])
    assert model.step_s(prefill=False, tokens=3, length=100) == pytest.approx(decode_s(3, 100))
    assert list(found) == ["cpu"]
    with closing(sqlite3.connect(tmp_path / "performance.sqlite")) as db:
        db.execute("DROP TABLE steps")  # as in a file of an older version
    store = PerformanceStore(tmp_path / "performance.sqlite")
    store.record_step_times("llm", kind="cpu", times=times)
    assert {cell.count for cell in store.step_times("llm")["cpu"].decode} == {5}
    store.close()


ANY_GRID = st.builds(
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


@given(st.one_of(ANY_GRID, ANYWHERE), st.integers(1, 40), st.floats(1, 3000), st.integers(1, 300))
def test_consecutive_decode_step_times_follow_the_growing_length(
    cells: tuple[StepCell, ...], rows: int, length: float, count: int
) -> None:
    times = StepTimes(PROMPT, cells)
    found = StepSeconds(times, factor=2.0).decode_s(rows, length, count=count)
    model = StepModel(times)
    expected = [2.0 * model.step_s(prefill=False, tokens=rows, length=length + number) for number in range(count)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_estimate_from_an_empty_step_time_table_raises_an_error() -> None:
    model = StepModel(group_samples(GRID))
    with pytest.raises(LookupError, match="no step"):
        model.step_s(prefill=True, tokens=1, length=1)
    with pytest.raises(LookupError):
        StepSeconds(StepTimes(PROMPT)).decode_s(1, 1.0)
    with pytest.raises(LookupError):
        StepSeconds(StepTimes()).prefill_s(1, 1.0)
    with pytest.raises(LookupError):
        StepTable().lower_bounds(length=1.0, most=8)


@given(
    st.one_of(ANY_GRID, ANYWHERE), st.integers(1, 64), st.floats(1, 100), st.floats(0, 8000), st.floats(0, 1)
)  # fmt: skip
def test_no_step_time_estimate_is_below_the_floor(cells, most, length, more, share):
    table, tokens = StepTable(cells), 1 + round(share * (most - 1))
    step_s, token_s = table.lower_bounds(length=length, most=most)
    seconds = table.estimate_seconds(tokens, length + more)
    assert seconds >= step_s * (1 - 1e-9)
    assert seconds >= tokens * token_s * (1 - 1e-9)
    assert step_s > 0 or len(cells) > 0

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from faults.world import until
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.joined_batches import JoinedBatches

WAIT_S = 30.0


class Engine:
    """An engine whose rows are numbers: their lengths. It waits at a gate before each batch and records the batch."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.kinds: list[Hashable] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.fails_at = -1
        if is_open:
            self.gate.set()
        self.joined: JoinedBatches[int, str] = JoinedBatches(self.compute, length=lambda row: row)

    def compute(self, kind: Hashable, rows: list[int]) -> list[str]:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.batches.append(list(rows))
        self.kinds.append(kind)
        if self.fails_at in rows:
            raise RuntimeError("out of memory")
        return [f"{kind}{row}" for row in rows]


def busy(pool: ThreadPoolExecutor, *, kind: str = "k", row: int = 50) -> tuple[Engine, Future[list[str]]]:
    """Return an engine that waits at its gate with one row, and the future result."""
    engine = Engine(is_open=False)
    first = pool.submit(engine.joined.run, kind, [row], batch_size=8)
    assert engine.entered.wait(WAIT_S)
    return engine, first


def until_waiting(engine: Engine, rows: int) -> None:
    until(lambda: sum(map(len, list(engine.joined._waiting.values()))) == rows, why=f"{rows} rows wait")


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(1, 9))
def test_results_keep_their_order_with_little_padding(rows: list[int], batch_size: int) -> None:
    engine = Engine()
    assert engine.joined.run("k", rows, batch_size=batch_size) == [f"k{row}" for row in rows]
    assert sorted(row for batch in engine.batches for row in batch) == sorted(rows)
    assert all(len(batch) <= batch_size for batch in engine.batches)
    assert all(max(batch) <= 2 * min(batch) + 16 for batch in engine.batches)


def test_rows_of_waiting_callers_join_one_batch(pool: ThreadPoolExecutor) -> None:
    engine, first = busy(pool)
    others = [pool.submit(engine.joined.run, "k", [row, row + 1], batch_size=8) for row in (10, 20, 12)]
    until_waiting(engine, 6)
    engine.gate.set()
    assert first.result(WAIT_S) == ["k50"]
    assert [each.result(WAIT_S) for each in others] == [["k10", "k11"], ["k20", "k21"], ["k12", "k13"]]
    assert [sorted(batch) for batch in engine.batches] == [[50], [10, 11, 12, 13, 20, 21]]


def test_batch_size_is_the_smallest_limit_of_its_callers(pool: ThreadPoolExecutor) -> None:
    engine, first = busy(pool)
    others = [pool.submit(engine.joined.run, "k", [10] * 4, batch_size=size) for size in (8, 2)]
    until_waiting(engine, 8)
    engine.gate.set()
    for each in (first, *others):
        each.result(WAIT_S)
    careful = engine.joined.run("k", [10] * 4, batch_size=2)
    assert careful == ["k10"] * 4
    assert [len(batch) for batch in engine.batches[-2:]] == [2, 2]
    assert sum(map(len, engine.batches)) == 13


def test_different_kinds_of_rows_are_computed_separately(pool: ThreadPoolExecutor) -> None:
    engine, first = busy(pool, kind="a", row=5)
    others = [pool.submit(engine.joined.run, kind, [5], batch_size=8) for kind in "bab"]
    until_waiting(engine, 3)
    engine.gate.set()
    assert [each.result(WAIT_S) for each in (first, *others)] == [["a5"], ["b5"], ["a5"], ["b5"]]
    assert sorted(map(str, engine.kinds)) == ["a", "a", "b"]


def test_error_of_a_batch_reaches_only_its_callers(pool: ThreadPoolExecutor) -> None:
    engine, first = busy(pool, row=500)
    engine.fails_at = 10
    poor = [pool.submit(engine.joined.run, "k", rows, batch_size=8) for rows in ([10, 900], [11])]
    until_waiting(engine, 3)
    far = pool.submit(engine.joined.run, "k", [300], batch_size=8)
    until_waiting(engine, 4)
    engine.gate.set()
    assert first.result(WAIT_S) == ["k500"]
    assert far.result(WAIT_S) == ["k300"]
    for each in poor:
        with pytest.raises(RuntimeError, match="out of memory"):
            each.result(WAIT_S)
    engine.fails_at = -1
    assert engine.joined.run("k", [10], batch_size=1) == ["k10"]


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)

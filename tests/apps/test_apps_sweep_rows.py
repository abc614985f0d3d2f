"""A sweep reads rows as it sends them, and keeps few in memory."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from polling import PATIENCE_S

import stoker
from stoker.apps.common import calls, data_rows
from stoker.apps.common.command_line import RunChoice
from stoker.apps.common.data_rows import DataItem, DataRows, check_rows
from stoker.apps.inference_sweep import run
from stoker.apps.inference_sweep.functions import SweepRequest
from stoker.apps.inference_sweep.plan import SweepModel
from stoker.contexts import Recipe
from stoker.datafile import Row, read_rows, write_rows
from stoker.errors import ConfigError

WANTED = {"plain": ("question",)}
HELD = frozenset((Row, DataItem, SweepRequest))
"""All types whose objects contain the texts of a row."""


def write_data(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"r{number}", "question": f"What is {number}?"}) + "\n")
    return path


def checked(path: Path, **more: int) -> DataRows:
    return check_rows(path, column="id", wanted=WANTED, **more)


def test_rows_of_a_file_can_be_iterated_repeatedly(tmp_path: Path) -> None:
    rows = checked(write_data(tmp_path / "rows.jsonl", 5))
    assert len(rows) == 5
    for _ in range(2):
        assert [(item.id, item.fields["question"], item.place) for item in rows][3:] == [
            ("r3", "What is 3?", "line 4"), ("r4", "What is 4?", "line 5"),
        ]  # fmt: skip
    assert [item.id for item in checked(rows.path, limit=2)] == ["r0", "r1"]


def test_row_changed_since_the_check_is_named_and_not_sent(tmp_path: Path) -> None:
    rows = checked(write_data(tmp_path / "rows.jsonl", 5))
    lines = rows.path.read_text().splitlines(keepends=True)
    rows.path.write_text("".join([*lines[:3], lines[3].replace("What", "Where"), lines[4]]))
    seen: list[str] = []
    with pytest.raises(ConfigError, match=r"rows\.jsonl: line 4: has changed since the file was checked"):
        seen.extend(item.id for item in rows)
    assert seen == ["r0", "r1", "r2"]
    rows.path.write_text("".join(lines[:3]))
    with pytest.raises(ConfigError, match=r"rows\.jsonl: its last 2 of 5 rows were removed since the file was checked"):
        list(rows)
    rows.path.write_text("".join([*lines, lines[0]]))
    assert len(list(rows)) == 5, "rows that were added later are ignored"


@stoker.context
def upper_case() -> object:
    class Model:
        def generate(self, prompts: list[str], **options: object) -> list[str]:
            if any("777" in prompt for prompt in prompts):
                raise ValueError("prompt 0 has a number that it cannot take")
            return [prompt.upper() for prompt in prompts]

    return Model()


def count_held() -> int:
    # The list of all objects exists only inside one call of `sum`, during which no other thread runs. A reference to a
    # tuple that another thread is creating would raise SystemError there.
    every = itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()]))
    return sum(map(HELD.__contains__, map(type, every)))


def test_sweep_keeps_few_of_many_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, batch = 3_000, 50
    write_data(tmp_path / "rows.jsonl", count)
    (tmp_path / "sweep.toml").write_text(
        'data = "rows.jsonl"\nid = "id"\n[[models]]\nname = "toy"\npath = "toy"\n'
        '[[prompts]]\nname = "bare"\ntext = "{question}"\n[parameters]\nmax_new_tokens = 2\n'
    )
    held: list[int] = []
    passes = 0

    def counted(path: Path) -> Iterator[Row]:
        nonlocal passes
        passes += 1
        for number, row in enumerate(read_rows(path)):
            if number % 1000 == 999:
                held.append(count_held())
            yield row

    def recipe_of(model: SweepModel) -> Recipe:
        return upper_case()

    ahead: list[int] = []

    class WatchedRows(run.SentRows):
        def pop(self, number: int, *default: object) -> object:
            ahead.append(len(self))
            return super().pop(number, *default)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_rows, "read_rows", counted)
    monkeypatch.setattr(run, "_make_recipe", recipe_of)
    monkeypatch.setattr(run, "MOST_ROWS_AHEAD", 20 * batch)
    monkeypatch.setattr(run, "LEAST_CALLS_AHEAD", 4)
    monkeypatch.setattr(run, "SentRows", WatchedRows)
    given = {"sweep": "sweep.toml", "batch_size": batch}
    code = run.run_sweep(given, RunChoice(out=Path("run"), json=True))
    assert code == 1, "the model refuses a row"
    assert passes >= 4
    assert len(held) >= 3 * 3
    assert 0 < min(held) <= max(held) <= 20 * batch, held
    assert run.max_calls_in_flight(batch) == 20
    assert 0 < max(ahead) <= 2 * 20, "calls in flight, and as many waiting results"
    table = pyarrow.parquet.read_table(tmp_path / "run" / "results.parquet")
    assert table.column("id").to_pylist() == [f"r{number}" for number in range(count)]
    outputs = table.column("output").to_pylist()
    refused = [number for number in range(count) if "777" in str(number)]
    assert [number for number, output in enumerate(outputs) if output is None] == refused
    assert outputs[-1] == f"WHAT IS {count - 1}?"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock", "results.jsonl.part", "results.parquet", "run.json", "summary.json",
    ]  # fmt: skip


def test_number_of_calls_in_flight_depends_on_the_batch_size() -> None:
    assert [run.max_calls_in_flight(size) for size in (1, 4, 8, 16, 50, 100_000)] == [2000, 2000, 2000, 1000, 320, 256]


class Noted(dict[str, object]):
    """A row that supports weak references."""


def test_parquet_table_is_written_in_parts_of_bounded_memory(tmp_path: Path) -> None:
    made: list[weakref.ref[Noted]] = []
    alive: list[int] = []

    def rows() -> Iterator[Noted]:
        for number in range(20_000):
            row = Noted(id=str(number), output=None if number < 10_000 else "x", seconds=0.5)
            made.append(weakref.ref(row))
            if number % 1000 == 0:
                alive.append(sum(one() is not None for one in made))
            yield row

    columns = {"id": str, "output": str, "seconds": float}
    write_rows(rows(), tmp_path / "table", kind="parquet", columns=columns)
    assert max(alive) <= 4096 + 1
    table = pyarrow.parquet.read_table(tmp_path / "table")
    assert table.schema.types == [pyarrow.string(), pyarrow.string(), pyarrow.float64()]
    assert table.column("id").to_pylist() == [str(number) for number in range(20_000)]
    assert table.column("output").null_count == 10_000


@stoker.app
def double(number: int) -> int:
    return 2 * number


def test_input_reading_pauses_while_results_are_not_consumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_WAITING", 5)
    given = 0

    def items() -> Iterator[int]:
        nonlocal given
        for number in range(200):
            given += 1
            yield number

    with stoker.load(run_dir=str(tmp_path)):
        results = calls.run_calls([(double, items()), (double, items())], window=10)
        first = next(results)
        before = -1
        while given != before:
            before = given
            time.sleep(0.5)
        assert given <= 2 * 3 * 10 + 20, "for each job: calls in flight, and twice as many results"
        assert sorted([first, *results]) == sorted(2 * [2 * number for number in range(200)])
        # The deletion of the iterator releases the waiting threads.
        left = calls.run_calls([(double, items()), (double, items())], window=10)
        next(left)
        del left
    for thread in threading.enumerate():
        if thread.name.startswith("stoker-sweep"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

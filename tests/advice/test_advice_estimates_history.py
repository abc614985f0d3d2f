"""The file of facts: damaged, full, of another shape, with several writers."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from stoker.manager.advice import similar
from stoker.manager.advice.similar import SourceHistory
from stoker.manager.advice.source.facts import SourceFact, WorkloadFacts

FACTS = WorkloadFacts(model=SourceFact("gpt2", "a.py:1", 0.9), text="run()", same="abc")


def write_rows(path: str, name: str, count: int) -> None:
    history = SourceHistory(path)
    for number in range(count):
        history.remember(f"{name}{number}", FACTS, function="run")
    history.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "sources.sqlite"


def test_what_is_remembered_is_there_again(path: Path):
    history = SourceHistory(path)
    history.remember("r", FACTS, function="run", name="r-1")
    history.close()
    assert history.rows() == []
    [row] = SourceHistory(path).rows()
    assert (row.recipe, row.function, row.name, row.facts) == ("r", "run", "r-1", FACTS)


def test_two_writers_and_a_reader(path: Path):
    reader = SourceHistory(path)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_rows, args=(str(path), name, 25)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(reader.rows()) == 50


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_with_a_word(path: Path, content: bytes, caplog: pytest.LogCaptureFixture):
    path.parent.mkdir()
    path.write_bytes(content)
    history = SourceHistory(path)
    history.remember("r", FACTS)
    assert [row.recipe for row in history.rows()] == ["r"]
    assert "was damaged" in caplog.text
    assert list(path.parent.glob("*.damaged-*"))


def test_a_file_of_another_shape_is_set_aside(path: Path):
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE sources (recipe TEXT, something TEXT)")
    db.close()
    history = SourceHistory(path)
    history.remember("r", FACTS)
    assert len(history.rows()) == 1


def test_a_row_that_cannot_be_read_is_passed_over(path: Path):
    history = SourceHistory(path)
    history.remember("good", FACTS)
    history.remember("bad", FACTS)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sources SET facts = x'7b22' WHERE recipe = 'bad'")
    db.close()
    assert [row.recipe for row in history.rows()] == ["good"]


def test_the_oldest_rows_are_dropped(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(similar, "MOST_ROWS", 3)
    write_rows(str(path), "r", 6)
    assert len(SourceHistory(path).rows()) == 4


def test_where_no_file_can_be_made_nothing_is_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    history = SourceHistory(tmp_path / "file" / "sources.sqlite")
    history.remember("r", FACTS)
    assert history.rows() == []
    assert "not remembered" in caplog.text

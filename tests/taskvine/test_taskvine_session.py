from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from faults.world import until
from parsl import python_app

import stoker
from stoker.errors import PoisonCallError
from stoker.manager.cli.status import render

LIMIT_S = 120.0


@stoker.context
def table(words, log):
    with open(log, "a") as file:
        file.write("loaded\n")
    return {word: len(word) for word in words}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("loads") / "loads.txt"


@pytest.fixture
def measure(pool, tmp_path):
    log = tmp_path / "own-loads.txt"

    @stoker.app(context=table(["pilot", "library", "call"], str(log)), batch_size=2)
    def measure(table, words):
        print("looking up", *words)
        return [table[word] for word in words]

    measure.loads = lambda: log.read_text().count("loaded")
    return measure


def test_program_runs_unchanged_on_taskvine(measure):
    words = ["pilot", "call", "library"] * 10
    assert [n for lengths in stoker.map(measure, words) for n in lengths] == [len(word) for word in words]
    assert measure(["call"]).result(LIMIT_S) == [4]
    assert 1 <= measure.loads() <= 4  # TaskVine may load the context more than once per slot


def test_plain_functions_run_in_the_folder_of_the_program(pool, tmp_path, monkeypatch):
    @python_app(executors=[pool.session.executor.label])
    def where():
        return os.getcwd()

    assert where().result(LIMIT_S) == os.getcwd()


def test_large_arguments_and_results_are_transferred(pool):
    objects = pool.session.folder / "objects"
    before = set(objects.iterdir())
    data = os.urandom(3_000_000)
    [back] = stoker.map(bytes, [bytearray(data)])
    assert back == data
    until(lambda: set(objects.iterdir()) <= before, why="no file is left")


def test_files_of_a_context_are_transferred_by_taskvine(pool, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.txt").write_text("one")
    (weights / "b.txt").write_text("two")

    @stoker.context(files=["path"])
    def model(path):
        return path, {file.name: file.read_text() for file in Path(path).iterdir()}

    @stoker.app(context=model(str(weights)))
    def read(model):
        return model

    path, found = read().result(LIMIT_S)
    assert found == {"a.txt": "one", "b.txt": "two"}
    assert not path.startswith(str(weights))


def test_call_that_kills_its_process_fails_with_its_last_output(pool, measure, log):
    @stoker.app(context=table(["poison"], str(log)))
    def die(table):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    futures = [measure(["pilot"]) for _ in range(20)]
    with pytest.raises(PoisonCallError) as caught:
        die().result(LIMIT_S)
    assert "last words" in str(caught.value)
    assert [future.result(LIMIT_S) for future in futures] == [[5]] * 20


def test_status_stories_and_logs_equal_those_of_stoker_pilots(pool, measure):
    future = pool.session.executor.submit(measure.func, measure.specification, ["library"])
    assert future.result(LIMIT_S) == [7]
    lines = "\n".join(render(pool.session.status()))
    assert "pilots    1 here" in lines
    assert "cpu:0 cpu (TaskVine)" in lines
    assert "table-" in lines
    story = pool.session.explain(future.parsl_executor_task_id)
    [place] = [line.text.partition("printed ")[2] for line in story.lines if "printed " in line.text]
    path, _, span = place.split(" ")[0].rpartition(":")
    start, _, end = span.rstrip(",;").partition("-")
    assert Path(path).read_bytes()[int(start) : int(end)] == b"looking up library\n"

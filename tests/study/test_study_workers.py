"""Processes that do tasks: each result comes once, a death is told, and none of them outlives who asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from stoker.errors import ConfigError
from stoker.manager.study.running import DiedError, Tell, Workers


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def square(task: int, tell: Tell) -> tuple[int, int]:
    """Ten cannot be done, eleven kills its process, twelve is interrupted, thirteen never ends."""
    tell("doing", task)
    if task == 10:
        raise ConfigError("ten is too many", key="task")
    if task == 11:
        os._exit(7)
    if task == 12:
        os.kill(os.getpid(), signal.SIGINT)
    while task == 13:
        tell(os.getpid())
        time.sleep(0.01)
    return task * task, os.getpid()


def do(todo: list[int], *, count: int, told: list[object] | None = None) -> list[tuple[int, int]]:
    with Workers(square, count=count) as workers:
        return list(workers.each(todo, hear=lambda *what: told.append(what) if told is not None else None))


def test_every_task_is_done_once_by_as_many_processes_as_are_wanted() -> None:
    told: list[object] = []
    done = do([1, 2, 3, 4, 5, 6, 7, 12], count=2, told=told)
    assert sorted(result for result, _ in done) == [1, 4, 9, 16, 25, 36, 49, 144]
    assert 1 <= len({pid for _, pid in done}) <= 2
    assert os.getpid() not in {pid for _, pid in done}
    assert sorted(told) == [("doing", task) for task in (1, 2, 3, 4, 5, 6, 7, 12)]  # type: ignore[type-var]


def test_more_processes_than_tasks_is_fine() -> None:
    assert [result for result, _ in do([3], count=2)] == [9]
    assert do([], count=1) == []


def test_an_error_comes_back_as_itself() -> None:
    with pytest.raises(ConfigError, match="ten is too many") as caught:
        do([1, 10, 2], count=1)
    assert caught.value.key == "task"


def test_a_death_is_told_with_its_task() -> None:
    with pytest.raises(DiedError, match=r"did 11 died \(exit code 7\)") as caught:
        do([11], count=1)
    assert (caught.value.task, caught.value.code) == (11, 7)


def test_who_stops_asking_leaves_no_process() -> None:
    with Workers(square, count=2) as workers, closing(workers.each([13, 4, 13], hear=lambda *_: None)) as results:
        assert next(results)[0] == 16
        assert len(multiprocessing.active_children()) == 2


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "from study.test_study_workers import square\n"
        "from stoker.manager.study.running import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(square, count=2) as workers:\n"
        "        list(workers.each([13, 13], hear=lambda *what: print(*what, flush=True)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids: set[int] = set()
    while len(pids) < 2:
        line = parent.stdout.readline()
        assert line, "it ended before both were at work"
        pids |= {int(word) for word in line.split() if word != "13" and word.isdigit()}
    processes = [psutil.Process(pid) for pid in pids]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, left = psutil.wait_procs(processes, timeout=30)
    assert left == []

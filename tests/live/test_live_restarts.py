"""How often a manager that dies is started again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.manager.live.attendants import PAUSE_S, Attendant
from stoker.manager.live.restarts import MOST_DEATHS, RestartProgress, Restarts
from stoker.manager.protocol.session import SessionFolder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lives(restarts: Restarts, file: Path, *, does: bool) -> float | None:
    """A manager starts, perhaps does something, and dies."""
    restarts.started()
    progress = RestartProgress(file, done=7)
    progress.report_first_end(7)
    if does:
        progress.report_first_end(8)
        os.utime(file, ns=(0, restarts._before + 1))  # file systems may be coarse
    return restarts.died()


def test_one_that_does_nothing_is_left_alone_after_growing_pauses(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path / "progress", clock=Clock())
    pauses = [lives(restarts, tmp_path / "progress", does=False) for _ in range(MOST_DEATHS)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, None]


def test_one_that_does_something_between_its_deaths_is_started_as_often_as_it_dies(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path / "progress", clock=Clock())
    assert [lives(restarts, tmp_path / "progress", does=True) for _ in range(50)] == [0.0] * 50


def test_deaths_that_are_long_ago_do_not_count(tmp_path: Path) -> None:
    clock = Clock()
    restarts = Restarts(tmp_path / "progress", clock=clock)
    for _ in range(20):
        assert lives(restarts, tmp_path / "progress", does=False) is not None
        clock.now += 20.0


def test_progress_is_said_once_in_a_life(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    progress = RestartProgress(file, done=3)
    progress.report_first_end(3)
    assert not file.exists()
    progress.report_first_end(4)
    file.unlink()
    progress.report_first_end(5)
    assert not file.exists()


def test_a_disk_without_room_for_the_word_harms_nothing(tmp_path: Path) -> None:
    RestartProgress(tmp_path / "no folder" / "progress", done=0).report_first_end(1)


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_factory_that_says_hello_before_it_dies_is_followed_as_soon_as_the_first_time(
    folder: SessionFolder, says_hello: bool
) -> None:
    attendant = Attendant(folder, "this", is_heard=lambda: says_hello, hello_limit_s=100.0)
    now, pids = 1000.0, set()
    for _ in range(4):
        attendant.keep_up(now)
        process = attendant._process
        assert process is not None
        process.wait(20)
        pids.add(process.pid)
        now += PAUSE_S + 0.01
    assert len(pids) == (4 if says_hello else 3)

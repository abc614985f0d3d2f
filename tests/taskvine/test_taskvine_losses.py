from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from faults.world import until

import stoker

LIMIT_S = 120.0


@stoker.context
def nothing():
    return 0


@stoker.app(context=nothing())
def work(_context, number, began):
    (Path(began) / str(number)).touch()
    time.sleep(0.3)
    return number


def run_while(began: Path, breaks) -> None:
    began.mkdir()

    def wait_and_break():
        until(lambda: len(list(began.iterdir())) >= 6, limit_s=LIMIT_S, why="calls run")
        breaks()

    breaking = threading.Thread(target=wait_and_break)
    breaking.start()
    futures = [work(number, str(began)) for number in range(30)]
    assert [future.result(LIMIT_S) for future in futures] == list(range(30))
    breaking.join()


def test_killed_worker_loses_no_result(two_workers, tmp_path):
    until(lambda: len(two_workers.workers()) == 2, limit_s=60, why="both workers are here")
    run_while(tmp_path / "began", lambda: os.kill(two_workers.workers()[0], signal.SIGKILL))
    until(lambda: "disconnected" in two_workers.log(), why="the pilot has noticed")
    until(lambda: len(two_workers.workers()) == 2, limit_s=60, why="the factory starts another")


def test_killed_pool_is_restarted(two_workers, tmp_path):
    def kill_pool():
        for pid in two_workers.world.of("stoker.pilot.taskvine.main"):
            os.kill(pid, signal.SIGKILL)

    run_while(tmp_path / "began", kill_pool)
    assert two_workers.session.status().lost_pilots == 1


def test_full_pool_gets_more_workers(growing, tmp_path):
    began = tmp_path / "began"
    began.mkdir()
    assert len(until(growing.workers, limit_s=60)) == 1
    for number in range(200):
        work(number, str(began))
    until(lambda: len(growing.workers()) == 2, limit_s=60, why="a second worker")
    until(lambda: {device.fault for device in growing.session.status().pilots[0].devices} == {""}, limit_s=60)

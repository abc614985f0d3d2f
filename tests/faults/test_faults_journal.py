"""The journal loses its end, as after a host's crash: the session goes on, and says so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faults.world import count_lines, kill, note, until

import stoker
from stoker.manager.core.state import JOURNAL_LOST

pytestmark = pytest.mark.long

CALLS = 120


@stoker.context
def loaded(log):
    note(log, "loaded")
    return os.getpid()


def cut_journal(world, journal: Path, *, keep: float) -> None:
    """The manager dies, and this share of its journal is all that is left."""
    manager = world.manager()
    kill([manager], signal.SIGSTOP)
    os.truncate(journal, int(journal.stat().st_size * keep))
    kill([manager])


@pytest.mark.long
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.02, 0.0])
def test_every_call_ends_once_and_contexts_stay_hot(session, world, tmp_path, keep):
    log = str(tmp_path / "log")

    @stoker.app(context=loaded(log))
    def work(context, number):
        note(log, number)
        time.sleep(0.02)
        return number * number

    futures = [work(number) for number in range(CALLS)]
    until(lambda: sum(future.done() for future in futures) >= CALLS // 3, limit_s=60)
    until(lambda: all(each.hot == len(session.status().libraries) for each in session.status().contexts))
    loads = count_lines(tmp_path / "log")["loaded"]
    cut_journal(world, session.folder / "journal", keep=keep)
    assert [future.result(60) for future in futures] == [number * number for number in range(CALLS)]
    assert work(7).result(60) == 49
    runs = count_lines(tmp_path / "log")
    assert runs.pop("loaded") == loads, "the libraries are the manager's again"
    assert set(runs) == {str(number) for number in range(CALLS)}
    again = sum(count - 1 for count in runs.values()) - 1  # 7 was asked for twice
    assert again <= CALLS // 3, "what the client has is not made again"
    status = session.status()
    assert (status.failed, status.cancelled, status.queued, status.running) == (0, 0, 0, 0)
    assert JOURNAL_LOST in [line.text for line in status.notices]


def test_large_arguments_and_results_survive(session, world, tmp_path):
    def double(data):
        time.sleep(0.05)
        return data * 2

    app = stoker.app()(double)
    results = stoker.map(app, [bytes([number]) * 2_000_000 for number in range(30)])
    got = [next(results) for _ in range(5)]
    cut_journal(world, session.folder / "journal", keep=0.3)
    got += results
    assert [each[0] for each in got] == list(range(30))
    assert all(len(each) == 4_000_000 for each in got)

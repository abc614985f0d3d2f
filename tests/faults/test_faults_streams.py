"""If a process is killed while a call yields, the reader receives each piece once and in order."""

from __future__ import annotations

import os
import signal
import time

import pytest
from faults.world import count_lines, kill, note, until

import stoker
from stoker.errors import StreamDiffersError

COUNT, HELD = 600, 500
"""Yield `COUNT` pieces. Before piece `HELD`, wait for the file `go`."""


@pytest.fixture
def go(tmp_path):
    return tmp_path / "go"


def wait_for(go):
    while go is not None and not go.exists():
        time.sleep(0.01)


@stoker.app
def count(log, number, go=None, *, pids=False):
    note(log, "begun")
    for each in range(number):
        if each == HELD:
            wait_for(go)
        yield os.getpid() if pids else f"piece {each}"
        time.sleep(0.001)


def expected(first=0):
    return [f"piece {each}" for each in range(first, COUNT)]


def test_stream_continues_after_its_pilot_is_killed(session, world, tmp_path, go):
    log = tmp_path / "log"
    stream = stoker.stream(count, str(log), COUNT, go)
    got = []
    for piece in stream:
        got.append(piece)
        if len(got) in (50, 300):
            kill([world.pilot()])
        if len(got) == 300:
            go.touch()
    assert got == expected()
    assert count_lines(log)["begun"] == 3


def test_streams_continue_without_a_rerun_if_the_manager_is_killed(session, world, tmp_path):
    logs = [tmp_path / "one", tmp_path / "two"]
    stream = stoker.stream(count, str(logs[0]), COUNT)
    future = count(str(logs[1]), COUNT)
    got, also = [next(stream)], future.pieces()
    next(also)
    for piece in stream:
        got.append(piece)
        if len(got) in (100, 400):
            kill([world.manager()])
    assert got == expected()
    assert list(also) == expected(1)
    assert future.result(60) == expected()
    assert [count_lines(log) for log in logs] == [{"begun": 1}, {"begun": 1}]


def test_stream_error_names_the_position_where_a_rerun_differs(session, world, tmp_path, go):
    stream = stoker.stream(count, str(tmp_path / "log"), COUNT, go, pids=True)
    first = [next(stream) for _ in range(10)]
    kill([world.pilot()])
    with pytest.raises(StreamDiffersError, match=r"piece 0 .*rerun_may_differ=True") as caught:
        list(stream)
    assert (caught.value.piece, caught.value.call) == (0, stream.call)
    assert caught.value.handed_on >= len(first)
    until(lambda: session.status().cancelled == 1, why="the call is cancelled")


@pytest.mark.long
def test_stream_accepts_a_different_rerun_with_rerun_may_differ(session, world, tmp_path, go):
    stream = stoker.stream(count, str(tmp_path / "log"), COUNT, go, pids=True, rerun_may_differ=True)
    first = [next(stream) for _ in range(10)]
    kill([world.pilot()])
    go.touch()
    got = first + list(stream)
    assert len(got) == COUNT
    assert len(set(got)) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_program_that_ends_while_it_reads_leaves_no_processes(world, how):
    program = world.start(
        "import stoker, os\n"
        "def endless():\n"
        "    for each in range(10**9):\n"
        "        yield each\n"
        "def one():\n"
        "    yield 0\n"
        "    import time; time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    session = stoker.load()\n"
        f"    stream = stoker.stream({'endless' if how == signal.SIGKILL else 'one'})\n"
        "    print(next(stream), flush=True)\n"
        f"    {'import time; time.sleep(60)' if how == signal.SIGKILL else 'next(stream)'}\n"
    )
    assert program.stdout.readline() == "0\n"
    kill([program.pid], how)
    program.communicate(timeout=30)
    world.empty()


def test_stream_repeats_no_item_after_a_parsl_retry(world, tmp_path):
    log = tmp_path / "log"

    @stoker.app
    def fail_once(log):
        note(log, "begun")
        for each in range(10):
            if each == 5 and os.path.getsize(log) < len("begun\n" * 2):
                raise OSError("not this time")
            yield each

    with stoker.load(run_dir=str(world.runs), retries=1):
        future = fail_once(str(log))
        assert list(future.pieces()) == list(range(10)) == future.result(60)
    assert count_lines(log) == {"begun": 2}

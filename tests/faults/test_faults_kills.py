from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faults.world import count_lines, is_alive, kill, note, until
from parsl import python_app

import stoker


@stoker.context
def loaded(log):
    note(log, "loaded")
    return os.getpid()


def test_killed_library_is_replaced_and_its_call_runs_again(session, world, tmp_path):
    log, go = str(tmp_path / "log"), tmp_path / "go"

    @stoker.app(context=loaded(log))
    def slow(context, number):
        note(log, f"{number} on {os.getpid()}")
        while number == 0 and not go.exists():
            time.sleep(0.01)
        return number, os.getpid()

    future = slow(0)
    pid = int(until(lambda: [line for line in count_lines(tmp_path / "log") if line.startswith("0 on")])[0].split()[2])
    others = [slow(number) for number in range(1, 40)]
    kill([pid])
    go.touch()
    number, second = future.result(60)
    assert number == 0
    assert second != pid
    assert [other.result(60)[0] for other in others] == list(range(1, 40))
    begun = count_lines(tmp_path / "log")
    assert all(sum(line.startswith(f"{n} on") for line in begun) == 1 for n in range(1, 40))


def test_calls_of_a_lost_pilot_run_again_on_another_block(session, world, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"

    @stoker.app(context=loaded(str(tmp_path / "loads")))
    def slow(context, number):
        note(str(begun), number)
        while not go.exists():
            time.sleep(0.01)
        return number

    futures = [slow(number) for number in range(6)]
    for lost in (1, 2):
        until(lambda lost=lost: count_lines(begun).get("0") == lost, why="the first call runs again")
        kill([world.pilot()])
    go.touch()
    assert [future.result(60) for future in futures] == list(range(6))
    status = session.status()
    assert status.lost_pilots == 2
    assert status.failed == 0
    assert len(status.pilots) == 1
    until(lambda: len(world.pilot_folders()) == 1, why="the dead pilots' scratch folders are swept")


def test_no_finished_call_is_repeated_after_the_manager_is_killed(session, world, tmp_path):
    log = str(tmp_path / "log")

    @stoker.app(context=loaded(log))
    def work(context, number):
        note(log, number)
        time.sleep(0.002)
        return number * number

    got = []
    for value in stoker.map(work, range(1000)):
        got.append(value)
        if len(got) in (100, 600):
            kill([world.manager()])
    assert got == [number * number for number in range(1000)]
    runs = count_lines(tmp_path / "log")
    assert runs.pop("loaded") <= 2, "libraries live on while the manager is away"
    assert runs == {str(number): 1 for number in range(1000)}
    assert session.status().pilots[0].state == "here"


@pytest.mark.long
def test_frozen_pilot_is_declared_lost_and_rejoins_after_waking(world, tmp_path):
    site, begun = tmp_path / "site.toml", tmp_path / "begun"
    site.write_text('[session]\nheartbeat = "0.3 s"\nlease = "60 s"\n')

    with stoker.load(site, run_dir=str(world.runs), strategy_period=0.2) as session:

        @python_app
        def slow(number):
            note(str(begun), number)
            time.sleep(0.3)
            return number

        futures = [slow(number) for number in range(6)]
        until(lambda: count_lines(begun))
        pilot = world.pilot()
        kill([pilot], signal.SIGSTOP)
        until(lambda: session.status().lost_pilots == 1, why="the silent pilot is noticed")
        kill([pilot], signal.SIGCONT)
        assert [future.result(60) for future in futures] == list(range(6))
        until(lambda: session.status().lost_pilots == 0, why="the pilot is connected again")
        assert is_alive(pilot)
        status = session.status()
        assert (status.failed, status.done) == (0, 6)


CLIENT = """
import os, time
import stoker

@stoker.context
def heavy():
    import subprocess
    subprocess.Popen(["sleep", "300"])
    return os.getpid()

@stoker.app(context=heavy())
def forever(context):
    import subprocess
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("in a call", flush=True)
    time.sleep(300)

with stoker.load() as session:
    futures = [forever() for _ in range(5)]
    while not any(context.running for context in session.status().contexts):
        time.sleep(0.05)
    print(session.folder, flush=True)
    futures[0].result()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ended_client_leaves_no_processes_or_pilot_folders(world, how):
    program = world.start(CLIENT)
    log = Path(program.stdout.readline().strip()) / "manager.log"
    assert len(world.processes()) >= 5
    assert world.pilot_folders()
    kill([program.pid], how)
    program.communicate()
    world.empty()
    assert how == signal.SIGTERM or "its client is gone" in log.read_text()


FORKS = """
import multiprocessing, os, sys
import stoker

@stoker.app()
def double(number):
    return number * 2

def in_child(number):
    try:
        double(number).result(10)
    except stoker.errors.SessionError as error:
        return str(error)

with stoker.load() as session:
    print(double(1).result(60), flush=True)
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(double(2).result(60), flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(in_child, [3]), flush=True)
    print(double(4).result(60), session.status().done, flush=True)
"""


@pytest.mark.long
def test_forked_children_do_not_end_the_session_of_their_parent(world):
    program = world.start(FORKS)
    out, err = program.communicate(timeout=60)
    lines = out.splitlines()
    assert lines[:3] == ["2", "7", "4"], err
    assert "double was called before a site was loaded" in lines[3]
    assert lines[4] == "8 3"
    assert program.returncode == 0

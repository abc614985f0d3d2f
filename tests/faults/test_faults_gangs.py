from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

import pytest
from faults.world import is_alive, kill, site_file, until

import stoker
from stoker import errors
from stoker.sessions import sent_call

STEPS, HELD = 25, 8
"""Run `STEPS` steps in a gang. After `HELD` steps the gang waits if the test requests a pause."""


@stoker.context
def loaded(log):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return {}


def work(context, number, folder, held=None):
    """Exchange a number between two ranks at each step; fail if the other rank has exited."""
    from stoker.contexts import saved_state

    place = stoker.gang()
    host, _, port = place.rendezvous.rpartition(":")
    try:
        if place.rank == 0:
            place.listener.settimeout(20)
            peer = place.listener.accept()[0]
        else:
            peer = socket.create_connection((host, int(port)), timeout=20)
        peer.settimeout(20)
        first = saved_state(0) if place.rank == 0 else 0
        if first >= STEPS:  # an earlier run reported the last checkpoint and was lost before its end
            peer.close()
            return number
        with peer, open(Path(folder) / f"call-{number}-rank-{place.rank}", "a") as log:
            while True:
                if place.rank == 0:
                    peer.sendall(first.to_bytes(4, "little"))
                    answer = peer.recv(4)
                else:
                    answer = peer.recv(4)
                    if answer:
                        peer.sendall(answer)
                if not answer:
                    if place.rank:
                        break
                    raise errors.GangBroken("the other rank has hung up")
                step = int.from_bytes(answer, "little")
                log.write(f"{step}\n")
                log.flush()
                first = step + 1
                stoker.progress(first, STEPS, state=first)
                while first == held and not (Path(folder) / "go").exists():
                    time.sleep(0.01)
                if first >= STEPS:
                    break
                time.sleep(0.02)
    except OSError as error:
        raise errors.GangBroken(f"rank {place.rank} lost the other: {error}") from error
    return number


@pytest.fixture
def site(tmp_path):
    return site_file(tmp_path, pilots=2)


@pytest.fixture
def steps(tmp_path):
    """Return a function that reads the steps of a rank in order."""

    def read(number, rank=0):
        path = tmp_path / f"call-{number}-rank-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return read


def of_rank_0(counted):
    """Check that rank 0 ran all steps; return the number of repeated steps."""
    assert sorted(set(counted)) == list(range(STEPS))
    return len(counted) - STEPS


def checkpoint_is_told(future):
    """Wait until the client and the manager have the checkpoint of a paused gang."""

    def told():
        call = sent_call(future)
        return call is not None and call.progress is not None and call.progress.done == HELD

    until(told, why="the checkpoint")


def test_gang_continues_after_a_pilot_is_killed(world, site, tmp_path, steps):
    loads = tmp_path / "loads"
    with stoker.load(site, run_dir=str(world.runs)):
        gang = stoker.app(context=loaded(str(loads)), gang=2)(work)
        future = gang(1, str(tmp_path), HELD)
        checkpoint_is_told(future)
        ranks = [int(line) for line in loads.read_text().split()]
        kill([random.choice(world.pilots())])
        until(lambda: not all(map(is_alive, ranks)), why="a rank ends with its pilot")
        (tmp_path / "go").touch()
        assert future.result(120) == 1
    assert of_rank_0(steps(1)) <= 3 + 5, "the gang continued from its last checkpoint"


def test_gang_continues_after_the_manager_is_killed(world, site, tmp_path, steps):
    with stoker.load(site, run_dir=str(world.runs)):
        gang = stoker.app(context=loaded(str(tmp_path / "loads")), gang=2)(work)
        assert gang(0, str(tmp_path)).result(120) == 0
        future = gang(1, str(tmp_path), HELD)
        checkpoint_is_told(future)
        kill([world.manager()])
        (tmp_path / "go").touch()
        assert future.result(120) == 1
    assert of_rank_0(steps(1)) <= 3 + 5
    assert len((tmp_path / "loads").read_text().split()) == 2, "both kept their contexts"


@pytest.mark.parametrize("policy", ["default", "prompt-tuner"])
def test_gang_too_large_for_all_pilots_fails_and_blocks_no_call(world, tmp_path, policy):
    site = tmp_path / "two.toml"
    site.write_text(f'[pilot]\ndevices = "cpu:2"\n[policy]\nname = "{policy}"\n')
    recipe = loaded(str(tmp_path / "log"))

    @stoker.app(context=recipe, gang=3)
    def three(context):
        return "three"

    @stoker.app(context=recipe, gang=2)
    def two(context):
        return "two"

    @stoker.app(context=recipe)
    def one(context, number):
        return number

    with stoker.load(site, run_dir=str(world.runs)):
        hopeless, pair, singles = three(), two(), [one(number) for number in range(8)]
        assert [single.result(60) for single in singles] == list(range(8))
        with pytest.raises(errors.NoDeviceError, match="a gang of 3 can run nowhere: at most 2 libraries of context"):
            hopeless.result(60)
        assert pair.result(60) == "two"

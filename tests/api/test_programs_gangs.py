from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

import stoker
from stoker import errors

LIMIT_S = 60


@stoker.context
def counter(log):
    with open(log, "a") as file:
        file.write("loaded\n")
    return {}


@pytest.fixture
def together(session, tmp_path):
    def make(function):
        return stoker.app(context=counter(str(tmp_path / "loads")), gang=2)(function)

    make.loads = lambda: (tmp_path / "loads").read_text().count("loaded")
    return make


def test_ranks_connect_to_the_address_of_rank_0(together):
    def exchange(context):
        place = stoker.gang()
        assert stoker.gang() is place
        host, _, port = place.rendezvous.rpartition(":")
        if place.rank == 0:
            peer, _ = place.listener.accept()
            return place.rank, place.size, peer.recv(100).decode()
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(f"from rank {place.rank}".encode())
        return "the result of another rank than 0 is nobody's"

    gang = together(exchange)
    assert [gang().result(LIMIT_S) for _ in range(3)] == [(0, 2, "from rank 1")] * 3
    assert together.loads() == 2


def test_call_outside_a_gang_is_rank_0_of_1(session):
    place = stoker.gang()
    assert (place.rank, place.size, place.rendezvous, place.listener) == (0, 1, "", None)
    assert stoker.app()(lambda: repr(stoker.gang()))().result(LIMIT_S) == "<rank 0 of 1>"


def test_killed_rank_loses_only_steps_since_the_last_checkpoint(together, tmp_path, until):
    def steps(context, folder):
        from stoker.contexts import saved_state

        place, first = stoker.gang(), saved_state(0)
        (Path(folder) / f"began-{place.rank}-{os.getpid()}").write_text(str(first))
        for step in range(first, 30):
            while step == 8 and not (Path(folder) / "go").exists():
                time.sleep(0.02)
                stoker.progress(step, 30, state=step)
            time.sleep(0.02)
            with open(Path(folder) / f"steps-{place.rank}", "a") as file:
                file.write(f"{step}\n")
            stoker.progress(step + 1, 30, state=step + 1)
            other = list(Path(folder).glob(f"began-{1 - place.rank}-*"))
            if step > first and not any(Path(f"/proc/{path.name.rpartition('-')[2]}/exe").exists() for path in other):
                raise errors.GangBroken("the other rank is gone")
        return step + 1

    gang = together(steps)
    future = gang(str(tmp_path))
    sent = until(lambda: future.task_record["exec_fu"])
    until(lambda: sent.progress is not None and sent.progress.done == 8)  # the manager has the checkpoint
    victim = int(until(lambda: next(tmp_path.glob("began-1-*"), None)).name.rpartition("-")[2])
    os.kill(victim, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{victim}/exe").exists())
    (tmp_path / "go").touch()
    assert future.result(LIMIT_S) == 30
    began = sorted(int(path.read_text()) for path in tmp_path.glob("began-0-*"))
    done = [int(line) for line in (tmp_path / "steps-0").read_text().split()]
    assert sorted(set(done)) == list(range(30))
    assert len(done) <= 30 + 4, "the gang restarted before its last checkpoint"
    assert began[-1] >= 8 or len(began) == 1  # a process may start twice; the file contains the last start
    assert together.loads() == 3, "the rank that was not killed kept its context"


def test_cancelled_gang_leaves_its_contexts_loaded(together, tmp_path, until):
    def long(context, folder):
        (Path(folder) / f"runs-{stoker.gang().rank}").touch()
        while True:
            time.sleep(0.02)
            stoker.progress(1)

    future = together(long)(str(tmp_path))
    until(lambda: len(list(tmp_path.glob("runs-*"))) == 2)
    assert future.cancel()
    assert together(lambda context: stoker.gang().size)().result(LIMIT_S) == 2
    assert together.loads() == 2


def test_ranks_that_repeatedly_lose_each_other_end_the_call(together):
    def peer_loss_end(context):
        raise errors.GangBroken("cannot stand the others")

    with pytest.raises(errors.GangBroken, match=r"lost their connection 10 times.*cannot stand the others"):
        together(peer_loss_end)().result(LIMIT_S)

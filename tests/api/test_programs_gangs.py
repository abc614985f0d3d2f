from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

import stoker

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

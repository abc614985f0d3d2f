"""Strangers at a gang's rendezvous learn nothing and break nothing."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import suppress

import pytest
from lazily import lazily
from polling import PATIENCE_S, polls
from tuning import gang

from stoker.connections import join_address, split_address
from stoker.pilot.transfer import wire

exchange, stores = lazily("stoker.tuning.exchange", "stoker.tuning.gang_store", needs="torch peft")

JOB = "the-name-of-the-job"
SAYS = [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(4096), wire.MAGIC + bytes(32) + bytes(32), b"\x07init/" * 50]


class Strangers:
    """Threads that connect to an address again and again without the key, and keep all that they hear."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[bytes] = []
        self.refused = 0
        self._stop = threading.Event()
        self._silent: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._talk, self._be_silent, self._use_a_wrong_key)
        ]
        for thread in self._threads:
            thread.start()

    def _talk(self) -> None:
        while not self._stop.wait(0.02):
            for say in SAYS:
                with suppress(OSError), socket.create_connection(split_address(self.address), timeout=0.5) as sock:
                    sock.settimeout(0.2)
                    sock.sendall(say)
                    with suppress(TimeoutError):
                        while data := sock.recv(4096):
                            self.heard.append(data)

    def _be_silent(self) -> None:
        while not self._stop.wait(0.02) and len(self._silent) < 60:
            with suppress(OSError):
                self._silent.append(socket.create_connection(split_address(self.address), timeout=0.5))

    def _use_a_wrong_key(self) -> None:
        while not self._stop.wait(0.02):
            with suppress(wire.PeerError):
                stores.reach(self.address, key=secrets.token_bytes(32), limit_s=1.0).close()
                raise AssertionError("a wrong key was taken")
            self.refused += 1

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for sock in self._silent:
            sock.close()


@pytest.mark.long
def test_the_gang_meets_while_strangers_knock_and_they_learn_nothing() -> None:
    where, key = gang.rendezvous(), secrets.token_bytes(32)
    specs = [{"rank": rank, "size": 3, "rendezvous": where, "job": JOB, "key": key} for rank in range(3)]
    with gang.gang("meet", specs) as ranks:
        strangers = Strangers(where)
        try:
            answers = ranks.answers()
        finally:
            strangers.close()
    assert answers == [6.0, 6.0, 6.0]
    assert strangers.refused
    heard = b"".join(strangers.heard)
    assert JOB.encode() not in heard
    assert b"here/" not in heard


def test_a_rank_with_another_key_does_not_meet_the_gang() -> None:
    where = gang.rendezvous()
    specs = [
        {
            "rank": rank,
            "size": 2,
            "rendezvous": where,
            "job": JOB,
            "limit_s": limit_s,
            "key": secrets.token_bytes(32),
        }
        for rank, limit_s in enumerate((15.0, 1.0))
    ]
    with gang.gang("meet", specs[:1]) as ranks:
        gang.wait_until_served(where)
        for more in polls(10.0):  # a busy machine may not answer within a second
            with pytest.raises(exchange.ExchangeError) as refused:
                gang.meet(specs[1])
            if "does not know the session's transfer key" in str(refused.value):
                break
            assert more, str(refused.value)
        (first,) = ranks.answers()
    assert isinstance(first, exchange.ExchangeError)
    assert "rank 1 did not come" in str(first)


def test_values_are_the_same_for_rank_0_and_for_others() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = join_address(*listener.getsockname()[:2])
    first = stores.serve(listener, key=b"k" * 32, limit_s=0.3)
    other = stores.reach(address, key=b"k" * 32, limit_s=0.3)
    try:
        first.set("a", b"1\x00\xff")
        other.set("b", "text")
        for store in (first, other):
            assert (store.get("a"), store.get("b")) == (b"1\x00\xff", b"text")
            assert store.check(["a", "b"])
            assert not store.check(["a", "c"])
            store.wait(["a", "b"])
            with pytest.raises(stores.StoreError, match="c did not come within"):
                store.get("c")
            with pytest.raises(stores.StoreError, match="c did not come within"):
                store.wait(["a", "c"])
        assert [first.add("n", 2), other.add("n", 3), first.add("n", -1)] == [2, 5, 4]
        assert other.compare_set("a", b"wrong", b"new") == b"1\x00\xff"
        assert other.compare_set("a", b"1\x00\xff", b"new") == b"new"
        assert first.compare_set("fresh", b"", b"made") == b"made"
        assert (other.delete_key("fresh"), first.delete_key("fresh"), other.num_keys()) == (True, False, 3)
        patient = stores.reach(address, key=b"k" * 32, limit_s=PATIENCE_S)
        threading.Timer(0.1, lambda: first.set("late", b"x" * 100_000)).start()
        assert patient.get("late") == b"x" * 100_000
        patient.close()
    finally:
        first.close()
        with pytest.raises(stores.StoreError, match="is lost"):
            other.get("a")
        other.close()


def test_a_question_that_makes_no_sense_ends_its_connection_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = join_address(*listener.getsockname()[:2])
    first = stores.serve(listener, key=b"k" * 32, limit_s=1.0)
    try:
        for question in ({"op": "get"}, {"op": "add", "name": "a", "amount": "x"}, {"op": "has", "names": 3}):
            channel = wire.connect(address, key=b"k" * 32)
            channel.send(question)
            with pytest.raises(wire.PeerError):
                channel.receive()
            channel.close()
        other = stores.reach(address, key=b"k" * 32, limit_s=1.0)
        other.set("a", b"1")
        assert first.get("a") == b"1"
        other.close()
    finally:
        first.close()


@pytest.mark.long
def test_local_values_wait_for_what_is_set_meanwhile() -> None:
    values = stores.LocalValues()
    threading.Timer(0.05, lambda: values.set("a", b"1")).start()
    assert values.get("a", wait_s=PATIENCE_S) == b"1"
    assert values.get("b", wait_s=0.0) is None

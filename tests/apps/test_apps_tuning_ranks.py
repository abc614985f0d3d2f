"""Gangs of processes compute the same numbers as one process and notice a lost rank. Peers without the key learn
nothing and break nothing.
"""

import re
import secrets
import socket
import threading
from contextlib import suppress

import pytest
from lazily import lazily
from polling import PATIENCE_S
from tuning import gang

from stoker.connections import join_address, split_address
from stoker.contexts import payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import ConfigError
from stoker.pilot.transfer import wire
from stoker.tuning import pace
from stoker.tuning.order import Tuned
from stoker.units import parse_seconds

torch, tiny, exchange, stores, tuner = lazily(
    "torch", "tuning.tiny", "stoker.tuning.exchange", "stoker.tuning.gang_store", "stoker.tuning.tune", needs="peft"
)


def specs(size, **more):
    where = gang.rendezvous() if size > 1 else ""
    return [{"rank": rank, "size": size, "rendezvous": where, **more} for rank in range(size)]


def tuned(size, each=None, **more):
    """Return the results and exit codes of all ranks. `each`: further options by rank."""
    found = [{**spec, "job": tiny.job(), **(each or {}).get(spec["rank"], {})} for spec in specs(size, **more)]
    with gang.gang("tune", found) as ranks:
        return ranks.answers(), [process.exitcode for process in ranks.processes]


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return tuner.tune(tiny.context(), tiny.job(), tiny.samples())


def prompt(result):
    import safetensors.torch

    return safetensors.torch.load(result.adapter)["prompt_embeddings"]


def same(one, other):
    """Return True if the results differ only by rounding errors, which optimizer steps amplify."""
    points = zip(one.points, other.points, strict=True)
    return torch.allclose(prompt(one), prompt(other), atol=1e-4) and all(
        (here.iteration, here.loss) == (there.iteration, pytest.approx(there.loss, rel=1e-4)) for here, there in points
    )


def test_two_ranks_give_the_same_tuning_result_as_one_rank(alone):
    answers, _ = tuned(2)
    assert all(isinstance(answer, Tuned) for answer in answers), answers
    assert len({(answer.adapter, answer.points, answer.held_out) for answer in answers}) == 1
    assert same(answers[0], alone)
    assert answers[0].devices == 2
    assert 0 < answers[0].communication_share < 1


@pytest.mark.long
def test_tuning_works_with_more_ranks_than_samples_in_a_batch(alone):
    small = tiny.job(batch=2, iterations=2)
    answers, _ = tuned(3, each={rank: {"job": small} for rank in range(3)})
    assert same(answers[2], tuner.tune(tiny.context(), small, tiny.samples()))


@pytest.mark.long
def test_job_continues_without_a_lost_rank(alone, tmp_path):
    kept = tmp_path / "checkpoint"
    answers, _ = tuned(3, each={1: {"die_at": 6}, 0: {"checkpoint": kept}})
    assert answers[1] is None
    for rank in (0, 2):
        assert isinstance(answers[rank], exchange.ExchangeError), answers
        assert f"rank {rank} of 3 lost a rank" in str(answers[rank])
    assert kept.exists()
    answers, _ = tuned(2, each={0: {"checkpoint": kept}})
    assert all(same(answer, alone) for answer in answers)


@pytest.mark.long
def test_all_ranks_stop_with_checkpoints_when_a_rank_is_evicted(alone):
    answers, _ = tuned(2, each={1: {"leave_at": 3}})
    assert all(isinstance(answer, Evicted) for answer in answers), answers
    checkpoints = [payloads.loads(answer.state) for answer in answers]
    answers, _ = tuned(4, each={0: {"start": checkpoints[1]}})
    assert all(same(answer, alone) for answer in answers)


def test_ranks_divide_prompt_scoring_and_share_the_initial_prompt(tmp_path):
    with gang.gang("choose", specs(1, bank=str(tmp_path / "one"))) as ranks:
        ((text, scored, _),) = ranks.answers()
    with gang.gang("choose", specs(3, bank=str(tmp_path / "three"))) as ranks:
        answers = ranks.answers()
    assert [answer[0] for answer in answers] == [text] * 3
    assert sum(answer[1] for answer in answers) == scored
    assert all(answer[1] >= scored // 5 for answer in answers), "rank 0 scores single prompts"
    remembered = pace.read_paces(tmp_path / "three")["cpu"]
    took_s = parse_seconds(answers[0][2].rpartition(" in ")[2])
    printed_to = 0.05  # the output is rounded to a tenth of a second
    told = pytest.approx(3 * took_s, rel=0.1, abs=3 * printed_to + 0.01)
    assert remembered.lookup_s == told, "seconds of one device, not of the whole gang"
    assert remembered.score_s == pytest.approx(remembered.lookup_s / scored)


def test_rendezvous_timeout_names_the_missing_ranks():
    three = specs(3, limit_s=2.0)
    with gang.gang("meet", [three[0], three[2]]) as ranks:
        first, last = ranks.answers()
    assert isinstance(first, exchange.ExchangeError)
    assert "rank 0 of 3 waited" in str(first)
    assert re.search("ranks? 1(, 2)? did not connect", str(first))
    assert isinstance(last, exchange.ExchangeError)
    with gang.gang("meet", [three[2]]) as ranks:
        (lonely,) = ranks.answers()
    assert isinstance(lonely, exchange.ExchangeError)
    assert "rank 2 of 3 did not find rank 0 at 127.0.0.1:" in str(lonely)


def test_ranks_of_different_jobs_fail():
    two = specs(2)
    with gang.gang("meet", [{**two[0], "job": "one"}, {**two[1], "job": "other"}]) as ranks:
        answers = ranks.answers()
    assert all(
        isinstance(answer, exchange.ExchangeError) and "another job or gang" in str(answer) for answer in answers
    ), answers


def test_unusable_address_of_rank_0_fails_at_once():
    two = specs(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        for where, why in ((there, "in use"), ("192.0.2.1:29500", "assign")):
            with pytest.raises(
                exchange.ExchangeError, match=f"rank 0 of 2 cannot serve the rendezvous at {where}: .*{why}.*free"
            ):
                gang.meet({**two[0], "rendezvous": where})


def test_second_process_of_a_rank_is_refused():
    three = specs(3)
    with gang.gang("meet", [three[0], three[1], three[1]]) as early:
        refused = early.first([1, 2])
        assert isinstance(refused, exchange.ExchangeError)
        assert "rank 1 of 3 has already joined at 127.0.0.1:" in str(refused)
        with gang.gang("meet", [three[2]]) as late:
            assert late.answers() == [6.0]
        assert early.first([0]) == 6.0


def test_process_can_join_a_rendezvous_repeatedly():
    both = zip(specs(2), specs(2), strict=True)
    with gang.gang("meet_twice", [{"first": first, "second": second} for first, second in both]) as ranks:
        assert ranks.answers() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"rank": 2, "size": 2, "rendezvous": "127.0.0.1:29500"}, "rank 2 of 2: ranks count from 0"),
        ({"rank": 0, "size": 2, "rendezvous": "29500"}, "is not an address; write host:port"),
        ({"rank": 0, "size": 2, "rendezvous": "127.0.0.1:x"}, "is not an address"),
    ],
)
def test_impossible_rank_or_address_is_refused(spec, said):
    with pytest.raises(ConfigError, match=said):
        gang.meet(spec)


# ---- strangers


JOB = "the-name-of-the-job"
SAYS = [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(4096), wire.MAGIC + bytes(32) + bytes(32), b"\x07init/" * 50]


class Strangers:
    """Threads that repeatedly connect to an address without the right key, and record all received bytes."""

    def __init__(self, address: str):
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

    def _talk(self):
        while not self._stop.wait(0.02):
            for say in SAYS:
                with suppress(OSError), socket.create_connection(split_address(self.address), timeout=0.5) as sock:
                    sock.settimeout(0.2)
                    sock.sendall(say)
                    with suppress(TimeoutError):
                        while data := sock.recv(4096):
                            self.heard.append(data)

    def _be_silent(self):
        while not self._stop.wait(0.02) and len(self._silent) < 60:
            with suppress(OSError):
                self._silent.append(socket.create_connection(split_address(self.address), timeout=0.5))

    def _use_a_wrong_key(self):
        while not self._stop.wait(0.02):
            with suppress(wire.PeerError):
                stores.connect_to_store(self.address, key=secrets.token_bytes(32), limit_s=1.0).close()
                raise AssertionError("a wrong key was taken")
            self.refused += 1

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for sock in self._silent:
            sock.close()


@pytest.mark.long
def test_rendezvous_succeeds_despite_strangers_who_receive_no_data():
    three = specs(3, job=JOB, key=secrets.token_bytes(32))
    with gang.gang("meet", three) as ranks:
        strangers = Strangers(three[0]["rendezvous"])
        try:
            answers = ranks.answers()
        finally:
            strangers.close()
    assert answers == [6.0, 6.0, 6.0]
    assert strangers.refused
    heard = b"".join(strangers.heard)
    assert JOB.encode() not in heard
    assert b"here/" not in heard


def test_rank_with_a_wrong_key_cannot_join_the_rendezvous():
    first, second = specs(2, job=JOB, key=secrets.token_bytes(32))
    with gang.gang("meet", [first]) as ranks:
        gang.wait_until_served(first["rendezvous"])
        with pytest.raises(exchange.ExchangeError, match="does not know the session's transfer key"):
            gang.meet({**second, "key": secrets.token_bytes(32), "limit_s": 5.0})
        with gang.gang("meet", [second]) as late:
            assert late.answers() == ranks.answers() == [3.0]


def test_every_rank_reads_the_same_values_from_the_store():
    listener = socket.create_server(("127.0.0.1", 0))
    address = join_address(*listener.getsockname()[:2])
    first = stores.serve_store(listener, key=b"k" * 32, limit_s=0.3)
    other = stores.connect_to_store(address, key=b"k" * 32, limit_s=0.3)
    try:
        first.set("a", b"1\x00\xff")
        other.set("b", "text")
        for store in (first, other):
            assert (store.get("a"), store.get("b")) == (b"1\x00\xff", b"text")
            assert store.check(["a", "b"])
            assert not store.check(["a", "c"])
            store.wait(["a", "b"])
            with pytest.raises(stores.StoreError, match="the key c was not set within"):
                store.get("c")
            with pytest.raises(stores.StoreError, match="not all of the keys a, c were set within"):
                store.wait(["a", "c"])
        assert [first.add("n", 2), other.add("n", 3), first.add("n", -1)] == [2, 5, 4]
        assert other.compare_set("a", b"wrong", b"new") == b"1\x00\xff"
        assert other.compare_set("a", b"1\x00\xff", b"new") == b"new"
        assert first.compare_set("fresh", b"", b"made") == b"made"
        assert (other.delete_key("fresh"), first.delete_key("fresh"), other.num_keys()) == (True, False, 3)
        patient = stores.connect_to_store(address, key=b"k" * 32, limit_s=PATIENCE_S)
        threading.Timer(0.1, lambda: first.set("late", b"x" * 100_000)).start()
        assert patient.get("late") == b"x" * 100_000
        patient.close()
    finally:
        first.close()
        with pytest.raises(stores.StoreError, match="is lost"):
            other.get("a")
        other.close()


def test_invalid_store_request_ends_only_its_own_connection():
    listener = socket.create_server(("127.0.0.1", 0))
    address = join_address(*listener.getsockname()[:2])
    first = stores.serve_store(listener, key=b"k" * 32, limit_s=1.0)
    try:
        for question in ({"op": "get"}, {"op": "add", "name": "a", "amount": "x"}, {"op": "has", "names": 3}):
            channel = wire.connect_to_peer(address, key=b"k" * 32)
            channel.send(question)
            with pytest.raises(wire.PeerError):
                channel.receive()
            channel.close()
        other = stores.connect_to_store(address, key=b"k" * 32, limit_s=1.0)
        other.set("a", b"1")
        assert first.get("a") == b"1"
        other.close()
    finally:
        first.close()

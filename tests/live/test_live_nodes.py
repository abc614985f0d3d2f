"""Records of excluded nodes outlive their session and reach other sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from live.peers import Manager, Peer, Peers, pilot_hello, until, welcomed
from msgspec.structs import replace

from stoker import locks
from stoker.contexts.folders import state_folder
from stoker.manager.live import node_store
from stoker.manager.live.node_store import NodeRecordStore
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import FORGET_NODE_S, AllowedNodes, BlockPhase, KnownBlock, NodeRecord
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder

SITE = """
name = "gpu"
[provider]
kind = "slurm"
[pilot]
max_blocks = 2
[policy]
provisioning = "fixed"
"""
BAD = "cuda:0 gave a wrong matrix product, twice"


def record(node: str = "n2", *, age_s: float = 10.0, excluded: bool = True) -> NodeRecord:
    at = time.time() - age_s
    return NodeRecord("gpu", node, excluded, BAD, since=at, at=at, heard_at=at)


def kept(*records: NodeRecord) -> None:
    store = NodeRecordStore()
    for each in records:
        store.store_record(each)
    store.close()


# ---- the store


def test_later_record_of_a_node_is_kept() -> None:
    first, later = record(age_s=20.0), record(age_s=10.0, excluded=False)
    kept(first, later, first)
    store = NodeRecordStore()
    assert store.read_records() == [later]
    store.close()


def test_old_node_records_are_removed() -> None:
    kept(record("n1", age_s=FORGET_NODE_S + 60.0), record("n2"))
    assert [each.node for each in node_store.excluded_nodes()] == ["n2"]
    store = NodeRecordStore()
    assert store._file.read("SELECT node FROM nodes") == [("n2",)]
    store.close()


def test_store_reports_only_changes_of_other_processes() -> None:
    kept(record("n1"))
    mine, other = NodeRecordStore(), NodeRecordStore()
    assert [each.node for each in mine.records_if_changed(100.0)] == ["n1"]
    mine.store_record(record("n2"))
    assert mine.records_if_changed(200.0) == []
    other.store_record(record("n3"))
    assert mine.records_if_changed(205.0) == []  # the store reads the file every 10 s
    assert [each.node for each in mine.records_if_changed(210.0)] == ["n1", "n2", "n3"]
    mine.close()
    other.close()


def test_only_one_of_two_sessions_claims_the_probe_of_a_bad_node() -> None:
    bad = record(age_s=100.0)
    kept(bad)
    one, other = NodeRecordStore(), NodeRecordStore()
    now = time.time()
    assert not one.claim_probe(bad, every_s=3600.0, now=now)
    assert one.claim_probe(bad, every_s=90.0, now=now)
    assert not other.claim_probe(bad, every_s=90.0, now=now + 1.0)
    assert other.claim_probe(bad, every_s=90.0, now=now + 91.0)
    kept(replace(bad, excluded=False, at=now + 92.0))
    assert not one.claim_probe(bad, every_s=90.0, now=now + 300.0)
    one.close()
    other.close()


def test_damaged_file_is_moved_aside(caplog: pytest.LogCaptureFixture) -> None:
    state_folder().mkdir(parents=True)
    (state_folder() / node_store.FILE).write_bytes(b"this is not a database" * 100)
    kept(record())
    assert [each.node for each in node_store.excluded_nodes()] == ["n2"]
    assert "was damaged" in caplog.text


def test_session_continues_without_the_node_file(caplog: pytest.LogCaptureFixture) -> None:
    (state_folder() / node_store.FILE).mkdir(parents=True)  # a folder in place of the file: even root cannot write
    store = NodeRecordStore()
    store.store_record(record())
    assert store.records_if_changed(100.0) == []
    assert store.claim_probe(record(), every_s=10.0, now=time.time())  # no other session can claim the probe
    store.close()
    assert "measurements are not stored" in caplog.text


# ---- sessions


@pytest.fixture
def folder(folder: SessionFolder) -> Iterator[SessionFolder]:
    (folder.sites / "gpu.toml").write_text(SITE)
    turn = os.open(folder.path / "factory.lock", os.O_RDWR | os.O_CREAT, 0o600)
    assert locks.try_lock(turn)  # the manager's factory waits for this lock, so only the test's factory is active
    yield folder
    os.close(turn)


def factory_of(peers: Peers) -> tuple[Peer, tuple[KnownBlock, ...]]:
    factory = peers("client", name="factory-mine", observer=True, factory=True)
    known: tuple[KnownBlock, ...] = factory.hear(to_client.KnownBlocks).blocks
    return factory, known


def test_bad_node_stays_excluded_in_later_sessions(folder: SessionFolder, manager: Manager, peers: Peers) -> None:
    factory, _ = factory_of(peers)
    [client] = welcomed(peers, "client")
    faulty = tuple(replace(device, fault=BAD) for device in pilot_hello("test").devices)
    factory.send(say.BlockUpdate(BlockId("b1"), BlockPhase.RUNNING, "12", source="gpu"))
    peers("pilot", devices=faulty, block="b1", node="n2")
    [excluded] = until(lambda: client.status().excluded_nodes, what="n2 is excluded")
    assert (excluded.node, excluded.why) == ("n2", BAD)
    factory.hear(to_client.SubmitBlocks, where=lambda said: [each.allowed.exclude for each in said.orders] == [("n2",)])
    client.send(say.EndSession("test is over"))
    assert manager.ended(seconds=30) == 0
    assert [each.node for each in node_store.excluded_nodes()] == ["n2"]


def test_cleared_node_is_used_by_a_running_session(folder: SessionFolder, peers: Peers) -> None:
    kept(record())
    with closing(Manager(folder)) as manager:
        _, known = factory_of(peers)
        assert [block.allowed for block in known] == [AllowedNodes(exclude=("n2",))]
        [client] = welcomed(peers, "client")
        assert [each.node for each in client.status().excluded_nodes] == ["n2"]
        assert [each.node for each in node_store.allow_node_again("n2")] == ["n2"]
        until(lambda: not client.status().excluded_nodes, what="the session hears that n2 is cleared")
        client.send(say.EndSession("test is over"))
        assert manager.ended(seconds=30) == 0

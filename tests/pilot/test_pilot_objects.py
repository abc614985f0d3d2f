"""Pilots request, fetch and serve objects by the transfer plan of the manager, also without shared files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_manager import TRANSFER_KEY, FakeManager, carried_session, recipe
from fetched import get

from stoker.contexts.loading import ObjectPath
from stoker.contexts.manifest import PART_BYTES
from stoker.contexts.objects import make_object_ref, publish_objects, read_object_manifest
from stoker.contexts.recipe import ObjectRef
from stoker.pilot.agent import objects
from stoker.pilot.transfer import wire
from stoker.protocol.calls import CallEnd, FailureKind
from stoker.protocol.to_manager import FetchFailed, LibraryReady, ObjectsCached, ObjectsGone, PilotLeaving
from stoker.protocol.to_pilot import Exit, FetchObject, ServingPeer


class Other:
    """A second pilot of the session, with its own manager and cache."""

    def __init__(self, folder: Path, *, lease_s: float = 20) -> None:
        self.manager = FakeManager(folder, lease_s=lease_s)
        self.manager.take_key()
        self.pilot = self.manager.start_pilot()
        self.hello = self.manager.hello()
        self.peer = ServingPeer(pilot=self.manager.peer.decode(), address=self.hello.peer)  # type: ignore[arg-type]


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    made = Other(tmp_path_factory.mktemp("other"))
    yield made
    made.manager.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Other, Other]]:
    both = Other(tmp_path_factory.mktemp("taker"), lease_s=900), Other(tmp_path_factory.mktemp("giver"), lease_s=900)
    yield both
    for each in both:
        each.manager.close()


@pytest.fixture
def taker(pair: tuple[Other, Other]) -> FakeManager:
    pair[0].manager.begin_test()
    return pair[0].manager


@pytest.fixture
def giver(pair: tuple[Other, Other]) -> Other:
    pair[1].manager.begin_test()
    return pair[1]


@pytest.fixture
def big(tmp_path: Path) -> ObjectRef:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2 * PART_BYTES + 9))
    return make_object_ref(path, digest_cache_file=tmp_path / "memo")


def _length(path: str) -> int:
    return os.path.getsize(path)


def wanting(ref: ObjectRef) -> Any:
    return recipe(_length, ObjectPath(ref.name), objects=(ref,))


def gone_from_here(ref: ObjectRef) -> ObjectRef:
    """Return this object with an origin path that does not exist on this host."""
    return ObjectRef(ref.name, ref.size_bytes, "/not/seen/here")


def want(manager: FakeManager, ref: ObjectRef) -> None:
    """Start a library with this object, and wait until the pilot requests the object."""
    manager.start(wanting(ref))
    manager.until(lambda: ref in manager.wanted)


def have(manager: FakeManager, ref: ObjectRef) -> None:
    want(manager, ref)
    manager.send(FetchObject(ref, origin=True, manifest=read_object_manifest(ref)))
    manager.wait_for(LibraryReady)


def test_object_is_fetched_from_another_pilot_if_the_first_is_lost(
    taker: FakeManager, giver: Other, big: ObjectRef
) -> None:
    have(giver.manager, big)
    ref = gone_from_here(big)
    want(taker, ref)
    taker.send(FetchObject(ref, peers=(ServingPeer(pilot="lost", address="127.0.0.1:1"),)))  # type: ignore[arg-type]
    failed = taker.wait_for(FetchFailed)
    assert failed.peers == ("lost",)
    assert "cannot be reached" in failed.reason
    taker.send(FetchObject(ref, peers=(giver.peer,), manifest=read_object_manifest(big)))
    (arrival,) = taker.wait_for(ObjectsCached).arrivals
    assert (arrival.name, arrival.size_bytes) == (big.name, big.size_bytes)
    assert (arrival.origin_bytes, arrival.peer_bytes) == (0, big.size_bytes)
    assert taker.wait_for(LibraryReady).fetch_s > 0
    assert taker.results(taker.run(lambda context: context, [()], takes_context=True)) == [big.size_bytes]
    taker.ready(wanting(ref), library=2, devices=("cpu:1",))
    assert len(taker.wanted) == 1, "another library of the pilot does not request the object again"
    get(big.name, taker.base / "again", addresses=[taker.hellos[-1].peer], key=TRANSFER_KEY)


def test_pending_requests_are_repeated_to_a_returning_manager(taker: FakeManager, big: ObjectRef) -> None:
    want(taker, big)
    taker.hang_up()
    taker.wanted.clear()
    taker.listen()
    taker.until(lambda: big in taker.wanted)
    taker.send(FetchObject(big, origin=True))
    taker.wait_for(LibraryReady)


def made_of(tmp_path: Path, *sizes: int) -> list[ObjectRef]:
    refs = []
    for number, size in enumerate(sizes):
        (tmp_path / f"thing-{number}").write_bytes(os.urandom(size))
        refs.append(make_object_ref(tmp_path / f"thing-{number}", digest_cache_file=tmp_path / "memo"))
    return refs


def test_small_cache_evicts_and_reports_missing_bytes(manager: FakeManager, tmp_path: Path) -> None:
    old, used, first, second = made_of(tmp_path, 600_000, 600_000, 300_000, 500_000)
    manager.start_pilot("--devices", "cpu:2", "--cache-size", "1 MB")
    manager.ready(wanting(old))
    assert manager.hello().peer == "", "a pilot without the key of its session serves no peer"
    manager.send(Exit(reason="over"))
    manager.wait_for(PilotLeaving)
    before = len(manager.hellos)
    manager.said.clear()
    manager.inbox.last = 0
    manager.start_pilot("--devices", "cpu:2", "--cache-size", "1 MB")
    manager.until(lambda: len(manager.hellos) > before)
    assert manager.hellos[-1].objects == (old.name,)
    manager.ready(wanting(used))
    manager.wait_for(ObjectsGone, names=(old.name,))

    manager.start(recipe(_length, ObjectPath(first.name), objects=(first, second)), library=2, devices=("cpu:1",))
    left = manager.gone(2)
    assert "running libraries use the cached objects" in left.failure.message
    assert left.cache_lacks_bytes == 400_000
    manager.start(recipe(_length, ObjectPath(old.name), objects=(old, second)), library=3, devices=("cpu:1",))
    left = manager.gone(3)
    assert left.failure.kind is FailureKind.PILOT
    assert "its files (1.1 MB) are larger than the whole cache (1.0 MB)" in left.failure.message
    assert left.cache_lacks_bytes == 0, "no other library is in the way"


def test_leaving_pilot_completes_its_transfers(other: Other, big: ObjectRef) -> None:
    have(other.manager, big)
    channel = wire.connect_to_peer(other.peer.address, key=TRANSFER_KEY)
    channel.send({"op": "open", "object": big.name, "manifest": False})
    header = channel.receive()
    assert header["whole"]
    other.manager.send(Exit(reason="drained", drain=True))
    other.manager.until(lambda: "leaving" in other.manager.logs())
    for index in range(3):
        channel.send({"op": "piece", "index": index})
        header = channel.receive()
        channel.receive_body(memoryview(bytearray(header["body"])))
    assert other.pilot.poll() is None
    channel.close()
    other.manager.wait_for(PilotLeaving)


def test_leaving_pilot_stays_until_its_only_copies_are_replicated(
    taker: FakeManager, other: Other, big: ObjectRef
) -> None:
    have(other.manager, big)
    other.manager.send(Exit(reason="drained", drain=True, hand_on_s=300.0))
    other.manager.until(lambda: "leaving" in other.manager.logs())
    taker.send(FetchObject(gone_from_here(big), peers=(other.peer,), keep=True))
    (arrival,) = taker.wait_for(ObjectsCached).arrivals
    assert (arrival.name, arrival.peer_bytes) == (big.name, big.size_bytes)
    assert other.pilot.poll() is None
    other.manager.send(Exit(reason="others have it", drain=True))
    other.manager.wait_for(PilotLeaving)
    taker.send(FetchObject(gone_from_here(big), peers=(other.peer,), keep=True))  # the manager repeats the order
    taker.until(lambda: len([one for one in taker.said if isinstance(one, ObjectsCached)]) > 1)


def _same(data: bytes) -> bytes:
    return data


def test_objects_and_large_payloads_travel_without_a_shared_folder(
    keyed: FakeManager, big: ObjectRef, tmp_path: Path
) -> None:
    with carried_session(keyed, tmp_path / "sandbox") as folder:
        keyed.start_pilot("--session", str(folder), "--devices", "cpu:2")
        keyed.hello()
        publish_objects(keyed.folder.objects, (big,))
        ref = gone_from_here(big)
        want(keyed, ref)
        keyed.send(FetchObject(ref, origin=True))
        assert keyed.wait_for(ObjectsCached).arrivals[0].origin_bytes == big.size_bytes
        keyed.wait_for(LibraryReady)
        data = os.urandom(3_000_000)
        specs = keyed.run(_same, [(data,), (b"small",)])
        assert keyed.results(specs) == [data, b"small"]
        end = keyed.ends()[specs[0]]
        assert isinstance(end.payload, ObjectRef)
        assert Path(end.payload.source).parent == keyed.folder.objects
        assert not list((folder / "objects").iterdir())


def test_inaccessible_object_path_fails_the_load(taker: FakeManager, big: ObjectRef) -> None:
    """A path that is too long fails like a path that needs a Kerberos ticket."""
    ref = ObjectRef(big.name, big.size_bytes, "/" + "x" * 5000)
    want(taker, ref)
    taker.send(FetchObject(ref, origin=True))
    failed = taker.wait_for(FetchFailed)
    assert failed.origin
    assert "(file name too long); put it on a file system that compute nodes can access" in failed.reason


@pytest.mark.parametrize(("breaks", "ok"), [(1, True), (len(objects._RETRY_PAUSES_S) + 1, False)])
def test_result_is_uploaded_again_if_the_connection_breaks(breaks: int, ok: bool, tmp_path: Path, monkeypatch):
    (tmp_path / "result").write_bytes(b"result")
    seen = []

    def put(name: str, parts: Any, **_: Any) -> str:
        seen.append(name)
        if len(seen) <= breaks:
            raise ConnectionResetError("the seed has been restarted")
        return "/seed/result"

    monkeypatch.setattr(objects, "send_result", put)
    monkeypatch.setattr(objects, "_RETRY_PAUSES_S", (0.0,) * len(objects._RETRY_PAUSES_S))
    agent: Any = SimpleNamespace(
        peers=SimpleNamespace(find_seed=lambda: "here:1", key=b""),
        state=SimpleNamespace(facts=SimpleNamespace(pilot="p"), log_path=lambda _library: str(tmp_path / "lib.log")),
    )  # fmt: skip
    ref = ObjectRef("result", 6, str(tmp_path / "result"))
    end = objects._upload_result(agent, 1, CallEnd(1, True, payload=ref))  # type: ignore[arg-type]
    assert end.ok is ok
    assert not (tmp_path / "result").exists()
    if ok:
        assert end.payload == ObjectRef("result", 6, "/seed/result")
    else:
        assert end.failure is not None
        assert "the seed has been restarted" in end.failure.message

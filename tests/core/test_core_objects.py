"""The transfer plan step by step: which pilot fetches an object from which source."""

from __future__ import annotations

import pytest
from core.builders import devices, recipe
from core.told import BIG, LLM, SMALL, Peers

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import ManagerRestarted
from stoker.manager.core.transfers import TransferLimits
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.ids import RecipeKey


# ---- sources
def test_first_pilot_reads_the_origin_and_other_pilots_read_peers(peers: Peers) -> None:
    peers.here("p1", "p2", "p3").want("p1")
    assert peers.told("p1") == ((), True)
    peers.want("p2")
    assert peers.told("p2") == (("p1",), False)
    assert peers.told("p1") is None  # a pilot that reads the origin needs no peer
    peers.want("p3")
    assert peers.told("p3") == (("p1", "p2"), False)
    assert peers.told("p2") == (("p1", "p3"), False)  # p2 and p3 give each other their parts


def test_object_manifest_is_sent_once_to_each_pilot(peers: Peers) -> None:
    peers.tell("ana", say.DefineManifest(BIG.name, b"digests"))
    peers.here("p1", "p2", "p3").want("p1", "p2")
    (order,) = peers.orders("p2")
    assert order == to_pilot.FetchObject(BIG, (to_pilot.ServingPeer("p1", "p1:7000"),), False, b"digests")
    peers.want("p3")
    assert [order.manifest for order in peers.orders("p2")] == [b""]
    peers.want("p2")  # p2 requests the object again, because the order may be lost
    assert [order.manifest for order in peers.orders("p2")] == [b"digests"]


def test_rarest_object_gets_the_free_transfer_slot(peers: Peers) -> None:
    """All transfer slots of p1 and p2 are used. The next free slot is for the rarer object."""
    common = ObjectRef("file-common", 100, "/c")
    rare = ObjectRef("file-rare", 100, "/r")
    peers.here("p1", has=(common, rare)).here("p2", has=(common,))
    for n in range(8):
        peers.here(f"q{n}", serves=False).want(f"q{n}", refs=(common,))
    assert sorted((peers.told(f"q{n}") or ((), True))[0][0] for n in range(8)) == ["p1"] * 4 + ["p2"] * 4
    peers.here("r1", "r2", serves=False).want("r1", refs=(common,)).want("r2", refs=(rare,))
    assert peers.told("r1") is peers.told("r2") is None
    freed = next(fetch.peer.id for fetch in peers.core.state.transfers.peers["p1"].serves.values())
    peers.arrive(freed, common)
    assert peers.told("r1") is None
    assert peers.told("r2") == (("p1",), False)


def test_pilots_of_one_cache_fetch_an_object_once(peers: Peers) -> None:
    peers.here("p1", "p2", "p3", cache="node7").here("q1").want("p1", "p2", "p3", "q1")
    assert peers.told("p1") == ((), True)
    assert peers.told("p2") is peers.told("p3") is None
    assert peers.told("q1") == (("p1",), False)  # q1 reads from p1; p2 and p3 have no parts yet
    peers.arrive("p1")
    # p1 fetched the object into the shared cache
    assert peers.told("p2") == peers.told("p3") == (("p1",), False)
    peers.arrive("p2").arrive("p3")
    assert not peers.core.state.transfers.objects[BIG.name].fetches.keys() - {"q1"}


def test_second_pilot_of_a_shared_cache_fetches_if_the_first_is_lost(peers: Peers) -> None:
    peers.here("p1", "p2", "p3", cache="node7").want("p1", "p2", "p3").forget().lose("p1")
    assert peers.told("p2") == ((), True)
    assert peers.told("p3") is None
    peers.arrive("p2")
    assert peers.told("p3") == (("p2",), False)


def test_object_evicted_from_the_cache_is_fetched_elsewhere(peers: Peers) -> None:
    peers.here("p1", cache="node7", has=(BIG,)).here("p2", cache="node7").here("q1", has=(BIG,)).want("p2")
    assert peers.told("p2") == (("p1",), False)
    peers.report("p1", say.ObjectsGone((BIG.name,)))
    assert peers.told("p2") == (("q1",), False)


def test_one_pilot_of_a_shared_cache_fetches_a_lost_object_again(peers: Peers) -> None:
    peers.here("p1", has=(BIG,), cache="node7").here("p2", "p3", cache="node7").here("q1").want("p2", "p3").forget()
    peers.lose("p1")
    assert peers.told("p2") == ((), True)
    assert peers.told("p3") is None
    peers.want("q1", "p3")
    assert peers.told("q1") == (("p2",), False)
    assert peers.told("p3") is None
    peers.arrive("p2")
    assert peers.told("p3") == (("p2",), False)


@pytest.mark.parametrize("lost", [False, True])
def test_pilot_waits_for_a_peer_that_checks_its_shared_cache(peers: Peers, lost: bool) -> None:
    """p1 fetched the object into the cache of p1 and p2, but p1 serves no other pilot. So q1 waits for p2."""
    peers.here("p1", serves=False, cache="node7").here("p2", cache="node7").here("q1", serves=False)
    peers.want("p1", "p2", "q1").forget().arrive("p1")
    assert peers.told("p2") == ((), True)
    assert peers.told("q1") is None
    if lost:
        peers.lose("p2")
    else:
        peers.arrive("p2")
    assert peers.told("q1") == (((), True) if lost else (("p2",), False))


# ---- losses
def test_another_pilot_replaces_a_disconnected_origin_reader(peers: Peers) -> None:
    peers.here("p1", "p2").want("p1", "p2").forget().cut("p1")
    assert peers.told("p2") == ((), True)
    peers.here("p1")
    assert peers.told("p1") == (("p2",), False)


def test_pilot_that_requests_an_object_that_it_had_gets_a_source(peers: Peers) -> None:
    peers.here("p1", "p2", has=(BIG,)).want("p1")
    assert peers.told("p1") == (("p2",), False)


def test_restarted_core_assigns_sources_after_pilots_reconnect(peers: Peers) -> None:
    peers.here("p1", "p2").want("p1", "p2").forget().event(ManagerRestarted())
    peers.nothing_else_was_said()
    peers.here("p2")
    assert peers.told("p2") == ((), True)
    peers.here("p1", has=(BIG,))
    assert peers.told("p1") is None


# ---- peers and origins that cannot be reached
def test_pilot_that_cannot_reach_peers_finally_gets_the_origin(peers: Peers) -> None:
    peers.here("p1", "p2", has=(SMALL,)).here("p3").want("p3", refs=(SMALL,))
    first, _ = peers.told("p3") or ((), True)
    peers.fail("p3", *first, ref=SMALL)
    second, origin = peers.told("p3") or ((), True)
    assert (set(first + second), origin) == ({"p1", "p2"}, False)
    peers.fail("p3", *second, ref=SMALL)
    assert peers.told("p3") == ((), True)


def test_pilot_tries_one_peer_if_peers_never_reach_each_other(peers: Peers) -> None:
    readers = [f"p{n}" for n in range(3)]
    peers.here("q1", "q2", has=(SMALL,))
    for name in readers:
        peers.here(name).want(name, refs=(SMALL,))
        for _ in range(len(peers.core.state.transfers.peers)):
            sources, origin = peers.told(name) or ((), True)
            if origin:
                break
            peers.fail(name, *sources, ref=SMALL)
        peers.arrive(name, SMALL, origin=1000)
    peers.here("last").want("last", refs=(SMALL,))
    sources, origin = peers.told("last") or ((), True)
    assert not origin
    assert len(sources) == 1
    peers.fail("last", *sources, ref=SMALL)
    assert peers.told("last") == ((), True)


def test_number_of_concurrent_origin_readers_is_bounded(peers: Peers) -> None:
    names = [f"p{n}" for n in range(7)]
    peers.here(*names, serves=False).want(*names)
    assert [peers.told(name) for name in names] == [((), True)] * 4 + [None] * 3
    peers.arrive("p1")
    assert [peers.told(name) for name in names] == [None] * 4 + [((), True)] + [None] * 2


def test_another_pilot_reads_the_origin_if_the_first_cannot(peers: Peers) -> None:
    peers.here("p1", "p2").want("p1", "p2").forget().fail("p1", origin=True)
    assert peers.told("p2") == ((), True)
    assert peers.told("p1") == (("p2",), False)


def test_pilot_without_any_source_gets_a_failure(peers: Peers) -> None:
    peers.here("p1").want("p1").forget().fail("p1", origin=True)
    assert peers.told("p1") == ((), False)
    peers.want("p1")  # a later request tries the origin again
    assert peers.told("p1") == ((), True)


def test_object_that_no_pilot_can_read_fails_for_all(peers: Peers) -> None:
    names = [f"p{n}" for n in range(30)]
    peers.here(*names).want(*names)
    readers = 0
    while True:
        told = {name: orders[-1] for name in names if (orders := peers.orders(name))}
        reader = next((name for name, order in told.items() if order.origin), None)
        if reader is None:
            break
        readers += 1
        peers.fail(reader, origin=True)
    assert readers == TransferLimits().origin_tries
    assert not peers.core.state.transfers.objects


def test_peer_that_fails_while_others_serve_is_no_longer_used(peers: Peers) -> None:
    bad = ("bad",)
    peers.here("bad", "good", has=(BIG,))
    for n in range(3):
        peers.here(f"p{n}").want(f"p{n}").fail(f"p{n}", "bad").arrive(f"p{n}", peer=BIG.size_bytes)
    peers.forget().here("last").want("last")
    sources, _ = peers.told("last") or ((), True)
    assert len(sources) == 3
    assert not set(sources) & set(bad)
    peers.lose("last").here("bad", has=(BIG,)).here("again")  # a hello clears the failures of a pilot
    assert peers.core.state.transfers.peers["bad"].address


# ---- stories
def test_status_and_explain_show_where_objects_are_fetched_from(peers: Peers) -> None:
    peers.here("p1").define(LLM).call("1", context="llm").forget()
    peers.want("p1", refs=(BIG, SMALL))
    assert "big.gguf (1.1 GB) is fetched from its origin" in peers.story("lib-1")
    assert "llm is starting (fetching from its origin) on cpu:0 of p1" in peers.story("1")
    assert peers.status().libraries[0].phase == "fetching from its origin"
    big, small = peers.status().objects
    assert (big.name, big.size_bytes, big.holders, big.fetching) == (BIG.name, BIG.size_bytes, 0, 1)
    peers.arrive("p1", origin=BIG.size_bytes).arrive("p1", SMALL, peer=1000)
    big, small = peers.status().objects
    assert (big.holders, big.fetching, big.origin_bytes, big.peer_bytes) == (1, 0, BIG.size_bytes, 0)
    assert (small.origin_bytes, small.peer_bytes) == (0, 1000)


def test_status_says_that_peers_cannot_reach_each_other(peers: Peers) -> None:
    peers.define(LLM).here("p1", has=(BIG,)).here("p2").want("p2").fail("p2", "p1")
    status = peers.status()
    assert "no peer could serve p2" in status.objects[0].trouble
    assert "connection timed out" in status.objects[0].trouble
    assert "Pilots cannot reach each other (connection timed out): p2" in status.trouble["peers"]


# ---- snapshots

FORM = "file-abc-float32-1"
SNAPSHOT = ObjectRef("folder-snapshot", 5 << 20, "/home/ana/snapshots/file-abc-float32-1")


def offer(peers: Peers, name: str, ref: ObjectRef = SNAPSHOT, *, made_s: float = 16.0) -> None:
    peers.report(name, say.SnapshotWritten(RecipeKey("llm"), FORM, ref, b"digests", made_s))


def start(peers: Peers, name: str) -> to_pilot.StartLibrary:
    return next(x for x in peers.mail.pop(name) if isinstance(x, to_pilot.StartLibrary))


def test_load_order_names_a_snapshot_that_another_pilot_has(peers: Peers) -> None:
    peers.define(recipe("llm")).here("p1").call("1", context="llm")
    assert start(peers, "p1").snapshots == {}
    offer(peers, "p1")
    peers.here("p2").call("2", context="llm")
    order = start(peers, "p2")
    assert (order.snapshots, order.snapshot_wait_s) == ({FORM: SNAPSHOT}, 16.0)
    peers.want("p2", refs=(SNAPSHOT,))
    (fetch,) = peers.orders("p2")
    assert ([peer.pilot for peer in fetch.peers], fetch.origin, fetch.manifest) == (["p1"], False, b"digests")
    assert "file-abc-float32-1 (5.2 MB) is fetched from peer p1" in peers.story("lib-2")
    assert [(one.name, one.holders, one.fetching) for one in peers.status().objects] == [(SNAPSHOT.name, 1, 1)]


def test_second_snapshot_is_offered_when_the_first_is_lost(peers: Peers) -> None:
    other = ObjectRef("folder-other", 6 << 20, "/elsewhere")
    peers.define(recipe("llm")).here("p1", "p2")
    offer(peers, "p1")
    offer(peers, "p2", other, made_s=12.0)
    peers.lose("p1")
    offer(peers, "p2", other, made_s=12.0)
    peers.here("p3").forget().call("1", "2", context="llm")
    assert start(peers, "p3").snapshots == {FORM: other}


def test_lost_snapshots_or_snapshots_of_other_devices_are_not_offered(peers: Peers) -> None:
    peers.define(recipe("llm")).here("p1")
    offer(peers, "p1")
    peers.report("p1", say.PilotLeaving("over")).hello("g1", devices=devices(1, kind="a10"), peer="g1:7000")
    peers.call("1", context="llm")
    assert start(peers, "g1").snapshots == {}
    offer(peers, "g1", ObjectRef("folder-half", 3 << 20, "/home/ana/snapshots/file-abc-bfloat16-1"))
    peers.report("g1", say.SnapshotWritten(RecipeKey("never"), FORM, SNAPSHOT))
    assert peers.refused == {"snapshot of an unknown context": 1}
    peers.here("p2").call("2", context="llm")
    assert start(peers, "p2").snapshots == {}


def test_load_order_comes_with_fetch_orders_for_its_objects(peers: Peers) -> None:
    """The fetch orders are in the frame of the load, which saves a round trip."""
    peers.here("p1", has=(BIG,)).here("p2", has=(SMALL,)).define(LLM).forget().call("1", "2", context="llm")
    orders = {name: list(peers.mail[name]) for name in ("p1", "p2")}
    start, fetch = orders["p2"][0], orders["p2"][1]
    assert isinstance(start, to_pilot.StartLibrary)
    assert start.planned == (BIG.name,), "it has the other one"
    assert (fetch.object, [peer.pilot for peer in fetch.peers]) == (BIG, ["p1"])

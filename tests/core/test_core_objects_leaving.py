"""Test the transfer plan for leaving pilots: objects they serve, and objects that no other pilot has."""

from __future__ import annotations

from core.told import BIG, SMALL, Peers, exits, leave, needing

from stoker.protocol import to_manager as say


def test_draining_pilot_serves_only_objects_without_another_source(peers: Peers) -> None:
    peers.here("p1", "p2", has=(SMALL,)).here("p3", "p4", "p5")
    leave(peers, "p1")
    peers.want("p3", "p4", refs=(SMALL,))
    assert peers.told("p3") == peers.told("p4") == (("p2",), False)
    for name in ("p2", "p3", "p4"):
        peers.lose(name)
    peers.want("p5", refs=(SMALL,))
    assert peers.told("p5") == (("p1",), False)


def test_free_slot_of_a_leaving_pilot_goes_to_a_waiting_fetch(peers: Peers) -> None:
    served = [f"q{n}" for n in range(4)]
    peers.here("p1", has=(BIG,)).here(*served, "late", "last", serves=False).want(*served, "late", "last").forget()
    leave(peers, "p1")
    peers.arrive("q2")
    assert peers.told("late") == (("p1",), False)
    assert peers.told("last") is None
    peers.lose("q0")
    assert peers.told("last") == (("p1",), False)


def test_object_read_by_a_leaving_pilot_goes_to_a_waiting_pilot(peers: Peers) -> None:
    served = [f"q{n}" for n in range(4)]
    peers.here("p1").want("p1").here(*served, "late", serves=False).want(*served, "late").forget()
    leave(peers, "p1")
    assert peers.told("late") is None
    peers.fail("q1", "p1")  # p1 can serve another pilot, because q1 will read from another source
    assert peers.told("late") == (("p1",), False)


def test_object_only_on_a_leaving_pilot_is_copied_first(peers: Peers) -> None:
    needing(peers).here("p1", has=(BIG,)).here("p2", "p3").call("2", "3", "4", context="llm").give_up("p2", "p3")
    assert leave(peers, "p1").hand_on_s > 60
    heir = next(name for name in ("p2", "p3") if any(order.keep for order in peers.orders(name)))
    assert "no other pilot has" in peers.story("p1")
    peers.arrive(heir, peer=BIG.size_bytes)
    assert [order.hand_on_s for order in exits(peers, "p1")][1:] == [0.0]  # the pilot may exit now


def test_replicated_or_unneeded_objects_delay_no_leaving_pilot(peers: Peers) -> None:
    peers.here("p1", has=(SMALL,)).here("p2")
    assert leave(peers, "p1").hand_on_s == 0.0
    assert peers.orders("p2") == []
    peers.here("q1", "q2", has=(BIG,))
    needing(peers)
    assert leave(peers, "q1").hand_on_s == 0.0


def test_last_pilot_leaves_without_copying_its_objects(peers: Peers) -> None:
    needing(peers).here("p1", has=(BIG,)).call("2", context="llm")
    assert leave(peers, "p1").hand_on_s == 0.0


def test_leaving_pilot_stays_while_other_pilots_fetch_from_it(peers: Peers) -> None:
    peers.here("p1", has=(BIG,)).here("p2").want("p2")
    assert leave(peers, "p1").hand_on_s > 0.0
    assert not any(order.keep for order in peers.orders("p2"))  # p2 keeps the object, because it requested the object
    peers.arrive("p2", peer=BIG.size_bytes)
    assert exits(peers, "p1")[-1].hand_on_s == 0.0


def test_failed_copy_is_retried_by_other_pilots_until_none_is_left(peers: Peers) -> None:
    needing(peers).here("p1", has=(BIG,)).here("p2", "p3").call("2", "3", "4", context="llm").give_up("p2", "p3")
    leave(peers, "p1")
    first = next(name for name in ("p2", "p3") if peers.orders(name))
    second = "p3" if first == "p2" else "p2"
    peers.report(first, say.ObjectsGone((BIG.name,)))  # the pilot's disk is full
    assert any(order.keep for order in peers.orders(second))
    assert len(exits(peers, "p1")) == 1
    peers.lose(second)
    assert exits(peers, "p1")[-1].hand_on_s == 0.0


def test_walltime_limits_how_long_a_leaving_pilot_stays(peers: Peers) -> None:
    needing(peers).here("p1", has=(BIG,)).here("p2").call("2", "3", context="llm")
    peers.core.state.pilots["p1"].ends_at = peers.now + 20.0
    assert 0 < leave(peers, "p1").hand_on_s < 20
    peers.here("q1", has=(SMALL,))
    peers.core.state.pilots["q1"].ends_at = peers.now + 2.0
    assert leave(peers, "q1").hand_on_s == 0.0


def test_pilot_with_the_most_time_left_receives_the_object_copy(peers: Peers) -> None:
    needing(peers).here("p1", has=(BIG,)).here("p2", "p3", "p4").call("2", "3", "4", "5", context="llm")
    peers.give_up("p2", "p3", "p4")
    for name, ends_at in (("p2", 100.0), ("p3", 900.0), ("p4", 300.0)):
        peers.core.state.pilots[name].ends_at = peers.now + ends_at
    leave(peers, "p1")
    assert [name for name in ("p2", "p3", "p4") if peers.orders(name)] == ["p3"]


# ---- objects in a shared cache
def told_to_find_it(peers: Peers) -> Peers:
    peers.here("p1", has=(BIG,), cache="node7").here("p2", "p3", cache="node7").here("q1", has=(BIG,))
    return peers.want("p2", "p3").forget()


def test_pilot_that_misses_an_object_fetches_it_for_its_cache(peers: Peers) -> None:
    told_to_find_it(peers).fail("p3", "p1")
    assert peers.told("p3") == (("q1",), False)
    peers.lose("p1")
    assert peers.told("p2") is None
    peers.arrive("p3", peer=BIG.size_bytes)
    assert peers.told("p2") == (("p3",), False)


def test_last_pilot_to_miss_an_object_fetches_it_for_its_cache(peers: Peers) -> None:
    told_to_find_it(peers).fail("p2", "p1")
    assert peers.told("p2") == (("q1",), False)
    peers.fail("p3", "p1")
    assert peers.told("p3") == (("q1",), False)
    assert peers.told("p2") is None
    peers.lose("p3")
    assert peers.told("p2") == (("q1",), False)


def test_pilot_without_the_cached_object_takes_over_the_fetch(peers: Peers) -> None:
    """Only one pilot can fetch an object into a cache; p2 waits for p3."""
    told_to_find_it(peers).lose("p1")
    assert peers.told("p2") == (("q1",), False)
    assert peers.told("p3") is None
    peers.fail("p3", "p1")
    assert peers.told("p3") == (("q1",), False)
    peers.arrive("p3", peer=BIG.size_bytes)
    assert peers.told("p2") == (("p3",), False)


def test_pilot_whose_source_gave_up_gets_another_source(peers: Peers) -> None:
    """q1 reads from p2, until p3 takes over the fetch into the cache that p2 and p3 share."""
    peers.here("p1", has=(BIG,), cache="node7").here("p2", "p3", cache="node7").here("q1")
    peers.want("p2", "p3").lose("p1").want("q1").forget()
    peers.fail("p3", "p1")
    assert peers.told("p3") == ((), True)
    assert peers.told("q1") == (("p3",), False)
    assert peers.told("p2") is None

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stoker.pilot.transfer.board import AGAIN_S, SPARED_S, PiecePicker


def picker(count: int, *, seed: int = 1) -> PiecePicker[str]:
    return PiecePicker(count, chance=random.Random(seed))


def test_rarest_piece_is_fetched_first() -> None:
    one = picker(10)
    for name in ("a", "b", "c"):
        one.add(name)
    one.has("a", range(10))
    one.has("b", range(9))
    one.has("c", range(9))
    assert one.take("a", 0.0) == 9
    assert one.take("b", 0.0) in range(9)


def test_equally_rare_pieces_are_chosen_at_random() -> None:
    first = []
    for seed in range(40):
        one = picker(30, seed=seed)
        one.add("a")
        one.has("a", range(30))
        first.append(one.take("a", 0.0))
    assert len(set(first)) > 10


def test_each_piece_is_requested_once() -> None:
    one = picker(100)
    for name in ("a", "b"):
        one.add(name)
        one.has(name, range(100))
    asked = [one.take(name, 0.0) for _ in range(50) for name in ("a", "b")]
    assert sorted(asked) == list(range(100))  # type: ignore[type-var]
    assert one.take("a", AGAIN_S / 2) is None
    one = picker(3)
    for name in ("a", "b"):
        one.add(name)
        one.has(name, [0])
    assert one.take("a", 0.0) == 0
    assert one.take("b", 1000.0) is None  # pieces 1 and 2 may arrive at any moment


def test_last_piece_of_a_slow_source_is_requested_from_another_source() -> None:
    one = picker(2)
    one.add("slow")
    one.has("slow", [0, 1])
    assert one.take("slow", 0.0) in (0, 1)
    one.add("quick")
    one.has("quick", [0, 1])
    other = one.take("quick", 10.0)
    assert other is not None
    # this piece was requested from the other source ten seconds ago
    assert one.take("quick", 10.0 + AGAIN_S / 2) == 1 - other
    one.arrived(1 - other, 11.0)
    assert one.take("slow", 11.0) is None  # the only missing piece was just requested from "quick"
    assert not one.arrived(1 - other, 12.0)
    assert one.missing == 1


def test_pieces_of_a_lost_source_are_requested_from_other_sources() -> None:
    one = picker(4)
    for name in ("a", "b"):
        one.add(name)
        one.has(name, range(4))
    taken = {one.take("a", 0.0) for _ in range(4)}
    assert taken == {0, 1, 2, 3}
    one.gone("a")
    assert {one.take("b", 0.0) for _ in range(4)} == taken
    one.gone("nobody")
    assert one.take("a", 0.0) is None
    one.mark_piece_unavailable("b", 0)
    assert one.take("b", 0.0) is None
    one.has("b", [0])
    assert one.take("b", 0.0) == 0, "a source that announces a piece again is asked again"


def test_piece_that_a_peer_has_is_not_requested_from_the_origin() -> None:
    one = picker(3)
    one.add("origin", origin=True)
    one.has("origin", range(3))
    one.add("peer")
    one.has("peer", [0, 1])
    one.arrived(1, 1.0)
    assert one.take("origin", 1.0) == 2
    assert one.take("origin", 2.0) is None
    assert one.take("peer", 2.0) == 0
    one.mark_piece_unavailable("peer", 0)
    one.has("peer", [0])
    assert one.take("origin", 1.0 + SPARED_S) == 0  # the peer does not send piece 0, so the origin is used


@given(count=st.integers(0, 200), seed=st.integers(0, 99), shares=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_every_available_piece_is_fetched(count: int, seed: int, shares: list[float]) -> None:
    chance = random.Random(seed)
    one: PiecePicker[int] = PiecePicker(count, chance=chance)
    held = {}
    for source, share in enumerate(shares):
        held[source] = [index for index in range(count) if chance.random() < share]
        one.add(source)
        one.has(source, held[source])
    came: Counter[int] = Counter()
    now, idle = 0.0, 0
    while idle < len(shares):
        idle = 0
        for source in held:
            now += 0.001
            index = one.take(source, now)
            if index is None:
                idle += 1
                continue
            assert index in held[source]
            assert one.arrived(index, now)
            came[index] += 1
    assert set(came) == set().union(*held.values())
    assert one.missing == count - len(came)

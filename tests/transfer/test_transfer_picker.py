from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stoker.pilot.transfer.board import MIN_OVERDUE_S, ORIGIN_FALLBACK_S, PiecePicker


def picker(count: int, *, seed: int = 1) -> PiecePicker[str]:
    return PiecePicker(count, chance=random.Random(seed))


def test_rarest_piece_is_fetched_first() -> None:
    one = picker(10)
    for name in ("a", "b", "c"):
        one.add_source(name)
    one.add_pieces_of_source("a", range(10))
    one.add_pieces_of_source("b", range(9))
    one.add_pieces_of_source("c", range(9))
    assert one.choose_next_piece("a", 0.0) == 9
    assert one.choose_next_piece("b", 0.0) in range(9)


def test_equally_rare_pieces_are_chosen_at_random() -> None:
    first = []
    for seed in range(40):
        one = picker(30, seed=seed)
        one.add_source("a")
        one.add_pieces_of_source("a", range(30))
        first.append(one.choose_next_piece("a", 0.0))
    assert len(set(first)) > 10


def test_each_piece_is_requested_once() -> None:
    one = picker(100)
    for name in ("a", "b"):
        one.add_source(name)
        one.add_pieces_of_source(name, range(100))
    asked = [one.choose_next_piece(name, 0.0) for _ in range(50) for name in ("a", "b")]
    assert sorted(asked) == list(range(100))  # type: ignore[type-var]
    assert one.choose_next_piece("a", MIN_OVERDUE_S / 2) is None
    one = picker(3)
    for name in ("a", "b"):
        one.add_source(name)
        one.add_pieces_of_source(name, [0])
    assert one.choose_next_piece("a", 0.0) == 0
    assert one.choose_next_piece("b", 1000.0) is None  # pieces 1 and 2 may arrive at any moment


def test_last_piece_of_a_slow_source_is_requested_from_another_source() -> None:
    one = picker(2)
    one.add_source("slow")
    one.add_pieces_of_source("slow", [0, 1])
    assert one.choose_next_piece("slow", 0.0) in (0, 1)
    one.add_source("quick")
    one.add_pieces_of_source("quick", [0, 1])
    other = one.choose_next_piece("quick", 10.0)
    assert other is not None
    # this piece was requested from the other source ten seconds ago
    assert one.choose_next_piece("quick", 10.0 + MIN_OVERDUE_S / 2) == 1 - other
    one.record_arrival(1 - other, 11.0)
    assert one.choose_next_piece("slow", 11.0) is None  # the only missing piece was just requested from "quick"
    assert not one.record_arrival(1 - other, 12.0)
    assert one.missing == 1


def test_pieces_of_a_lost_source_are_requested_from_other_sources() -> None:
    one = picker(4)
    for name in ("a", "b"):
        one.add_source(name)
        one.add_pieces_of_source(name, range(4))
    taken = {one.choose_next_piece("a", 0.0) for _ in range(4)}
    assert taken == {0, 1, 2, 3}
    one.remove_source("a")
    assert {one.choose_next_piece("b", 0.0) for _ in range(4)} == taken
    one.remove_source("nobody")
    assert one.choose_next_piece("a", 0.0) is None
    one.mark_piece_unavailable("b", 0)
    assert one.choose_next_piece("b", 0.0) is None
    one.add_pieces_of_source("b", [0])
    assert one.choose_next_piece("b", 0.0) == 0, "a source that announces a piece again is asked again"


def test_piece_that_a_peer_has_is_not_requested_from_the_origin() -> None:
    one = picker(3)
    one.add_source("origin", origin=True)
    one.add_pieces_of_source("origin", range(3))
    one.add_source("peer")
    one.add_pieces_of_source("peer", [0, 1])
    one.record_arrival(1, 1.0)
    assert one.choose_next_piece("origin", 1.0) == 2
    assert one.choose_next_piece("origin", 2.0) is None
    assert one.choose_next_piece("peer", 2.0) == 0
    one.mark_piece_unavailable("peer", 0)
    one.add_pieces_of_source("peer", [0])
    # The peer does not send piece 0, so the origin is used.
    assert one.choose_next_piece("origin", 1.0 + ORIGIN_FALLBACK_S) == 0


@given(count=st.integers(0, 200), seed=st.integers(0, 99), shares=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_every_available_piece_is_fetched(count: int, seed: int, shares: list[float]) -> None:
    chance = random.Random(seed)
    one: PiecePicker[int] = PiecePicker(count, chance=chance)
    held = {}
    for source, share in enumerate(shares):
        held[source] = [index for index in range(count) if chance.random() < share]
        one.add_source(source)
        one.add_pieces_of_source(source, held[source])
    came: Counter[int] = Counter()
    now, idle = 0.0, 0
    while idle < len(shares):
        idle = 0
        for source in held:
            now += 0.001
            index = one.choose_next_piece(source, now)
            if index is None:
                idle += 1
                continue
            assert index in held[source]
            assert one.record_arrival(index, now)
            came[index] += 1
    assert set(came) == set().union(*held.values())
    assert one.missing == count - len(came)

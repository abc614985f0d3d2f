"""Acknowledgements that wait for a frame to travel with."""

from __future__ import annotations

import math

from stoker.manager.live.clock import Acks
from stoker.protocol.to_pilot import Ack


def test_an_acknowledgement_goes_along_with_the_next_frame_and_only_the_last_one_does() -> None:
    acks = Acks(4.0)
    acks.add("p1", Ack(1), 0.0)
    acks.add("p1", Ack(2), 0.1)
    assert acks.along("p2") == ()
    assert acks.along("p1") == (Ack(2),)
    assert acks.along("p1") == ()


def test_one_that_finds_no_frame_goes_alone_after_half_of_its_time_and_before_all_of_it() -> None:
    acks = Acks(4.0)
    assert acks.due_at == math.inf
    acks.add("p1", Ack(1), 0.0)
    acks.add("p2", Ack(7), 1.9)
    assert acks.overdue(1.99) == []
    assert acks.due_at == 2.0
    assert acks.overdue(2.0) == []  # from now on they are the older ones
    acks.add("p1", Ack(3), 3.0)  # an older one that is replaced keeps its place
    acks.add("p3", Ack(1), 3.0)
    assert acks.overdue(4.0) == [("p1", Ack(3)), ("p2", Ack(7))]
    assert acks.overdue(6.0) == [("p3", Ack(1))]
    assert acks.due_at == math.inf

from __future__ import annotations

import socket
import threading

import pytest

from stoker.errors import GangBroken
from stoker.pilot.library.pieces import GangMeetings
from stoker.protocol.calls import GangPlace
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import Listens

CALL = CallId(7)


@pytest.fixture
def said() -> list[Listens]:
    return []


@pytest.fixture
def meetings(said: list[Listens]) -> GangMeetings:
    return GangMeetings(host="127.0.0.1", say=said.append)


def test_rank_0_listens_before_it_reports_its_address(meetings: GangMeetings, said: list[Listens]) -> None:
    place = meetings.seat(CALL, GangPlace(0, 3), limit_s=1.0)
    assert said == [Listens(CALL, int(place.rendezvous.rpartition(":")[2]))]
    with socket.create_connection(("127.0.0.1", said[0].port)):
        place.listener.accept()[0].close()
    place.close()


def test_address_may_arrive_before_its_rank_requests_it(meetings: GangMeetings) -> None:
    meetings.told(CALL, "10.0.0.7:29500")
    place = meetings.seat(CALL, GangPlace(2, 3), limit_s=0.0)
    assert (place.rank, place.size, place.rendezvous, place.listener) == (2, 3, "10.0.0.7:29500", None)


def test_late_address_wakes_its_rank(meetings: GangMeetings) -> None:
    timer = threading.Timer(0.05, meetings.told, (CALL, "10.0.0.7:29500"))
    timer.start()
    assert meetings.seat(CALL, GangPlace(1, 2), limit_s=30.0).rendezvous == "10.0.0.7:29500"
    timer.join()


def test_address_of_another_call_is_ignored(meetings: GangMeetings) -> None:
    meetings.told(8, "10.0.0.7:29500")
    with pytest.raises(GangBroken, match=r"rank 1 of 2 did not get the address of rank 0 within"):
        meetings.seat(CALL, GangPlace(1, 2), limit_s=0.01)


def test_cancelled_rank_does_not_wait(meetings: GangMeetings) -> None:
    meetings.told(CALL, "")
    with pytest.raises(GangBroken, match="rank 1 of 2 was cancelled"):
        meetings.seat(CALL, GangPlace(1, 2), limit_s=30.0)
    meetings.told(CALL, "10.0.0.7:29500")  # this address is for the next gang of the call
    assert meetings.seat(CALL, GangPlace(1, 2), limit_s=0.0).rendezvous == "10.0.0.7:29500"


def test_address_of_one_gang_is_not_used_by_the_next(meetings: GangMeetings) -> None:
    meetings.told(CALL, "10.0.0.7:29500")  # the rank ended without fetching this address
    meetings.over(CALL)
    with pytest.raises(GangBroken, match="did not get the address"):
        meetings.seat(CALL, GangPlace(1, 2), limit_s=0.01)


def test_gang_of_one_needs_no_address(meetings: GangMeetings, said: list[Listens]) -> None:
    place = meetings.seat(CALL, GangPlace(0, 1), limit_s=0.0)
    assert (place.rendezvous, place.listener, said) == ("", None, [])


def test_rank_0_that_cannot_listen_names_its_address() -> None:
    elsewhere = GangMeetings(host="192.0.2.1", say=lambda _: None)  # an address reserved for documentation
    with pytest.raises(GangBroken, match=r"rank 0 of 2 cannot listen on 192\.0\.2\.1"):
        elsewhere.seat(CALL, GangPlace(0, 2), limit_s=1.0)

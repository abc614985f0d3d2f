"""Pieces of many calls share frames, and the ranks of a gang meet."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict

import pytest

from stoker.errors import GangBroken
from stoker.pilot.library import pieces
from stoker.pilot.library.pieces import GangMeetings, PieceBatcher
from stoker.protocol.calls import GangPlace
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import RankZeroListens, Yielded


def piece(run: int, number: int) -> Yielded:
    return Yielded(CallId(run), run, number, [b"%d/%d" % (run, number)])


@pytest.fixture
def frames() -> list[list[Yielded]]:
    return []


@pytest.fixture
def waiting(frames, monkeypatch) -> PieceBatcher:
    """Return a batcher that has just sent a frame, so that the next pieces wait for hours."""
    monkeypatch.setattr(pieces, "MAX_PAUSE_PER_CALL_S", 10_000.0)
    monkeypatch.setattr(pieces, "MAX_PAUSE_S", 10_000.0)
    found = PieceBatcher(frames.append)
    found.yielding_calls = 3
    found.add_pieces(piece(1, 0), at_once=False)
    assert [each.run for each in frames.pop()] == [1]
    return found


def test_first_piece_of_a_call_is_sent_with_all_waiting_pieces(waiting, frames):
    waiting.add_pieces(piece(1, 1), at_once=False)
    waiting.add_pieces(piece(2, 7), at_once=False)
    waiting.add_pieces(piece(1, 2), at_once=False)
    assert not frames
    waiting.add_pieces(piece(3, 0), at_once=True)
    [frame] = frames
    assert [(each.run, each.first, each.items) for each in frame] == [
        (1, 1, [b"1/1", b"1/2"]), (2, 7, [b"2/7"]), (3, 0, [b"3/0"]),
    ]  # fmt: skip


def test_wait_for_the_reader_is_sent_with_the_waiting_pieces(waiting, frames):
    waiting.add_pieces(piece(1, 1), at_once=False)
    waiting.add_pieces(Yielded(CallId(1), 1, 2, [], waits=True), at_once=False)
    assert frames == [[Yielded(CallId(1), 1, 1, [b"1/1"], waits=True)]]


def test_pieces_with_many_bytes_are_sent_at_once(waiting, frames):
    waiting.add_pieces(Yielded(CallId(1), 1, 1, [bytes(pieces.MAX_GATHERED_BYTES)]), at_once=False)
    assert len(frames) == 1


def test_waiting_pieces_of_an_ended_call_are_dropped(waiting, frames):
    waiting.add_pieces(piece(1, 1), at_once=False)
    waiting.add_pieces(piece(2, 0), at_once=False)
    waiting.drop_pieces_of_run(1)
    waiting.add_pieces(piece(3, 0), at_once=True)
    assert [each.run for each in frames[0]] == [2, 3]


def test_pieces_of_many_threads_are_sent_once_and_in_order(frames):
    streams, count = 20, 50
    all_left = threading.Event()
    seen: dict[int, list[bytes]] = defaultdict(list)

    def send(frame: list[Yielded]) -> None:
        frames.append(frame)
        for each in frame:
            assert each.first == len(seen[each.run])
            seen[each.run] += each.items
        if sum(map(len, seen.values())) == streams * count:
            all_left.set()

    found = PieceBatcher(send)
    found.yielding_calls = streams

    def write(run: int) -> None:
        for number in range(count):
            found.add_pieces(piece(run, number), at_once=number == 0)

    writers = [threading.Thread(target=write, args=(run,)) for run in range(streams)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all_left.wait(60)  # the last pieces are sent although no later piece triggers sending
    assert seen == {run: [b"%d/%d" % (run, number) for number in range(count)] for run in range(streams)}
    assert len(frames) < streams * count


# ---- gangs


CALL = CallId(7)


@pytest.fixture
def said() -> list[RankZeroListens]:
    return []


@pytest.fixture
def meetings(said: list[RankZeroListens]) -> GangMeetings:
    return GangMeetings(host="127.0.0.1", send_message=said.append)


def test_rank_0_listens_before_it_reports_its_address(meetings: GangMeetings, said: list[RankZeroListens]) -> None:
    place = meetings.join_gang(CALL, GangPlace(0, 3), limit_s=1.0)
    assert said == [RankZeroListens(CALL, int(place.rendezvous.rpartition(":")[2]))]
    with socket.create_connection(("127.0.0.1", said[0].port)):
        place.listener.accept()[0].close()
    place.close()


def test_address_may_arrive_before_its_rank_requests_it(meetings: GangMeetings) -> None:
    meetings.record_address(CALL, "10.0.0.7:29500")
    place = meetings.join_gang(CALL, GangPlace(2, 3), limit_s=0.0)
    assert (place.rank, place.size, place.rendezvous, place.listener) == (2, 3, "10.0.0.7:29500", None)


def test_late_address_wakes_its_rank(meetings: GangMeetings) -> None:
    timer = threading.Timer(0.05, meetings.record_address, (CALL, "10.0.0.7:29500"))
    timer.start()
    assert meetings.join_gang(CALL, GangPlace(1, 2), limit_s=30.0).rendezvous == "10.0.0.7:29500"
    timer.join()


def test_address_of_another_call_is_ignored(meetings: GangMeetings) -> None:
    meetings.record_address(8, "10.0.0.7:29500")
    with pytest.raises(GangBroken, match=r"rank 1 of 2 did not get the address of rank 0 within"):
        meetings.join_gang(CALL, GangPlace(1, 2), limit_s=0.01)


def test_cancelled_rank_does_not_wait(meetings: GangMeetings) -> None:
    meetings.record_address(CALL, "")
    with pytest.raises(GangBroken, match="rank 1 of 2 was cancelled"):
        meetings.join_gang(CALL, GangPlace(1, 2), limit_s=30.0)
    meetings.record_address(CALL, "10.0.0.7:29500")  # this address is for the next gang of the call
    assert meetings.join_gang(CALL, GangPlace(1, 2), limit_s=0.0).rendezvous == "10.0.0.7:29500"


def test_address_of_one_gang_is_not_used_by_the_next_gang(meetings: GangMeetings) -> None:
    meetings.record_address(CALL, "10.0.0.7:29500")  # the rank ended without fetching this address
    meetings.forget_call(CALL)
    with pytest.raises(GangBroken, match="did not get the address"):
        meetings.join_gang(CALL, GangPlace(1, 2), limit_s=0.01)


def test_gang_of_one_rank_needs_no_address(meetings: GangMeetings, said: list[RankZeroListens]) -> None:
    place = meetings.join_gang(CALL, GangPlace(0, 1), limit_s=0.0)
    assert (place.rendezvous, place.listener, said) == ("", None, [])


def test_rank_0_that_cannot_listen_names_its_address() -> None:
    elsewhere = GangMeetings(host="192.0.2.1", send_message=lambda _: None)  # an address reserved for documentation
    with pytest.raises(GangBroken, match=r"rank 0 of 2 cannot listen on 192\.0\.2\.1"):
        elsewhere.join_gang(CALL, GangPlace(0, 2), limit_s=1.0)

"""Pieces of many calls share frames; the pieces of each call are sent once and in order."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from stoker.pilot.library import pieces
from stoker.pilot.library.pieces import PieceBatcher
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import Yielded


def piece(run: int, number: int) -> Yielded:
    return Yielded(CallId(run), run, number, [b"%d/%d" % (run, number)])


@pytest.fixture
def frames() -> list[list[Yielded]]:
    return []


@pytest.fixture
def waiting(frames, monkeypatch) -> PieceBatcher:
    """Return a batcher that has just sent a frame, so that pieces wait for hours."""
    monkeypatch.setattr(pieces, "GATHER_EACH_S", 10_000.0)
    monkeypatch.setattr(pieces, "GATHER_S", 10_000.0)
    found = PieceBatcher(frames.append)
    found.calls = 3
    found.add(piece(1, 0), at_once=False)
    assert [each.run for each in frames.pop()] == [1]
    return found


def test_first_piece_of_a_call_is_sent_with_all_waiting_pieces(waiting, frames):
    waiting.add(piece(1, 1), at_once=False)
    waiting.add(piece(2, 7), at_once=False)
    waiting.add(piece(1, 2), at_once=False)
    assert not frames
    waiting.add(piece(3, 0), at_once=True)
    [frame] = frames
    assert [(each.run, each.first, each.items) for each in frame] == [
        (1, 1, [b"1/1", b"1/2"]), (2, 7, [b"2/7"]), (3, 0, [b"3/0"]),
    ]  # fmt: skip


def test_reader_wait_of_a_call_is_reported_after_its_pieces(waiting, frames):
    waiting.add(piece(1, 1), at_once=False)
    waiting.add(Yielded(CallId(1), 1, 2, [], waits=True), at_once=False)
    assert frames == [[Yielded(CallId(1), 1, 1, [b"1/1"], waits=True)]]


def test_many_bytes_are_sent_at_once(waiting, frames):
    waiting.add(Yielded(CallId(1), 1, 1, [bytes(pieces.GATHER_BYTES)]), at_once=False)
    assert len(frames) == 1


def test_waiting_pieces_of_an_ended_call_are_dropped(waiting, frames):
    waiting.add(piece(1, 1), at_once=False)
    waiting.add(piece(2, 0), at_once=False)
    waiting.drop(1)
    waiting.add(piece(3, 0), at_once=True)
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
    found.calls = streams

    def write(run: int) -> None:
        for number in range(count):
            found.add(piece(run, number), at_once=number == 0)

    writers = [threading.Thread(target=write, args=(run,)) for run in range(streams)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all_left.wait(60)  # the last pieces are sent although no later piece triggers sending
    assert seen == {run: [b"%d/%d" % (run, number) for number in range(count)] for run in range(streams)}
    assert len(frames) < streams * count

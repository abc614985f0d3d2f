from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts import payloads
from stoker.errors import CallError, SerializationError, StreamDiffersError
from stoker.manager.executor.pieces import ACK_PIECES, MOST_PIECES, PieceInbox, PieceReader, wake_tasks
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId
from stoker.protocol.to_client import Pieces
from stoker.protocol.to_manager import PiecesTaken

CALL = CallId(3)


def make(**how: Any) -> PieceInbox:
    inbox = PieceInbox(**{"keeps_all": False, **how})
    inbox.expect_call(CALL)
    return inbox


def pieces(*numbers: int, run: int = 1, waits: bool = False, mark: str = "") -> Pieces:
    return Pieces(CALL, run, numbers[0] if numbers else 0, [f"{n}{mark}".encode() for n in numbers], waits)


def read(inbox: PieceInbox, first: int, count: int) -> list[bytes]:
    found = [inbox.take_piece(number) for number in range(first, first + count)]
    return [item[0] for item in found if item is not None]


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_pieces_are_read_in_order_before_the_end_of_the_stream(error: Exception | None) -> None:
    inbox = make()
    inbox.add_pieces(pieces(0, 1))
    assert read(inbox, 0, 2) == [b"0", b"1"]
    assert inbox.take_piece(2) is None
    inbox.end_stream(error, end=CallEnd(CALL, ok=True, pieces=2) if error is None else None)
    with pytest.raises(StopIteration if error is None else ValueError):
        inbox.take_piece(2)


def test_unreadable_piece_raises_at_its_position() -> None:
    inbox = make()
    good = payloads.dumps("good")
    inbox.add_pieces(Pieces(CALL, 1, 0, [good, good, b"no pickle", good]))
    reader = PieceReader(inbox, lambda _taken: None)
    assert reader.take_arrived(most=9) == ["good", "good"]
    with pytest.raises(SerializationError, match="piece 2 "):
        next(reader)


def test_tasks_of_many_streams_are_woken_together() -> None:
    inboxes = [make() for _ in range(3)]

    async def read() -> list[Any]:
        readers = [asyncio.ensure_future(anext(PieceReader(each, lambda _taken: None))) for each in inboxes]
        await asyncio.sleep(0)
        for inbox in inboxes:
            inbox.add_pieces(Pieces(CALL, 1, 0, [payloads.dumps("one")]))
        await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        waiters = [waiter for inbox in inboxes for waiter in inbox.take_waiters()]
        assert len(waiters) == 3
        waiters[0].cancel()
        wake_tasks(waiters)
        return await asyncio.gather(*readers, return_exceptions=True)

    found = asyncio.run(read())
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == ["one", "one"]


def test_acknowledgements_are_batched_unless_the_call_waits() -> None:
    inbox = make()
    assert inbox.add_pieces(pieces(*range(ACK_PIECES - 1))) is None
    assert inbox.add_pieces(pieces(ACK_PIECES - 1)) == PiecesTaken(CALL, 1, ACK_PIECES)
    assert inbox.add_pieces(pieces(ACK_PIECES, waits=True)) == PiecesTaken(CALL, 1, ACK_PIECES + 1)
    # the pilot asks again, because the acknowledgement was lost
    again = Pieces(CALL, 1, ACK_PIECES + 1, [], waits=True)
    assert inbox.add_pieces(again) == PiecesTaken(CALL, 1, ACK_PIECES + 1)


def test_full_inbox_delays_acknowledgements_until_pieces_are_read() -> None:
    inbox = make()
    inbox.add_pieces(pieces(*range(MOST_PIECES)))
    assert inbox.add_pieces(pieces(MOST_PIECES, MOST_PIECES + 1, waits=True)) is None
    first = inbox.take_piece(0)
    assert first is not None
    assert first[2] is None
    second = inbox.take_piece(1)
    assert second is not None
    assert second[2] == PiecesTaken(CALL, 1, MOST_PIECES + 2)
    kept = make(keeps_all=True)
    kept.add_pieces(pieces(*range(MOST_PIECES)))
    assert kept.add_pieces(pieces(MOST_PIECES, waits=True)) == PiecesTaken(CALL, 1, MOST_PIECES + 1)


@pytest.mark.parametrize("keeps_all", [True, False])
def test_rerun_stream_continues_after_the_pieces_already_read(keeps_all: bool) -> None:
    inbox = make(keeps_all=keeps_all)
    inbox.add_pieces(pieces(0, 1, 2, 3))
    assert read(inbox, 0, 1) == [b"0"]
    inbox.add_pieces(pieces(0, run=2))
    inbox.add_pieces(pieces(1, run=2, mark="!"))
    assert read(inbox, 1, 9) == [b"1!"], "only pieces of the last run wait"
    inbox.add_pieces(pieces(2, 3, run=2, mark="!"))
    assert read(inbox, 2, 9) == [b"2!", b"3!"]


@pytest.mark.parametrize("keeps_all", [True, False])
def test_rerun_that_differs_from_pieces_already_read_raises_an_error(keeps_all: bool) -> None:
    inbox = make(keeps_all=keeps_all)
    inbox.add_pieces(pieces(0, 1, 2))
    read(inbox, 0, 2)
    with pytest.raises(StreamDiffersError, match=r"piece 1 .*2 pieces were delivered.*rerun_may_differ") as caught:
        inbox.add_pieces(Pieces(CALL, 2, 0, [b"0", b"other"]))
    assert (caught.value.piece, caught.value.handed_on, caught.value.call) == (1, 2, "c-3")
    with pytest.raises(StreamDiffersError):
        inbox.take_piece(2)


def test_rerun_with_fewer_pieces_than_were_read_raises_an_error() -> None:
    inbox = make()
    inbox.add_pieces(pieces(0, 1, 2))
    read(inbox, 0, 2)
    inbox.add_pieces(pieces(0, run=2))
    inbox.end_stream(end=CallEnd(CALL, ok=True, pieces=1))
    with pytest.raises(StreamDiffersError, match="the new run sent only 1"):
        inbox.take_piece(2)


def test_stream_end_raises_an_error_if_pieces_are_missing() -> None:
    inbox = make(keeps_all=True)
    inbox.add_pieces(pieces(0))
    with pytest.raises(CallError, match="2 of its 3 pieces did not arrive"):
        inbox.pickled_pieces_at_end(CallEnd(CALL, ok=True, pieces=3))


def test_reconnected_program_requests_missing_pieces() -> None:
    inbox = make()
    assert inbox.request_lost_pieces() == PiecesTaken(CALL, 0, 0, again=True)
    inbox.add_pieces(pieces(0, 1))
    assert inbox.request_lost_pieces() == PiecesTaken(CALL, 1, 2, again=True)
    inbox.close()
    assert inbox.request_lost_pieces() is None
    assert inbox.add_pieces(pieces(2)) is None


def test_earlier_run_of_a_stream_may_continue_after_a_later_run() -> None:
    inbox = make()
    inbox.add_pieces(pieces(0, 1))
    inbox.add_pieces(pieces(0, run=2))
    inbox.add_pieces(pieces(2, 3, run=1))  # the first run's pilot is connected again
    assert read(inbox, 0, 9) == [b"0", b"1", b"2", b"3"]


@given(st.data())
def test_each_piece_is_delivered_once_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    inbox, got, sent = make(), [], {}
    run = 1
    while len(got) < count:
        step = data.draw(st.sampled_from(["send", "send", "repeat", "lose", "rerun", "read"]))
        at = sent.get(run, 0)
        if step == "rerun" and run < 5:
            run += 1
        elif step == "read":
            got += read(inbox, len(got), data.draw(st.integers(0, 5)))
        elif at < count:
            items = list(range(at, min(count, at + data.draw(st.integers(1, 8)))))
            if step != "lose":
                inbox.add_pieces(pieces(*items, run=run))
                sent[run] = items[-1] + 1
            if step == "repeat":
                inbox.add_pieces(pieces(*range(items[-1] + 1), run=run))
        else:
            got += read(inbox, len(got), count)
    assert got == [b"%d" % number for number in range(count)]

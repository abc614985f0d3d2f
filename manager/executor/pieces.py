"""The pieces of one call: the link's thread adds pieces, and the program's threads read them.

Each run of a call sends all pieces. A later run must repeat the pieces that the program has read, so the inbox stores
an eight-byte digest of each such piece. Later pieces may differ. A full inbox acknowledges nothing, so that the call
waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from stoker.contexts import payloads
from stoker.contexts.payload_layout import Buffer
from stoker.errors import CallError, SerializationError, StreamDiffersError
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, format_call_id
from stoker.protocol.to_client import Pieces
from stoker.protocol.to_manager import PiecesTaken

MOST_PIECES, MOST_BYTES = 4_096, 16_000_000
"""Number of unread pieces or bytes above which no acknowledgement is sent."""
ACK_PIECES, ACK_BYTES = 64, 250_000
"""Numbers of pieces or bytes after which an acknowledgement is sent. A waiting call gets it immediately."""
TakenPiece = tuple[Any, bool, PiecesTaken | None]
"""A piece; True if it is a value, False if it is bytes; and the acknowledgement to send now."""


class PieceInbox:
    """The received pieces of one call. `keeps_all`: keep all pieces for the call's result, without limit. `may_differ`:
    a repeated run may yield other pieces.
    """

    def __init__(self, *, keeps_all: bool, may_differ: bool = False) -> None:
        self.keeps_all = keeps_all
        self.call: CallId | None = None
        self._may_differ = may_differ
        self._items: list[Any] | deque[Any] = [] if keeps_all else deque()
        self._holds_values = False
        """True if the items are values instead of bytes."""
        self._bytes = 0
        self._taken = 0
        self._digests: array[int] = array("Q")
        """Digests of read pieces, to detect reruns that differ."""
        self._expected_numbers: dict[int, int] = {}
        """Number of the next expected piece, by run of the call."""
        self._run = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0
        self._is_ack_due = False
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiters: list[asyncio.Future[None]] = []

    # ---- for the link

    def expect_call(self, call: CallId) -> None:
        """Expect the pieces of this call, which may be Parsl's retry of an earlier call."""
        with self._changed:
            self.call = call

    def add_pieces(self, message: Pieces) -> PiecesTaken | None:
        """Add pieces; return the acknowledgement to send now. The caller then wakes the tasks of `take_waiters`."""
        with self._changed:
            if self._is_over:
                return None
            due = self._expected_numbers.setdefault(message.run, 0)
            if message.run != self._run:
                self._run, self._acknowledged, self._unacknowledged_bytes = message.run, due, 0
            for number, item in enumerate(message.items, message.first):
                if number > due:  # earlier pieces were lost with a connection; all pieces are sent again
                    break
                if number == due:
                    due = self._expected_numbers[message.run] = due + 1
                    self._unacknowledged_bytes += len(item)
                    self._add_piece(number, item)
            self._is_ack_due |= message.waits
            self._changed.notify_all()
            return self._acknowledgement_if_due()

    def take_waiters(self) -> list[asyncio.Future[None]]:
        with self._changed:
            waiters, self._waiters = self._waiters, []
        return waiters

    def request_lost_pieces(self) -> PiecesTaken | None:
        with self._changed:
            if self.call is None or self._is_over:
                return None
            if not self._is_full():
                self._mark_received_as_acknowledged()
            return PiecesTaken(self.call, self._run, self._acknowledged, again=True)

    def _add_piece(self, number: int, item: bytes) -> None:
        if number < self._taken:
            if number < len(self._digests) and self._digests[number] != _piece_digest(item):
                self._raise_stream_differs(f"piece {number:,} (counted from 0) of the new run differs", number)
            return
        place = number - self._first_kept_number
        if place < len(self._items):
            if self._items[place] == item:
                return
            self._drop_pieces_from(place)
        self._items.append(item)
        self._bytes += len(item)

    def _acknowledgement_if_due(self) -> PiecesTaken | None:
        fresh = self._expected_numbers.get(self._run, self._acknowledged) - self._acknowledged
        is_due = self._is_ack_due or fresh >= ACK_PIECES or self._unacknowledged_bytes >= ACK_BYTES
        if not is_due or self.call is None or self._is_full():
            return None
        self._mark_received_as_acknowledged()
        return PiecesTaken(self.call, self._run, self._acknowledged)

    def _mark_received_as_acknowledged(self) -> None:
        self._acknowledged = self._expected_numbers.get(self._run, self._acknowledged)
        self._is_ack_due, self._unacknowledged_bytes = False, 0

    # ---- the end

    def pickled_pieces_at_end(self, end: CallEnd) -> list[bytes]:
        with self._changed:
            self._check_piece_count(end)
            return list(self._items)

    def end_stream(
        self, error: BaseException | None = None, *, end: CallEnd | None = None, values: list[Any] | None = None
    ) -> None:
        """End the stream after the pieces that have arrived, or replace the pieces by these values."""
        with self._changed:
            if values is not None:
                self._items, self._holds_values = values, True
            if end is not None and end.ok:
                try:
                    self._check_piece_count(end)
                except CallError as wrong:
                    error = wrong
            self._error = self._error or error
            self._end_stream()

    def close(self) -> None:
        with self._changed:
            self._drop_pieces_from(0)
            self._end_stream()

    def _check_piece_count(self, end: CallEnd) -> None:
        here = self._first_kept_number + len(self._items)
        if end.pieces > here:
            raise CallError(
                f"call {format_call_id(end.call)}: {end.pieces - here} of its {end.pieces} pieces did not arrive: call"
                " again",
                call=format_call_id(end.call),
            )
        if end.pieces < self._taken and not self._may_differ:
            self._raise_stream_differs(f"the new run sent only {end.pieces:,}", end.pieces)
        self._drop_pieces_from(max(0, end.pieces - self._first_kept_number))

    def _raise_stream_differs(self, what: str, at: int) -> None:
        call, handed = format_call_id(self.call or 0), self._taken
        self._drop_pieces_from(max(0, handed - self._first_kept_number))
        error = StreamDiffersError(
            f"call {call} ran again, as it does when its pilot is lost, and {what}; {handed:,} pieces were delivered"
            " before. Make the function yield the same pieces each time (a seed, greedy decoding), or allow runs to"
            " differ: stoker.stream(..., rerun_may_differ=True)",
            call=call,
            piece=at,
            handed_on=handed,
        )
        self._error = error
        self._end_stream()
        raise error

    def _end_stream(self) -> None:
        self._is_over, self._digests = True, array("Q")
        self._changed.notify_all()
        wake_tasks(self.take_waiters())

    # ---- for the program

    def take_piece(self, number: int) -> TakenPiece | None:
        """Return a piece; None before it arrives. After the last piece, raise the call's error or StopIteration."""
        with self._changed:
            if self._has_piece(number):
                return self._take_piece(number)
            if self._is_over:
                raise self._error or StopIteration
            return None

    def take_arrived(self, number: int, *, most: int) -> list[TakenPiece]:
        with self._changed:
            count = min(most, self._first_kept_number + len(self._items) - number)
            return [self._take_piece(each) for each in range(number, number + count)]

    def _take_piece(self, number: int) -> TakenPiece:
        item = self._items[number - self._first_kept_number]
        if number != self._taken:  # this piece was read before, so do not count it again
            return item, self._holds_values, None
        if isinstance(self._items, deque):
            self._items.popleft()
            self._bytes -= len(item)
        self._taken += 1
        if not (self._may_differ or self._is_over):
            self._digests.append(_piece_digest(item))
        return item, self._holds_values, None if self.keeps_all else self._acknowledgement_if_due()

    def wait_for_piece(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._has_piece(number))

    def create_piece_waiter(self, number: int) -> asyncio.Future[None] | None:
        """Return a future that ends when `take_piece` may succeed; None if it can succeed now."""
        with self._changed:
            if self._is_over or self._has_piece(number):
                return None
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            return waiter

    def _has_piece(self, number: int) -> bool:
        return number - self._first_kept_number < len(self._items)

    # ---- helpers; the caller holds the lock

    @property
    def _first_kept_number(self) -> int:
        return 0 if self.keeps_all else self._taken

    def _is_full(self) -> bool:
        return not self.keeps_all and (len(self._items) > MOST_PIECES or self._bytes > MOST_BYTES)

    def _drop_pieces_from(self, place: int) -> None:
        while len(self._items) > place:
            self._bytes -= len(self._items.pop())


def _piece_digest(piece: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(piece, digest_size=8).digest())


def wake_tasks(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Wake tasks from any thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, theirs in by_loop.items():
        with suppress(RuntimeError):  # a closed loop has no tasks to wake
            loop.call_soon_threadsafe(_end_futures, theirs)


def _end_futures(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def unpickle_result_or_piece(data: Buffer, *, call: int | None, piece: int | None = None) -> Any:
    try:
        return payloads.loads(data, keep_classes=True)
    except BaseException as error:  # classes in the value may raise SystemExit, which would end this thread
        if payloads.is_interrupt(error):
            raise
        name, what = format_call_id(call or 0), "result" if piece is None else f"piece {piece:,} (counted from 0)"
        text = f"call {name}: its {what} cannot be unpickled here: {error!r}"
        if isinstance(error, ImportError | AttributeError):
            text += "; the modules that define it must be importable in this program too"
        raise SerializationError(text, what="result", call=name) from error


class PieceReader(Iterator[Any], AsyncIterator[Any]):
    """The pieces of a call in order, for `for` and `async for`. After the last piece, the inbox or `at_end` may raise
    the call's error.
    """

    def __init__(
        self, inbox: PieceInbox, acknowledge: Callable[[PiecesTaken], None], *,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._inbox = inbox
        self._acknowledge = acknowledge
        self._at_end = at_end
        self._read_lock = threading.Lock()
        self.taken = 0
        self._unreadable: SerializationError | None = None

    def __iter__(self) -> PieceReader:
        return self

    def __next__(self) -> Any:
        while (found := self._take_piece()) is None:
            self._inbox.wait_for_piece(self.taken)
        return self._unpickle_piece(*found)

    def __aiter__(self) -> PieceReader:
        return self

    async def __anext__(self) -> Any:
        try:
            while (found := self._take_piece()) is None:
                changed = self._inbox.create_piece_waiter(self.taken)
                if changed is not None:
                    await changed
        except StopIteration:
            raise StopAsyncIteration from None
        return self._unpickle_piece(*found)

    def take_arrived(self, most: int = 64) -> list[Any]:
        """Return up to `most` pieces that have arrived, without blocking. If unpickling a piece fails, the next step of
        the loop raises the error."""
        with self._read_lock:
            first, taken = self.taken, self._inbox.take_arrived(self.taken, most=most)
            self.taken += len(taken)
        found: list[Any] = []
        try:
            for number, each in enumerate(taken, first):
                found.append(self._unpickle_piece(number, *each))
        except SerializationError as error:
            self._unreadable = error
        return found

    def _take_piece(self) -> tuple[int, Any, bool, PiecesTaken | None] | None:
        with self._read_lock:
            if self._unreadable is not None:
                raise self._unreadable
            try:
                found = self._inbox.take_piece(self.taken)
            except StopIteration:
                self._at_end()
                raise
            if found is None:
                return None
            self.taken += 1
            return self.taken - 1, *found

    def _unpickle_piece(self, number: int, item: Any, is_value: bool, acknowledged: PiecesTaken | None) -> Any:
        if acknowledged is not None:
            self._acknowledge(acknowledged)
        return item if is_value else unpickle_result_or_piece(item, call=self._inbox.call, piece=number)

"""How a program reads the pieces of a call: in a loop, or in an `async for`."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from stoker.contexts import payloads
from stoker.errors import SerializationError
from stoker.manager.executor.failures import unpickling_advice
from stoker.manager.executor.piece_inbox import PieceInbox
from stoker.protocol.ids import show_call
from stoker.protocol.to_manager import PiecesTaken


def open_piece(data: bytes, *, call: int | None, number: int) -> Any:
    """A piece from its bytes. Raises SerializationError."""
    try:
        return payloads.loads(data, keep_classes=True)
    except BaseException as error:  # what its classes do may raise SystemExit
        if payloads.is_interrupt(error):
            raise
        raise SerializationError(
            f"call {show_call(call or 0)}: its piece {number:,} (counted from 0) cannot be unpickled here:"
            f" {error!r}{unpickling_advice(error)}",
            what="result",
        ) from error


class PieceReader(Iterator[Any], AsyncIterator[Any]):
    """The pieces of a call in order, each as soon as it is there; what the call raised comes behind them. For `for` and
    for `async for`. `acknowledge` is called with what the manager is to be told; `at_end`, behind the last piece,
    raises what the call raised."""

    def __init__(
        self,
        inbox: PieceInbox,
        acknowledge: Callable[[PiecesTaken], None],
        *,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._inbox = inbox
        self._acknowledge = acknowledge
        self._at_end = at_end
        self._taking = threading.Lock()
        """Several threads may share a reader."""
        self.taken = 0
        """How many pieces it has given."""
        self._unreadable: SerializationError | None = None
        """Why a piece that was taken ahead cannot be given."""

    def __iter__(self) -> PieceReader:
        return self

    def __next__(self) -> Any:
        while (found := self._take()) is None:
            self._inbox.wait(self.taken)
        return self._opened(*found)

    def __aiter__(self) -> PieceReader:
        return self

    async def __anext__(self) -> Any:
        try:
            while (found := self._take()) is None:
                changed = self._inbox.when_changed(self.taken)
                if changed is not None:
                    await changed
        except StopIteration:
            raise StopAsyncIteration from None
        return self._opened(*found)

    def take_arrived(self, *, most: int) -> list[Any]:
        """The next pieces that have come, at most so many; empty if none has. Never waits, and raises nothing: that is
        for the next one."""
        with self._taking:
            first, taken = self.taken, self._inbox.take_arrived(self.taken, most=most)
            self.taken += len(taken)
        found: list[Any] = []
        try:
            for number, each in enumerate(taken, first):
                found.append(self._opened(number, *each))
        except SerializationError as error:
            self._unreadable = error
        return found

    def _take(self) -> tuple[int, Any, bool, PiecesTaken | None] | None:
        with self._taking:
            if self._unreadable is not None:
                raise self._unreadable
            try:
                found = self._inbox.take(self.taken)
            except StopIteration:
                self._at_end()
                raise
            if found is None:
                return None
            self.taken += 1
            return self.taken - 1, *found

    def _opened(self, number: int, item: Any, is_value: bool, acknowledged: PiecesTaken | None) -> Any:
        if acknowledged is not None:
            self._acknowledge(acknowledged)
        return item if is_value else open_piece(item, call=self._inbox.call, number=number)

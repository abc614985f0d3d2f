"""Calls in both directions over one socket, between a gateway and each worker.

A frame is its length in four bytes, then a MessagePack list: kind, number of the call, arguments.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

log = logging.getLogger("stoker.gateway")

_LENGTH = struct.Struct(">I")
_CALL, _NOTE, _CANCEL, _RESULT, _ERROR = range(5)
_ENDED = "the other process has ended"


class PeerLostError(ConnectionError):
    """The other process has ended, or a call failed there."""


class GatewayPeer:
    """`do`: executes a call of the other process, by name and arguments."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        do: Callable[[str, list[Any]], Awaitable[Any]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._do = do
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._work: dict[int, asyncio.Task[None]] = {}
        """Running calls of the other process, by number."""
        self._is_over = False

    async def call(self, name: str, *given: Any) -> Any:
        """Return the result of a call in the other process. A cancellation cancels it there. Raises PeerLostError."""
        if self._is_over:
            raise PeerLostError(_ENDED)
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(_CALL, number, name, given)
            await self._writer.drain()
            return await waiting
        except asyncio.CancelledError:
            self._write(_CANCEL, number)
            raise
        finally:
            del self._waiting[number]

    def note(self, name: str, *given: Any) -> None:
        """Send a call without waiting for a result."""
        self._write(_NOTE, next(self._numbers), name, given)

    async def run(self) -> None:
        """Execute calls and receive results until the other process ends."""
        try:
            while True:
                [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                kind, number, *rest = msgspec.msgpack.decode(await self._reader.readexactly(length))
                self._take(kind, number, rest)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._is_over = True
            for task in self._work.values():
                task.cancel()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(PeerLostError(_ENDED))
            self._writer.close()

    def _take(self, kind: int, number: int, rest: list[Any]) -> None:
        if kind in (_CALL, _NOTE):
            task = self._work[number] = asyncio.create_task(self._answer(number, *rest, has_result=kind == _CALL))
            task.add_done_callback(lambda _task: self._work.pop(number, None))
        elif kind == _CANCEL:
            if number in self._work:
                self._work[number].cancel()
        elif (waiting := self._waiting.get(number)) is not None and not waiting.done():
            if kind == _RESULT:
                waiting.set_result(rest[0])
            else:
                waiting.set_exception(PeerLostError(rest[0]))

    async def _answer(self, number: int, name: str, given: list[Any], *, has_result: bool) -> None:
        try:
            kind, result = _RESULT, await self._do(name, given)
        except Exception as error:
            log.warning("a call between the gateway's processes failed", exc_info=True)
            kind, result = _ERROR, str(error)
        if has_result:
            self._write(kind, number, result)

    def _write(self, *frame: Any) -> None:
        data = msgspec.msgpack.encode(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)

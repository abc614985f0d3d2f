"""An answer that is streamed: the pieces of its calls as events, and what is due when it ends or its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from stoker.apps.gateway.chunks import Chunks, comment, error_event
from stoker.apps.gateway.failures import refusal_of
from stoker.apps.gateway.guard import HeldRequest
from stoker.apps.gateway.metrics import RequestFigures
from stoker.apps.gateway.wire import ClientLeft

_HEADERS_S = 1.0
_HOT_HEADERS_S = 10.0
"""A stream whose call is silent for so long begins with comments (the second: that of a model that is loaded, which is
short of a turn and not of a model). Until then an error has a status, by which clients try again."""
_COMMENT_S = 2.0
_ENDS_S = 1.0
"""A call that is cancelled ends within this long."""


class RunningRequest:
    """A request that has been let in, until it is over: its figures, and its place among those of its key."""

    def __init__(self, figures: RequestFigures, held: HeldRequest) -> None:
        self.figures = figures
        self._held = held
        self._over = False

    def count(self, read: int, written: int) -> None:
        """All tokens that it has read, and those written that are not counted yet."""
        self.figures.read(read)
        if written:
            self.figures.written(written)
        self.count_tokens(read + written)

    def count_tokens(self, tokens: int) -> None:
        """The tokens that count for its key's limits, read and written."""
        self._held.tokens = tokens

    def end(self, error: BaseException | None) -> None:
        """It is over; twice is no error."""
        if not self._over:
            self._over = True
            self._held.end()
            self.figures.end(error)

    def leave(self, error: BaseException) -> None:
        """Its client has left. Its calls are cancelled, and count among those of its key until they have ended."""
        if not self._over:
            self._over = True
            asyncio.get_running_loop().call_later(_ENDS_S, self._held.end)
            self.figures.end(error)


class StreamedAnswer:
    """The events of one answer. `pieces` are (place of the choice, its pieces that have come); `waits_for` says why
    there is none yet, and `is_hot` whether the model is loaded. `failed` is told of an error that ends the stream."""

    def __init__(
        self,
        pieces: AsyncGenerator[tuple[int, list[Any]], None],
        chunks: Chunks,
        running: RunningRequest,
        *,
        waits_for: Callable[[], Awaitable[str]],
        is_hot: Callable[[], Awaitable[bool]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._pieces = pieces
        self._chunks = chunks
        self._running = running
        self._waits_for = waits_for
        self._is_hot = is_hot
        self._failed = failed
        self._first: asyncio.Future[tuple[int, list[Any]]] = asyncio.ensure_future(anext(pieces))
        self._failure: BaseException | None = None
        self._is_whole = False

    async def begin(self) -> None:
        """Wait a moment for the first piece. Raises what the calls raise until then."""
        await asyncio.wait({self._first}, timeout=_HEADERS_S)
        if not self._first.done() and await self._is_hot():
            await asyncio.wait({self._first}, timeout=_HOT_HEADERS_S - _HEADERS_S)
        if self._first.done():
            self._first.result()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events: comments until there is a piece, chunks, and how it ended."""
        try:
            while not self._first.done():
                yield comment(await self._waits_for())
                await asyncio.wait({self._first}, timeout=_COMMENT_S)
            found: tuple[int, list[Any]] | None = self._first.result()
            while found is not None:
                before = self._chunks.written
                events = self._chunks.events(*found)
                if tokens := self._chunks.written - before:
                    self._running.figures.written(tokens, streamed=True)
                yield events
                found = await anext(self._pieces, None)
            self._is_whole = True
            yield self._chunks.end()
        except Exception as error:
            self._failure = error
            self._failed(error)
            yield error_event(refusal_of(error).error)
        except BaseException as error:
            self._failure = error
            raise

    async def close(self) -> None:
        """The response is over, or its client has gone: calls that still run end, and the request is counted."""
        self._running.figures.read(self._chunks.read)
        self._running.count_tokens(self._chunks.tokens)
        if self._is_whole or isinstance(self._failure, Exception):
            self._running.end(self._failure)
        else:
            self._running.leave(self._failure or ClientLeft())
        await self.leave()

    async def leave(self) -> None:
        """End the calls."""
        self._first.cancel()
        await asyncio.wait({self._first})
        if not self._first.cancelled():
            self._first.exception()  # the stream has told its client of it, or has no client any more
        await self._pieces.aclose()

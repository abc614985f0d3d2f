"""The calls of one request, and their pieces as they come. To leave them cancels what still runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import stoker
from stoker.apps.common.openai.request import ApiError, ApiRequest, RequestRefused
from stoker.errors import StreamDiffersError
from stoker.sessions import StokerApp

_WAITING = 4
"""The most groups of pieces that wait for a slow client of several choices. When there are more, the calls wait."""
Piece = Any
"""What a function of `functions.py` gives, and no ApiError."""


class ModelRefused(RequestRefused):
    """The model has refused a request."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


async def pieces_of(app: StokerApp, request: ApiRequest) -> AsyncGenerator[list[Piece], None]:
    """The pieces of one call, in groups: each group has all pieces that have arrived since the one before. Raises
    ModelRefused, and what the call raises."""
    with stoker.stream(app, request) as stream:
        async for piece in stream:
            if isinstance(piece, ApiError):
                raise ModelRefused(piece)
            yield [piece, *stream.take_arrived()]


async def joined_pieces(
    app: StokerApp, requests: Sequence[ApiRequest]
) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """The pieces of a call a request, with the request's place, as they come. Raises as `pieces_of`: the first error
    ends all calls."""
    if len(requests) == 1:
        async with aclosing(pieces_of(app, requests[0])) as pieces:
            async for some in pieces:
                yield 0, some
        return
    come: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue(_WAITING)

    async def run(place: int) -> None:
        try:
            async with aclosing(pieces_of(app, requests[place])) as pieces:
                async for some in pieces:
                    await come.put((place, some))
            await come.put(None)
        except Exception as error:
            await come.put(error)

    tasks = [asyncio.create_task(run(place)) for place in range(len(requests))]
    left = len(tasks)
    try:
        while left:
            match await come.get():
                case None:
                    left -= 1
                case BaseException() as error:
                    raise error
                case found:
                    yield found
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def all_pieces(app: StokerApp, requests: Sequence[ApiRequest]) -> list[list[Piece]]:
    """All pieces that each of these calls gives, in the order of the requests. Raises as `joined_pieces`.

    The client has had none of them. So if a call runs again and its new pieces differ, all are made once more.
    """
    try:
        return await _collected(app, requests)
    except StreamDiffersError:
        return await _collected(app, requests)


async def _collected(app: StokerApp, requests: Sequence[ApiRequest]) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in requests]
    async with aclosing(joined_pieces(app, requests)) as pieces:
        async for place, some in pieces:
            found[place] += some
    return found

"""HTTP requests, responses and middleware for all routes."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.failures import error_for_client

T = TypeVar("T")
_LARGEST_BODY_FACTOR = 16
"""A body over the size limit is still read up to this multiple of the limit, because clients read an answer only after
sending the body.
"""
_REQUEST_ID = "x-request-id"


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = id
            await send(message)

        await self._app(scope, receive, send_with_id)


class CrossOriginMiddleware:
    """If the gateway requires keys, web pages from `origins` (empty: all) may send requests. Without keys, `KeyGuard`
    refuses pages of other sites.
    """

    def __init__(self, app: ASGIApp, *, is_open: Callable[[], bool], origins: Sequence[str]) -> None:
        self._app = app
        self._is_open = is_open
        self._cors = CORSMiddleware(
            app, allow_origins=list(origins) or ["*"], allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=[_REQUEST_ID, "retry-after"], max_age=600,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if self._is_open() else self._cors
        await app(scope, receive, send)


class ClientDisconnected(Exception): ...


class JSONResponse(Response):  # type: ignore[misc]  # starlette has no types here
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def stream_json_parts(parts: Iterator[bytes]) -> Response:
    """Answer with JSON that is encoded in parts during sending, to limit memory use."""
    first, second = next(parts), next(parts, None)
    if second is None:
        return Response(first, media_type="application/json")

    async def encode_parts() -> AsyncGenerator[bytes, None]:
        for part in itertools.chain([first, second], parts):
            yield part
            await asyncio.sleep(0)  # let other requests run, even if the send does not wait

    return StreamingResponse(encode_parts(), media_type="application/json")


def make_error_response(error: BaseException) -> Response:
    """Return an error in OpenAI's format, with headers that control retries."""
    refusal = error_for_client(error)
    headers = {}
    if refusal.retry_after_s:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    elif refusal.status >= 500:
        headers["x-should-retry"] = "false"
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refusal.body, refusal.status, headers)


async def receive_body(request: Request, *, most_bytes: int) -> bytes:
    """Return the body of a request. Raises RequestRefused (413) above `most_bytes`, or ClientDisconnected."""
    parts: list[bytes] = []
    size, has_more = 0, True
    while has_more and size <= most_bytes * _LARGEST_BODY_FACTOR:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size <= most_bytes:
            parts.append(part)
        has_more = message.get("more_body", False)
    if size > most_bytes:
        raise RequestRefused(f"the body has more than {most_bytes:,} bytes", code="request_too_large", status=413)
    return b"".join(parts)


async def result_unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientDisconnected."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        await _cancel_and_wait(working)
        await _cancel_and_wait(gone)


_SILENT_S = 15.0
"""Seconds without an event before a stream sends a comment, because proxies close silent connections after a minute."""
_FEW_STREAMS = 8
_APART_S = 0.015
"""Seconds between two writes to a stream while many streams are open. Fewer writes save time: without grouping, they
take a third of the gateway's time.
"""


class EventStream(Response):  # type: ignore[misc]
    """Server-sent events, with comments during silence. `at_end`: called at the end, or on a disconnect.

    While many streams are open, consecutive events are grouped, unless `at_once` is true.
    """

    media_type = "text/event-stream"
    open_streams = 0

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, at_end: Callable[[], Awaitable[None]] | None = None,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._at_once = at_once
        self._events = events
        self._at_end = at_end
        self._is_open = False
        self._was_silent = False
        """True if no event was sent since the last check."""
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        beside = asyncio.create_task(self._send_keepalive_comments(send))
        try:
            with suppress(ClientDisconnected):
                await result_unless_disconnected(receive, self._send_stream(send))
        finally:
            await _cancel_and_wait(beside)
            await self._events.aclose()
            if self._at_end is not None:
                await self._at_end()

    async def _send_stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._is_open = True
        EventStream.open_streams += 1
        try:
            await self._send_events(send)
        finally:
            EventStream.open_streams -= 1
        self._is_open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        sent_at = 0.0
        async for event in self._events:
            if not event:
                continue
            self._was_silent = False
            await send({"type": "http.response.body", "body": event, "more_body": True})
            before, sent_at = sent_at, time.monotonic()
            many = EventStream.open_streams > _FEW_STREAMS and not self._at_once
            if many and sent_at - before < _APART_S:
                await asyncio.sleep(_APART_S)
                sent_at += _APART_S

    async def _send_keepalive_comments(self, send: Send) -> None:
        while True:
            self._was_silent = True
            await asyncio.sleep(_SILENT_S)
            if self._was_silent and self._is_open:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel_and_wait(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(BaseException):
        await task

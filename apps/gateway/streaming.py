"""Run the calls of a request, merge the pieces of their results, and create the events of a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec

import stoker
from stoker.apps.common.openai_answers import (
    AnswerPiece,
    Likelihoods,
    TextBegun,
    TextEnded,
    TextPiece,
    TokenPiece,
    build_answer_head,
    build_chat_logprobs,
    build_completion_logprobs,
    build_delta_body,
    build_token_usage,
)
from stoker.apps.common.openai_requests import ApiError, ApiRequest, Endpoint, RequestRefused
from stoker.apps.gateway.failures import error_for_client
from stoker.apps.gateway.figures import RunningRequest
from stoker.apps.gateway.responses import ResponseEvents
from stoker.apps.gateway.served import SessionWatch
from stoker.apps.gateway.wire import ClientDisconnected
from stoker.errors import StreamDiffersError
from stoker.sessions import StokerApp

_WAITING = 4
"""Maximum number of groups of pieces that wait for a slow client. Beyond this number, the calls wait too."""
Piece = Any
"""A result of a function in `functions.py`, other than ApiError."""


async def stream_call_pieces(app: StokerApp, request: ApiRequest) -> AsyncGenerator[list[Piece], None]:
    """Yield the pieces of one call, grouped by arrival. Raises RequestRefused and errors of the call."""
    with stoker.stream(app, request) as stream:
        async for piece in stream:
            if isinstance(piece, ApiError):
                raise RequestRefused(**msgspec.structs.asdict(piece))
            yield [piece, *stream.take_arrived()]


async def stream_merged_call_pieces(
    app: StokerApp, requests: Sequence[ApiRequest]
) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """Yield the pieces of one call per request, with the request's index. An error ends all calls."""
    if len(requests) == 1:
        async with aclosing(stream_call_pieces(app, requests[0])) as pieces:
            async for some in pieces:
                yield 0, some
        return
    come: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue(_WAITING)

    async def forward_pieces(place: int) -> None:
        try:
            async with aclosing(stream_call_pieces(app, requests[place])) as pieces:
                async for some in pieces:
                    await come.put((place, some))
            await come.put(None)
        except Exception as error:
            await come.put(error)

    tasks = [asyncio.create_task(forward_pieces(place)) for place in range(len(requests))]
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


async def collect_pieces_with_retry(app: StokerApp, requests: Sequence[ApiRequest]) -> list[list[Piece]]:
    """Return all pieces of each call. If a call runs again and returns different pieces, repeat all calls once."""
    try:
        return await _collect_pieces(app, requests)
    except StreamDiffersError:
        return await _collect_pieces(app, requests)


async def _collect_pieces(app: StokerApp, requests: Sequence[ApiRequest]) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in requests]
    async with aclosing(stream_merged_call_pieces(app, requests)) as pieces:
        async for place, some in pieces:
            found[place] += some
    return found


DONE = b"data: [DONE]\n\n"
_MARK = b"\x00"
"""Placeholder for the text in an encoded event: a byte that JSON text does not contain."""
_encode = msgspec.json.encode


class ChunkEncoder:
    """Encodes a streamed answer. `read`, `written`: tokens so far; `finish_reasons`: why choices ended."""

    def __init__(
        self, *, endpoint: Endpoint, name: str, model: str, created: int, per_prompt: int, usage: bool,
        continuous: bool = False,
    ) -> None:  # fmt: skip
        """`per_prompt`: choices per prompt; `usage`: True to put token counts in the last chunk; `continuous`: True to
        put them in every chunk.
        """
        self._is_chat = endpoint is Endpoint.CHAT
        self._head = build_answer_head(endpoint, name=name, model=model, created=created, is_chunk=True)
        self._per_prompt = per_prompt
        self._usage = usage
        self._continuous = continuous
        self._offsets: dict[int, int] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes before and after the text of an event that has only text."""
        self.read, self.written = 0, 0
        self._completed = 0
        """Number of generated tokens of the ended choices."""
        self.finish_reasons: list[str] = []

    def encode_pieces(self, index: int, pieces: Sequence[TextPiece]) -> bytes:
        return b"".join([self._encode_piece(index, piece) for piece in pieces])

    def _encode_piece(self, index: int, piece: TextPiece) -> bytes:
        match piece:
            case str():
                self.written += 1
                if self._continuous:
                    return self._encode_choice(index, text=piece)
                head, tail = self._plain.get(index) or self._encode_plain_event_parts(index)
                return head + _encode(piece) + tail
            case TokenPiece():
                self.written += piece.tokens
                if piece.unshown:
                    self._offsets[index] = -piece.unshown
                return self._encode_choice(index, text=piece.text, likelihoods=piece.logprobs)
            case AnswerPiece():
                self.written += piece.tokens
                return self._encode_choice(index, delta=build_delta_body(piece.delta), likelihoods=piece.logprobs)
            case TextBegun():
                if index % self._per_prompt == 0:  # choices of one prompt share this prompt, so count it once
                    self.read += piece.prompt_tokens
                return self._encode_choice(index, first=True) if self._is_chat else b""
            case TextEnded():
                self._completed += piece.completion_tokens
                self.finish_reasons.append(piece.finish_reason)
                return self._encode_choice(index, finish=piece.finish_reason)

    def encode_end(self) -> bytes:
        self.written = self._completed
        if not self._usage:
            return DONE
        last: dict[str, Any] = {**self._head, "choices": [], "usage": build_token_usage(self.read, self.written)}
        return _encode_event(last) + DONE

    def _encode_plain_event_parts(self, index: int) -> tuple[bytes, bytes]:
        """Encode and remember the bytes before and after the text of an event that has only text."""
        head, tail = self._encode_choice(index, text=msgspec.Raw(_MARK)).split(_MARK)
        self._plain[index] = head, tail
        return head, tail

    def _encode_choice(
        self, index: int, *, text: str | msgspec.Raw = "", likelihoods: Likelihoods | None = None, finish: str = "",
        first: bool = False, delta: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            begin = {"role": "assistant", "content": "", "refusal": None}
            choice["delta"] = begin if first else {} if finish else delta if delta is not None else {"content": text}
            choice["logprobs"] = build_chat_logprobs(likelihoods)
        else:
            offset = self._offsets.get(index, 0)
            choice["text"] = text
            choice["logprobs"] = build_completion_logprobs(likelihoods, offset=offset)
            if likelihoods:
                self._offsets[index] = offset + sum(len(token) for token, _, _ in likelihoods)
        choice["finish_reason"] = finish or None
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = build_token_usage(self.read, self.written) if self._continuous else None
        return _encode_event(chunk)


def _encode_event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


_HEADERS_S = 1.0
_HOT_HEADERS_S = 10.0
"""Seconds that a stream waits for its first piece before it sends HTTP status 200 and comments (`_HOT_HEADERS_S`: if
the model is loaded). An error within this time gets an HTTP error status, so that clients retry.
"""
_COMMENT_S = 2.0


class StreamedAnswer:
    """A streamed answer. `failed`: receives the error that ends the answer."""

    def __init__(
        self, pieces: AsyncGenerator[tuple[int, list[Piece]], None], chunks: ChunkEncoder | ResponseEvents,
        running: RunningRequest, watch: SessionWatch, *, failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._pieces = pieces
        self._chunks = chunks
        self._running = running
        self._watch = watch
        self._failed = failed
        self._first: asyncio.Future[tuple[int, list[Any]]] = asyncio.ensure_future(anext(pieces))
        self._failure: BaseException | None = None
        self._is_whole = False

    async def wait_for_first_piece(self) -> None:
        """Wait up to 10 s for the first piece. Raises errors of calls."""
        await asyncio.wait({self._first}, timeout=_HEADERS_S)
        if not self._first.done() and (await self._watch.read_facts(self._running.model)).hot:
            await asyncio.wait({self._first}, timeout=_HOT_HEADERS_S - _HEADERS_S)
        if self._first.done():
            self._first.result()

    async def stream_events(self) -> AsyncGenerator[bytes, None]:
        """Yield comments, which clients ignore, until the first piece, then chunks, then the last events."""
        try:
            while not self._first.done():
                yield f": {await self._watch.explain_wait(self._running.model)}\n\n".encode()
                await asyncio.wait({self._first}, timeout=_COMMENT_S)
            found: tuple[int, list[Any]] | None = self._first.result()
            self._running.record_queue_time()
            while found is not None:
                before = self._chunks.written
                events = self._chunks.encode_pieces(*found)
                if tokens := self._chunks.written - before:
                    self._running.count_written_tokens(tokens, streamed=True)
                yield events
                found = await anext(self._pieces, None)
            self._is_whole = True
            yield self._chunks.encode_end()
        except Exception as error:
            self._failure = error
            self._failed(error)
            yield _encode_event(error_for_client(error).body)
        except BaseException as error:
            self._failure = error
            raise

    async def end_request(self) -> None:
        """After the response or a disconnect, record the request's metrics and end its calls."""
        running, chunks = self._running, self._chunks
        running.count_prompt_tokens(chunks.read)
        running.count_tokens(chunks.read, chunks.written)
        running.count_finish_reasons(chunks.finish_reasons)
        if self._is_whole:
            running.model.lengths.record_answer_length(chunks.written // max(1, len(chunks.finish_reasons)))
        if self._is_whole or isinstance(self._failure, Exception):
            running.end_request(self._failure)
        else:
            running.end_after_disconnect(self._failure or ClientDisconnected())
        await self.end_calls()

    async def end_calls(self) -> None:
        self._first.cancel()
        await asyncio.wait({self._first})
        if not self._first.cancelled():
            self._first.exception()  # read the error, so that asyncio does not log it as unread
        await self._pieces.aclose()

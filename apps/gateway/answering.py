"""The endpoints that models answer: a request is read, its calls run, and what they give is put in OpenAI's form."""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from stoker.apps.common.openai.answers import Vectors, chat_body, completion_body, embedding_parts, token_usage
from stoker.apps.common.openai.bodies import refuse_engine_fields
from stoker.apps.common.openai.request import Endpoint
from stoker.apps.common.openai.writing import Choice
from stoker.apps.gateway.admission import Admission
from stoker.apps.gateway.calls import all_pieces, joined_pieces
from stoker.apps.gateway.chunks import Chunks
from stoker.apps.gateway.failure_log import log, log_failure
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.guard import Caller, Guard
from stoker.apps.gateway.metrics import GatewayMetrics
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.apps.gateway.streaming import RunningRequest, StreamedAnswer
from stoker.apps.gateway.watch import SessionWatch
from stoker.apps.gateway.wire import ClientLeft, EventStream, JSONAnswer, JSONParts, read_body, unless_gone
from stoker.apps.gateway.wishes import Asked, read_asked, tokens_asked
from stoker.units import show_seconds


class Answering:
    """Answers requests with the models of a session."""

    def __init__(
        self, models: ServedModels, watch: SessionWatch, guard: Guard, metrics: GatewayMetrics, *, most_bytes: int
    ) -> None:
        self._models = models
        self._watch = watch
        self._admission = Admission(watch)
        self._guard = guard
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._ignored: set[str] = set()
        """Fields of requests that were ignored so far."""

    async def answer(self, request: Request, endpoint: Endpoint, caller: Caller) -> Response:
        """The answer to a request. Raises RequestRefused, ClientLeft, and what its calls raise."""
        begun = time.monotonic()
        data = await read_body(request, most=self._most_bytes)
        name = secrets.token_hex(12)
        asked = read_asked(data, endpoint=endpoint, name=name, ignored=self._note_ignored)
        model = self._models.asked(asked.request.model, endpoint)
        refuse_engine_fields(asked.request, model.engine_options)
        model.prepare()
        await self._admission.check(request, model)
        figures = self._metrics.request(model, endpoint, begun=begun)
        try:
            held = self._guard.begin(caller)
        except TryLater as error:
            figures.end(error)
            raise
        running = RunningRequest(figures, held)
        try:
            if asked.stream:
                return await self._stream(request, asked, model, name=name, running=running)
            response = await unless_gone(request, self._whole(asked, model, name=name, running=running))
        except (ClientLeft, asyncio.CancelledError) as error:
            running.count_tokens(tokens_asked(asked))
            running.leave(error)
            raise
        except BaseException as error:
            running.end(error)
            raise
        running.end(None)
        return response

    async def _whole(self, asked: Asked, model: ServedModel, *, name: str, running: RunningRequest) -> Response:
        """The response to a request that wants its answer whole."""
        found = await all_pieces(model.app(), asked.choices)
        if asked.request.endpoint is Endpoint.EMBEDDINGS:
            [pieces] = found
            vectors = Vectors(pieces[0].width, pieces[0].tokens, b"".join(piece.data for piece in pieces))
            running.count(vectors.tokens, 0)
            return JSONParts(embedding_parts(vectors, model=model.name, packed=asked.request.packed))
        choices: list[Choice] = [choice for [choice] in found]
        per_prompt = len(choices) // asked.prompts
        read = sum(choice.prompt_tokens for choice in choices[::per_prompt])
        written = sum(choice.completion_tokens for choice in choices)
        running.count(read, written)
        body = chat_body if asked.request.endpoint is Endpoint.CHAT else completion_body
        usage = token_usage(read, written)
        return JSONAnswer(body(choices, name=name, model=model.name, created=int(time.time()), usage=usage))

    async def _stream(
        self, request: Request, asked: Asked, model: ServedModel, *, name: str, running: RunningRequest
    ) -> Response:
        """The response to a request that wants pieces. An error within the first moment is raised, and has a status."""
        chunks = Chunks(
            endpoint=asked.request.endpoint, name=name, model=model.name, created=int(time.time()),
            per_prompt=len(asked.choices) // asked.prompts, usage=asked.include_usage,
            continuous=asked.continuous_usage,
        )  # fmt: skip
        running.figures.await_first_token(is_hot=self._watch.last(model).hot > 0)
        pieces = joined_pieces(model.app(in_pieces=True), asked.choices)
        answer = StreamedAnswer(
            pieces, chunks, running, waits_for=lambda: self._waits_for(model), is_hot=lambda: self._is_hot(model),
            failed=lambda error: log_failure(error, request),
        )  # fmt: skip
        try:
            await unless_gone(request, answer.begin())
        except BaseException:
            await answer.leave()
            raise
        return EventStream(answer.events(), at_end=answer.close)

    def _note_ignored(self, field: str) -> None:
        """Say once that a field is ignored."""
        if field not in self._ignored:
            self._ignored.add(field)
            log.warning("requests have the field %s, which changes no answer here; it is ignored (said once)", field)

    async def _is_hot(self, model: ServedModel) -> bool:
        return (await self._watch.facts(model)).hot > 0

    async def _waits_for(self, model: ServedModel) -> str:
        """Why a stream has not begun, in words. Hosts, jobs and folders stay here."""
        facts = await self._watch.facts(model)
        if self._watch.journal_trouble:
            return "the session's journal cannot be written just now"
        if facts.loading:
            about = f" of about {show_seconds(facts.load_s)}" if facts.load_s else ""
            return f"loading {model.name}: {show_seconds(facts.loading_s)}{about}"
        if not facts.hot:
            return f"loading {model.name}"
        return f"{model.name}: {facts.queued} requests wait, {facts.running} run"

"""The HTTP routes of a gateway, and the check of API keys for these routes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from stoker.apps.common.openai_requests import Endpoint, RequestRefused
from stoker.apps.gateway.answering import Answering
from stoker.apps.gateway.batch_files import StoredFile, read_batch, read_upload
from stoker.apps.gateway.batches import Batches, GatewayBatch
from stoker.apps.gateway.failures import TryLater, log, log_failure, refusal_of
from stoker.apps.gateway.figures import GatewayFigures, GatewayMetrics, GatewayNotes
from stoker.apps.gateway.keys import Caller, Guard, KeyLimits
from stoker.apps.gateway.objectives import refuse_objectives
from stoker.apps.gateway.page import PAGE_ROUTES, PageFigures
from stoker.apps.gateway.responses import ADDRESS as RESPONSES
from stoker.apps.gateway.scoring import RERANK, SCORE
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch
from stoker.apps.gateway.tokenizing import DETOKENIZE, TOKENIZE, Tokenizing
from stoker.apps.gateway.usage import UsageRecorder, read_query, usage_row_to_dict
from stoker.apps.gateway.wire import (
    ClientLeft,
    CrossOrigin,
    EventStream,
    JSONAnswer,
    RequestIds,
    error_answer,
    receive_body,
)
from stoker.apps.gateway.workers import GatewayWorkers

MOST_FILE_BYTES = 200_000_000
_PAGE = 20
_MOST_PAGE = 10_000
_NUMBER = re.compile(r"[0-9]{1,5}")


Handler = Callable[[Request, Caller], Awaitable[Response]]
Guarding = Callable[[Handler], Callable[[Request], Awaitable[Response]]]
"""A function that wraps a handler, so that only clients known to the guard get answers."""


class BatchRoutes:
    """Routes for files and batches. Each caller sees only the files and batches of its key."""

    def __init__(self, batches: Batches, guard: Guard, *, most_bytes: int) -> None:
        self._files = batches.files
        self._batches = batches
        self._guard = guard
        self._most_bytes = most_bytes

    def routes(self, guarded: Guarding) -> list[Route]:
        return [
            Route("/v1/files", guarded(self._upload), methods=["POST"]),
            Route("/v1/files", guarded(self._list_files), methods=["GET"]),
            Route("/v1/files/{id}", guarded(self._file), methods=["GET"]),
            Route("/v1/files/{id}", guarded(self._remove), methods=["DELETE"]),
            Route("/v1/files/{id}/content", guarded(self._content), methods=["GET"]),
            Route("/v1/batches", guarded(self._begin), methods=["POST"]),
            Route("/v1/batches", guarded(self._list_batches), methods=["GET"]),
            Route("/v1/batches/{id}", guarded(self._batch), methods=["GET"]),
            Route("/v1/batches/{id}/cancel", guarded(self._cancel), methods=["POST"]),
        ]

    async def _upload(self, request: Request, caller: Caller) -> Response:
        body = await receive_body(request, most=MOST_FILE_BYTES)
        kind = request.headers.get("content-type", "")
        name, purpose, data = await asyncio.to_thread(read_upload, kind, body)
        made = await asyncio.to_thread(self._files.add, data, filename=name, purpose=purpose, owner=caller.name)
        return JSONAnswer(made.body)

    async def _list_files(self, request: Request, caller: Caller) -> Response:
        wanted = request.query_params.get("purpose", "")
        found = [one for one in self._files.all(owner=caller.name) if wanted in ("", one.purpose)]
        return JSONAnswer(_paginate_list(request, found))

    async def _file(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._files.get(request.path_params["id"], owner=caller.name).body)

    async def _remove(self, request: Request, caller: Caller) -> Response:
        id = request.path_params["id"]
        self._files.remove(id, owner=caller.name)
        return JSONAnswer({"id": id, "object": "file", "deleted": True})

    async def _content(self, request: Request, caller: Caller) -> Response:
        found = self._files.get(request.path_params["id"], owner=caller.name)
        return FileResponse(self._files.data(found.id), media_type="application/octet-stream")

    async def _begin(self, request: Request, caller: Caller) -> Response:
        refuse_objectives(request.headers, what="a batch")
        asked = read_batch(await receive_body(request, most=self._most_bytes))
        self._guard.begin(caller, used=KeyLimits.rates).end()
        return JSONAnswer((await self._batches.add(asked, owner=caller.name)).body)

    async def _list_batches(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(_paginate_list(request, self._batches.all(owner=caller.name)))

    async def _batch(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.get(request.path_params["id"], owner=caller.name).body)

    async def _cancel(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.cancel(request.path_params["id"], owner=caller.name).body)


def _paginate_list(request: Request, found: Sequence[StoredFile | GatewayBatch]) -> dict[str, Any]:
    """Return a page of a list: `limit` entries after the entry `after`. Raises RequestRefused."""
    limit, after = request.query_params.get("limit", str(_PAGE)), request.query_params.get("after", "")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= _MOST_PAGE:
        raise RequestRefused(f"limit must be a number from 1 to {_MOST_PAGE}", param="limit", code="invalid_value")
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    shown = found[start : start + int(limit)]
    return {
        "object": "list",
        "data": [one.body for one in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(found),
    }


_NOT_ALLOWED = 405
_USAGE_RETRY_S = 5.0
_TIDY_EVERY_S = 3600.0
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Gateway:
    """The complete gateway.

    Args:
        most_bytes: maximum size of a body, except for files.
        batches: None for a gateway without batches.
        notes: writes the note for `stoker status`; None for no note.
        usage: counts requests by key; None for no counts.
        origins: sites whose pages may send requests with a key; empty: all sites.
        workers: the processes that answer at the address; None if this process answers.
    """

    def __init__(
        self, models: ServedModels, watch: SessionWatch, guard: Guard, *, site: str, most_bytes: int,
        batches: Batches | None = None, notes: GatewayNotes | None = None, origins: Sequence[str] = (),
        usage: UsageRecorder | None = None, workers: GatewayWorkers | None = None,
    ) -> None:  # fmt: skip
        self._models = models
        self._watch = watch
        self._guard = guard
        self._usage = usage or UsageRecorder()
        self._metrics = GatewayMetrics(self._usage)
        self._answering = Answering(models, watch, guard.hold, self._metrics, most_bytes=most_bytes)
        self._tokenizing = Tokenizing(models, most_bytes=most_bytes)
        self._batches = batches
        self._notes = notes
        self._origins = origins
        self._batch_routes = BatchRoutes(batches, guard, most_bytes=most_bytes) if batches is not None else None
        self._workers = workers
        figures = GatewayFigures(models, watch, site=site, is_open=lambda: guard.is_open, workers=workers)
        self._page = PageFigures(figures.now)
        self.when_over: Callable[[], None] = lambda: None
        """Function that is called when the session has ended."""

    def application(self) -> Starlette:
        routes = [
            *PAGE_ROUTES,
            Route("/health", self._health),
            Route("/status", self._guarded(self._status)),
            Route("/metrics", self._guarded(self._prometheus)),
            Route("/v1/models", self._guarded(self._list_models)),
            Route("/v1/usage", self._guarded(self._show_usage)),
            Route("/v1/models/{name:path}", self._guarded(self._show_model)),
            *(self._batch_routes.routes(self._guarded) if self._batch_routes is not None else ()),
            *model_routes(self._answering, self._tokenizing, self._guarded),
        ]
        return build_starlette_app(routes, self._guard, origins=self._origins, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        reduce_garbage_collection()
        self._usage.begin()
        works = [self._watch.keep_warm(), self._stop_when_session_over(), self._tidy(), self._page.keep()]
        if self._notes is not None:
            works.append(self._notes.keep())
        if self._workers is not None:
            works.append(self._workers.keep(app))
        beside = [asyncio.create_task(work) for work in works]
        if self._batches is not None:
            self._batches.resume()
        try:
            yield
        finally:
            if self._workers is not None:
                await self._workers.stop()
            if self._batches is not None:
                await self._batches.leave()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await asyncio.to_thread(self._usage.end)

    async def _stop_when_session_over(self) -> None:
        await self._watch.until_over()
        self.when_over()

    async def _tidy(self) -> None:
        while self._batches is not None:
            try:
                await asyncio.to_thread(self._batches.remove_old, time.time())
            except OSError as error:
                log.warning("old files and batches could not be removed; the gateway retries later: %s", error)
            await asyncio.sleep(_TIDY_EVERY_S)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        return guarded(handler, self._guard, failed=self._metrics.count_error)

    async def _health(self, _request: Request) -> Response:
        """Return 200 while the session answers. This route needs no key."""
        status = await self._watch.now()
        trouble = self._watch.trouble or self._watch.journal_trouble
        why = trouble if self._guard.is_open else "the gateway's log says why"
        body = {"status": "ok" if not trouble else "waits" if status else "no session", "why": why if trouble else None}
        return JSONAnswer({**body, "session": self._watch.session.id}, 503 if trouble else 200)

    async def _status(self, request: Request, _caller: Caller) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(self._page.events())
        return Response(await self._page.now(), media_type="application/json")

    async def _prometheus(self, _request: Request, _caller: Caller) -> Response:
        status = await self._watch.now()
        samples = await self._workers.collect() if self._workers is not None else ()
        return Response(self._metrics.text(self._models, status, samples), media_type=PROMETHEUS)

    async def _list_models(self, _request: Request, _caller: Caller) -> Response:
        return JSONAnswer({"object": "list", "data": [_shown(model) for model in self._models.values()]})

    async def _show_usage(self, request: Request, caller: Caller) -> Response:
        asked = read_query(request.query_params)
        if not (caller.admin or self._guard.is_open):
            if asked.key not in ("", caller.name):
                raise RequestRefused(
                    "this key may only see its own usage; stoker serve keys add NAME --admin creates a key that may see"
                    " the usage of all keys",
                    type="authentication_error", param="key", code="not_an_admin", status=403,
                )  # fmt: skip
            asked = msgspec.structs.replace(asked, key=caller.name)
        try:
            rows = await asyncio.to_thread(self._usage.read, asked)
        except (OSError, sqlite3.Error) as error:
            raise TryLater(
                "the usage cannot be read now; the gateway's log says why", type="server_error",
                code="usage_unavailable", status=503, retry_after_s=_USAGE_RETRY_S, why=str(error),
            ) from error  # fmt: skip
        return JSONAnswer(
            {"object": "list", "since": asked.since, "data": [usage_row_to_dict(row, asked.by) for row in rows]}
        )

    async def _show_model(self, request: Request, _caller: Caller) -> Response:
        return JSONAnswer(_shown(self._models.named(request.path_params["name"])))


def model_routes(answering: Answering, tokenizing: Tokenizing, guarded: Guarding) -> list[Route]:
    def answers(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request, caller: Caller) -> Response:
            return await answering.answer(request, endpoint, caller)

        return guarded(answer)

    return [
        Route(TOKENIZE, guarded(tokenizing.tokenize), methods=["POST"]),
        Route(DETOKENIZE, guarded(tokenizing.detokenize), methods=["POST"]),
        *(Route(path, guarded(answering.score), methods=["POST"]) for path in (SCORE, RERANK)),
        Route(RESPONSES, guarded(answering.handle_responses_request), methods=["POST"]),
        *(Route(endpoint.value, answers(endpoint), methods=["POST"]) for endpoint in Endpoint),
    ]


def build_starlette_app(
    routes: Sequence[Route], guard: Guard, *, origins: Sequence[str], lifespan: Callable[..., Any]
) -> Starlette:
    middleware = [
        Middleware(RequestIds),
        Middleware(CrossOrigin, is_open=lambda: guard.is_open, origins=origins),
    ]
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS, lifespan=lifespan, middleware=middleware)


def reduce_garbage_collection() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _shown(model: ServedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "stoker"}
    if model.settings.base:
        shown["parent"] = model.settings.base
    return {**shown, "max_model_len": longest} if (longest := model.longest) else shown


def guarded(
    handler: Handler, guard: Guard, *, failed: Callable[[int], None] = lambda _status: None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler for known clients, and convert errors to responses. `failed`: receives the status of an error."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, guard.caller(request.headers))
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:
            log_failure(error, request)
            failed(refusal_of(error).error.status)
            return error_answer(error)

    return answer


async def _error(request: Request, error: Exception) -> Response:
    log_failure(error, request)
    answer = error_answer(error)
    if id := request.scope.get("state", {}).get("request_id"):  # the middleware that sets this header did not run
        answer.headers["x-request-id"] = id
    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == _NOT_ALLOWED:
        return Response(status_code=204, headers=error.headers)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    said = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_answer(RequestRefused(said, code=code, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


ERROR_HANDLERS = {RequestRefused: _error, HTTPException: _answer_http_exception, Exception: _error}

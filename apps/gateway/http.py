"""The HTTP routes of a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
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
from stoker.apps.gateway.batch_files import GatewayBatch, StoredFile, read_batch, read_upload
from stoker.apps.gateway.batches import Batches
from stoker.apps.gateway.failures import log, log_failure, refusal_of
from stoker.apps.gateway.figures import GatewayMetrics, build_note_figures, model_figures, model_names_by_recipe
from stoker.apps.gateway.keys import Caller, Guard
from stoker.apps.gateway.objectives import refuse_objectives
from stoker.apps.gateway.page import PAGE_ROUTES, PageFigures
from stoker.apps.gateway.responses import ADDRESS as RESPONSES
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch
from stoker.apps.gateway.session_figures import session_figures
from stoker.apps.gateway.usage import UsageRecorder, read_query
from stoker.apps.gateway.vllm_endpoints import DETOKENIZE, RERANK, SCORE, TOKENIZE, Tokenizing
from stoker.apps.gateway.wire import ClientLeft, CrossOrigin, JSONAnswer, RequestIds, error_answer, receive_body
from stoker.apps.gateway.workers import GatewayWorkers
from stoker.sessions import WRITTEN_EVERY_S, GatewayNote, Session, remove_gateway_note, write_gateway_note

MOST_FILE_BYTES = 200_000_000
_PAGE = 20
_MOST_PAGE = 10_000
_NUMBER = re.compile(r"[0-9]{1,5}")
_NOT_ALLOWED = 405
_USAGE_RETRY_S = 5.0
_TIDY_EVERY_S = 3600.0
_OVER_CHECK_S = 1.0

Handler = Callable[[Request, Caller], Awaitable[Response]]
Guarding = Callable[[Handler], Callable[[Request], Awaitable[Response]]]
"""A function that wraps a handler so that only known clients reach it (see `guarded`)."""


def batch_routes(batches: Batches, guard: Guard, guarded: Guarding, *, most_bytes: int) -> list[Route]:
    """Return the routes for files and batches. A caller sees only files and batches of its key."""
    files = batches.files

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, guarded(handler), methods=[method])

    def item(get: Callable[..., StoredFile | GatewayBatch]) -> Handler:
        async def show(request: Request, caller: Caller) -> Response:
            return JSONAnswer(get(request.path_params["id"], owner=caller.name).body)

        return show

    async def upload(request: Request, caller: Caller) -> Response:
        body = await receive_body(request, most=MOST_FILE_BYTES)
        kind = request.headers.get("content-type", "")
        name, purpose, data = await asyncio.to_thread(read_upload, kind, body)
        made = await asyncio.to_thread(files.add, data, filename=name, purpose=purpose, owner=caller.name)
        return JSONAnswer(made.body)

    async def list_files(request: Request, caller: Caller) -> Response:
        wanted = request.query_params.get("purpose", "")
        return _list_page(request, [one for one in files.all(owner=caller.name) if wanted in ("", one.purpose)])

    async def remove(request: Request, caller: Caller) -> Response:
        id = request.path_params["id"]
        files.remove(id, owner=caller.name)
        return JSONAnswer({"id": id, "object": "file", "deleted": True})

    async def content(request: Request, caller: Caller) -> Response:
        found = files.get(request.path_params["id"], owner=caller.name)
        return FileResponse(files.data(found.id), media_type="application/octet-stream")

    async def begin(request: Request, caller: Caller) -> Response:
        refuse_objectives(request.headers)
        batch = read_batch(await receive_body(request, most=most_bytes), owner=caller.name)
        guard.begin(caller, used=lambda limits: msgspec.structs.replace(limits, concurrent=0)).end()
        return JSONAnswer((await batches.add(batch)).body)

    async def list_batches(request: Request, caller: Caller) -> Response:
        return _list_page(request, batches.all(owner=caller.name))

    return [
        route("/v1/files", upload, "POST"),
        route("/v1/files", list_files),
        route("/v1/files/{id}", item(files.get)),
        route("/v1/files/{id}", remove, "DELETE"),
        route("/v1/files/{id}/content", content),
        route("/v1/batches", begin, "POST"),
        route("/v1/batches", list_batches),
        route("/v1/batches/{id}", item(batches.get)),
        route("/v1/batches/{id}/cancel", item(batches.cancel), "POST"),
    ]


def _list_page(request: Request, found: Sequence[StoredFile | GatewayBatch]) -> Response:
    """Answer with a page of a list: `limit` entries after the entry `after`. Raises RequestRefused."""
    limit, after = request.query_params.get("limit", str(_PAGE)), request.query_params.get("after", "")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= _MOST_PAGE:
        raise RequestRefused(f"limit must be a number from 1 to {_MOST_PAGE}", param="limit", code="invalid_value")
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    shown = found[start : start + int(limit)]
    return JSONAnswer(
        {
            "object": "list", "data": [one.body for one in shown], "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None, "has_more": start + len(shown) < len(found),
        }
    )  # fmt: skip


class Gateway:
    """The web application of a gateway. `keeps`: background tasks of the gateway; `workers`: processes that share its
    requests.
    """

    def __init__(
        self, models: ServedModels, watch: SessionWatch, guard: Guard, *, site: str, most_bytes: int,
        usage: UsageRecorder, batches: Batches | None = None, keeps: Sequence[Callable[[], Awaitable[None]]] = (),
        origins: Sequence[str] = (), workers: GatewayWorkers | None = None,
    ) -> None:  # fmt: skip
        self._models = models
        self._watch = watch
        self._guard = guard
        self._usage = usage
        self._metrics = GatewayMetrics(self._usage)
        self._answering = Answering(models, watch, guard.hold, self._metrics, most_bytes=most_bytes)
        self._tokenizing = Tokenizing(models, most_bytes=most_bytes)
        self._batches = batches
        self._keeps = keeps
        self._origins = origins
        self._workers = workers
        self._site = site
        self._most_bytes = most_bytes
        self._begun_at = time.time()
        self._page = PageFigures(self._figures)
        self.when_over: Callable[[], None] = lambda: None
        """Function that is called when the session has ended."""

    def application(self) -> Starlette:
        known = partial(guarded, guard=self._guard, failed=self._metrics.count_error)
        routes = [
            *PAGE_ROUTES,
            Route("/health", self._health),
            Route("/status", known(self._page.answer)),
            Route("/metrics", known(self._prometheus)),
            Route("/v1/models", known(self._list_models)),
            Route("/v1/usage", known(self._show_usage)),
            Route("/v1/models/{name:path}", known(self._show_model)),
            *model_routes(self._answering, self._tokenizing, known),
        ]
        if self._batches is not None:
            routes += batch_routes(self._batches, self._guard, known, most_bytes=self._most_bytes)
        return build_starlette_app(routes, self._guard, origins=self._origins, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        reduce_garbage_collection()
        self._usage.begin()
        works = [
            self._watch.keep_warm(), self._stop_when_session_over(), self._tidy(), self._page.keep(),
            *(keep() for keep in self._keeps),
        ]  # fmt: skip
        if self._workers is not None:
            works.append(self._workers.keep(app))
        beside = [asyncio.ensure_future(work) for work in works]
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
        while self._watch.session.over is None:
            await asyncio.sleep(_OVER_CHECK_S)
        self.when_over()

    async def _tidy(self) -> None:
        while self._batches is not None:
            try:
                await asyncio.to_thread(self._batches.remove_old, time.time())
            except OSError as error:
                log.warning("old files and batches could not be removed; the gateway retries later: %s", error)
            await asyncio.sleep(_TIDY_EVERY_S)

    async def _health(self, _request: Request) -> Response:
        """Return 200 while the session answers. This route needs no key."""
        status = await self._watch.now()
        trouble = self._watch.trouble or self._watch.journal_trouble
        why = trouble if self._guard.is_open else "the gateway's log says why"
        body = {"status": "ok" if not trouble else "waits" if status else "no session", "why": why if trouble else None}
        return JSONAnswer({**body, "session": self._watch.session.id}, 503 if trouble else 200)

    async def _figures(self) -> dict[str, Any]:
        """Return the data of the page. The data quotes errors only if no key is required."""
        status = await self._watch.now()
        workers, names = self._workers, model_names_by_recipe(self._models)
        if workers is not None:
            await workers.collect()
        return {
            "at": time.time(), "since": self._begun_at, "site": self._site, "session": self._watch.session.id,
            "trouble": self._watch.trouble,
            "workers": workers.facts if workers is not None else None,
            "models": [model_figures(model, status) for model in self._models.values()],
            **session_figures(status, names=names, with_texts=self._guard.is_open),
        }  # fmt: skip

    async def _prometheus(self, _request: Request, _caller: Caller) -> Response:
        status = await self._watch.now()
        samples = await self._workers.collect() if self._workers is not None else ()
        return prometheus_answer(self._metrics.text(self._models, status, samples))

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
            raise RequestRefused(
                "the usage cannot be read now; the gateway's log says why", type="server_error",
                code="usage_unavailable", status=503, retry_after_s=_USAGE_RETRY_S, why=str(error),
            ) from error  # fmt: skip
        return JSONAnswer({"object": "list", "since": asked.since, "data": rows})

    async def _show_model(self, request: Request, _caller: Caller) -> Response:
        return JSONAnswer(_shown(self._models.named(request.path_params["name"])))


async def keep_note(
    session: Session, models: ServedModels, *, name: str, address: str, workers: GatewayWorkers | None = None
) -> None:
    """Update the file `name`, which describes a gateway for `stoker status`, until this task is cancelled."""
    told = ""
    try:
        while True:
            if workers is not None:
                await workers.collect()
            figures, facts = tuple(map(build_note_figures, models.values())), workers.facts if workers else None
            note = GatewayNote(address, socket.gethostname(), os.getpid(), figures, at=time.time(), workers=facts)
            try:
                await asyncio.to_thread(write_gateway_note, session.folder, name, note)
                told = ""
            except OSError as error:  # usually a full disk
                why = error.strerror or str(error)  # `str(error)` contains a new file name each time
                if told != why:
                    told = why
                    log.warning("stoker status will not show this gateway's models: %s", error)
            await asyncio.sleep(WRITTEN_EVERY_S)
    finally:
        remove_gateway_note(session.folder, name)


def model_routes(answering: Answering, tokenizing: Tokenizing, guarded: Guarding) -> list[Route]:
    handlers: dict[str, Handler] = {
        TOKENIZE: tokenizing.tokenize, DETOKENIZE: tokenizing.detokenize, SCORE: answering.score,
        RERANK: answering.score, RESPONSES: answering.handle_responses_request,
        **{endpoint.value: partial(answering.answer, endpoint=endpoint) for endpoint in Endpoint},
    }  # fmt: skip
    return [Route(path, guarded(handler), methods=["POST"]) for path, handler in handlers.items()]


def build_starlette_app(
    routes: Sequence[Route], guard: Guard, *, origins: Sequence[str], lifespan: Callable[..., Any]
) -> Starlette:
    middleware = [Middleware(RequestIds), Middleware(CrossOrigin, is_open=lambda: guard.is_open, origins=origins)]
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


def prometheus_answer(text: bytes) -> Response:
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def guarded(
    handler: Handler, guard: Guard, *, failed: Callable[[int], None] = lambda _status: None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that only known clients reach it and errors become responses. `failed` receives the status of
    each error.
    """

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, guard.caller(request.headers))
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:
            log_failure(error, request)
            failed(refusal_of(error).status)
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

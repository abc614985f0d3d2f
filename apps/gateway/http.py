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
from stoker.apps.gateway.answering import ModelEndpoints
from stoker.apps.gateway.batch_files import GatewayBatch, StoredFile, parse_batch_request, parse_file_upload
from stoker.apps.gateway.batches import GatewayBatches
from stoker.apps.gateway.failures import error_for_client, log, log_failure
from stoker.apps.gateway.figures import (
    GatewayMetrics,
    build_model_figures,
    build_note_figures,
    map_recipes_to_model_names,
)
from stoker.apps.gateway.keys import Caller, KeyGuard
from stoker.apps.gateway.objectives import refuse_objectives
from stoker.apps.gateway.page import PAGE_ROUTES, PageFigures
from stoker.apps.gateway.responses import ADDRESS as RESPONSES
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch
from stoker.apps.gateway.session_figures import collect_session_figures
from stoker.apps.gateway.usage import UsageRecorder, parse_usage_query
from stoker.apps.gateway.vllm_endpoints import DETOKENIZE, RERANK, SCORE, TOKENIZE, TokenizerEndpoints
from stoker.apps.gateway.wire import (
    ClientDisconnected,
    CrossOriginMiddleware,
    JSONResponse,
    RequestIdMiddleware,
    make_error_response,
    receive_body,
)
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
"""A function that wraps a handler, so that only clients with a valid key reach the handler (see `guard_handler`)."""


def build_batch_routes(
    batches: GatewayBatches, guard: KeyGuard, guard_handler: Guarding, *, most_bytes: int
) -> list[Route]:
    """Return the routes for files and batches. A caller sees only files and batches of its key."""
    files = batches.files

    def make_route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, guard_handler(handler), methods=[method])

    def make_item_handler(get: Callable[..., StoredFile | GatewayBatch]) -> Handler:
        async def answer_with_item(request: Request, caller: Caller) -> Response:
            return JSONResponse(get(request.path_params["id"], owner=caller.name).body)

        return answer_with_item

    async def store_uploaded_file(request: Request, caller: Caller) -> Response:
        body = await receive_body(request, most_bytes=MOST_FILE_BYTES)
        kind = request.headers.get("content-type", "")
        name, purpose, data = await asyncio.to_thread(parse_file_upload, kind, body)
        made = await asyncio.to_thread(files.add_file, data, filename=name, purpose=purpose, owner=caller.name)
        return JSONResponse(made.body)

    async def answer_file_list(request: Request, caller: Caller) -> Response:
        wanted = request.query_params.get("purpose", "")
        return _answer_list_page(
            request, [one for one in files.list_files(owner=caller.name) if wanted in ("", one.purpose)]
        )

    async def delete_file(request: Request, caller: Caller) -> Response:
        id = request.path_params["id"]
        batches.remove_file(id, owner=caller.name)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def send_file_content(request: Request, caller: Caller) -> Response:
        found = files.get_file(request.path_params["id"], owner=caller.name)
        return FileResponse(files.content_path(found.id), media_type="application/octet-stream")

    async def create_batch(request: Request, caller: Caller) -> Response:
        refuse_objectives(request.headers)
        batch = parse_batch_request(await receive_body(request, most_bytes=most_bytes), owner=caller.name)
        guard.begin_request(caller, used=lambda limits: msgspec.structs.replace(limits, concurrent=0)).end_request()
        return JSONResponse((await batches.add_batch(batch)).body)

    async def answer_batch_list(request: Request, caller: Caller) -> Response:
        return _answer_list_page(request, batches.list_batches(owner=caller.name))

    return [
        make_route("/v1/files", store_uploaded_file, "POST"),
        make_route("/v1/files", answer_file_list),
        make_route("/v1/files/{id}", make_item_handler(files.get_file)),
        make_route("/v1/files/{id}", delete_file, "DELETE"),
        make_route("/v1/files/{id}/content", send_file_content),
        make_route("/v1/batches", create_batch, "POST"),
        make_route("/v1/batches", answer_batch_list),
        make_route("/v1/batches/{id}", make_item_handler(batches.get_batch)),
        make_route("/v1/batches/{id}/cancel", make_item_handler(batches.cancel_batch), "POST"),
    ]


def _answer_list_page(request: Request, found: Sequence[StoredFile | GatewayBatch]) -> Response:
    """Answer with a page of a list: `limit` entries after the entry `after`. Raises RequestRefused."""
    limit, after = request.query_params.get("limit", str(_PAGE)), request.query_params.get("after", "")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= _MOST_PAGE:
        raise RequestRefused(f"limit must be a number from 1 to {_MOST_PAGE}", param="limit", code="invalid_value")
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    shown = found[start : start + int(limit)]
    return JSONResponse(
        {
            "object": "list", "data": [one.body for one in shown], "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None, "has_more": start + len(shown) < len(found),
        }
    )  # fmt: skip


class GatewayApplication:
    """The web application of a gateway. `keeps`: further background tasks; `workers`: processes that answer requests
    too.
    """

    def __init__(
        self, models: ServedModels, watch: SessionWatch, guard: KeyGuard, *, site: str, most_bytes: int,
        usage: UsageRecorder, batches: GatewayBatches | None = None,
        keeps: Sequence[Callable[[], Awaitable[None]]] = (),
        origins: Sequence[str] = (), workers: GatewayWorkers | None = None,
    ) -> None:  # fmt: skip
        self._models = models
        self._watch = watch
        self._guard = guard
        self._usage = usage
        self._metrics = GatewayMetrics(self._usage)
        self._answering = ModelEndpoints(models, watch, guard.begin_request_async, self._metrics, most_bytes=most_bytes)
        self._tokenizing = TokenizerEndpoints(models, most_bytes=most_bytes)
        self._batches = batches
        self._keeps = keeps
        self._origins = origins
        self._workers = workers
        self._site = site
        self._most_bytes = most_bytes
        self._begun_at = time.time()
        self._page = PageFigures(self._collect_figures)
        self.stop_server: Callable[[], None] = lambda: None
        """Called when the session has ended. `run_server` sets this function."""

    def build_application(self) -> Starlette:
        known = partial(guard_handler, guard=self._guard, on_error=self._metrics.count_error)
        routes = [
            *PAGE_ROUTES,
            Route("/health", self._answer_health_request),
            Route("/status", known(self._page.answer_status_request)),
            Route("/metrics", known(self._answer_metrics_request)),
            Route("/v1/models", known(self._list_models)),
            Route("/v1/usage", known(self._show_usage)),
            Route("/v1/models/{name:path}", known(self._show_model)),
            *build_model_routes(self._answering, self._tokenizing, known),
        ]
        if self._batches is not None:
            routes += build_batch_routes(self._batches, self._guard, known, most_bytes=self._most_bytes)
        return build_starlette_app(routes, self._guard, origins=self._origins, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        reduce_garbage_collection()
        self._usage.start_writing()
        works = [
            self._watch.keep_models_loaded(), self._stop_when_session_over(), self._remove_old_files_repeatedly(),
            self._page.record_history(),
            *(keep() for keep in self._keeps),
        ]  # fmt: skip
        if self._workers is not None:
            works.append(self._workers.keep_workers_running(app))
        beside = [asyncio.ensure_future(work) for work in works]
        if self._batches is not None:
            self._batches.resume_open_batches()
        try:
            yield
        finally:
            if self._workers is not None:
                await self._workers.stop_workers()
            if self._batches is not None:
                await self._batches.stop_all()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await asyncio.to_thread(self._usage.stop_writing)

    async def _stop_when_session_over(self) -> None:
        while self._watch.session.over is None:
            await asyncio.sleep(_OVER_CHECK_S)
        self.stop_server()

    async def _remove_old_files_repeatedly(self) -> None:
        while self._batches is not None:
            try:
                await asyncio.to_thread(self._batches.remove_old_batches, time.time())
            except OSError as error:
                log.warning("old files and batches could not be removed; the gateway retries later: %s", error)
            await asyncio.sleep(_TIDY_EVERY_S)

    async def _answer_health_request(self, _request: Request) -> Response:
        """Answer with HTTP status 200 while the session answers, else with 503. This route needs no API key."""
        status = await self._watch.read_status()
        trouble = self._watch.trouble or self._watch.journal_trouble
        why = trouble if self._guard.is_open else "the gateway's log says why"
        body = {"status": "ok" if not trouble else "waits" if status else "no session", "why": why if trouble else None}
        return JSONResponse({**body, "session": self._watch.session.id}, 503 if trouble else 200)

    async def _collect_figures(self) -> dict[str, Any]:
        """Return the data of the web page. Error messages are included only if the gateway requires no keys."""
        status = await self._watch.read_status()
        workers, names = self._workers, map_recipes_to_model_names(self._models)
        if workers is not None:
            await workers.collect_reports()
        return {
            "at": time.time(), "since": self._begun_at, "site": self._site, "session": self._watch.session.id,
            "trouble": self._watch.trouble,
            "workers": workers.worker_facts if workers is not None else None,
            "models": [build_model_figures(model, status) for model in self._models.values()],
            **collect_session_figures(status, names=names, with_texts=self._guard.is_open),
        }  # fmt: skip

    async def _answer_metrics_request(self, _request: Request, _caller: Caller) -> Response:
        status = await self._watch.read_status()
        samples = await self._workers.collect_reports() if self._workers is not None else ()
        return make_metrics_response(self._metrics.render_text(self._models, status, samples))

    async def _list_models(self, _request: Request, _caller: Caller) -> Response:
        return JSONResponse({"object": "list", "data": [_describe_model(model) for model in self._models.values()]})

    async def _show_usage(self, request: Request, caller: Caller) -> Response:
        asked = parse_usage_query(request.query_params)
        if not (caller.admin or self._guard.is_open):
            if asked.key not in ("", caller.name):
                raise RequestRefused(
                    "this key may only see its own usage; stoker serve keys add NAME --admin creates a key that may see"
                    " the usage of all keys",
                    type="authentication_error", param="key", code="not_an_admin", status=403,
                )  # fmt: skip
            asked = msgspec.structs.replace(asked, key=caller.name)
        try:
            rows = await asyncio.to_thread(self._usage.read_report, asked)
        except (OSError, sqlite3.Error) as error:
            raise RequestRefused(
                "the usage cannot be read now; the gateway's log says why", type="server_error",
                code="usage_unavailable", status=503, retry_after_s=_USAGE_RETRY_S, why=str(error),
            ) from error  # fmt: skip
        return JSONResponse({"object": "list", "since": asked.since, "data": rows})

    async def _show_model(self, request: Request, _caller: Caller) -> Response:
        return JSONResponse(_describe_model(self._models.get_model(request.path_params["name"])))


async def keep_gateway_note_updated(
    session: Session, models: ServedModels, *, name: str, address: str, workers: GatewayWorkers | None = None
) -> None:
    """Update the file `name`, which describes a gateway for `stoker status`, until this task is cancelled."""
    told = ""
    try:
        while True:
            if workers is not None:
                await workers.collect_reports()
            figures, facts = tuple(map(build_note_figures, models.values())), workers.worker_facts if workers else None
            note = GatewayNote(address, socket.gethostname(), os.getpid(), figures, at=time.time(), workers=facts)
            try:
                await asyncio.to_thread(write_gateway_note, session.folder, name, note)
                told = ""
            except OSError as error:  # usually a full disk
                why = error.strerror or str(error)  # each `str(error)` contains a new file name
                if told != why:
                    told = why
                    log.warning("stoker status will not show this gateway's models: %s", error)
            await asyncio.sleep(WRITTEN_EVERY_S)
    finally:
        remove_gateway_note(session.folder, name)


def build_model_routes(
    answering: ModelEndpoints, tokenizing: TokenizerEndpoints, guard_handler: Guarding
) -> list[Route]:
    handlers: dict[str, Handler] = {
        TOKENIZE: tokenizing.answer_tokenize_request, DETOKENIZE: tokenizing.answer_detokenize_request,
        SCORE: answering.answer_scoring_request,
        RERANK: answering.answer_scoring_request, RESPONSES: answering.handle_responses_request,
        **{endpoint.value: partial(answering.answer_request, endpoint=endpoint) for endpoint in Endpoint},
    }  # fmt: skip
    return [Route(path, guard_handler(handler), methods=["POST"]) for path, handler in handlers.items()]


def build_starlette_app(
    routes: Sequence[Route], guard: KeyGuard, *, origins: Sequence[str], lifespan: Callable[..., Any]
) -> Starlette:
    middleware = [
        Middleware(RequestIdMiddleware),
        Middleware(CrossOriginMiddleware, is_open=lambda: guard.is_open, origins=origins),
    ]
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS, lifespan=lifespan, middleware=middleware)


def reduce_garbage_collection() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _describe_model(model: ServedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "stoker"}
    if model.settings.base:
        shown["parent"] = model.settings.base
    return {**shown, "max_model_len": longest} if (longest := model.context_length) else shown


def make_metrics_response(text: bytes) -> Response:
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def guard_handler(
    handler: Handler, guard: KeyGuard, *, on_error: Callable[[int], None] = lambda _status: None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: check the client's key before the call, and turn errors into responses. `on_error`: receives the
    HTTP status of each error.
    """

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, guard.identify_caller(request.headers))
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:
            log_failure(error, request)
            on_error(error_for_client(error).status)
            return make_error_response(error)

    return answer


async def _answer_error(request: Request, error: Exception) -> Response:
    log_failure(error, request)
    answer = make_error_response(error)
    if id := request.scope.get("state", {}).get("request_id"):  # no middleware adds this id after an unexpected error
        answer.headers["x-request-id"] = id
    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == _NOT_ALLOWED:
        return Response(status_code=204, headers=error.headers)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    said = f"{request.method} {request.url.path}: {error.detail}"
    answer = make_error_response(RequestRefused(said, code=code, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


ERROR_HANDLERS = {RequestRefused: _answer_error, HTTPException: _answer_http_exception, Exception: _answer_error}

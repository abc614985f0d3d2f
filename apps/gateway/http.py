"""The routes of a gateway, and access to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

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
from stoker.apps.gateway.failures import log, log_failure, refusal_of
from stoker.apps.gateway.figures import PAGE, GatewayFigures, GatewayMetrics, GatewayNotes
from stoker.apps.gateway.keys import Caller, Guard
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch
from stoker.apps.gateway.wire import (
    ClientLeft,
    CrossOrigin,
    EventStream,
    JSONAnswer,
    RequestIds,
    error_answer,
    receive_body,
)

MOST_FILE_BYTES = 200_000_000
_PAGE = 20
_MOST_PAGE = 10_000
_NUMBER = re.compile(r"[0-9]{1,5}")


class BatchRoutes:
    """Routes of files and batches. Each caller sees only its key's."""

    def __init__(self, batches: Batches, guard: Guard, *, most_bytes: int) -> None:
        self._files = batches.files
        self._batches = batches
        self._guard = guard
        self._most_bytes = most_bytes

    def routes(self, guarded: Callable[[Handler], Callable[[Request], Awaitable[Response]]]) -> list[Route]:
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
        return JSONAnswer(_list_page(request, found))

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
        asked = read_batch(await receive_body(request, most=self._most_bytes))
        self._guard.begin(caller, limits=caller.limits.rates).end()
        return JSONAnswer((await self._batches.add(asked, owner=caller.name)).body)

    async def _list_batches(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(_list_page(request, self._batches.all(owner=caller.name)))

    async def _batch(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.get(request.path_params["id"], owner=caller.name).body)

    async def _cancel(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.cancel(request.path_params["id"], owner=caller.name).body)


def _list_page(request: Request, found: Sequence[StoredFile | GatewayBatch]) -> dict[str, Any]:
    """Return a page of a list: `limit` entries after the one named `after`. Raises RequestRefused."""
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
_TIDY_EVERY_S = 3600.0
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Request, Caller], Awaitable[Response]]


class Gateway:
    """The whole gateway.

    Args:
        most_bytes: the largest body, except for files.
        batches: None without batches.
        notes: the note for `stoker status`; None writes none.
        origins: sites whose pages may ask with a key; empty: all.
    """

    def __init__(
        self, models: ServedModels, watch: SessionWatch, guard: Guard, *, site: str, most_bytes: int,
        batches: Batches | None = None, notes: GatewayNotes | None = None, origins: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._models = models
        self._watch = watch
        self._guard = guard
        self._metrics = GatewayMetrics()
        self._answering = Answering(models, watch, guard, self._metrics, most_bytes=most_bytes)
        self._batches = batches
        self._notes = notes
        self._origins = origins
        self._batch_routes = BatchRoutes(batches, guard, most_bytes=most_bytes) if batches is not None else None
        self._figures = GatewayFigures(models, watch, site=site)
        self.when_over: Callable[[], None] = lambda: None
        """Called when the session is over."""

    def application(self) -> Starlette:
        routes = [
            Route("/", _show_page),
            Route("/health", self._health),
            Route("/status", self._guarded(self._status)),
            Route("/metrics", self._guarded(self._prometheus)),
            Route("/v1/models", self._guarded(self._list_models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            *(self._batch_routes.routes(self._guarded) if self._batch_routes is not None else ()),
            *(Route(endpoint.value, self._answers(endpoint), methods=["POST"]) for endpoint in Endpoint),
        ]
        handlers = {RequestRefused: _error, HTTPException: _no_such_address, Exception: _error}
        middleware = [
            Middleware(RequestIds),
            Middleware(CrossOrigin, is_open=lambda: self._guard.is_open, origins=self._origins),
        ]
        return Starlette(
            routes=routes, exception_handlers=handlers, lifespan=self._lifespan, middleware=middleware
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        _keep_garbage_cheap()
        works = [self._watch.keep_warm(), self._until_over(), self._tidy()]
        if self._notes is not None:
            works.append(self._notes.keep())
        beside = [asyncio.create_task(work) for work in works]
        if self._batches is not None:
            self._batches.resume()
        try:
            yield
        finally:
            if self._batches is not None:
                await self._batches.leave()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _until_over(self) -> None:
        await self._watch.until_over()
        self.when_over()

    async def _tidy(self) -> None:
        while self._batches is not None:
            try:
                await asyncio.to_thread(self._batches.remove_old, time.time())
            except OSError as error:
                log.warning("old files and batches could not be removed, and are removed later: %s", error)
            await asyncio.sleep(_TIDY_EVERY_S)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:

        async def answer(request: Request) -> Response:
            try:
                return await handler(request, self._guard.caller(request.headers))
            except ClientLeft:
                return Response(status_code=499)  # the client has closed its connection
            except Exception as error:
                log_failure(error, request)
                self._metrics.errors.labels(str(refusal_of(error).error.status)).inc()
                return error_answer(error)

        return answer

    def _answers(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request, caller: Caller) -> Response:
            return await self._answering.answer(request, endpoint, caller)

        return self._guarded(answer)

    async def _health(self, _request: Request) -> Response:
        """Return 200 while the session answers. Load balancers and scripts ask this without a key."""
        status = await self._watch.now()
        trouble = self._watch.trouble or self._watch.journal_trouble
        why = trouble if self._guard.is_open else "the gateway's log says why"
        body = {"status": "ok" if not trouble else "waits" if status else "no session", "why": why if trouble else None}
        return JSONAnswer({**body, "session": self._watch.session.id}, 503 if trouble else 200)

    async def _status(self, request: Request, _caller: Caller) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(self._figures.events())
        return JSONAnswer(await self._figures.now())

    async def _prometheus(self, _request: Request, _caller: Caller) -> Response:
        return Response(self._metrics.text(self._models, await self._watch.now()), media_type=_PROMETHEUS)

    async def _list_models(self, _request: Request, _caller: Caller) -> Response:
        return JSONAnswer({"object": "list", "data": [_shown(model) for model in self._models.values()]})

    async def _one_model(self, request: Request, _caller: Caller) -> Response:
        return JSONAnswer(_shown(self._models.named(request.path_params["name"])))


def _keep_garbage_cheap() -> None:
    """Make the garbage collector skip permanent objects and run less often: a run of 20 ms delays all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _shown(model: ServedModel) -> dict[str, Any]:
    shown = {"id": model.name, "object": "model", "created": model.created, "owned_by": "stoker"}
    return {**shown, "max_model_len": longest} if (longest := model.longest) else shown


async def _show_page(_request: Request) -> Response:
    return FileResponse(PAGE, media_type="text/html")


async def _error(request: Request, error: Exception) -> Response:
    log_failure(error, request)
    answer = error_answer(error)
    if id := request.scope.get("state", {}).get("request_id"):  # this answer is made outside of all that sets it
        answer.headers["x-request-id"] = id
    return answer


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == _NOT_ALLOWED:
        return Response(status_code=204, headers=error.headers)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    said = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_answer(RequestRefused(said, code=code, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer

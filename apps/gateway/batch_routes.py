"""The addresses of files and batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from stoker.apps.common.openai.request import RequestRefused
from stoker.apps.gateway.batch_files import StoredFile, read_batch, read_upload
from stoker.apps.gateway.batches import Batches, GatewayBatch
from stoker.apps.gateway.keys import Caller, Guard
from stoker.apps.gateway.wire import JSONAnswer, receive_body

# ---- batch bodies


# ---- batch routes


MOST_FILE_BYTES = 200_000_000
_PAGE = 20
_MOST_PAGE = 10_000
_NUMBER = re.compile(r"[0-9]{1,5}")
Handler = Callable[[Request, Caller], Awaitable[Response]]


class BatchRoutes:
    """Answers what is asked of files and batches. Each caller sees those of its own key."""

    def __init__(self, batches: Batches, guard: Guard, *, most_bytes: int) -> None:
        self._files = batches.files
        self._batches = batches
        self._guard = guard
        self._most_bytes = most_bytes

    def routes(self, guarded: Callable[[Handler], Callable[[Request], Awaitable[Response]]]) -> list[Route]:
        """All addresses; `guarded` lets those in who may ask."""
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
        return JSONAnswer(_page(request, found))

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
        return JSONAnswer(_page(request, self._batches.all(owner=caller.name)))

    async def _batch(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.get(request.path_params["id"], owner=caller.name).body)

    async def _cancel(self, request: Request, caller: Caller) -> Response:
        return JSONAnswer(self._batches.cancel(request.path_params["id"], owner=caller.name).body)


def _page(request: Request, found: Sequence[StoredFile | GatewayBatch]) -> dict[str, Any]:
    """A part of a list: `limit` of them behind the one named `after`. Raises RequestRefused."""
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

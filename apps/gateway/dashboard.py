"""`stoker dashboard`: the page and the metrics of any session, without a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.apps.gateway.http import ERROR_HANDLERS, guarded, prometheus_answer
from stoker.apps.gateway.keys import Caller, Guard, KeyFile
from stoker.apps.gateway.listening import FIRST_PAGE_PORT, open_listener, run_server
from stoker.apps.gateway.page import PAGE_ROUTES, PageFigures
from stoker.apps.gateway.session_figures import SessionMetrics, session_figures
from stoker.apps.gateway.wire import JSONAnswer
from stoker.console import Screen
from stoker.errors import StokerError
from stoker.sessions import FollowedSession, Status

_FRESH_S = 0.5


class Dashboard:
    """The page of a session. `guard`: decides who may see the page."""

    def __init__(self, session: FollowedSession, guard: Guard) -> None:
        self._session = session
        self._guard = guard
        self._page = PageFigures(self._figures)
        self._registry = CollectorRegistry()
        self._metrics = SessionMetrics(self._registry)
        self._status_lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._status: Status | None = None
        self._over = self._trouble = ""
        self.when_over: Callable[[], None] = lambda: None

    def application(self) -> Starlette:
        routes = [
            *PAGE_ROUTES,
            Route("/health", self._health),
            Route("/status", guarded(self._page.answer, self._guard)),
            Route("/metrics", guarded(self._prometheus, self._guard)),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._page.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _read(self) -> None:
        async with self._status_lock:
            if time.monotonic() - self._asked_at < _FRESH_S:
                return
            try:
                answer = await asyncio.to_thread(self._session.answer)
                self._status, self._over, self._trouble = answer.status, answer.over, ""
            except StokerError as error:
                self._status, self._trouble = None, str(error) or "the session's manager does not answer"
            self._asked_at = time.monotonic()

    async def _figures(self) -> dict[str, Any]:
        await self._read()
        return {
            "at": time.time(), "site": self._session.site, "session": self._session.session, "trouble": self._trouble,
            "over": self._over, "folder": self._session.folder, "log": self._session.log,
            **session_figures(self._status),
        }  # fmt: skip

    async def _health(self, _request: Request) -> Response:
        """Return 200 while the session answers. This route needs no key."""
        await self._read()
        status = "over" if self._over else "waits" if self._trouble else "ok"
        return JSONAnswer({"status": status, "session": self._session.session}, 200 if status == "ok" else 503)

    async def _prometheus(self, _request: Request, _caller: Caller) -> Response:
        await self._read()
        self._metrics.status = None if self._over else self._status
        return prometheus_answer(generate_latest(self._registry))


def show(session_id: str, *, host: str, port: int, uds: str, as_json: bool, screen: Screen) -> int:
    """Serve the page of a session until Ctrl-C, and return the exit status. Raises SessionError, ConfigError."""
    keys = KeyFile.usual()
    listener = open_listener(host, port, uds, keys=keys, first=FIRST_PAGE_PORT)
    address = listener.address
    with listener.socket, contextlib.closing(FollowedSession(session_id)) as session:
        answer = session.answer()
        screen.line(f"session {session.session} · {answer.over or f'site {session.site}'}")
        for line in listener.lines(f"a page: {address}/     for Prometheus: {address}/metrics", path="/metrics"):
            screen.line(line)
        if keys.exists:
            screen.line(f"  the page asks for a key ({keys.path})")
        elif not uds:
            screen.line("  no keys: everybody on this machine can read the page; --uds PATH makes it private")
        if as_json:
            page, metrics = (None, None) if uds else (f"{address}/", f"{address}/metrics")
            facts = {"page": page, "metrics": metrics, "socket": uds or None, "over": answer.over or None}
            screen.json({**facts, "session": session.session, "folder": session.folder, "pid": os.getpid()})
        run_server(Dashboard(session, Guard(keys)), listener.socket)
        screen.line("the page has ended" + ("" if answer.over else f"; session {session.session} keeps running"))
    return 0

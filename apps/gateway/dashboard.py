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

from stoker.apps.gateway.http import ERROR_HANDLERS, guard_handler, make_metrics_response
from stoker.apps.gateway.keys import Caller, KeyFile, KeyGuard
from stoker.apps.gateway.listening import FIRST_PAGE_PORT, open_listener, run_server
from stoker.apps.gateway.page import PAGE_ROUTES, PageFigures
from stoker.apps.gateway.session_figures import SessionMetrics, collect_session_figures
from stoker.apps.gateway.wire import JSONResponse
from stoker.console import Screen
from stoker.errors import StokerError
from stoker.sessions import FollowedSession, Status

_FRESH_S = 0.5


class Dashboard:
    """The web application that shows a session. `guard`: decides who may see the page."""

    def __init__(self, session: FollowedSession, guard: KeyGuard) -> None:
        self._session = session
        self._guard = guard
        self._page = PageFigures(self._collect_figures)
        self._registry = CollectorRegistry()
        self._metrics = SessionMetrics(self._registry)
        self._status_lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._status: Status | None = None
        self._over = self._trouble = ""
        self.stop_server: Callable[[], None] = lambda: None

    def build_application(self) -> Starlette:
        routes = [
            *PAGE_ROUTES,
            Route("/health", self._answer_health_request),
            Route("/status", guard_handler(self._page.answer_status_request, self._guard)),
            Route("/metrics", guard_handler(self._answer_metrics_request, self._guard)),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._page.record_history())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _update_status(self) -> None:
        async with self._status_lock:
            if time.monotonic() - self._asked_at < _FRESH_S:
                return
            try:
                answer = await asyncio.to_thread(self._session.answer)
                self._status, self._over, self._trouble = answer.status, answer.over, ""
            except StokerError as error:
                self._status, self._trouble = None, str(error) or "the session's manager does not answer"
            self._asked_at = time.monotonic()

    async def _collect_figures(self) -> dict[str, Any]:
        await self._update_status()
        return {
            "at": time.time(), "site": self._session.site, "session": self._session.session, "trouble": self._trouble,
            "over": self._over, "folder": self._session.folder, "log": self._session.log,
            **collect_session_figures(self._status),
        }  # fmt: skip

    async def _answer_health_request(self, _request: Request) -> Response:
        """Answer with HTTP status 200 while the session answers, else with 503. This route needs no API key."""
        await self._update_status()
        status = "over" if self._over else "waits" if self._trouble else "ok"
        return JSONResponse({"status": status, "session": self._session.session}, 200 if status == "ok" else 503)

    async def _answer_metrics_request(self, _request: Request, _caller: Caller) -> Response:
        await self._update_status()
        self._metrics.status = None if self._over else self._status
        return make_metrics_response(generate_latest(self._registry))


def serve_dashboard(session_id: str, *, host: str, port: int, uds: str, as_json: bool, screen: Screen) -> int:
    """Serve the page of a session until Ctrl-C, and return the exit status. Raises SessionError, ConfigError."""
    keys = KeyFile.at_default_path()
    listener = open_listener(host, port, uds, keys=keys, first_port=FIRST_PAGE_PORT)
    address = listener.address
    with listener.socket, contextlib.closing(FollowedSession(session_id)) as session:
        answer = session.answer()
        screen.line(f"session {session.session} · {answer.over or f'site {session.site}'}")
        for line in listener.format_help_lines(
            f"a page: {address}/     for Prometheus: {address}/metrics", path="/metrics"
        ):
            screen.line(line)
        if keys.exists:
            screen.line(f"  the page asks for a key ({keys.path})")
        elif not uds:
            screen.line("  no keys: everybody on this machine can read the page; --uds PATH makes it private")
        if as_json:
            page, metrics = (None, None) if uds else (f"{address}/", f"{address}/metrics")
            facts = {"page": page, "metrics": metrics, "socket": uds or None, "over": answer.over or None}
            screen.json({**facts, "session": session.session, "folder": session.folder, "pid": os.getpid()})
        run_server(Dashboard(session, KeyGuard(keys)), listener.socket)
        screen.line("the page has ended" + ("" if answer.over else f"; session {session.session} keeps running"))
    return 0

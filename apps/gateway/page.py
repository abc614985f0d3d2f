"""The server-sent events of the web page at `/`, with the history of the last day."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from stoker.apps.gateway.failures import log
from stoker.apps.gateway.keys import Caller
from stoker.apps.gateway.session_figures import make_history_sample
from stoker.apps.gateway.wire import EventStream

Figures = dict[str, Any]
_EVERY_S = 1.0
_HISTORY_EVERY_S = 10.0
_MOST_STEPS = 720
_WORK_FRACTION = 1 / 60
"""Maximum fraction of time that the manager and this process spend on data for web pages."""


class FigureHistory:
    """The values that the web page draws over time: their means per time step. A step is 1 s long at first.

    When there are 720 steps, the step length doubles, up to `longest_s` seconds. At this length, the oldest steps are
    deleted instead. The default keeps 25 hours.
    """

    def __init__(self, *, longest_s: int = 128) -> None:
        self._longest_s = longest_s
        self._step_s = 1
        self._steps: dict[int, tuple[int, dict[str, float]]] = {}
        """For each time step, counted from 1970: number of samples, and the sum of each value."""

    def add_sample(self, now: float, values: Mapping[str, float]) -> None:
        step = int(now // self._step_s)
        self._add_to_step(step, 1, values)
        while step - next(iter(self._steps)) >= _MOST_STEPS:
            if self._step_s < self._longest_s:
                self._step_s *= 2
                step //= 2
                steps, self._steps = self._steps, {}
                for each, (count, sums) in steps.items():
                    self._add_to_step(each // 2, count, sums)
            else:
                del self._steps[next(iter(self._steps))]

    def to_json(self) -> dict[str, Any]:
        """Return the start of each time step in seconds since 1970 (`at`), and each value's means (`series`)."""
        names = dict.fromkeys(name for _, sums in self._steps.values() for name in sums)
        return {
            "step_s": self._step_s,
            "at": [step * self._step_s for step in self._steps],
            "series": {
                name: [round(sums[name] / count, 2) if name in sums else None for count, sums in self._steps.values()]
                for name in names
            },
        }

    def _add_to_step(self, step: int, count: int, values: Mapping[str, float]) -> None:
        before, sums = self._steps.setdefault(step, (0, {}))
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
        self._steps[step] = before + count, sums


def _make_file_route(path: str, name: str, media_type: str) -> Route:
    file = Path(__file__).parent / "data" / name

    async def answer(_request: Request) -> Response:
        return FileResponse(file, media_type=media_type)

    return Route(path, answer)


PAGE_ROUTES = [
    _make_file_route("/", "page.html", "text/html"),
    _make_file_route("/grafana.json", "grafana.json", "application/json"),
]  # fmt: skip
"""Routes of the web page and of a Grafana dashboard file. These routes need no API key."""


class PageFigures:
    """The data that all open web pages show. `read`: returns the current data."""

    def __init__(self, read: Callable[[], Awaitable[Figures]]) -> None:
        self._read = read
        self._history = {"recent": FigureHistory(longest_s=1), "day": FigureHistory()}
        self._reading = asyncio.Lock()
        self._last = b""
        self._every_s = _EVERY_S
        self._read_at = float("-inf")

    async def read_encoded_figures(self) -> bytes:
        """Return the data as JSON, at most 1 s old (in a very large session, 10 s)."""
        async with self._reading:
            began = time.monotonic()
            if began - self._read_at >= self._every_s * 0.9:
                figures = await self._read()
                if sample := make_history_sample(figures):
                    for history in self._history.values():
                        history.add_sample(time.time(), sample)
                self._last = msgspec.json.encode(figures)
                self._read_at = time.monotonic()
                self._every_s = min(_HISTORY_EVERY_S, max(_EVERY_S, (self._read_at - began) / _WORK_FRACTION))
        return self._last

    async def record_history(self) -> None:
        """Record the history every 10 s until this task is cancelled, also while no page is open."""
        while True:
            try:
                await self.read_encoded_figures()
            except Exception:  # a web page that reads the figures will report the error
                log.warning("the page's history could not be written", exc_info=True)
            await asyncio.sleep(_HISTORY_EVERY_S)

    async def answer_status_request(self, request: Request, _caller: Caller) -> Response:
        """Answer `/status` with JSON, or with server-sent events if the client asks for them."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(self.stream_events())
        return Response(await self.read_encoded_figures(), media_type="application/json")

    async def stream_events(self) -> AsyncGenerator[bytes, None]:
        """Yield the current figures about every second, and the history at the start and every 10 s."""
        history_at = float("-inf")
        while True:
            yield b"data: " + await self.read_encoded_figures() + b"\n\n"
            if time.monotonic() - history_at >= _HISTORY_EVERY_S:
                history_at = time.monotonic()
                shown = {name: history.to_json() for name, history in self._history.items()}
                yield b"event: history\ndata: " + msgspec.json.encode(shown) + b"\n\n"
            await asyncio.sleep(self._every_s)

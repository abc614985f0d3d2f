"""The figures of a gateway: for Prometheus, for the page at `/`, and in the note that `stoker status` reads."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.gateway.failures import refusal_of
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch, facts_of, median
from stoker.apps.gateway.wire import ClientLeft
from stoker.sessions import (
    WRITTEN_EVERY_S,
    GatewayNote,
    ServedModelFigures,
    Session,
    Status,
    remove_gateway_note,
    write_gateway_note,
)

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_GONE = "499"
"""Status of a request whose client has left, as in nginx."""


class GatewayMetrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        names = ("model", "endpoint")
        self.requests = Counter(
            "stoker_gateway_requests", "Requests by their status", (*names, "status"), registry=registry
        )
        self.errors = Counter(
            "stoker_gateway_errors",
            "Requests that were answered with an error, by status",
            ("status",),
            registry=registry,
        )
        self.running = Gauge("stoker_gateway_running", "Requests that run or wait", ("model",), registry=registry)
        self.tokens = Counter("stoker_gateway_tokens", "Tokens by direction", ("model", "way"), registry=registry)
        self.ttft = Histogram(
            "stoker_gateway_ttft_seconds", "Time to the first token of streams", ("model",), buckets=_TTFT,
            registry=registry,
        )  # fmt: skip
        self.tpot = Histogram(
            "stoker_gateway_tpot_seconds", "Time for each further token of streams", ("model",), buckets=_TPOT,
            registry=registry,
        )  # fmt: skip
        self.hot = Gauge("stoker_model_hot", "Libraries that hold the model", ("model",), registry=registry)
        self.loading = Gauge("stoker_model_loading", "Libraries that load the model", ("model",), registry=registry)
        self.pilots = Gauge("stoker_pilots", "Pilots that are here", registry=registry)

    def request(self, model: ServedModel, endpoint: Endpoint, *, begun: float) -> RequestFigures:
        return RequestFigures(self, model, endpoint, begun=begun)

    def text(self, models: ServedModels, status: Status | None) -> bytes:
        for model in models.values():
            facts = facts_of(status, model)
            self.hot.labels(model.name).set(facts.hot)
            self.loading.labels(model.name).set(facts.loading)
        self.pilots.set(len(status.pilots) if status else 0)
        return bytes(generate_latest(self._registry))


class RequestFigures:
    def __init__(self, metrics: GatewayMetrics, model: ServedModel, endpoint: Endpoint, *, begun: float) -> None:
        self._metrics = metrics
        self._model = model
        self._endpoint = endpoint
        self._begun = begun
        self._first_at = self._last_at = 0.0
        self._pieces = 0
        self._found_hot = False
        self._before: int | None = None
        """Number of streams that waited for a first token when this one arrived; None if it does not wait."""
        model.meter.begin(time.time())
        metrics.running.labels(model.name).inc()
        self._tokens = metrics.tokens.labels(model.name, "written")

    def await_first_token(self, *, is_hot: bool) -> None:
        """A stream starts to wait for its first token. `is_hot`: the model is loaded."""
        self._found_hot = is_hot
        self._before = self._model.meter.first.begin()

    def read(self, tokens: int) -> None:
        self._metrics.tokens.labels(self._model.name, "read").inc(tokens)

    def written(self, tokens: int, *, streamed: bool = False) -> None:
        now = time.monotonic()
        if streamed:
            if not self._first_at:
                self._first_at = now
                self._has_first_token(now - self._begun if self._found_hot else None)
            self._last_at = now
            self._pieces += tokens
        self._tokens.inc(tokens)
        self._model.meter.write(tokens, now)

    def end(self, error: BaseException | None) -> None:
        metrics, name = self._metrics, self._model.name
        self._has_first_token(None)
        ttft_s = self._first_at - self._begun if self._first_at else None
        tpot_s = (self._last_at - self._first_at) / (self._pieces - 1) if self._pieces > 1 else None
        failed = isinstance(error, Exception) and not isinstance(error, ClientLeft)
        if error is not None and not failed:
            status = _GONE
        else:
            status = str(refusal_of(error).error.status) if error is not None else "200"
        metrics.running.labels(name).dec()
        metrics.requests.labels(name, self._endpoint.value, status).inc()
        if ttft_s is not None:
            metrics.ttft.labels(name).observe(ttft_s)
        if tpot_s is not None:
            metrics.tpot.labels(name).observe(tpot_s)
        self._model.meter.end(failed=failed and status.startswith("5"), ttft_s=ttft_s, tpot_s=tpot_s)

    def _has_first_token(self, ttft_s: float | None) -> None:
        """Stop waiting; a second call has no effect."""
        if self._before is not None:
            self._model.meter.first.end(self._before, ttft_s)
            self._before = None


PAGE = Path(__file__).parent / "data" / "page.html"
_EVERY_S = 1.0


class GatewayFigures:
    def __init__(self, models: ServedModels, watch: SessionWatch, *, site: str) -> None:
        self._models = models
        self._watch = watch
        self._site = site
        self._begun = time.time()

    async def now(self) -> dict[str, Any]:
        status = await self._watch.now()
        return {
            "at": time.time(),
            "since": self._begun,
            "site": self._site,
            "session": self._watch.session.id,
            "trouble": self._watch.trouble,
            "models": [_model(model, status) for model in self._models.values()],
            "pilots": _pilots(status, self._models),
            "waiting": [
                {"block": str(job.block), "source": job.source, "job": job.job, "phase": job.phase, "why": job.reason}
                for job in (status.jobs if status else ())
                if job.phase != "running"
            ],
            "calls": {"queued": status.queued, "running": status.running, "rate": status.rate} if status else {},
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: " + msgspec.json.encode(await self.now()) + b"\n\n"
            await asyncio.sleep(_EVERY_S)


def _model(model: ServedModel, status: Status | None) -> dict[str, Any]:
    facts, meter, settings = facts_of(status, model), model.meter, model.settings
    return {
        "name": model.name,
        "kind": settings.kind.value,
        "state": "trouble" if model.trouble else facts.state,
        "hot": facts.hot,
        "loading": facts.loading,
        "loading_s": facts.loading_s,
        "load_s": facts.load_s,
        "why": model.trouble or (facts.waits_for if not facts.hot else "") or (facts.failure if not facts.hot else ""),
        "running": meter.running,
        "queued": facts.queued,
        "requests": meter.requests,
        "failed": meter.failed,
        "tokens_per_s": meter.rate(time.monotonic()),
        "ttft_s": median(meter.ttft),
        "tpot_s": median(meter.tpot),
        "ttft_objective_s": float(settings.ttft) or None,
        "tpot_objective_s": float(settings.tpot) or None,
        "met": meter.met,
        "min": settings.min,
        "max": settings.max,
        "keep_alive_s": None if settings.keep_alive is None else float(settings.keep_alive),
    }


def _pilots(status: Status | None, models: ServedModels) -> list[dict[str, Any]]:
    if status is None:
        return []
    names: dict[str, list[str]] = {}
    for model in models.values():
        if model.recipe is not None:  # models of the same settings share one
            names.setdefault(model.recipe.name, []).append(model.name)
    holds = {
        library.library: f"{' and '.join(names.get(library.recipe, [library.recipe]))} ({library.state})"
        for library in status.libraries
    }
    return [
        {
            "pilot": pilot.pilot,
            "host": pilot.host,
            "state": pilot.draining or pilot.state,
            "ends_in_s": pilot.ends_in_s,
            "rate": pilot.rate,
            "devices": [
                {
                    "device": device.device,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "promised_bytes": device.promised_bytes,
                    "fault": device.fault,
                    "holds": [holds[one] for one in device.libraries if one in holds],
                }
                for device in pilot.devices
            ],
        }
        for pilot in status.pilots
    ]


log = logging.getLogger("stoker.gateway")


class GatewayNotes:
    """The note of one gateway. `name`: of its file, stable across restarts; `address`: where it listens."""

    def __init__(self, session: Session, models: ServedModels, *, name: str, address: str) -> None:
        self._session, self._models = session, models
        self._name, self._address = name, address

    async def keep(self) -> None:
        """Write the note repeatedly; remove it when cancelled. A full disk costs only the note."""
        told = ""
        try:
            while True:
                try:
                    await asyncio.to_thread(write_gateway_note, self._session.folder, self._name, self.now())
                    told = ""
                except OSError as error:
                    why = error.strerror or str(error)  # its text names a draft, another one each time
                    if told != why:
                        told = why
                        log.warning("stoker status will not show these models: %s", error)
                await asyncio.sleep(WRITTEN_EVERY_S)
        finally:
            remove_gateway_note(self._session.folder, self._name)

    def now(self) -> GatewayNote:
        models = tuple(map(_figures, self._models.values()))
        return GatewayNote(self._address, socket.gethostname(), os.getpid(), models, at=time.time())


def _figures(model: ServedModel) -> ServedModelFigures:
    meter = model.meter
    return ServedModelFigures(
        name=model.name,
        key=model.recipe.key if model.recipe is not None else "",
        recipe=model.recipe.name if model.recipe is not None else "",
        running=meter.running,
        tokens_per_s=meter.rate(time.monotonic()),
        ttft_s=median(meter.ttft),
        ttft_objective_s=float(model.settings.ttft) or None,
        met=meter.met,
        trouble=model.trouble,
    )

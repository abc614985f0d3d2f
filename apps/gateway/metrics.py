"""Figures of requests, for Prometheus and for the page."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stoker.apps.common.openai.request import Endpoint
from stoker.apps.gateway.failures import refusal_of
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.apps.gateway.watch import facts_of
from stoker.apps.gateway.wire import ClientLeft
from stoker.sessions import Status

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_GONE = "499"
"""What stands for the status of a request whose client has gone, as in nginx."""


class GatewayMetrics:
    """The counters of one gateway."""

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
        """A request of a model has come."""
        return RequestFigures(self, model, endpoint, begun=begun)

    def text(self, models: ServedModels, status: Status | None) -> bytes:
        """All figures, in Prometheus' form."""
        for model in models.values():
            facts = facts_of(status, model)
            self.hot.labels(model.name).set(facts.hot)
            self.loading.labels(model.name).set(facts.loading)
        self.pilots.set(len(status.pilots) if status else 0)
        return bytes(generate_latest(self._registry))


class RequestFigures:
    """The figures of one request, from its beginning to its end."""

    def __init__(self, metrics: GatewayMetrics, model: ServedModel, endpoint: Endpoint, *, begun: float) -> None:
        self._metrics = metrics
        self._model = model
        self._endpoint = endpoint
        self._begun = begun
        self._first_at = self._last_at = 0.0
        self._pieces = 0
        self._found_hot = False
        self._before: int | None = None
        """Streams that waited for a first token when this one, which still does, came."""
        model.meter.begin(time.time())
        metrics.running.labels(model.name).inc()
        self._tokens = metrics.tokens.labels(model.name, "written")

    def await_first_token(self, *, is_hot: bool) -> None:
        """A stream waits for its first token from now on. `is_hot`: the wait is for no load."""
        self._found_hot = is_hot
        self._before = self._model.meter.first.begin()

    def read(self, tokens: int) -> None:
        """Count tokens of prompts."""
        self._metrics.tokens.labels(self._model.name, "read").inc(tokens)

    def written(self, tokens: int, *, streamed: bool = False) -> None:
        """Count tokens that were written; with `streamed`, just now."""
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
        """It is over."""
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
        """It waits no more; twice is no error."""
        if self._before is not None:
            self._model.meter.first.end(self._before, ttft_s)
            self._before = None

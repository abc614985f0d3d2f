"""The metrics of a gateway's requests for Prometheus, and the figures of its models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.gateway.failures import OBJECTIVE_UNREACHABLE, refusal_of
from stoker.apps.gateway.keys import HeldRequest
from stoker.apps.gateway.objectives import Objectives
from stoker.apps.gateway.served import ServedModel, ServedModels, facts_of, median
from stoker.apps.gateway.session_figures import SessionMetrics
from stoker.apps.gateway.usage import UsageCount, UsageRecorder
from stoker.apps.gateway.wire import ClientLeft
from stoker.sessions import ServedModelFigures, Status

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_LATENCY = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_MODEL = "model_name"
_NO_OBJECTIVES = Objectives()
_REFUSED = ("rate_limit_error", "overloaded")
"""Error types of requests that exceed a limit or would be answered too late."""
_CLIENT_CLOSED = "499"
"""HTTP status of a request whose client has disconnected, as in nginx."""


Sample = tuple[str, str, tuple[tuple[str, str], ...], float]
"""Metric family, name of the sample, labels, and value."""


def summed(samples: Iterable[Sample]) -> list[Sample]:
    """Add up samples of several processes. Of `_created` times, keep the earliest."""
    sums: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for family, name, labels, value in samples:
        key = (family, name, labels)
        sums[key] = min(sums.get(key, value), value) if name.endswith("_created") else sums.get(key, 0.0) + value
    return [(*key, value) for key, value in sums.items()]


class _SummedRegistry:
    """Adds the samples of other processes to a registry's samples."""

    def __init__(self, registry: CollectorRegistry, others: Sequence[Sample]) -> None:
        self._registry = registry
        self._others = others

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            own = [(family.name, each.name, tuple(each.labels.items()), each.value) for each in family.samples]
            more = [each for each in self._others if each[0] == family.name]
            if more:
                family.samples = []
                for _, name, labels, value in summed((*own, *more)):
                    family.add_sample(name, dict(labels), value)
            yield family


class GatewayMetrics:
    """Metrics of requests. A metric that vLLM also has gets vLLM's name, with `stoker_` for `vllm:`."""

    def __init__(self, usage: UsageRecorder) -> None:
        self._usage = usage
        registry = self._registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, (_MODEL,), registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, (_MODEL,), buckets=buckets, registry=registry)

        self.requests = counter("stoker_gateway_requests", "Requests by status", _MODEL, "endpoint", "status")
        self.errors = counter("stoker_gateway_errors", "Requests that were answered with an error, by status", "status")
        self.finished = counter("stoker_request_success", "Answers by finish reason", _MODEL, "finished_reason")
        self.running = gauge("stoker_gateway_running", "Requests that run or wait")
        self.read = counter("stoker_prompt_tokens", "Tokens read", _MODEL)
        self.written = counter("stoker_generation_tokens", "Tokens written", _MODEL)
        self.queue = histogram("stoker_request_queue_time_seconds", "Time until the model begins a stream", _TTFT)
        self.ttft = histogram("stoker_time_to_first_token_seconds", "Time to the first token of streams", _TTFT)
        self.tpot = histogram(
            "stoker_request_time_per_output_token_seconds", "Time for each further token of streams", _TPOT
        )
        self.latency = histogram("stoker_e2e_request_latency_seconds", "Time of whole answers", _LATENCY)
        self.objectives = counter(
            "stoker_gateway_objectives", "Streams with an objective, by whether they met it", _MODEL, "objective", "met"
        )
        self.refused = counter("stoker_gateway_refused", "Requests refused because they would have been late", _MODEL)
        self.states = (
            gauge("stoker_model_hot", "Libraries with the model loaded"),
            gauge("stoker_model_loading", "Libraries that load the model"),
            gauge("stoker_model_asleep", "Libraries with the model asleep"),
            gauge("stoker_model_wake_seconds", "Duration of the model's last wake"),
        )
        self._session = SessionMetrics(registry)

    def count_usage(
        self, model: ServedModel, *, key: str, error: BaseException | None, tokens: tuple[int, int] = (0, 0)
    ) -> None:
        count = UsageCount(1, *tokens)
        if isinstance(error, Exception) and not isinstance(error, ClientLeft):
            is_refused = refusal_of(error).type in _REFUSED
            count.refused, count.failed = int(is_refused), int(not is_refused)
        self._usage.count(count, key=key, model=model.name)

    def count_error(self, status: int) -> None:
        self.errors.labels(str(status)).inc()

    def count_late_refusal(self, model: ServedModel, error: BaseException) -> bool:
        """Count an error that refuses a late request, and return True. Ignore other errors."""
        is_late = refusal_of(error).code == OBJECTIVE_UNREACHABLE
        if is_late:
            model.meter.refused += 1
            self.refused.labels(model.name).inc()
        return is_late

    def samples(self) -> list[Sample]:
        return [
            (family.name, each.name, tuple(each.labels.items()), each.value)
            for family in self._registry.collect()
            if family.type in ("counter", "histogram")
            for each in family.samples
        ]

    def text(self, models: ServedModels, status: Status | None, others: Sequence[Sample] = ()) -> bytes:
        """Return the text that Prometheus reads. `others`: samples of other processes."""
        for model in models.values():
            facts = facts_of(status, model)
            self.running.labels(model.name).set(model.meter.running)
            for gauge, value in zip(self.states, (facts.hot, facts.loading, facts.asleep, facts.wake_s), strict=True):
                gauge.labels(model.name).set(value)
        self._session.status, self._session.names = status, model_names_by_recipe(models)
        return bytes(generate_latest(_SummedRegistry(self._registry, others) if others else self._registry))


_CANCEL_LIMIT_S = 1.0
"""Seconds after a disconnect in which a request still counts for its key. Its calls end within this time."""


class RunningRequest:
    """A running request and its metrics. `held`: counts the request for the limits of its key."""

    def __init__(
        self, metrics: GatewayMetrics, model: ServedModel, endpoint: Endpoint, *, begun: float,
        wanted: Objectives = _NO_OBJECTIVES, key: str = "",
    ) -> None:  # fmt: skip
        self.model = model
        self.held = HeldRequest()
        self._metrics = metrics
        self._endpoint = endpoint
        self._begun_at = begun
        self._wanted = wanted
        self._key = key
        self.tokens = (0, 0)
        """Tokens read and written, for the usage of the key."""
        self._first_at = self._last_at = 0.0
        self._pieces = 0
        self._is_late = self._found_hot = self._is_over = False
        self._before: int | None = None
        """Number of streams that waited before this stream; None if this request does not wait."""
        model.meter.begin()
        self._tokens = metrics.written.labels(model.name)

    def count(self, read: int, written: int) -> None:
        """Count the tokens of a whole answer."""
        self.read(read)
        if written:
            self.written(written)
        self.count_tokens(read, written)

    def count_tokens(self, read: int, written: int) -> None:
        self.held.tokens = read + written
        self.tokens = read, written

    def begin_first_token_wait(self, *, is_hot: bool) -> None:
        self._found_hot = is_hot
        self._before = self.model.meter.first.begin()

    def read(self, tokens: int) -> None:
        self._metrics.read.labels(self.model.name).inc(tokens)

    def begins(self) -> None:
        self._metrics.queue.labels(self.model.name).observe(time.monotonic() - self._begun_at)

    def finished(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._metrics.finished.labels(self.model.name, reason).inc()

    def written(self, tokens: int, *, streamed: bool = False) -> None:
        now = time.monotonic()
        if streamed:
            if not self._first_at:
                self._first_at = now
                self._metrics.ttft.labels(self.model.name).observe(now - self._begun_at)
                self._end_first_token_wait(now - self._begun_at if self._found_hot else None)
            elif self._wanted.tpot_s:
                due_s = self._wanted.due_s(self._pieces, ttft_s=self._first_at - self._begun_at)
                self._is_late |= now - self._begun_at > due_s
            self._last_at = now
            self._pieces += tokens
        self._tokens.inc(tokens)
        self.model.meter.write(tokens, now)

    def end(self, error: BaseException | None) -> None:
        if not self._is_over:
            self.held.end()
            self._count_end(error)

    def leave(self, error: BaseException) -> None:
        """End a request whose client has disconnected."""
        if not self._is_over:
            asyncio.get_running_loop().call_later(_CANCEL_LIMIT_S, self.held.end)
            self._count_end(error)

    def _count_end(self, error: BaseException | None) -> None:
        self._is_over = True
        metrics, name = self._metrics, self.model.name
        self._end_first_token_wait(None)
        ttft_s = self._first_at - self._begun_at if self._first_at else None
        tpot_s = (self._last_at - self._first_at) / (self._pieces - 1) if self._pieces > 1 else None
        failed = isinstance(error, Exception) and not isinstance(error, ClientLeft)
        status = "200" if error is None else str(refusal_of(error).status) if failed else _CLIENT_CLOSED
        metrics.requests.labels(name, self._endpoint.value, status).inc()
        if error is None:
            metrics.latency.labels(name).observe(time.monotonic() - self._begun_at)
        if tpot_s is not None:
            metrics.tpot.labels(name).observe(tpot_s)
        is_late = error is not None and self._metrics.count_late_refusal(self.model, error)
        failed = failed and status.startswith("5") and not is_late
        late = self._is_late if tpot_s is not None else None
        met = self._wanted.met(ttft_s=ttft_s, late=late, failed=failed) if ttft_s is not None else {}
        for objective, is_met in met.items():
            metrics.objectives.labels(name, objective, "yes" if is_met else "no").inc()
        self.model.meter.end(failed=failed, ttft_s=ttft_s, tpot_s=tpot_s, met=met.values())
        metrics.count_usage(self.model, key=self._key, error=error, tokens=self.tokens)

    def _end_first_token_wait(self, ttft_s: float | None) -> None:
        if self._before is not None:
            self.model.meter.first.end(self._before, ttft_s)
            self._before = None


def model_names_by_recipe(models: ServedModels) -> dict[str, str]:
    """Return the models' names by recipe. Models with equal settings share a recipe."""
    names: dict[str, list[str]] = {}
    for model in models.values():
        if model.recipe is not None:
            names.setdefault(model.recipe.name, []).append(model.name)
    return {recipe: " and ".join(served) for recipe, served in names.items()}


def model_figures(model: ServedModel, status: Status | None) -> dict[str, Any]:
    """Return the figures of a model for the page."""
    facts, meter, settings = facts_of(status, model), model.meter, model.settings
    facts_shown = ("hot", "loading", "asleep", "wake_s", "loading_s", "load_s", "queued")
    return {
        "name": model.name, "kind": settings.kind.value, "state": "trouble" if model.trouble else facts.state,
        **{name: getattr(facts, name) for name in facts_shown},
        "why": model.trouble or ("" if facts.hot else facts.waits_for or facts.failure),
        **{name: getattr(meter, name) for name in ("running", "requests", "failed", "met", "refused")},
        "tokens_per_s": meter.rate(time.monotonic()), "ttft_s": median(meter.ttft), "tpot_s": median(meter.tpot),
        "ttft_objective_s": model.objectives.ttft_s or None, "tpot_objective_s": model.objectives.tpot_s or None,
        "min": settings.min, "max": settings.max,
        "keep_alive_s": None if settings.keep_alive is None else float(settings.keep_alive),
    }  # fmt: skip


def build_note_figures(model: ServedModel) -> ServedModelFigures:
    """Return the figures of a model for `stoker status`."""
    meter, recipe = model.meter, model.recipe
    return ServedModelFigures(
        name=model.name, key=recipe.key if recipe is not None else "", recipe=recipe.name if recipe is not None else "",
        running=meter.running, tokens_per_s=meter.rate(time.monotonic()), ttft_s=median(meter.ttft),
        ttft_objective_s=model.objectives.ttft_s or None, met=meter.met, trouble=model.trouble, refused=meter.refused,
    )  # fmt: skip

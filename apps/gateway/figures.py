"""Prometheus metrics of a gateway's requests, and data about its models to display."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.gateway.failures import OBJECTIVE_UNREACHABLE, error_for_client
from stoker.apps.gateway.keys import CountedRequest
from stoker.apps.gateway.objectives import LatencyObjectives
from stoker.apps.gateway.served import ServedModel, ServedModels, make_model_facts, median_or_none
from stoker.apps.gateway.session_figures import SessionMetrics
from stoker.apps.gateway.usage import UsageCount, UsageRecorder
from stoker.apps.gateway.wire import ClientDisconnected
from stoker.sessions import ServedModelFigures, Status

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_LATENCY = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_MODEL = "model_name"
_NO_OBJECTIVES = LatencyObjectives()
_REFUSED = ("rate_limit_error", "overloaded")
"""Error types of requests that exceed a limit or would be answered too late."""
_CLIENT_CLOSED = "499"
"""HTTP status of a request whose client has disconnected, as in nginx."""


Sample = tuple[str, str, tuple[tuple[str, str], ...], float]
"""One value for Prometheus: metric family, name of the sample, labels, and value."""


def sum_samples(samples: Iterable[Sample]) -> list[Sample]:
    """Add up the samples of several processes. For `_created` samples, keep the earliest time instead."""
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
                for _, name, labels, value in sum_samples((*own, *more)):
                    family.add_sample(name, dict(labels), value)
            yield family


class GatewayMetrics:
    """Metrics of requests. If vLLM has the same metric, its name is vLLM's, with `stoker_` instead of `vllm:`."""

    def __init__(self, usage: UsageRecorder) -> None:
        self._usage = usage
        registry = self._registry = CollectorRegistry()

        def make_counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def make_gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, (_MODEL,), registry=registry)

        def make_histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, (_MODEL,), buckets=buckets, registry=registry)

        self.requests = make_counter("stoker_gateway_requests", "Requests by status", _MODEL, "endpoint", "status")
        self.errors = make_counter(
            "stoker_gateway_errors", "Requests that were answered with an error, by status", "status"
        )
        self.finished = make_counter("stoker_request_success", "Answers by finish reason", _MODEL, "finished_reason")
        self.running = make_gauge("stoker_gateway_running", "Requests that run or wait")
        self.read = make_counter("stoker_prompt_tokens", "Tokens read", _MODEL)
        self.written = make_counter("stoker_generation_tokens", "Tokens written", _MODEL)
        self.queue = make_histogram("stoker_request_queue_time_seconds", "Time until the model begins a stream", _TTFT)
        self.ttft = make_histogram("stoker_time_to_first_token_seconds", "Time to the first token of streams", _TTFT)
        self.tpot = make_histogram(
            "stoker_request_time_per_output_token_seconds", "Time for each further token of streams", _TPOT
        )
        self.latency = make_histogram("stoker_e2e_request_latency_seconds", "Time of whole answers", _LATENCY)
        self.objectives = make_counter(
            "stoker_gateway_objectives", "Streams with an objective, by whether they met it", _MODEL, "objective", "met"
        )
        self.refused = make_counter(
            "stoker_gateway_refused", "Requests refused because they would have been late", _MODEL
        )
        self.states = (
            make_gauge("stoker_model_hot", "Libraries with the model loaded"),
            make_gauge("stoker_model_loading", "Libraries that load the model"),
            make_gauge("stoker_model_asleep", "Libraries with the model asleep"),
            make_gauge("stoker_model_wake_seconds", "Duration of the model's last wake"),
        )
        self._session = SessionMetrics(registry)

    def count_usage(
        self, model: ServedModel, *, key: str, error: BaseException | None, tokens: tuple[int, int] = (0, 0)
    ) -> None:
        count = UsageCount(1, *tokens)
        if isinstance(error, Exception) and not isinstance(error, ClientDisconnected):
            is_refused = error_for_client(error).type in _REFUSED
            count.refused, count.failed = int(is_refused), int(not is_refused)
        self._usage.add_count(count, key=key, model=model.name)

    def count_error(self, status: int) -> None:
        self.errors.labels(str(status)).inc()

    def count_if_late_refusal(self, model: ServedModel, error: BaseException) -> bool:
        """Return True, and count the error, if it refuses a request that would be answered too late."""
        is_late = error_for_client(error).code == OBJECTIVE_UNREACHABLE
        if is_late:
            model.meter.refused += 1
            self.refused.labels(model.name).inc()
        return is_late

    def collect_samples(self) -> list[Sample]:
        return [
            (family.name, each.name, tuple(each.labels.items()), each.value)
            for family in self._registry.collect()
            if family.type in ("counter", "histogram")
            for each in family.samples
        ]

    def render_text(self, models: ServedModels, status: Status | None, others: Sequence[Sample] = ()) -> bytes:
        """Return the text that Prometheus reads. `others`: samples of other processes."""
        for model in models.values():
            facts = make_model_facts(status, model)
            self.running.labels(model.name).set(model.meter.running)
            for gauge, value in zip(self.states, (facts.hot, facts.loading, facts.asleep, facts.wake_s), strict=True):
                gauge.labels(model.name).set(value)
        self._session.status, self._session.names = status, map_recipes_to_model_names(models)
        return bytes(generate_latest(_SummedRegistry(self._registry, others) if others else self._registry))


_CANCEL_LIMIT_S = 1.0
"""Seconds that a request still counts for its key after the client disconnects. Its calls end within this time."""


class RunningRequest:
    """A running request and its metrics. `held`: counts the request against the limits of its key."""

    def __init__(
        self, metrics: GatewayMetrics, model: ServedModel, endpoint: Endpoint, *, begun: float,
        wanted: LatencyObjectives = _NO_OBJECTIVES, key: str = "",
    ) -> None:  # fmt: skip
        self.model = model
        self.held = CountedRequest()
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
        model.meter.count_request_start()
        self._tokens = metrics.written.labels(model.name)

    def count_whole_answer(self, read: int, written: int) -> None:
        self.count_prompt_tokens(read)
        if written:
            self.count_written_tokens(written)
        self.count_tokens(read, written)

    def count_tokens(self, read: int, written: int) -> None:
        self.held.tokens = read + written
        self.tokens = read, written

    def begin_first_token_wait(self, *, is_hot: bool) -> None:
        self._found_hot = is_hot
        self._before = self.model.meter.first.begin_wait()

    def count_prompt_tokens(self, tokens: int) -> None:
        self._metrics.read.labels(self.model.name).inc(tokens)

    def record_queue_time(self) -> None:
        self._metrics.queue.labels(self.model.name).observe(time.monotonic() - self._begun_at)

    def count_finish_reasons(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._metrics.finished.labels(self.model.name, reason).inc()

    def count_written_tokens(self, tokens: int, *, streamed: bool = False) -> None:
        now = time.monotonic()
        if streamed:
            if not self._first_at:
                self._first_at = now
                self._metrics.ttft.labels(self.model.name).observe(now - self._begun_at)
                self._end_first_token_wait(now - self._begun_at if self._found_hot else None)
            elif self._wanted.tpot_s:
                due_s = self._wanted.token_due_s(self._pieces, ttft_s=self._first_at - self._begun_at)
                self._is_late |= now - self._begun_at > due_s
            self._last_at = now
            self._pieces += tokens
        self._tokens.inc(tokens)
        self.model.meter.count_written_tokens(tokens, now)

    def end_request(self, error: BaseException | None) -> None:
        if not self._is_over:
            self.held.end_request()
            self._count_end(error)

    def end_after_disconnect(self, error: BaseException) -> None:
        if not self._is_over:
            asyncio.get_running_loop().call_later(_CANCEL_LIMIT_S, self.held.end_request)
            self._count_end(error)

    def _count_end(self, error: BaseException | None) -> None:
        self._is_over = True
        metrics, name = self._metrics, self.model.name
        self._end_first_token_wait(None)
        ttft_s = self._first_at - self._begun_at if self._first_at else None
        tpot_s = (self._last_at - self._first_at) / (self._pieces - 1) if self._pieces > 1 else None
        failed = isinstance(error, Exception) and not isinstance(error, ClientDisconnected)
        status = "200" if error is None else str(error_for_client(error).status) if failed else _CLIENT_CLOSED
        metrics.requests.labels(name, self._endpoint.value, status).inc()
        if error is None:
            metrics.latency.labels(name).observe(time.monotonic() - self._begun_at)
        if tpot_s is not None:
            metrics.tpot.labels(name).observe(tpot_s)
        is_late = error is not None and self._metrics.count_if_late_refusal(self.model, error)
        failed = failed and status.startswith("5") and not is_late
        late = self._is_late if tpot_s is not None else None
        met = self._wanted.check_stream(ttft_s=ttft_s, late=late, failed=failed) if ttft_s is not None else {}
        for objective, is_met in met.items():
            metrics.objectives.labels(name, objective, "yes" if is_met else "no").inc()
        self.model.meter.count_request_end(failed=failed, ttft_s=ttft_s, tpot_s=tpot_s, met=met.values())
        metrics.count_usage(self.model, key=self._key, error=error, tokens=self.tokens)

    def _end_first_token_wait(self, ttft_s: float | None) -> None:
        if self._before is not None:
            self.model.meter.first.end_wait(self._before, ttft_s)
            self._before = None


def map_recipes_to_model_names(models: ServedModels) -> dict[str, str]:
    """Return the names of the models by their recipe. Models with equal settings share a recipe."""
    names: dict[str, list[str]] = {}
    for model in models.values():
        if model.recipe is not None:
            names.setdefault(model.recipe.name, []).append(model.name)
    return {recipe: " and ".join(served) for recipe, served in names.items()}


def build_model_figures(model: ServedModel, status: Status | None) -> dict[str, Any]:
    """Return the data of a model for the web page."""
    facts, meter, settings = make_model_facts(status, model), model.meter, model.settings
    facts_shown = ("hot", "loading", "asleep", "wake_s", "loading_s", "load_s", "queued")
    return {
        "name": model.name, "kind": settings.kind.value, "state": "trouble" if model.trouble else facts.state,
        **{name: getattr(facts, name) for name in facts_shown},
        "why": model.trouble or ("" if facts.hot else facts.waits_for or facts.failure),
        "running": meter.running, "requests": meter.requests, "failed": meter.failed,
        "met": meter.objectives_met_share, "refused": meter.refused,
        "tokens_per_s": meter.tokens_per_second(time.monotonic()),
        "ttft_s": median_or_none(meter.ttft), "tpot_s": median_or_none(meter.tpot),
        "ttft_objective_s": model.objectives.ttft_s or None, "tpot_objective_s": model.objectives.tpot_s or None,
        "min": settings.min, "max": settings.max,
        "keep_alive_s": None if settings.keep_alive is None else float(settings.keep_alive),
    }  # fmt: skip


def build_note_figures(model: ServedModel) -> ServedModelFigures:
    """Return the data of a model for `stoker status`."""
    meter, recipe = model.meter, model.recipe
    return ServedModelFigures(
        name=model.name, key=recipe.key if recipe is not None else "", recipe=recipe.name if recipe is not None else "",
        running=meter.running, tokens_per_s=meter.tokens_per_second(time.monotonic()),
        ttft_s=median_or_none(meter.ttft), ttft_objective_s=model.objectives.ttft_s or None,
        met=meter.objectives_met_share, trouble=model.trouble, refused=meter.refused,
    )  # fmt: skip

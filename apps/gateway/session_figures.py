"""The data of a session, in short lists for the page and as metrics for Prometheus.

Metrics have vLLM's names where vLLM has them: `vllm:num_requests_running` becomes `stoker_num_requests_running`, with
the label `model_name`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.sessions import ContextStatus, Status

_MOST_ROWS = 50
_MOST_PILOTS = 25
_MOST_NOTICES = 8
_NO_NAMES: Mapping[str, str] = {}


def collect_session_figures(
    status: Status | None, *, names: Mapping[str, str] = _NO_NAMES, with_texts: bool = True
) -> dict[str, Any]:
    """Return the web page's data of a session. `with_texts`: False to omit error messages, which may quote inputs."""
    if status is None:
        return {"calls": {}, **{part: [] for part in _LIST_FIGURES}, "more_pilots": 0, "kinds": {}}
    short = {each.name: each.name if each.arguments else each.title for each in status.contexts}
    served, names = names, {**short, **names}
    busiest = sorted(status.contexts, key=lambda each: -(each.running + each.queued))[:_MOST_ROWS]
    keys = {each.key for each in busiest}
    contexts = [each for each in status.contexts if each.key in keys]  # keep the order of `status`
    return {
        "uptime_s": status.uptime_s,
        "calls": {
            "queued": status.queued, "running": status.running, "done": status.done, "failed": status.failed,
            "cancelled": status.cancelled, "rate": status.rate, "left_s": status.left_s,
            "pilot_in_s": status.pilot_in_s, "lost_pilots": status.lost_pilots, "rerun": status.rerun_calls,
        },
        "maps": [_with_shown_context_name(each, names) for each in status.maps[:_MOST_ROWS]],
        "contexts": [_make_context_figures(each, served) for each in contexts],
        "failures": [
            {**asdict(each), "message": each.message if with_texts else ""} for each in status.failure_groups
        ],
        "longest": [
            {"call": each.call, "function": each.function, "context": names.get(each.context, each.context),
             "since_s": each.since_s, "where": " ".join(each.where), "ahead": each.ahead}
            for each in status.longest
        ],
        "slowest": [_with_shown_context_name(each, names) for each in status.slowest],
        **_make_pilot_figures(status, names),
        "waiting": [
            {"block": str(job.block), "source": job.source, "job": job.job, "phase": job.phase, "why": job.reason}
            for job in status.jobs
            if job.phase != "running"
        ][:_MOST_ROWS],
        "notices": [asdict(each) for each in status.notices[-_MOST_NOTICES:]],
        "faults": [{"where": where, "text": text} for where, text in status.trouble.items()][:_MOST_NOTICES],
    }  # fmt: skip


_LIST_FIGURES = ("maps", "contexts", "failures", "longest", "slowest", "pilots", "waiting", "notices", "faults")


def make_history_sample(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the page's history; empty while the manager does not answer."""
    calls = figures["calls"]
    if not calls:
        return {}
    models = figures.get("models")
    tokens = {"tokens": sum(each["tokens_per_s"] for each in models)} if models is not None else {}
    return {
        "rate": calls["rate"], "waiting": calls["queued"], "running": calls["running"],
        "memory": figures["memory_bytes"], "devices": figures["device_bytes"], **tokens,
    }  # fmt: skip


def _with_shown_context_name(struct: Any, names: Mapping[str, str]) -> dict[str, Any]:
    fields = asdict(struct)
    fields["context"] = names.get(struct.context, struct.context)
    return fields


def _make_context_figures(context: ContextStatus, names: Mapping[str, str]) -> dict[str, Any]:
    shown = ("hot", "loading", "asleep", "queued", "running", "loads", "load_s", "ended", "run_s", "rate", "left_s",
             "memory_bytes", "waits_for", "last_failure")  # fmt: skip
    return {
        "name": names.get(context.name, context.title), **{name: getattr(context, name) for name in shown}
    }  # fmt: skip


def _make_pilot_figures(status: Status, names: Mapping[str, str]) -> dict[str, Any]:
    holds: dict[str, Counter[str]] = {}
    memory_bytes = device_bytes = 0
    for library in status.libraries:
        memory_bytes += library.memory_bytes
        device_bytes += library.device_bytes
        for device in library.devices:
            text = f"{names.get(library.recipe, library.recipe)} ({library.state})"
            holds.setdefault(f"{library.pilot}/{device}", Counter())[text] += 1
    here = [pilot for pilot in status.pilots if pilot.state != "gone"]
    kinds = Counter(device.kind for pilot in here for device in pilot.devices)
    first = sorted(status.pilots, key=lambda pilot: not any(device.fault for device in pilot.devices))[:_MOST_PILOTS]
    return {
        "memory_bytes": memory_bytes,
        "device_bytes": device_bytes,
        "pilots_here": len(here),
        "kinds": kinds,
        "more_pilots": len(status.pilots) - len(first),
        "pilots": [
            {
                "pilot": pilot.pilot, "host": pilot.host, "state": pilot.draining or pilot.state,
                "ends_in_s": pilot.ends_in_s, "rate": pilot.rate, "ended": pilot.ended,
                "devices": [
                    {
                        "device": device.device, "kind": device.kind, "memory_bytes": device.memory_bytes,
                        "promised_bytes": device.promised_bytes, "fault": device.fault,
                        "holds": [
                            text if count == 1 else f"{count} x {text}"
                            for text, count in holds.get(f"{pilot.pilot}/{device.device}", {}).items()
                        ],
                    }
                    for device in pilot.devices
                ],
            }
            for pilot in first
        ],
    }  # fmt: skip


# ---- Prometheus

_MOST_MODELS = 200


class SessionMetrics:
    """Collects a session's metrics. `status`: None while the manager does not answer; `names`: names of contexts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.status: Status | None = None
        self.names: Mapping[str, str] = _NO_NAMES
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("stoker_session_up", "1 if the session's manager answers", self.status is not None)
        if self.status is not None:
            yield from _session_metrics(self.status)
            yield from _context_metrics(self.status, self.names)
            yield from _engine_metrics(self.status, self.names)
            yield from _map_metrics(self.status)
            yield from _pilot_metrics(self.status)


def _make_metric_family(
    name: str, help: str, labels: list[str], rows: Iterable[tuple[Sequence[str], float]], *, counts: bool = False
) -> Metric:
    """Return a gauge or a counter, with a value for each row of label values."""
    family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, help, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _session_metrics(status: Status) -> Iterator[Metric]:
    ended = (("done", status.done), ("failed", status.failed), ("cancelled", status.cancelled))
    rows: Iterable[tuple[Sequence[str], float]] = (([reason], count) for reason, count in ended)
    yield _make_metric_family("stoker_calls", "Ended calls, by result", ["finished_reason"], rows, counts=True)
    yield GaugeMetricFamily("stoker_calls_running", "Calls that run, or wait at a library", status.running)
    yield GaugeMetricFamily("stoker_calls_waiting", "Calls in queues", status.queued)
    yield GaugeMetricFamily("stoker_calls_per_second", "Calls that ended in the last 30 s, per second", status.rate)
    yield GaugeMetricFamily("stoker_left_seconds", "Expected seconds until open calls end; 0: unknown", status.left_s)
    yield GaugeMetricFamily("stoker_uptime_seconds", "Seconds since the session began", status.uptime_s)
    yield CounterMetricFamily("stoker_lost_pilots", "Pilots that were lost", status.lost_pilots)
    yield CounterMetricFamily("stoker_rerun_calls", "Calls that ran again after a loss", status.rerun_calls)
    rows = (([group.function, group.error, group.place], group.count) for group in status.failure_groups)
    labels = ["function", "error", "place"]
    yield _make_metric_family(
        "stoker_failures", "Failed calls in the largest groups of equal failures", labels, rows, counts=True
    )


_CONTEXT_METRICS = (
    ("stoker_num_requests_running", "Calls that run, or wait at a library", "running", False),
    ("stoker_num_requests_waiting", "Calls in the model's queue", "queued", False),
    ("stoker_loads", "Loads of the model", "loads", True),
    ("stoker_load_seconds", "Device time of loads", "load_total_s", True),
    ("stoker_served_calls", "Calls that the model's libraries completed", "served", True),
    ("stoker_run_seconds", "Device time of calls", "run_total_s", True),
)
"""Metrics of each context: metric name, help, field of the context's status, and True for a counter."""


def _context_metrics(status: Status, names: Mapping[str, str]) -> Iterator[Metric]:
    label = ["model_name"]
    contexts = [(names.get(each.name, each.name), each) for each in status.contexts[:_MOST_MODELS]]
    for metric, help, field, counts in _CONTEXT_METRICS:
        rows = (([name], getattr(context, field)) for name, context in contexts)
        yield _make_metric_family(metric, help, label, rows, counts=counts)
    states = ("hot", "loading", "asleep")
    rows = (([name, state], getattr(context, state)) for name, context in contexts for state in states)
    yield _make_metric_family("stoker_libraries", "Libraries of the model", [*label, "state"], rows)
    rows = (([name, case], count) for name, context in contexts for case, count in context.refused_offers.items())
    yield _make_metric_family(
        "stoker_refused_offers", "Offers that pilots refused", [*label, "case"], rows, counts=True
    )


def _engine_metrics(status: Status, names: Mapping[str, str]) -> Iterator[Metric]:
    """Yield metrics of each model, summed over its engines. The cache usage is the maximum over the engines."""
    label = ["model_name"]
    read, written, preempted, reused = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    used: dict[str, float] = {}
    for library in status.libraries:
        load, name = library.batch, names.get(library.recipe, library.recipe)
        if load is not None:
            read[name] += load.prompt_tokens
            written[name] += load.new_tokens
            preempted[name] += load.evictions
            reused[name] += load.reused_tokens
            if load.cache_tokens:
                used[name] = max(used.get(name, 0.0), min(1.0, load.peak_tokens / load.cache_tokens))
    for metric, help, counts in (
        ("stoker_engine_prompt_tokens", "Tokens that the current libraries have read", read),
        ("stoker_engine_generation_tokens", "Tokens that the current libraries have written", written),
        ("stoker_prefix_cache_queries", "Tokens of prompts, read or taken from kept prefixes", read + reused),
        ("stoker_prefix_cache_hits", "Tokens of prompts that were taken from kept prefixes", reused),
        ("stoker_num_preemptions", "Requests that engines of the current libraries have evicted", preempted),
    ):
        yield _make_metric_family(metric, help, label, (([name], count) for name, count in counts.items()), counts=True)
    help = "Share of the cache that requests will use at their expected lengths"
    yield _make_metric_family(
        "stoker_kv_cache_usage_perc", help, label, (([name], part) for name, part in used.items())
    )


def _map_metrics(status: Status) -> Iterator[Metric]:
    label = ["function", "model_name", "client"]
    totals, done = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in status.maps[:_MOST_MODELS]:
        labels = (each.function, each.context, str(each.client))
        totals[labels] += max(0, each.total)
        done[labels] += each.done
    yield _make_metric_family("stoker_map_items", "Items of open maps, if known", label, totals.items())
    yield _make_metric_family("stoker_map_items_done", "Items of open maps with a result", label, done.items())


def _pilot_metrics(status: Status) -> Iterator[Metric]:
    def make_count_metric(name: str, help: str, label: str, counts: Mapping[str, float]) -> Metric:
        return _make_metric_family(name, help, [label], (([each], count) for each, count in counts.items()))

    yield make_count_metric(
        "stoker_pilots", "Pilots, by state", "state", Counter(pilot.state for pilot in status.pilots)
    )
    counts, sizes, reserved = Counter[str](), Counter[str](), Counter[str]()
    for pilot in status.pilots:
        for device in pilot.devices:
            counts[device.kind] += 1
            sizes[device.kind] += device.memory_bytes
            reserved[device.kind] += device.promised_bytes
    yield make_count_metric("stoker_devices", "Devices of connected pilots", "kind", counts)
    yield make_count_metric("stoker_device_memory_bytes", "Device memory", "kind", sizes)
    yield make_count_metric("stoker_device_memory_promised_bytes", "Memory reserved for libraries", "kind", reserved)
    phases = Counter(str(job.phase) for job in status.jobs)
    yield make_count_metric("stoker_blocks", "Blocks that have not ended", "phase", phases)
    memory, device_memory = (
        sum(getattr(each, field) for each in status.libraries) for field in ("memory_bytes", "device_bytes")
    )
    yield GaugeMetricFamily("stoker_library_memory_bytes", "Measured memory of libraries", memory)
    help = "Measured device memory of libraries"
    yield GaugeMetricFamily("stoker_library_device_memory_bytes", help, device_memory)

"""The metrics of a session for Prometheus.

Metrics that vLLM also has follow vLLM's names: `vllm:num_requests_running` becomes `stoker_num_requests_running`, with
the label `model_name`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.sessions import Status

_MOST_MODELS = 200
_NO_NAMES: Mapping[str, str] = {}


class SessionMetrics:
    """A Prometheus collector. `status`: None while the manager does not answer; `names`: display names of contexts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.status: Status | None = None
        self.names: Mapping[str, str] = _NO_NAMES
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("stoker_session_up", "1 if the session's manager answers", self.status is not None)
        if self.status is not None:
            yield from _session(self.status)
            yield from _contexts(self.status, self.names)
            yield from _engines(self.status, self.names)
            yield from _map_metrics(self.status)
            yield from _pilots(self.status)


def _session(status: Status) -> Iterator[Metric]:
    ended = CounterMetricFamily("stoker_calls", "Ended calls, by result", labels=["finished_reason"])
    for reason, count in (("done", status.done), ("failed", status.failed), ("cancelled", status.cancelled)):
        ended.add_metric([reason], count)
    yield ended
    yield GaugeMetricFamily("stoker_calls_running", "Calls that run, or wait at a library", status.running)
    yield GaugeMetricFamily("stoker_calls_waiting", "Calls in queues", status.queued)
    yield GaugeMetricFamily("stoker_calls_per_second", "Calls that ended in the last 30 s, per second", status.rate)
    yield GaugeMetricFamily("stoker_left_seconds", "Expected seconds until open calls end; 0: unknown", status.left_s)
    yield GaugeMetricFamily("stoker_uptime_seconds", "Seconds since the session began", status.uptime_s)
    yield CounterMetricFamily("stoker_lost_pilots", "Pilots that were lost", status.lost_pilots)
    yield CounterMetricFamily("stoker_rerun_calls", "Calls that ran again after a loss", status.rerun_calls)
    failures = CounterMetricFamily(
        "stoker_failures", "Failed calls of the largest groups", labels=["function", "error", "place"]
    )
    for group in status.failure_groups:
        failures.add_metric([group.function, group.error, group.place], group.count)
    yield failures


def _contexts(status: Status, names: Mapping[str, str]) -> Iterator[Metric]:
    label = ["model_name"]
    running = GaugeMetricFamily("stoker_num_requests_running", "Calls that run, or wait at a library", labels=label)
    waiting = GaugeMetricFamily("stoker_num_requests_waiting", "Calls in the model's queue", labels=label)
    libraries = GaugeMetricFamily("stoker_libraries", "Libraries of the model", labels=[*label, "state"])
    loads = CounterMetricFamily("stoker_loads", "Loads of the model", labels=label)
    load_s = CounterMetricFamily("stoker_load_seconds", "Device time of loads", labels=label)
    served = CounterMetricFamily("stoker_served_calls", "Calls that the model's libraries completed", labels=label)
    run_s = CounterMetricFamily("stoker_run_seconds", "Device time of calls", labels=label)
    refused = CounterMetricFamily("stoker_refused_offers", "Offers that pilots refused", labels=[*label, "case"])
    for context in status.contexts[:_MOST_MODELS]:
        name = [names.get(context.name, context.name)]
        running.add_metric(name, context.running)
        waiting.add_metric(name, context.queued)
        for state, count in (("hot", context.hot), ("loading", context.loading), ("asleep", context.asleep)):
            libraries.add_metric([*name, state], count)
        loads.add_metric(name, context.loads)
        load_s.add_metric(name, context.load_total_s)
        served.add_metric(name, context.served)
        run_s.add_metric(name, context.run_total_s)
        for case, count in context.refused_offers.items():
            refused.add_metric([*name, case], count)
    yield from (running, waiting, libraries, loads, load_s, served, run_s, refused)


def _engines(status: Status, names: Mapping[str, str]) -> Iterator[Metric]:
    """Yield metrics of each model, summed over the last reports of its engines. The cache usage is a maximum."""
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
        ("stoker_engine_prompt_tokens", "Tokens that present libraries have read", read),
        ("stoker_engine_generation_tokens", "Tokens that present libraries have written", written),
        ("stoker_prefix_cache_queries", "Tokens of prompts, read or taken from kept prefixes", read + reused),
        ("stoker_prefix_cache_hits", "Tokens of prompts that were taken from kept prefixes", reused),
        ("stoker_num_preemptions", "Requests that engines of present libraries have evicted", preempted),
    ):
        family = CounterMetricFamily(metric, help, labels=label)
        for name, count in counts.items():
            family.add_metric([name], count)
        yield family
    cache = GaugeMetricFamily(
        "stoker_kv_cache_usage_perc", "Cache that requests will use at their expected lengths; 1 = all", labels=label
    )
    for name, part in used.items():
        cache.add_metric([name], part)
    yield cache


def _map_metrics(status: Status) -> Iterator[Metric]:
    label = ["function", "model_name", "client"]
    total = GaugeMetricFamily("stoker_map_items", "Items of open maps, if known", labels=label)
    done = GaugeMetricFamily("stoker_map_items_done", "Items of open maps with a result", labels=label)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for each in status.maps[:_MOST_MODELS]:
        counts = sums.setdefault((each.function, each.context, str(each.client)), [0, 0])
        counts[0] += max(0, each.total)
        counts[1] += each.done
    for labels, (items, ended) in sums.items():
        total.add_metric(labels, items)
        done.add_metric(labels, ended)
    yield from (total, done)


def _pilots(status: Status) -> Iterator[Metric]:
    states = GaugeMetricFamily("stoker_pilots", "Pilots, by state", labels=["state"])
    for state, count in Counter(pilot.state for pilot in status.pilots).items():
        states.add_metric([state], count)
    devices = GaugeMetricFamily("stoker_devices", "Devices of connected pilots", labels=["kind"])
    memory = GaugeMetricFamily("stoker_device_memory_bytes", "Device memory", labels=["kind"])
    promised = GaugeMetricFamily(
        "stoker_device_memory_promised_bytes", "Memory reserved for libraries", labels=["kind"]
    )
    counts, sizes, reserved = Counter[str](), Counter[str](), Counter[str]()
    for pilot in status.pilots:
        for device in pilot.devices:
            counts[device.kind] += 1
            sizes[device.kind] += device.memory_bytes
            reserved[device.kind] += device.promised_bytes
    for family, sums in ((devices, counts), (memory, sizes), (promised, reserved)):
        for kind in sums:
            family.add_metric([kind], sums[kind])
    yield from (states, devices, memory, promised)
    blocks = GaugeMetricFamily("stoker_blocks", "Blocks that have not ended", labels=["phase"])
    for phase, number in Counter(str(job.phase) for job in status.jobs).items():
        blocks.add_metric([phase], number)
    yield blocks
    yield GaugeMetricFamily(
        "stoker_library_memory_bytes",
        "Measured memory of libraries",
        sum(each.memory_bytes for each in status.libraries),
    )
    yield GaugeMetricFamily(
        "stoker_library_device_memory_bytes",
        "Measured device memory of libraries",
        sum(each.device_bytes for each in status.libraries),
    )

"""Synthetic workloads, and settings for recorded calls (docs/workloads.md, `study.traces`).

Random draws depend only on seed and call number (`stoker.chance`).

- *bursts*: a Poisson process whose rate alternates between two values, each for an exponential time (MMPP-2; Fischer
  and Meier-Hellstern, Performance Evaluation 18(2), 1993). The process starts in its stationary distribution. When the
  rate changes, the next gap between two calls is drawn again.
- *diurnal*: a Poisson process whose rate follows a cosine, by thinning (Lewis and Shedler, Naval Research Logistics
  Quarterly 26(3), 1979).

Times are added in whole nanoseconds, so sums are equal on every machine.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate, count, islice, takewhile
from typing import Annotated, assert_never

import msgspec
from msgspec.structs import replace

from stoker.chance import Stream
from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import NO_TIME, Count, Positive, Share, World
from stoker.protocol.calls import Objective
from stoker.site import Duration

Many = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
AsMany = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
PerSecond = Annotated[float, msgspec.Meta(gt=0.0, le=10_000_000.0)]
Weight = Annotated[float, msgspec.Meta(gt=0.0, le=1_000_000.0)]
Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]

_NANO = 1_000_000_000


def _check_gang(gang: tuple[int, int]) -> None:
    least, most = gang
    if least > most:
        raise ValueError(f"gang: at least {least} libraries and at most {most}: write the smaller number first")


class TokenObjective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines of a call's tokens. For the first token: the larger of `ttft` and `ttft_per_token` times the input
    tokens, but at most `ttft_most`.
    """

    ttft_s: Duration = msgspec.field(default=NO_TIME, name="ttft")
    tpot_s: Duration = msgspec.field(default=NO_TIME, name="tpot")
    ttft_per_token_s: Duration = msgspec.field(default=NO_TIME, name="ttft_per_token")
    ttft_most_s: Duration = msgspec.field(default=NO_TIME, name="ttft_most")

    def __post_init__(self) -> None:
        if self.tpot_s and not (self.ttft_s or self.ttft_per_token_s):
            raise ValueError("tpot: a time per token counts from the first token; set ttft, too")

    @property
    def objective(self) -> Objective:
        return Objective(
            ttft_s=float(self.ttft_s), tpot_s=float(self.tpot_s), ttft_per_token_s=float(self.ttft_per_token_s),
            ttft_most_s=float(self.ttft_most_s),
        )  # fmt: skip


class _CallSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """The calls of a workload. Lengths are means in tokens. With a `_cv` (coefficient of variation), they are
    lognormal.
    """

    context: str | dict[str, Weight]
    items: Positive = 1
    input_length: Count = 0
    input_cv: Share = 0.0
    expected_output: Count = 0
    output_cv: Share = 0.0
    priority: Priority = 0
    deadline_s: Duration = msgspec.field(default=NO_TIME, name="deadline")
    gang: tuple[Positive, Positive] = (1, 1)
    tokens: TokenObjective = TokenObjective()
    latency_s: Duration = msgspec.field(default=NO_TIME, name="latency")

    def __post_init__(self) -> None:
        if not self.context:
            raise ValueError("context: name the context that the calls use")
        _check_gang(self.gang)


class SweepCalls(_CallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="sweep"):
    """All calls arrive together. `inputs`: total items. `items`: items per call."""

    inputs: Many


class _TimedCallSettings(_CallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    for_s: Duration = msgspec.field(default=NO_TIME, name="for")
    count: AsMany = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.for_s and not self.count:
            raise ValueError('count: set the number of calls, or for = "10 min", the time in which they arrive')


class ConstantRateCalls(_TimedCallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="constant"):
    """Calls at equal intervals from time 0."""

    rate_per_s: PerSecond = msgspec.field(name="rate")


class PoissonCalls(_TimedCallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="poisson"):
    rate_per_s: PerSecond = msgspec.field(name="rate")


class BurstCalls(_TimedCallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="bursts"):
    """Alternating calm periods and bursts of calls. `calm`, `burst`: their mean durations."""

    rate_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=10_000_000.0)] = msgspec.field(name="rate")
    burst_rate_per_s: PerSecond = msgspec.field(name="burst_rate")
    calm_s: Duration = msgspec.field(name="calm")
    burst_s: Duration = msgspec.field(name="burst")

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, mean_s in (("calm", self.calm_s), ("burst", self.burst_s)):
            if not mean_s >= 0.001:
                raise ValueError(f"{setting}: the mean time must be at least 1 ms, not {mean_s:g} s")


class DiurnalCalls(_TimedCallSettings, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="diurnal"):
    """Calls whose rate changes over the day. `swing`: height of the peak above the mean, as a share of the mean."""

    rate_per_s: PerSecond = msgspec.field(name="rate")
    swing: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    period_s: Duration = msgspec.field(default=Duration(86_400.0), name="period")
    peak_s: Duration = msgspec.field(default=NO_TIME, name="peak")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.period_s > 0:
            raise ValueError("period: it must be longer than 0 s")


class TraceFormat(enum.Enum):
    PHILLY = "philly"  # Jobs of Microsoft's Philly clusters (Sia artifact): time, duration, GPUs, cluster
    ELASTICFLOW = "elasticflow"  # Jobs of the ElasticFlow simulator: time, duration, GPUs, model, deadline
    AZURE_LLM = "azure_llm"  # Requests to Azure's language models: time, prompt and output lengths
    SLINFER = "slinfer"  # Requests to many functions (SLINFER's JSON): arrival times and both lengths
    CSV = "csv"  # A table whose header names fields of `Arrival`; `gang_least` and `gang_most` specify a gang


_FORMATS_WITH_JOBS = frozenset({TraceFormat.PHILLY, TraceFormat.ELASTICFLOW})
_FORMATS_WITH_NAMES = _FORMATS_WITH_JOBS | {TraceFormat.SLINFER}


class Trace(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="trace"
):  # fmt: skip
    """Recorded calls. `file` is relative to the scenario's folder and may be gzipped.

    `context`: one name, or several names that the trace's models, functions or clusters get in turn. `contexts` assigns
    contexts by name. `start`, `for`, `count`: the part of the trace to use, in the trace's time.
    """

    format: TraceFormat
    file: str
    context: str | tuple[str, ...] = ""
    contexts: dict[str, str] = {}
    cluster: str = ""
    item_s: Duration = msgspec.field(default=NO_TIME, name="item")
    items: Positive = 1
    priority: Priority = 0
    deadline_s: Duration = msgspec.field(default=NO_TIME, name="deadline")
    gang: tuple[Positive, Positive] = (1, 1)
    speedup: Annotated[float, msgspec.Meta(gt=0.0, le=1_000_000.0)] = 1.0
    start_s: Duration = msgspec.field(default=NO_TIME, name="start")
    for_s: Duration = msgspec.field(default=NO_TIME, name="for")
    count: AsMany = 0
    tokens: TokenObjective = TokenObjective()

    def __post_init__(self) -> None:
        written = f"a trace of format {self.format.value!r}"
        if not self.file:
            raise ValueError("file: name the file of the trace")
        if not self.context and not self.contexts and self.format is not TraceFormat.CSV:
            raise ValueError(f"context: {written} does not name the context of its calls")
        if not isinstance(self.context, str) and self.format not in _FORMATS_WITH_NAMES:
            raise ValueError(f"context: {written} has only one kind of calls; name one context")
        if self.contexts and self.format not in _FORMATS_WITH_NAMES:
            raise ValueError(f"contexts: {written} has no names that could be mapped to contexts")
        if self.cluster and self.format is not TraceFormat.PHILLY:
            raise ValueError(f"cluster: {written} has no clusters")
        if bool(self.item_s) != (self.format in _FORMATS_WITH_JOBS):
            has = (
                "has no durations"
                if self.item_s
                else 'has jobs; set the part of a job that is one item, for example item = "1 s"'
            )
            raise ValueError(f"item: {written} {has}")
        if self.items != 1 and self.format in _FORMATS_WITH_JOBS:
            raise ValueError(f"items: {written} has durations; set the part of a job that is one item with item")
        if self.deadline_s and self.format is TraceFormat.ELASTICFLOW:
            raise ValueError(f"deadline: {written} already has a deadline for each job")
        if self.gang != (1, 1) and self.format in _FORMATS_WITH_JOBS:
            raise ValueError(f"gang: {written} has jobs, and each GPU of a job becomes a call; leave gang out")
        _check_gang(self.gang)


Generated = SweepCalls | ConstantRateCalls | PoissonCalls | BurstCalls | DiurnalCalls
Workload = SweepCalls | ConstantRateCalls | PoissonCalls | BurstCalls | DiurnalCalls | Trace


def context_names_of_workload(workload: Workload) -> tuple[str, ...]:
    context = workload.context
    named: list[str] = [context] if isinstance(context, str) else list(context)
    if isinstance(workload, Trace):
        named += workload.contexts.values()
    return tuple(dict.fromkeys(filter(None, named)))


def has_deadlines(workload: Workload) -> bool:
    in_rows = isinstance(workload, Trace) and workload.format in (TraceFormat.ELASTICFLOW, TraceFormat.CSV)
    return bool(workload.deadline_s) or in_rows


def generate_arrivals(workload: Generated, *, seed: int) -> Iterator[Arrival]:
    of, which = workload, Stream(seed, "arrivals/contexts")
    inputs, outputs = Stream(seed, "arrivals/inputs"), Stream(seed, "arrivals/outputs")
    weights = {of.context: 1.0} if isinstance(of.context, str) else of.context
    names, up_to = tuple(weights), tuple(accumulate(weights.values()))
    objective = replace(of.tokens.objective, latency_s=float(of.latency_s))

    def call(number: int, at_s: float, items: int) -> Arrival:
        drawn = which.uniform(number) * up_to[-1] if len(names) > 1 else 0.0
        return Arrival(
            at_s, names[bisect(up_to, drawn, hi=len(names) - 1)], items,
            _draw_length(of.input_length, inputs, number, cv=of.input_cv),
            of.expected_output, of.priority, float(of.deadline_s), of.gang,
            output=_draw_length(of.expected_output, outputs, number, cv=of.output_cv), objective=objective,
        )  # fmt: skip

    if isinstance(workload, SweepCalls):
        whole, rest = divmod(workload.inputs, workload.items)
        yield from (call(number, 0.0, workload.items) for number in range(whole))
        if rest:
            yield call(whole, 0.0, rest)
        return
    times = _arrival_times(workload, seed)
    if workload.for_s:
        end_ns = _to_nanoseconds(workload.for_s)
        times = takewhile(lambda at_ns: at_ns < end_ns, times)
    if workload.count:
        times = islice(times, workload.count)
    yield from (call(number, at_ns / _NANO, workload.items) for number, at_ns in enumerate(times))


def _draw_length(mean: int, stream: Stream, number: int, *, cv: float) -> int:
    return max(1, round(mean * stream.lognormal_factor(number, cv=cv))) if mean and cv else mean


def _arrival_times(workload: ConstantRateCalls | PoissonCalls | BurstCalls | DiurnalCalls, seed: int) -> Iterator[int]:
    gaps = Stream(seed, "arrivals/gaps")
    match workload:
        case ConstantRateCalls(rate_per_s=rate):
            return (round(number * _NANO / rate) for number in count())
        case PoissonCalls(rate_per_s=rate):
            return accumulate(_to_nanoseconds(gaps.exponential(number, mean=1.0 / rate)) for number in count())
        case BurstCalls():
            return _burst_arrival_times(workload, gaps, Stream(seed, "arrivals/stays"))
        case DiurnalCalls():
            return _diurnal_arrival_times(workload, gaps, Stream(seed, "arrivals/thinning"))
        case _:
            assert_never(workload)


def _burst_arrival_times(workload: BurstCalls, gaps: Stream, stays: Stream) -> Iterator[int]:
    bursting = stays.uniform(0) < workload.burst_s / (workload.burst_s + workload.calm_s)
    now_ns, drawn = 0, count()
    for stay in count(1):
        rate, mean_s = workload.rate_per_s, workload.calm_s
        if bursting:
            rate, mean_s = workload.burst_rate_per_s, workload.burst_s
        ends_ns = now_ns + _to_nanoseconds(stays.exponential(stay, mean=mean_s))
        while rate:
            now_ns += _to_nanoseconds(gaps.exponential(next(drawn), mean=1.0 / rate))
            if now_ns >= ends_ns:
                break
            yield now_ns
        now_ns, bursting = ends_ns, not bursting


def _diurnal_arrival_times(workload: DiurnalCalls, gaps: Stream, thinning: Stream) -> Iterator[int]:
    swing, turn = workload.swing, 2.0 * math.pi / (workload.period_s * _NANO)
    peak_ns, now_ns = _to_nanoseconds(workload.peak_s), 0
    for number in count():
        now_ns += _to_nanoseconds(gaps.exponential(number, mean=1.0 / (workload.rate_per_s * (1.0 + swing))))
        rate = 1.0 + swing * math.cos((now_ns - peak_ns) * turn)
        if thinning.uniform(number) * (1.0 + swing) < rate:
            yield now_ns


def _to_nanoseconds(seconds: float) -> int:
    return round(seconds * _NANO)


def expand_family_names(world: World, names: Iterable[str]) -> tuple[str, ...]:
    families = _contexts_by_family(world)
    return tuple(dict.fromkeys(context for name in names for context in families.get(name, (name,))))


def choose_contexts_by_length(world: World, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield the calls. A call to a context family gets the context with the smallest sufficient `longest_input`.
    Contexts with a larger limit become the call's variants.
    """
    families = _contexts_by_family(world)
    if not families:
        yield from arrivals
        return
    for number, arrival in enumerate(arrivals):
        runtimes = families.get(arrival.context)
        if runtimes is None:
            yield arrival
            continue
        length = arrival.prompt_tokens
        serving = [name for name in runtimes if world.contexts[name].longest_input >= length]
        if not serving:
            longest = world.contexts[runtimes[-1]].longest_input
            raise ConfigError(f"call {number} is {length} tokens long, but {arrival.context} takes at most {longest}")
        yield replace(arrival, context=serving[0], variants=tuple(serving[1:]))


def _contexts_by_family(world: World) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, model in sorted(world.contexts.items(), key=lambda item: item[1].longest_input):
        if model.family:
            found.setdefault(model.family, []).append(name)
    return {family: tuple(names) for family, names in found.items()}

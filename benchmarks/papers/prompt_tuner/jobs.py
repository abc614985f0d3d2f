"""Generate the jobs of §6.1, because the trace of the paper is not public. `grid.toml` gives the values that the paper
omits.

- *Arrivals*: each load is one trace of 20 minutes. One minute has five times the mean count (§2.2); the other minutes
have exponentially distributed shares. Gaps within a minute are exponential (§6.1).

- *Work*: the duration is lognormal and independent of the number of replicas. The iteration limit is their product
divided by the seconds of an iteration.

- *Prompts*: a prompt from the bank needs fewer iterations, by the speedups of Figure 9b. Lookup times are from §6.3.

Draws depend only on seed, model and job number, so all policies get the same jobs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, islice

import msgspec

from benchmarks.papers.prompt_tuner import paper
from stoker.chance import Stream
from stoker.manager.sim.client import Arrival


class Model(msgspec.Struct, frozen=True):
    """`item_s`: seconds of an iteration on a replica of `devices` GPUs. `bank_s`: seconds of a lookup among 3,000
    candidates. `speedup`: minimum and maximum ratio of iterations without and with the bank.
    """

    name: str
    item_s: float
    weights_bytes: float
    bank_s: float
    speedup: tuple[float, float]
    devices: int = 1


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("gpt2-base", 0.05, 0.5e9, 5.3, (1.81, 2.8)),
        Model("gpt2-large", 0.1, 3.1e9, 6.1, (1.38, 2.4)),
        Model("vicuna-7b", 0.2, 13.5e9, 9.2, (1.28, 2.2)),
        Model("llama-30b", 0.2, 65e9, 10.0, (1.28, 2.2), devices=4),
        Model("qwen-7b-r1", 0.2, 15.2e9, 9.2, (1.28, 2.2), devices=4),
    )
}


class Parameters(msgspec.Struct, frozen=True):
    peak: float = 5.0
    duration_median_s: float = 30.0
    duration_spread: float = 0.93
    duration_least_s: float = 5.0
    duration_most_s: float = 300.0
    replicas: tuple[tuple[int, float], ...] = ((1, 0.6), (2, 0.25), (4, 0.15))
    widest: int = 8
    speedup: float = 1.0
    prepare_s: float = 23.5
    read_bytes_per_s: float = 1.1e9
    overhead: float = 1.0
    meet_s: float = 2.0
    gang_efficiency: float = 0.995
    budget: float = 0.2
    price_per_hour: float = 40.97

    def cold_s(self, model: Model) -> float:
        return self.prepare_s + model.weights_bytes / model.devices / self.read_bytes_per_s

    @property
    def device_price_s(self) -> float:
        return self.price_per_hour / paper.SERVER_GPUS / 3600.0


_MINUTE_S = 60.0


class Bank(enum.Enum):
    BUDGET = "budget"
    ALWAYS = "always"
    NEVER = "never"


class Job(msgspec.Struct, frozen=True):
    """A tuning job; `duration_s` applies to `replicas` replicas, as in the trace. `speedup`: with 3,000 candidates."""

    at_s: float
    model: str
    duration_s: float
    replicas: int
    speedup: float


def jobs(counts: Mapping[str, int], parameters: Parameters, *, seed: int) -> list[Job]:
    times = arrival_times(sum(counts.values()), Stream(seed, "tuning/arrivals"), peak=parameters.peak)
    order = iter(sorted(range(len(times)), key=Stream(seed, "tuning/models").uniform))
    found: list[Job] = []
    for name, count in counts.items():
        found += _of_model(MODELS[name], sorted(times[place] for place in islice(order, count)), parameters, seed)
    return sorted(found, key=lambda job: job.at_s)


def slo_s(job: Job, emergence: float, parameters: Parameters) -> float:
    return job.duration_s * emergence + parameters.overhead * parameters.cold_s(MODELS[job.model])


def uses_bank(job: Job, emergence: float, parameters: Parameters, bank: Bank) -> bool:
    if bank is not Bank.BUDGET:
        return bank is Bank.ALWAYS
    return MODELS[job.model].bank_s <= parameters.budget * slo_s(job, emergence, parameters)


def arrival(job: Job, emergence: float, parameters: Parameters, bank: Bank) -> Arrival:
    """Return the simulated arrival of a job. The bank changes the required iterations, not the limit."""
    model = MODELS[job.model]
    most = max(1, round(job.duration_s * job.replicas / model.item_s))
    banked = uses_bank(job, emergence, parameters, bank)
    needs = max(1, round(most / (job.speedup * parameters.speedup))) if banked else most
    return Arrival(
        at_s=job.at_s, context=model.name, items=most, deadline_s=round(slo_s(job, emergence, parameters), 6),
        gang=(1, parameters.widest), items_done=needs, shared_s=model.bank_s if banked else 0.0,
    )  # fmt: skip


def _of_model(model: Model, times: Iterable[float], parameters: Parameters, seed: int) -> list[Job]:
    low, high = model.speedup
    streams = {what: Stream(seed, f"tuning/{model.name}/{what}") for what in ("durations", "replicas", "speedups")}
    found = []
    for number, at_s in enumerate(times):
        duration_s = parameters.duration_median_s * math.exp(
            parameters.duration_spread * streams["durations"].normal(number)
        )
        duration_s = min(max(duration_s, parameters.duration_least_s), parameters.duration_most_s)
        replicas = _replicas(streams["replicas"].uniform(number), parameters)
        speedup = float(low * (high / low) ** streams["speedups"].uniform(number))
        found.append(Job(at_s, model.name, duration_s, replicas, speedup))
    return found


def arrival_times(count: int, stream: Stream, *, peak: float) -> list[float]:
    counts = _per_minute(count, stream, peak=peak)
    times: list[float] = []
    number = 2 * paper.MINUTES
    for minute, here in enumerate(counts):
        gaps = [stream.exponential(number + place, mean=1.0) for place in range(here + 1)]
        number += len(gaps)
        places = list(accumulate(gaps))
        times += [round((minute + place / places[-1]) * _MINUTE_S, 6) for place in places[:-1]]
    return times


def _per_minute(count: int, stream: Stream, *, peak: float) -> list[int]:
    fullest = int(stream.uniform(0) * paper.MINUTES)
    most = round(count * peak / paper.MINUTES)
    shares = [stream.exponential(1 + minute, mean=1.0) for minute in range(paper.MINUTES)]
    counts = [0] * paper.MINUTES
    counts[fullest] = most
    others = [minute for minute in range(paper.MINUTES) if minute != fullest]
    for _ in range(count - most):  # Assign each job to the minute that lacks most of its share (Webster's method).
        open_minutes = [minute for minute in others if counts[minute] < most]
        counts[max(open_minutes, key=lambda minute: shares[minute] / (2 * counts[minute] + 1))] += 1
    return counts


def _replicas(uniform: float, parameters: Parameters) -> int:
    for replicas, share in parameters.replicas:
        uniform -= share
        if uniform < 0.0:
            return replicas
    return parameters.replicas[-1][0]

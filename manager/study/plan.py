"""Forecast a run before its submission: its end, its device time, and the best number and walltime of blocks.

The simulator runs a world with measured times (`evidence`) under the site's rules. The seed determines all random
numbers: queue waits, variation of times, lost pilots, and the error of each measured mean. Many calls are simulated as
fewer, longer calls. Other users' load, time of day, links, and the earlier start of short jobs are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
from msgspec.structs import replace

from stoker.chance import Stream
from stoker.contexts.recipe import Awareness
from stoker.manager.core.seams import Policies
from stoker.manager.live.helper_processes import create_source
from stoker.manager.live.session_policies import create_policies_for_sites, find_policy, policies_named_by_all_sites
from stoker.manager.policies import LoadWhereWanted
from stoker.manager.policies.prompt_tuner.residency import WarmPools
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, SourceModel, World, limit_awareness
from stoker.manager.study.evidence import Evidence, MeasuredTime, Reason, Sureness, Work
from stoker.manager.study.statistics import quantile
from stoker.protocol.blocks import ProvisioningRule
from stoker.site import Duration, Site, Size

MANY_SEEDS, FEW_SEEDS = 20, 3
CALLS, CALLS_A_DEVICE, CALLS_A_WALLTIME = 500, 20, 20
WALLTIMES_S = (900.0, 3600.0, 14_400.0, 43_200.0)
LARGEST_GOOD_RATIO = 1.05  # A plan is as good as the fastest plan if it takes at most this many times as long
_HOUR_S = 3600.0
_LOSS_DURATION_S = 1.0
_ENDLESS_WALLTIMES = 20  # If calls are longer than a walltime, a run that lasts this many walltimes counts as endless
_CONTEXT = "context"
_MOST_RECONSIDERATIONS = 1_000


class Percentiles(msgspec.Struct, frozen=True):
    p10: float
    p50: float
    p90: float


class PlanForecast(msgspec.Struct, frozen=True):
    """Forecast of a run on at most `blocks` blocks of `walltime_s` seconds (0 = no limit). Infinite times: the run
    never ends.
    """

    blocks: int
    walltime_s: float
    finish_s: Percentiles
    device_hours: Percentiles


class RunPlan(msgspec.Struct, frozen=True):
    """The forecasts of a run. `best_...`: the smallest values whose forecast is as good as the best (0: irrelevant)."""

    site: str
    work: Work
    kind: str
    devices: int
    as_written: PlanForecast
    by_blocks: tuple[PlanForecast, ...]
    by_walltime: tuple[PlanForecast, ...]
    best_blocks: int
    best_walltime_s: float
    price: float
    sureness: Sureness
    reasons: tuple[Reason, ...]
    policy: str = ""


def make_plan(site: Site, work: Work, evidence: Evidence, *, tell: Callable[[str], None] | None = None) -> RunPlan:
    """Simulate the work with the site's settings and with other settings. `tell` receives each simulation's name."""

    @cache
    def simulate(blocks: int, walltime_s: float, seed: int) -> tuple[float, float]:
        return _simulate_plan(site, work, evidence, blocks=blocks, walltime_s=walltime_s, seed=seed)

    found: dict[tuple[int, float], PlanForecast] = {}

    def forecast_of(blocks: int, walltime_s: float, *, seeds: int) -> PlanForecast:
        if (blocks, walltime_s) not in found:
            if tell is not None:
                tell(f"{blocks} blocks, walltime {walltime_s:g} s" if walltime_s else f"{blocks} blocks")
            finished, device_s = zip(*(simulate(blocks, walltime_s, seed) for seed in range(seeds)), strict=True)
            hours = _compute_percentiles([seconds / _HOUR_S for seconds in device_s])
            found[blocks, walltime_s] = PlanForecast(blocks, walltime_s, _compute_percentiles(finished), hours)
        return found[blocks, walltime_s]

    source = create_source(site, kept=False)
    most = max(1, source.first if source.rule in (ProvisioningRule.FIXED, ProvisioningRule.ONCE) else source.most)
    as_written = forecast_of(most, source.walltime_s, seeds=MANY_SEEDS)
    by_blocks, by_walltime, best_blocks, best_walltime_s = list[PlanForecast](), list[PlanForecast](), most, 0.0
    if not site.is_local:
        counts = sorted({*(2**n for n in range(most.bit_length())), most})
        by_blocks = [forecast_of(count, source.walltime_s, seeds=FEW_SEEDS) for count in counts]
        best_blocks = _cheapest_good_forecast(by_blocks, key=lambda each: each.blocks).blocks
        useful = [seconds for seconds in WALLTIMES_S if seconds > 2 * (evidence.load.mean_s + evidence.run.mean_s)]
        walltimes = sorted({*useful, source.walltime_s} - {0.0})
        by_walltime = [forecast_of(best_blocks, seconds, seeds=FEW_SEEDS) for seconds in walltimes]
        if by_walltime:
            best_walltime_s = _cheapest_good_forecast(by_walltime, key=lambda each: each.walltime_s).walltime_s
    return RunPlan(
        site=site.name, work=work, kind=evidence.kind, devices=evidence.devices, as_written=as_written,
        by_blocks=tuple(by_blocks), by_walltime=tuple(by_walltime), best_blocks=best_blocks,
        best_walltime_s=best_walltime_s,
        price=site.provider.price, sureness=evidence.sureness, reasons=evidence.reasons,
        policy=str(policies_named_by_all_sites([site])),
    )  # fmt: skip


def _cheapest_good_forecast(forecasts: Sequence[PlanForecast], *, key: Callable[[PlanForecast], float]) -> PlanForecast:
    quickest = min(each.finish_s.p50 for each in forecasts)
    good = [each for each in forecasts if each.finish_s.p50 <= quickest * LARGEST_GOOD_RATIO]
    return min(good or forecasts, key=key)


def calls_per_simulated_call(work: Work, *, devices: int, walltime_s: float, each_s: float) -> int:
    least = max(CALLS, CALLS_A_DEVICE * devices)
    if walltime_s:
        least = max(least, math.ceil(CALLS_A_WALLTIME * work.calls * each_s / walltime_s))
    return -(-work.calls // least)


def _simulate_plan(
    site: Site, work: Work, evidence: Evidence, *, blocks: int, walltime_s: float, seed: int
) -> tuple[float, float]:
    source = create_source(site, kept=False)
    run = _with_random_mean(evidence.run, Stream(seed, "plan/run"))
    load = _with_random_mean(evidence.load, Stream(seed, "plan/load"))
    devices = blocks * source.nodes * evidence.devices
    awareness = find_policy(site.policy.name).make().awareness
    loads_s = load.mean_s if awareness not in (None, Awareness.FULL) else 0.0
    shares = calls_per_simulated_call(work, devices=devices, walltime_s=walltime_s, each_s=run.mean_s + loads_s)
    calls = -(-work.calls // shares)
    calls_each = work.calls / calls
    each_s = run.mean_s + loads_s * (1.0 - 1.0 / calls_each)  # without the first load, which the simulator adds
    alone_s = work.calls * each_s / devices + load.mean_s + evidence.wait.mean_s + evidence.boot.mean_s
    until_s = 20 * alone_s + 24 * _HOUR_S
    if 0 < walltime_s < load.mean_s + run.mean_s:
        until_s = min(until_s, _ENDLESS_WALLTIMES * (walltime_s + evidence.wait.mean_s + evidence.boot.mean_s))
    model = SourceModel(
        name=source.name, kind=evidence.kind, devices=evidence.devices, nodes=source.nodes,
        capacity=_capacity_with_lost_pilots(
            blocks, evidence.lost_per_s * source.nodes, until_s=2 * alone_s + _HOUR_S, seed=seed
        ),
        wait_s=Duration(evidence.wait.mean_s), wait_cv=evidence.wait.cv, boot_s=Duration(evidence.boot.mean_s),
        boot_cv=evidence.boot.cv, walltime_s=Duration(walltime_s), rule=source.rule,
        init_blocks=blocks if source.rule is ProvisioningRule.FIXED else min(source.first, blocks),
        min_blocks=min(source.least, blocks), max_blocks=blocks, keep_pending=source.keep_pending,
        idle_s=Duration(source.idle_s), finish_within_s=Duration(source.finish_within_s),
    )  # fmt: skip
    context = ContextModel(
        device_memory_bytes=Size(evidence.memory_bytes // 2 + 1),  # so that only one library fits on a device
        load_s={"": Duration(load.mean_s)}, load_cv=load.cv, call_s={"": Duration(each_s * calls_each)},
        item_cv=run.cv / math.sqrt(shares),
    )  # fmt: skip
    poll_s = 0.0 if site.is_local else float(site.provider.poll_s)
    world = World(
        devices={evidence.kind: DeviceKind(Size(evidence.memory_bytes))}, sources=(model,),
        contexts={_CONTEXT: context}, delays=Delays(poll_s=Duration(poll_s)),
    )  # fmt: skip
    arrivals = (Arrival(0.0, _CONTEXT) for _ in range(calls))
    outcome = Simulation(
        limit_awareness(world, awareness), arrivals, _make_slower_policies(site, alone_s), seed=seed
    ).run(until_s=until_s)
    done = outcome.complete and not outcome.failed
    return (outcome.ended_at if done else math.inf), sum(outcome.device_s.values())


def _make_slower_policies(site: Site, alone_s: float) -> Policies:
    """Return the site's policies, changed so that they reconsider waiting calls at most about 1,000 times per run."""
    policies = create_policies_for_sites([site])
    residency = policies.residency
    residency = residency.default if isinstance(residency, WarmPools) else residency
    if isinstance(residency, LoadWhereWanted):
        residency.ask_again_s = max(residency.ask_again_s, alone_s / _MOST_RECONSIDERATIONS)
    return policies


def _with_random_mean(time: MeasuredTime, stream: Stream) -> MeasuredTime:
    return replace(time, mean_s=time.mean_s * stream.lognormal_factor(0, cv=time.error))


def _capacity_with_lost_pilots(
    blocks: int, lost_per_s: float, *, until_s: float, seed: int
) -> tuple[tuple[float, int], ...]:
    steps, at, number = [(0.0, blocks)], 0.0, 0
    gaps = Stream(seed, "plan/lost")
    while lost_per_s and at <= until_s:
        at += max(2 * _LOSS_DURATION_S, gaps.exponential(number, mean=1.0 / (lost_per_s * blocks)))
        number += 1
        if at <= until_s:
            steps += (round(at, 3), blocks - 1), (round(at + _LOSS_DURATION_S, 3), blocks)
    return tuple(steps)


def _compute_percentiles(values: Sequence[float]) -> Percentiles:
    ordered = sorted(values)
    if math.isinf(ordered[-1]):  # infinity cannot be interpolated
        return Percentiles(*(ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)))
    return Percentiles(*(quantile(ordered, share) for share in (0.1, 0.5, 0.9)))

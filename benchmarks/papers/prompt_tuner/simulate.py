"""Simulate a run on the clusters of the paper with policies of live sessions.

A server has eight GPUs. A GPU has one model at a time; the cold start is a constant of the model. All policies know
the model profiles (§5.3). A job is in time if its result arrives within its SLO. A GPU costs from the load order until
the process ends. In systems that never release GPUs, a GPU always costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from benchmarks.baselines.loading import policy
from benchmarks.papers.common import fixed_source
from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import MODELS, Model, Parameters, arrival, jobs
from benchmarks.papers.prompt_tuner.scenarios import Case
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, FromClient, OfContext
from stoker.manager.core.seams import Action, Changes, Policies, View
from stoker.manager.policies.prompt_tuner.pools import AllotInRounds
from stoker.manager.sim.client import Arrival, make_recipe
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.manager.sim.runs import compute_speedup
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, World
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import DefineRecipe
from stoker.site import Duration, Size

_KIND = "NVIDIA A100-SXM4-80GB"
_GPU_BYTES = Size(80_000_000_000)
_DELAYS = Delays(progress_s=Duration(5.0))


def world(models: Iterable[str], parameters: Parameters, *, gpus: int) -> World:
    source = fixed_source("servers", _KIND, gpus // paper.SERVER_GPUS, devices=paper.SERVER_GPUS)
    contexts = {
        name: ContextModel(
            device_memory_bytes=_GPU_BYTES, devices=model.devices, load_s={"": Duration(parameters.cold_s(model))},
            item_s={"": Duration(model.item_s)}, gang_s=Duration(parameters.meet_s),
            gang_efficiency=parameters.gang_efficiency,
        )
        for name, model in ((name, MODELS[name]) for name in models)
    }  # fmt: skip
    return World(devices={_KIND: DeviceKind(_GPU_BYTES)}, sources=(source,), contexts=contexts, delays=_DELAYS)


_ROUNDING_S = 1e-3
"""Seconds that a job may exceed its SLO because of message latency."""


class Result(msgspec.Struct, frozen=True):
    """Results of a run in seconds and device-seconds. `held_s`: with a loaded or loading model; `busy_s`: with a job;
    `all_s`: whole cluster. `start_share`: share of job latency during library starts.
    """

    jobs: int
    late: int
    refused: int
    unfinished: int
    banked: int
    loads: int
    held_s: float
    busy_s: float
    all_s: float
    ended_at: float
    start_share: float = 0.0
    start_most: float = 0.0
    waiting_s: float = 0.0
    """Replica-seconds in which idle replicas of a job waited for other replicas (`together=False`)."""

    @property
    def violations(self) -> float:
        return 100.0 * (self.late + self.refused + self.unfinished) / self.jobs


def result_of(log: EventLog, arrivals: Sequence[Arrival], outcome: RunOutcome, *, gpus: int) -> Result:
    calls = _Calls(arrivals)
    for row in zip(log.at_s, log.what, log.call, log.library, log.value, strict=True):
        calls.hear(*row)
    done_s, starts = calls.latencies_s(), calls.starts()
    late = sum(took_s > arrivals[job].deadline_s + _ROUNDING_S for job, took_s in done_s.items())
    return Result(
        jobs=len(arrivals), late=late, refused=len(calls.failed),
        unfinished=len(arrivals) - len(done_s) - len(calls.failed),
        banked=sum(arrival.shared_s > 0.0 for arrival in arrivals),
        loads=sum(what == LoggedEvent.LIBRARY_STARTED for what in log.what), held_s=outcome.warm_s,
        busy_s=outcome.busy_s, all_s=max(outcome.ended_at, paper.MINUTES * 60.0) * gpus, ended_at=outcome.ended_at,
        start_share=fmean(starts) if starts else 0.0, start_most=max(starts, default=0.0),
    )  # fmt: skip


class _Calls:
    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._jobs: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._ran_on: dict[int, set[int]] = {}
        self._loads: dict[int, tuple[float, float]] = {}
        self.failed: set[int] = set()

    def hear(self, at_s: float, what: int, call: int, library: int, value: float) -> None:
        if what == LoggedEvent.CALL_CAME:
            self._jobs[call] = len(self._jobs)
        elif what == LoggedEvent.LIBRARY_READY:
            self._loads[library] = (at_s - value, at_s)
        elif what in (LoggedEvent.CALL_BEGAN, LoggedEvent.PART_BEGAN):
            job = self._jobs[call]
            if what == LoggedEvent.CALL_BEGAN:
                self._began.setdefault(job, at_s)
            if at_s <= self._began.get(job, at_s):  # Count only the first run of a job.
                self._ran_on.setdefault(job, set()).add(library)
        elif what == LoggedEvent.CALL_ENDED:
            self._ended[self._jobs[call]] = at_s
        elif what == LoggedEvent.CALL_FAILED:
            self.failed.add(self._jobs[call])

    def latencies_s(self) -> dict[int, float]:
        came = self._arrivals
        return {job: at_s - came[job].at_s for job, at_s in self._ended.items() if job not in self.failed}

    def starts(self) -> list[float]:
        """For each job, return the share of latency during library loads before the start."""
        found = []
        for job, took_s in self.latencies_s().items():
            loads = [self._loads[library] for library in self._ran_on[job] if library in self._loads]
            found.append(_covered_s(loads, self._arrivals[job].at_s, self._began[job]) / max(took_s, _ROUNDING_S))
        return found


def _covered_s(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    covered = 0.0
    for begins, ends in sorted(spans):
        since = max(since, begins)
        covered += max(0.0, min(ends, until) - since)
        since = max(since, min(ends, until))
    return covered


_LONGEST_S = 4 * 3600.0
"""Maximum seconds of a run; unfinished jobs count as violations."""
_KNOWN_AT_S = 1e-3


def simulate(case: Case) -> Result:
    parameters, system, counts = case.parameters, case.system, dict(case.counts)
    arrivals = [
        arrival(job, case.emergence, parameters, system.bank) for job in jobs(counts, parameters, seed=case.seed)
    ]
    policies = policy(system.policy).make(**dict(system.settings))
    waiting = _WaitingReplicas(policies.dispatch) if isinstance(policies.dispatch, AllotInRounds) else None
    simulation, outcome = simulate_arrivals(arrivals, policies, parameters, gpus=case.gpus)
    result = result_of(simulation.log, arrivals, outcome, gpus=case.gpus)
    return msgspec.structs.replace(result, waiting_s=waiting.total_s) if waiting is not None else result


class _WaitingReplicas:
    """Adds up the time in which replicas of a job wait for others, in rounds of PromptTuner's dispatch policy."""

    def __init__(self, dispatch: AllotInRounds) -> None:
        self._states, self._round = dispatch.states, dispatch.on_round
        self._count, self._at = 0, 0.0
        self.total_s = 0.0
        setattr(dispatch, "on_round", self._count_round)  # noqa: B010 - mypy refuses an assignment to a method

    def _count_round(self, view: View, changes: Changes) -> Sequence[Action]:
        self.total_s += self._count * (view.now - self._at)
        plan = self._round(view, changes)
        self._count, self._at = sum(sum(state.held.values()) for state in self._states.pools.values()), view.now
        return plan


def simulate_arrivals(
    arrivals: Sequence[Arrival], policies: Policies, parameters: Parameters, *, gpus: int
) -> tuple[Simulation, RunOutcome]:
    models = [MODELS[name] for name in dict.fromkeys(each.context for each in arrivals)]
    simulation = Simulation(world([model.name for model in models], parameters, gpus=gpus), arrivals, policies)
    simulation.agenda.schedule_at(_KNOWN_AT_S, _profile, simulation, models, parameters)
    return simulation, simulation.run(until_s=_LONGEST_S)


def _profile(simulation: Simulation, models: Sequence[Model], parameters: Parameters) -> None:
    sizes = range(1, parameters.widest + 1)
    for model in models:
        recipe = make_recipe(model.name, simulation.world.contexts[model.name])
        simulation.handle(FromClient(simulation.client.id, 0, [DefineRecipe(recipe)]))
        paces = {size: model.item_s / compute_speedup(size, efficiency=parameters.gang_efficiency) for size in sizes}
        known = ContextAdvice(load_s=parameters.cold_s(model), paces=paces, meet_s=parameters.meet_s)
        simulation.handle(AdviceArrived(OfContext(RecipeKey(recipe.key)), CostAdvice({"": known})))

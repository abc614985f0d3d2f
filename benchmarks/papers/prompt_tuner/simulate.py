"""One run of the evaluation, in the simulator with the policies that a live session has.

All policies know profiles of the models beforehand (§5.3): how long one takes to load, and an iteration on each number
of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.baselines.loading import policy
from benchmarks.papers.prompt_tuner import worlds
from benchmarks.papers.prompt_tuner.cases import Case
from benchmarks.papers.prompt_tuner.jobs import arrival, jobs
from benchmarks.papers.prompt_tuner.parameters import MODELS, Model, Parameters
from benchmarks.papers.prompt_tuner.result import Result, result_of
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, FromClient
from stoker.manager.core.seams import Action, Changes, Policies, View
from stoker.manager.core.subjects import OfContext
from stoker.manager.sim.client import Arrival, recipe_of
from stoker.manager.sim.duration import speedup
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import DefineRecipe

_LONGEST_S = 4 * 3600.0
"""A run that goes on for so long is cut off; what is not done by then counts as a violation."""
_KNOWN_AT_S = 1e-3
"""When the manager is told of the models: before jobs come."""


def simulate(case: Case) -> Result:
    """Do one run. Raises SimulationError."""
    parameters, system, counts = case.parameters, case.system, dict(case.counts)
    arrivals = [
        arrival(job, case.emergence, parameters, system.bank) for job in jobs(counts, parameters, seed=case.seed)
    ]
    policies = policy(system.policy).make(**dict(system.settings))
    dispatch, residency = Timed(policies.dispatch), Timed(policies.residency)
    policies = msgspec.structs.replace(policies, dispatch=dispatch, residency=residency)
    simulation, outcome = play(arrivals, policies, parameters, gpus=case.gpus)
    found = result_of(simulation.log, arrivals, outcome, gpus=case.gpus)
    most_s = dispatch.most_s + residency.most_s
    return msgspec.structs.replace(found, round_s=dispatch.mean_s + residency.mean_s, round_most_s=most_s)


def play(
    arrivals: Sequence[Arrival], policies: Policies, parameters: Parameters, *, gpus: int
) -> tuple[Simulation, RunOutcome]:
    """These jobs, on so many GPUs. Raises SimulationError."""
    models = [MODELS[name] for name in dict.fromkeys(each.context for each in arrivals)]
    simulation = Simulation(worlds.world([model.name for model in models], parameters, gpus=gpus), arrivals, policies)
    simulation.agenda.at(_KNOWN_AT_S, _profile, simulation, models, parameters)
    return simulation, simulation.run(until_s=_LONGEST_S)


def _profile(simulation: Simulation, models: Sequence[Model], parameters: Parameters) -> None:
    """Tell the manager of the models that there are, and what is known of them."""
    sizes = range(1, parameters.widest + 1)
    for model in models:
        recipe = recipe_of(model.name, simulation.world.contexts[model.name])
        simulation.handle(FromClient(simulation.client.id, 0, [DefineRecipe(recipe)]))
        paces = {size: model.item_s / speedup(size, efficiency=parameters.gang_efficiency) for size in sizes}
        known = ContextAdvice(load_s=parameters.cold_s(model), paces=paces, meet_s=parameters.meet_s)
        simulation.handle(AdviceArrived(OfContext(RecipeKey(recipe.key)), CostAdvice({"": known})))


class Timed:
    """A policy whose rounds are timed: this thread's time on the processor."""

    def __init__(self, policy: Any) -> None:
        self.period_s = policy.period_s
        self._policy = policy
        self._rounds = 0
        self._spent_s = self.most_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def round(self, view: View, changes: Changes) -> Sequence[Action]:
        """A round of the policy."""
        began = time.thread_time()
        actions: Sequence[Action] = self._policy.round(view, changes)
        took_s = time.thread_time() - began
        self.most_s = max(self.most_s, took_s)
        if actions or changes.calls or changes.libraries or changes.pilots:
            self._rounds += 1
            self._spent_s += took_s
        return actions

    @property
    def mean_s(self) -> float:
        """Seconds a round, over those that had something to look at: an idle tick costs nothing and says nothing."""
        return self._spent_s / self._rounds if self._rounds else 0.0

"""The runs that the evaluation consists of, as values: whoever has the same value has the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from benchmarks.prompt_tuner import paper
from benchmarks.prompt_tuner.jobs import Bank
from benchmarks.prompt_tuner.parameters import Parameters

OURS, INFLESS, ELASTIC_FLOW = "prompt-tuner", "infless", "elastic-flow"
SYSTEMS = (OURS, INFLESS, ELASTIC_FLOW)
SEEDS = tuple(range(1, 11))
TUNING_SEEDS = (1000, 1001)
"""Baselines' settings are chosen on these, which no result is from."""

Settings = tuple[tuple[str, bool | int | float | str], ...]
"""What a policy is made with: keywords and their values."""


class System(msgspec.Struct, frozen=True):
    """A policy with its settings, and who gets prompts from the bank under it."""

    policy: str
    settings: Settings = ()
    bank: Bank = Bank.BUDGET

    def __str__(self) -> str:
        settings = [f"{name} = {value}" for name, value in self.settings]
        return ", ".join([self.policy, *settings, f"bank {self.bank.value}"])


NOBODY = System(OURS, (("learn", False),))
"""Ours as the paper has it: jobs are planned with all that they may do."""


class Extent(msgspec.Struct, frozen=True):
    """How much is done of everything: under which seeds (`large_seeds`: on the large cluster, where runs take long),
    and on a cluster so many times smaller with as many fewer jobs."""

    seeds: tuple[int, ...] = SEEDS
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    large_seeds: tuple[int, ...] = SEEDS[:3]
    smaller: int = 1


WHOLE_EXTENT, LOOK = Extent(), Extent(SEEDS[:1], TUNING_SEEDS[:1], SEEDS[:1], smaller=4)


class Case(msgspec.Struct, frozen=True):
    """One run. `counts`: jobs by model."""

    counts: tuple[tuple[str, int], ...]
    emergence: float
    system: System
    seed: int
    gpus: int = paper.GPUS
    parameters: Parameters = Parameters()


class Group(msgspec.Struct, frozen=True):
    """A case in which several systems are compared; pages print its `name`. `times` multiplies the load's jobs."""

    name: str
    load: str = "medium"
    emergence: float = 1.0
    gpus: int = paper.GPUS
    times: int = 1
    parameters: Parameters = Parameters()

    def cases(self, system: System, *, seeds: Iterable[int], smaller: int = 1) -> Iterator[Case]:
        """A system's runs, one a seed."""
        counts = tuple((model, count * self.times // smaller) for model, count in paper.LOADS[self.load].items())
        for seed in seeds:
            yield Case(counts, self.emergence, system, seed, self.gpus // smaller, self.parameters)


MAIN = tuple(
    Group(f"{load}, S = {emergence:g}", load, emergence) for load in paper.MAIN_LOADS for emergence in paper.EMERGENCES
)
HEAVY = (
    Group("llama-30b", "llama-30b"),
    Group("qwen-7b-r1", "qwen-7b-r1"),
    Group("large", gpus=paper.LARGE_GPUS, times=paper.LARGE_GPUS // paper.GPUS),
)
"""Table 7; S is not in the text, and 1.0 here."""


def at(load: str, emergence: float) -> Group:
    """One of `MAIN`."""
    return next(group for group in MAIN if (group.load, group.emergence) == (load, emergence))


MEDIUM = at("medium", 1.0)


def _varied(name: str, **changed: float | bool) -> Group:
    return Group(name, parameters=msgspec.structs.replace(Parameters(), **changed))


_USUAL = Parameters()
SENSITIVITY = (
    _varied("durations 1.5 times as long", duration_median_s=_USUAL.duration_median_s * 1.5),
    _varied("SLOs with half a cold start", overhead=0.5),
    _varied("cold starts half as long", prepare_s=_USUAL.prepare_s / 2),
    _varied("cold starts twice as long", prepare_s=_USUAL.prepare_s * 2),
    _varied("bounds of twice the iterations that are needed", bound=2.0),
    _varied("each model with a trace and a peak of its own", mixed=False),
)
"""Medium load, S = 1.0, one unknown changed at a time."""

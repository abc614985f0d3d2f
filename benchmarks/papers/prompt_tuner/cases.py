"""The runs that the evaluation consists of, as values: whoever has the same value has the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import Bank, Parameters

OURS, INFLESS, ELASTIC_FLOW = "prompt-tuner", "infless", "elastic-flow"
TUNING_SEEDS = (1000, 1001, 1002, 1003)
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

    def having(self, **settings: bool | float | str) -> System:
        return System(self.policy, tuple({**dict(self.settings), **settings}.items()), self.bank)


NOBODY = System(OURS, (("learn", False),))
"""Ours as the paper has it: jobs are planned with all that they may do."""
STATIC = frozenset({ELASTIC_FLOW})
"""Policies that hold a cluster of a fixed size."""


class Case(msgspec.Struct, frozen=True):
    """One run. `counts`: jobs by model."""

    counts: tuple[tuple[str, int], ...]
    emergence: float
    system: System
    seed: int
    gpus: int = paper.GPUS
    parameters: Parameters = Parameters()


class Group(msgspec.Struct, frozen=True):
    """A case in which several systems are compared; pages print its `name`. `times` multiplies the load's jobs;
    `changed`: parameters that are not those of the set."""

    name: str
    load: str = "medium"
    emergence: float = 1.0
    gpus: int = paper.GPUS
    times: int = 1
    changed: tuple[tuple[str, float | bool], ...] = ()

    def cases(
        self, system: System, parameters: Parameters, *, seeds: Iterable[int], smaller: int = 1
    ) -> Iterator[Case]:
        """A system's runs on a set's parameters, one a seed; on a cluster so many times smaller, with as many fewer
        jobs."""
        counts = tuple((model, count * self.times // smaller) for model, count in paper.LOADS[self.load].items())
        own = msgspec.structs.replace(parameters, **dict(self.changed))
        for seed in seeds:
            yield Case(counts, self.emergence, system, seed, self.gpus // smaller, own)


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
    return next(group for group in MAIN if (group.load, group.emergence) == (load, emergence))


MEDIUM, HIGH = at("medium", 1.0), at("high", 1.0)
BOUND = Group("bounds of twice the iterations that are needed", changed=(("bound", 2.0),))
APART = Group("each model with a trace and a peak of its own", changed=(("mixed", False),))
"""Medium load, S = 1.0, what the grid does not vary."""
FEWER_GPUS = tuple(Group(f"{gpus} GPUs", gpus=gpus) for gpus in (8, 16, 24))
"""Figure 3c, whose numbers of GPUs the text does not give: medium load, S = 1.0."""

VICUNA = (
    Group("Vicuna-7B's jobs alone", "vicuna-7b"),
    Group("Vicuna-7B's jobs alone, three times as many", "vicuna-7b", times=3),
)
"""Figure 3 is of this model's jobs (§3): as many as the medium load has, and about as many as it has in all."""


def of_bank(size: int) -> Group:
    return MEDIUM if size == Parameters().bank_size else Group(f"bank of {size}", changed=(("bank_size", size),))

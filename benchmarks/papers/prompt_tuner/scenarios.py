"""The evaluation's runs as values, and the systems: each baseline in every reading, with or without learning.

INFless starts a job on all instances at once, or its instances hold their devices and wait (§3.2). ElasticFlow resizes
running jobs (§3.1), or does not. In the paper no system learns a job's iterations.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import Bank, Parameters

OURS, INFLESS, ELASTIC_FLOW = "prompt-tuner", "infless", "elastic-flow"
TUNING_SEEDS = (1000, 1001, 1002, 1003)
"""Seeds to choose the baselines' settings; no result uses them."""

Settings = tuple[tuple[str, bool | int | float | str], ...]
"""Keyword arguments of a policy, as pairs."""


class System(msgspec.Struct, frozen=True):
    """A policy with its settings, and the jobs that get prompts from the bank."""

    policy: str
    settings: Settings = ()
    bank: Bank = Bank.BUDGET

    def __str__(self) -> str:
        settings = [f"{name} = {value}" for name, value in self.settings]
        return ", ".join([self.policy, *settings, f"bank {self.bank.value}"])

    def having(self, **settings: bool | float | str) -> System:
        return System(self.policy, tuple({**dict(self.settings), **settings}.items()), self.bank)


NOBODY = System(OURS, (("learn", False),))
"""Our scheduler as in the paper: it plans jobs with their maximum iterations."""
STATIC = frozenset({ELASTIC_FLOW})
"""Policies with a cluster of fixed size."""


class Case(msgspec.Struct, frozen=True):
    counts: tuple[tuple[str, int], ...]
    emergence: float
    system: System
    seed: int
    gpus: int = paper.GPUS
    parameters: Parameters = Parameters()


class Group(msgspec.Struct, frozen=True):
    """A case for comparisons. `times` multiplies the load's jobs."""

    name: str
    load: str = "medium"
    emergence: float = 1.0
    gpus: int = paper.GPUS
    times: int = 1
    changed: tuple[tuple[str, float | bool], ...] = ()

    def cases(
        self, system: System, parameters: Parameters, *, seeds: Iterable[int], smaller: int = 1
    ) -> Iterator[Case]:
        """Yield a system's runs, one per seed, on a cluster divided by `smaller`."""
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
"""Table 7. The text gives no S; here it is 1.0."""


def at(load: str, emergence: float) -> Group:
    return next(group for group in MAIN if (group.load, group.emergence) == (load, emergence))


MEDIUM, HIGH = at("medium", 1.0), at("high", 1.0)
BOUND = Group("bounds of twice the iterations that are needed", changed=(("bound", 2.0),))
APART = Group("each model with a trace and a peak of its own", changed=(("mixed", False),))
FEWER_GPUS = tuple(Group(f"{gpus} GPUs", gpus=gpus) for gpus in (8, 16, 24))
"""Figure 3c; the numbers of GPUs are ours."""

VICUNA = (
    Group("Vicuna-7B's jobs alone", "vicuna-7b"),
    Group("Vicuna-7B's jobs alone, three times as many", "vicuna-7b", times=3),
)
"""Jobs of Figure 3's model (§3)."""


def of_bank(size: int) -> Group:
    return MEDIUM if size == Parameters().bank_size else Group(f"bank of {size}", changed=(("bank_size", size),))


class Reading(enum.Enum):
    """Readings of the text on the baselines; the first of each baseline is closest to the text."""

    HOLD = "INFless, instances hold and wait"
    AT_ONCE = "INFless, all at once"
    RESIZES = "ElasticFlow, resizes"
    FIXED = "ElasticFlow, sizes stay"


POLICIES = {Reading.HOLD: INFLESS, Reading.AT_ONCE: INFLESS, Reading.RESIZES: ELASTIC_FLOW, Reading.FIXED: ELASTIC_FLOW}


class Condition(enum.Enum):
    NOBODY = "nobody learns"
    ALL = "all learn"
    OURS_ALONE = "ours alone learns"


Chosen = Mapping[Reading, System]


def ours(condition: Condition) -> System:
    return NOBODY if condition is Condition.NOBODY else LEARNS


def baseline(chosen: Chosen, reading: Reading, condition: Condition) -> System:
    return chosen[reading].having(learn=True) if condition is Condition.ALL else chosen[reading]


LEARNS = System(OURS, (("learn", True),))
TABLE_8: Mapping[str, System] = {
    "whole": NOBODY,
    "no-warm-allocator": NOBODY.having(together=False),
    "no-delay": NOBODY.having(delay=False),
    "no-budget": System(OURS, NOBODY.settings, Bank.ALWAYS),
}
NO_PROMPTS, NO_RUNTIMES = System(OURS, NOBODY.settings, Bank.NEVER), NOBODY.having(reuse=False)
FIGURE_8_AB: Mapping[str, System] = {"both": NOBODY, "no prompt reusing": NO_PROMPTS, "no runtime reusing": NO_RUNTIMES}
SHOWN: Mapping[str, str] = {
    "whole": "the whole scheduler",
    "no-warm-allocator": "without the warm allocator",
    "no-delay": "without DelaySchedulable",
    "no-budget": "without the latency budget",
}


OF_INFLESS = (Reading.HOLD, Reading.AT_ONCE)
KEPT_S = (15.0, 120.0)
"""Seconds that INFless keeps idle instances, instead of its histogram."""


def kept(system: System) -> Iterator[System]:
    return (system.having(keep_alive_s=seconds) for seconds in KEPT_S)


def of_window(window_s: float, *, usual_s: float) -> System:
    return NOBODY if window_s == usual_s else NOBODY.having(window_s=window_s)

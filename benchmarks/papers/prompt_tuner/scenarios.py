"""The evaluation's runs as values: systems, and the groups of jobs that they meet.

INFless has two readings, side by side. *Literal*: it serves jobs by arrival, predictions are 10 % longer, and a job's
instances hold their devices while they wait for the others (§3.2). *Tuned*: the best of these settings and their
alternatives, found on seeds of the search. ElasticFlow resizes running jobs (§3.1). No system learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

import msgspec

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import Bank, Parameters

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
    times: int = 1

    def cases(
        self, system: System, parameters: Parameters, *, seeds: Iterable[int], smaller: int = 1
    ) -> Iterator[Case]:
        """Yield a system's runs, one per seed, on a cluster divided by `smaller`."""
        counts = tuple((model, count * self.times // smaller) for model, count in paper.LOADS[self.load].items())
        for seed in seeds:
            yield Case(counts, self.emergence, system, seed, paper.GPUS // smaller, parameters)


MEDIUM = Group("medium, S = 1")
HEAVY = (Group("llama-30b", "llama-30b"), Group("qwen-7b-r1", "qwen-7b-r1"))
"""Table 7. The text gives no S; here it is 1.0."""
VICUNA = (
    Group("Vicuna-7B's jobs alone", "vicuna-7b"),
    Group("Vicuna-7B's jobs alone, three times as many", "vicuna-7b", times=3),
)
"""Jobs of Figure 3's model (§3)."""

OURS = System("prompt-tuner", (("learn", False),))
"""Our scheduler as in the paper: it plans jobs with their maximum iterations."""
LITERAL = System("infless", (("order", "arrival"), ("hold", True), ("margin", 0.1)))
TUNINGS = tuple(
    LITERAL.having(order=order, hold=hold, margin=margin)
    for order, margin, hold in product(("arrival", "deadline"), (0.0, 0.1), (False, True))
)
"""The settings that *INFless tuned* is chosen from."""
ELASTIC_FLOW = System("elastic-flow", (("slot_s", 1.0),))
STATIC = frozenset({ELASTIC_FLOW.policy})
"""Policies with a cluster of fixed size."""


class Part(msgspec.Struct, frozen=True):
    """Our scheduler without a part. The paper's difference: points of late jobs, and the factor of the cost."""

    what: str
    system: System
    points: tuple[float, float]
    times: tuple[float, float]
    dearer: bool = True


def _of_table_8(what: str, name: str, system: System) -> Part:
    whole, said = paper.TABLE_8["whole"], paper.TABLE_8[name]
    points, times = round(said.violations - whole.violations, 1), said.cost / whole.cost
    return Part(what, system, (points, points), (times, times), times > 1.0)


_SAVED = tuple(1.0 / (1.0 - percent / 100.0) for percent in paper.BANK_SAVED)
PARTS = (
    _of_table_8("without the warm allocator", "no-warm-allocator", OURS.having(together=False)),
    _of_table_8("without DelaySchedulable", "no-delay", OURS.having(delay=False)),
    _of_table_8("without the latency budget", "no-budget", System(OURS.policy, OURS.settings, Bank.ALWAYS)),
    Part("without the bank", System(OURS.policy, OURS.settings, Bank.NEVER), paper.BANK_FEWER_POINTS,
         (_SAVED[0], _SAVED[1])),
)  # fmt: skip
NO_BANK = PARTS[3].system

Baselines = Mapping[str, System]
"""Systems by the names of the page."""


def baselines(tuned: System) -> Baselines:
    return {"INFless, literal": LITERAL, "INFless, tuned": tuned, "ElasticFlow": ELASTIC_FLOW}

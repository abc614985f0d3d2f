"""Define the runs of the evaluation: systems, groups of jobs, and the sets of unspecified values.

`grid.toml` has the values of the sets. The file was fixed before the first run.

INFless has two variants. *Literal*: jobs run in order of arrival, predictions are 10 % longer, and instances reserve
devices while their job waits for more instances (§3.2). *Tuned*: the best of these and other settings on search seeds.
ElasticFlow resizes running jobs (§3.1). No system learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.papers.common import case_name
from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import Bank, Parameters, jobs, slo_s
from stoker.chance import Stream

Settings = tuple[tuple[str, bool | int | float | str], ...]
"""Keyword arguments of a policy, as pairs."""


class System(msgspec.Struct, frozen=True):
    """A policy with its settings, and which jobs use prompts from the bank."""

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

    def __str__(self) -> str:
        return f"{self.system}, seed {self.seed}"

    @property
    def name(self) -> str:
        return case_name(self)


class Group(msgspec.Struct, frozen=True):
    """A case for comparisons: load, S (`emergence`) and cluster size. `times` multiplies the jobs; `clusters`
    multiplies the GPUs.
    """

    name: str
    load: str = "medium"
    emergence: float = 1.0
    times: int = 1
    clusters: int = 1

    def cases(
        self, system: System, parameters: Parameters, *, seeds: Iterable[int], smaller: int = 1
    ) -> Iterator[Case]:
        """Yield one run of the system per seed. `smaller` divides the jobs and the GPUs."""
        counts = tuple((model, count * self.times // smaller) for model, count in paper.LOADS[self.load].items())
        for seed in seeds:
            yield Case(counts, self.emergence, system, seed, self.clusters * paper.GPUS // smaller, parameters)


MEDIUM = Group("medium, S = 1")
HEAVY = (
    Group("llama-30b", "llama-30b"), Group("qwen-7b-r1", "qwen-7b-r1"), Group("96 GPUs", times=3, clusters=3)
)  # fmt: skip
"""Runs of Table 7, with S = 1.0 because the text gives no S."""
OTHERS = (
    Group("low, S = 1", "low"), Group("high, S = 1", "high"),
    Group("medium, S = 0.5", emergence=0.5), Group("medium, S = 1.5", emergence=1.5),
)  # fmt: skip
"""The other runs of Figure 7."""
VICUNA = (
    Group("Vicuna-7B's jobs alone", "vicuna-7b"),
    Group("Vicuna-7B's jobs alone, three times as many", "vicuna-7b", times=3),
)
"""Jobs of Figure 3's model (§3)."""

OURS = System("prompt-tuner", (("learn", False),))
"""Our scheduler like in the paper: plans use maximum iterations."""
LITERAL = System("infless", (("order", "arrival"), ("hold", True), ("margin", 0.1)))
TUNINGS = tuple(
    LITERAL.having(order=order, hold=hold, margin=margin)
    for order, margin, hold in product(("arrival", "deadline"), (0.0, 0.1), (False, True))
)
"""Candidate settings of *INFless tuned*."""
ELASTIC_FLOW = System("elastic-flow", (("slot_s", 1.0),))
STATIC = frozenset({ELASTIC_FLOW.policy})
"""Policies on a cluster of fixed size."""


class Part(msgspec.Struct, frozen=True):
    """Our scheduler without a part. Effects in the paper: points of late jobs, and cost factor."""

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
"""Systems by name on the page."""


def baselines(tuned: System) -> Baselines:
    return {"INFless, literal": LITERAL, "INFless, tuned": tuned, "ElasticFlow": ELASTIC_FLOW}


SEED = 0


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    duration_median_s: tuple[float, ...]
    overhead: tuple[float, ...]
    width: tuple[str, ...]
    prepare_s: tuple[float, ...]
    speedup: tuple[float, ...]
    widest: tuple[int, ...]


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`late`: target share of late jobs in percent. `within`: allowed relative deviation from the target. Others:
    search steps.
    """

    late: float
    within: float
    seeds: tuple[int, ...]
    looked_at: int
    finalists: int
    more_seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]

    def deviation(self, late: float) -> float:
        return late / self.late - 1.0


class Judge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seeds of the results; numbers of seeds for scheduler parts and for smaller tables; and the limit, as a share,
    above which numbers conflict.
    """

    seeds: tuple[int, ...]
    parts: int
    few: int
    conflict: float


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed_on: str
    draws: int
    slo_s: float
    values: Values
    width: Mapping[str, tuple[tuple[int, float], ...]]
    search: Search
    judge: Judge


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A parameter set: for each line of the grid, the index of the value."""

    places: tuple[int, ...]

    def values(self, grid: Grid) -> dict[str, float | str]:
        every = msgspec.structs.asdict(grid.values)
        return {name: values[place] for (name, values), place in zip(every.items(), self.places, strict=True)}

    def parameters(self, grid: Grid) -> Parameters:
        values = self.values(grid)
        replicas = grid.width[str(values.pop("width"))]
        return msgspec.structs.replace(Parameters(), replicas=replicas, **values)


@cache
def read_grid() -> Grid:
    return msgspec.toml.decode(Path(__file__).with_name("grid.toml").read_bytes(), type=Grid)


def every_choice(grid: Grid) -> list[Choice]:
    return [Choice(places) for places in product(*(range(len(v)) for v in msgspec.structs.astuple(grid.values)))]


@cache
def median_slo_s(parameters: Parameters, seeds: tuple[int, ...]) -> float:
    """Return the median SLO of jobs at medium load, S = 1."""
    found = (jobs(paper.LOADS["medium"], parameters, seed=seed) for seed in seeds)
    return median(slo_s(job, 1.0, parameters) for some in found for job in some)


def draw_choices(grid: Grid) -> list[Choice]:
    seeds = grid.search.seeds
    every = [each for each in every_choice(grid) if median_slo_s(each.parameters(grid), seeds) >= grid.slo_s]
    some = set(sorted(range(len(every)), key=Stream(SEED, "PromptTuner's grid").uniform)[: grid.draws])
    return [choice for number, choice in enumerate(every) if number in some]

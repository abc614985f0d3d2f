"""Each baseline's best setting, found before anything is compared, on seeds that no result is from.

Settings run at medium load under every S. The best one has the fewest violations on the mean; of those within half a
point of it, the cheapest. Ours keeps the paper's settings (§4.4, §6.3), but learns what jobs need. No source has that
of the baselines: each is taken as it is told, and once more with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.prompt_tuner import paper
from benchmarks.prompt_tuner.cases import (
    ELASTIC_FLOW,
    INFLESS,
    WHOLE_EXTENT,
    Case,
    Extent,
    Settings,
    System,
    at,
)
from benchmarks.prompt_tuner.jobs import Bank
from benchmarks.prompt_tuner.runs import Found
from benchmarks.prompt_tuner.summary import STATIC, Search

ALIKE_POINTS = 0.5

CHOICES: Mapping[str, Sequence[Settings]] = {
    INFLESS: tuple(
        (("order", order), ("window_s", window_s), ("learn", learn))
        for order in ("arrival", "deadline")
        for window_s in (0.0, 60.0)
        for learn in (False, True)
    ),
    ELASTIC_FLOW: tuple(
        (setting, ("learn", learn))
        for setting in (("slot_s", 1.0), ("slot_s", 10.0), ("rescale", False))
        for learn in (False, True)
    ),
}
"""Settings that are tried with the latency budget; the first also without it."""


def candidates(policy: str) -> list[System]:
    """Everything that is tried of a baseline."""
    choices = CHOICES[policy]
    return [*(System(policy, settings) for settings in choices), System(policy, choices[0], Bank.ALWAYS)]


def cases(systems: Sequence[System], *, extent: Extent = WHOLE_EXTENT) -> Iterator[Case]:
    """The runs that they are judged by."""
    for system in systems:
        for emergence in paper.EMERGENCES:
            yield from at("medium", emergence).cases(system, seeds=extent.tuning_seeds, smaller=extent.smaller)


def searched(system: System, found: Found, *, extent: Extent = WHOLE_EXTENT) -> Search:
    """What came of a setting."""
    runs = [(case, found[case]) for case in cases([system], extent=extent)]
    static = system.policy in STATIC
    costs = [run.cost(static=static, device_price_s=case.parameters.device_price_s) for case, run in runs]
    return Search(system, fmean(run.violations for _, run in runs), fmean(costs))


def learns(system: System) -> bool:
    """Whether it expects of a job what the last ones needed, as ours does."""
    return dict(system.settings).get("learn", False) is True


def best(searches: Sequence[Search]) -> System:
    """The best of one baseline's settings."""
    fewest = min(search.violations for search in searches)
    alike = [search for search in searches if search.violations <= fewest + ALIKE_POINTS]
    return min(alike, key=lambda search: (search.cost, search.violations)).system

"""What PromptTuner is without one of its parts (Table 8, Figure 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from benchmarks.prompt_tuner import paper
from benchmarks.prompt_tuner.cases import HEAVY, MEDIUM, OURS, Extent, Group, System, at
from benchmarks.prompt_tuner.jobs import Bank
from benchmarks.prompt_tuner.parameters import Parameters

WHOLE = System(OURS)
LOADED = (MEDIUM, at("high", 1.0))
TABLE_8: Mapping[str, System] = {
    "whole": WHOLE,
    "no-warm-allocator": System(OURS, (("together", False),)),
    "no-delay": System(OURS, (("delay", False),)),
    "no-budget": System(OURS, bank=Bank.ALWAYS),
}
NO_PROMPTS, NO_RUNTIMES = System(OURS, bank=Bank.NEVER), System(OURS, (("reuse", False),))
FIGURE_8_AB: Mapping[str, System] = {
    "both": WHOLE,
    "no prompt reusing": NO_PROMPTS,
    "no runtime reusing": NO_RUNTIMES,
}
"""At medium load, under every S."""
BY_BOUND = System(OURS, (("learn", False),))
"""As in the paper: every job is expected to do all of its iterations."""
EARLY = System(OURS, (("early", True),))
"""Beyond the paper: idle replicas of other models make room at once for a job that would be late."""
SHOWN: Mapping[str, str] = {
    "whole": "the whole scheduler",
    "no-warm-allocator": "without the warm allocator",
    "no-delay": "without DelaySchedulable",
    "no-budget": "without the latency budget",
}


def of_window(window_s: float) -> System:
    """Ours with another window of reclaim."""
    return WHOLE if window_s == paper.WINDOW_S else System(OURS, (("window_s", window_s),))


def of_bank(size: int) -> Group:
    """Medium load, S = 1.0, with a bank of so many candidates."""
    if size == Parameters().bank_size:
        return MEDIUM
    return Group(f"bank of {size}", parameters=msgspec.structs.replace(Parameters(), bank_size=size))


def runs() -> Iterator[tuple[Group, System]]:
    """Everything that is wanted, some of it twice."""
    yield from ((MEDIUM, system) for system in TABLE_8.values())
    for emergence in paper.EMERGENCES:
        yield from ((at("medium", emergence), system) for system in FIGURE_8_AB.values())
    yield from ((group, system) for group in LOADED for system in (BY_BOUND, EARLY))
    yield from ((MEDIUM, of_window(window_s)) for window_s in paper.WINDOWS_S)
    yield from ((of_bank(size), WHOLE) for size in paper.BANK_SIZES)


def seeds_of(group: Group, extent: Extent) -> tuple[int, ...]:
    """Under which seeds a group is run."""
    return extent.large_seeds if group == HEAVY[-1] else extent.seeds

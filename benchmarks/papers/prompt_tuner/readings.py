"""Which systems are compared: each baseline in every reading that the text allows, and who learns.

INFless starts a job on all its instances at once, or its instances hold their devices and wait for the others (§3.2
tells of instances that wait). ElasticFlow resizes running jobs, as its paper and PromptTuner's §3.1 have it, or lets
them keep their size. Settings that no text has (whose turn is first, how soon it plans anew, whether instances are
launched ahead of traffic) are chosen by `tuning`, for each reading the one with the fewest violations.

In the paper nobody learns how many of its iterations a job needs: each is planned with all that it may do. A session's
policy does learn it. So there are three conditions: nobody learns (the paper's), all learn, ours alone learns.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

from benchmarks.papers.prompt_tuner.cases import ELASTIC_FLOW, INFLESS, NOBODY, OURS, System
from benchmarks.papers.prompt_tuner.jobs import Bank


class Reading(enum.Enum):
    """A baseline, as it may be meant. The first of each is the one nearest to the text."""

    HOLD = "INFless, instances hold and wait"
    AT_ONCE = "INFless, all at once"
    RESIZES = "ElasticFlow, resizes"
    FIXED = "ElasticFlow, sizes stay"


POLICIES = {
    Reading.HOLD: INFLESS,
    Reading.AT_ONCE: INFLESS,
    Reading.RESIZES: ELASTIC_FLOW,
    Reading.FIXED: ELASTIC_FLOW,
}


class Condition(enum.Enum):
    NOBODY = "nobody learns"
    ALL = "all learn"
    OURS_ALONE = "ours alone learns"


Chosen = Mapping[Reading, System]
"""Each reading in its best setting, where nobody learns."""


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
"""Seconds for which INFless keeps idle instances, where that is not by its histogram of arrivals."""


def kept(system: System) -> Iterator[System]:
    return (system.having(keep_alive_s=seconds) for seconds in KEPT_S)


def of_window(window_s: float, *, usual_s: float) -> System:
    return NOBODY if window_s == usual_s else NOBODY.having(window_s=window_s)

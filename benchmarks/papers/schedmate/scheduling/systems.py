"""What is compared: policies, and for shortest first the errors of its predictions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.baselines.shortest_first import fifo, shortest_first
from benchmarks.baselines.tiresias import tiresias
from benchmarks.papers.schedmate.scheduling import errors, settings
from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Policies
from stoker.protocol.ids import CallId

FIFO, SJF, TIRESIAS = "FIFO", "SJF", "Tiresias"
OURS, OUR_AVERAGE, OURS_UNKNOWN = "our error", "our recipes, plain average", "our error, 30 % unknown"
PAPER, LUCID, SHUFFLED = "SchedMate's error", "Lucid's error", "shuffled"
FIFO_SKIP, SJF_SKIP, OURS_SKIP = "FIFO, passing", "SJF, passing", "our error, passing"
TIRESIAS_OTHER, TIRESIAS_FREE = "Tiresias, 3 queues", "Tiresias, preempting free"

ERRORS: dict[str, errors.Predict] = {
    SJF: errors.none,
    OURS: errors.ours(),
    OURS_UNKNOWN: errors.ours(unknown_share=settings.UNKNOWN_SHARE),
    OUR_AVERAGE: errors.our_average(),
    PAPER: errors.PAPER,
    LUCID: errors.LUCID,
    SHUFFLED: errors.shuffled,
    SJF_SKIP: errors.none,
    OURS_SKIP: errors.ours(),
    **{f"spread {spread:g}": errors.lognormal(spread) for spread in settings.SPREADS},
}
"""Of the systems that put the shortest expected job first."""
SWEEP = tuple(f"spread {spread:g}" for spread in settings.SPREADS)

MAIN = (FIFO, SJF, TIRESIAS, OURS, PAPER, LUCID, SHUFFLED)
BESIDE = (OUR_AVERAGE, OURS_UNKNOWN, FIFO_SKIP, SJF_SKIP, OURS_SKIP, TIRESIAS_OTHER, TIRESIAS_FREE)


class Case(msgspec.Struct, frozen=True):
    """A system at a load, with one draw of its error, over all windows."""

    system: str
    load: float
    draw: int = 0

    @property
    def name(self) -> str:
        """Tells it from others."""
        return f"{self.system}/{self.load:g}/{self.draw}"


def draws(system: str) -> int:
    """How often its error is drawn."""
    is_random = system in ERRORS and ERRORS[system] is not errors.none
    return settings.DRAWS if is_random and system not in SWEEP else 1


def cases() -> list[Case]:
    """All that the page needs."""
    at_main = [
        Case(system, settings.MAIN_LOAD, draw) for system in (*MAIN, *BESIDE, *SWEEP) for draw in range(draws(system))
    ]
    others = [load for load in settings.LOADS if load != settings.MAIN_LOAD]
    return at_main + [Case(system, load, draw) for load in others for system in MAIN for draw in range(draws(system))]


def policies_of(system: str, predictions_s: Mapping[CallId, float]) -> Policies:
    """The policies of a system, which is told these predictions."""
    restart_s = settings.TIRESIAS_RESTART_S
    match system:
        case "FIFO":
            return fifo()
        case "FIFO, passing":
            return fifo(skip=True)
        case "Tiresias":
            return tiresias(thresholds_gpu_s=settings.TIRESIAS_THRESHOLDS_GPU_S, restart_s=restart_s)
        case "Tiresias, 3 queues":
            return tiresias(thresholds_gpu_s=settings.TIRESIAS_OTHER_GPU_S, restart_s=restart_s)
        case "Tiresias, preempting free":
            return tiresias(thresholds_gpu_s=settings.TIRESIAS_THRESHOLDS_GPU_S, restart_s=(0.0, 0.0))

    def expected_s(call: Call) -> float:
        return predictions_s[call.id]

    return shortest_first(expected_s=expected_s, skip=system in (SJF_SKIP, OURS_SKIP))

"""A simulated run in the few numbers that a table has room for."""

from __future__ import annotations

from array import array

import msgspec

from stoker.manager.sim.log import EventLog, Happened
from stoker.manager.sim.run import RunOutcome
from stoker.manager.study.measures import Measures
from stoker.manager.study.statistics import quantile

# ---- tokens of engines


class TokenFigures(msgspec.Struct, frozen=True):
    """Quantiles over calls to engines that have ended, in seconds: of the time to first token, of the mean time per
    output token, of the longest time between two tokens. `objectives`: calls that had one and have ended or failed;
    `met`: those of them whose tokens were all in time (SLINFER eq. 1)."""

    objectives: int
    met: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p99_s: float

    @property
    def met_share(self) -> float | None:
        """The share of the objectives that were met; None: there are none."""
        return self.met / self.objectives if self.objectives else None


def token_figures(log: EventLog) -> TokenFigures | None:
    """The figures of a run; None where no call to an engine has ended."""
    counted = Happened.CALLS_CAME in log.what  # a row is a class then, and says how many calls are in it
    kinds = (Happened.TOKEN_FIRST, Happened.TOKEN_MEAN, Happened.TOKEN_GAP, Happened.TOKEN_LATE)
    found = {what: array("d") for what in kinds}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what in found:
            found[Happened(what)].extend([value] * (call if counted else 1))
    first, mean, gap, late = (array("d", sorted(found[what])) for what in kinds)
    if not first:
        return None
    return TokenFigures(
        objectives=len(late), met=sum(each <= 0 for each in late),
        ttft_p50_s=quantile(first, 0.5), ttft_p99_s=quantile(first, 0.99),
        tpot_p50_s=quantile(mean or array("d", [0.0]), 0.5), tpot_p99_s=quantile(mean or array("d", [0.0]), 0.99),
        gap_p99_s=quantile(gap or array("d", [0.0]), 0.99),
    )  # fmt: skip


# ---- figures of a run


class Figures(msgspec.Struct, frozen=True):
    """What a run came to. Times in seconds, sums of devices in device-seconds, shares from 0 to 1.

    `items_per_s`: items done over the whole run. `busy`: the share of the device time that was held in which at least
    one call ran on the device; several at once count once, and one that is cut off later counts as well. `wait_p50_s`,
    `wait_p95_s`: from a call's coming to its first beginning (`Measures.waits_s`). `bound_s`: no policy can be done
    before; None = not asked, or never.
    `in_time`: the share of calls with a deadline that met it; None = none has one, or calls were only counted.
    `warm_s`: in which at least one library had the device, from its order to its end. `tokens`: of calls to engines.
    """

    items_per_s: float
    held_s: float
    busy: float
    lost_s: float
    loads: int
    wait_p50_s: float
    wait_p95_s: float
    shared_bytes: float
    peer_bytes: float
    bound_s: float | None = None
    in_time: float | None = None
    warm_s: float = 0.0
    tokens: TokenFigures | None = None

    @property
    def violations(self) -> float | None:
        """The share of calls with a deadline that did not meet it."""
        return None if self.in_time is None else 1.0 - self.in_time


def figures_of(log: EventLog, outcome: RunOutcome, measured: Measures, *, bound_s: float | None = None) -> Figures:
    """The figures of a run that is over, and was measured."""
    violations = measured.violations
    waits = measured.waits_s or [0.0]
    return Figures(
        items_per_s=outcome.items / outcome.ended_at if outcome.ended_at else 0.0,
        held_s=measured.held_s,
        busy=min(1.0, outcome.busy_s / measured.held_s) if measured.held_s else 0.0,  # more than 1 is rounding
        lost_s=measured.lost_s,
        loads=log.what.count(Happened.LIBRARY_READY),
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        shared_bytes=measured.shared_bytes,
        peer_bytes=measured.peer_bytes,
        bound_s=bound_s,
        in_time=None if violations is None else 1.0 - violations,
        warm_s=outcome.warm_s,
        tokens=token_figures(log),
    )

"""When the tokens of a run's calls came: what its event log says of contexts with an engine."""

from __future__ import annotations

from array import array

import msgspec

from stoker.manager.sim.log import EventLog, Happened
from stoker.manager.study.statistics import quantile


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

"""Draw errors of predicted durations for each job, from distributions of log(prediction / truth).

- *Ours*: the errors of 108 estimates (`our_errors.json`, which `python -m
  benchmarks.papers.schedmate.scheduling.errors` writes), or the errors of the paper's plain average.
- *SchedMate's* and *Lucid's*: §5.4 gives the share of relative errors under 100 %. Both distributions are lognormal
  with E[truth / prediction] = 1, so a spread s shifts the mean by s^2 / 2. P(log ratio < log 2) = share then gives s =
  0.52 (SchedMate) and 1.91 (Lucid).
- *Shuffled*: each job has the duration of another job.

A common factor does not change the order of jobs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from benchmarks.harness import side_options
from benchmarks.papers.schedmate import estimates
from benchmarks.papers.schedmate.scheduling import settings
from stoker.chance import Stream

OUR_ERRORS = Path(__file__).with_name("our_errors.json")
Predict = Callable[[Sequence[float], Stream], list[float]]


def none(durations_s: Sequence[float], chance: Stream) -> list[float]:  # noqa: ARG001
    return list(durations_s)


def shuffled(durations_s: Sequence[float], chance: Stream) -> list[float]:
    order = sorted(range(len(durations_s)), key=chance.uniform)
    return [durations_s[place] for place in order]


def lognormal(spread: float, *, shift: float = 0.0) -> Predict:
    def predict(durations_s: Sequence[float], chance: Stream) -> list[float]:
        return [said * math.exp(shift + spread * chance.normal(number)) for number, said in enumerate(durations_s)]

    return predict


def spread_of(share: float) -> float:
    """Return the spread s with P(z s + s^2 / 2 < log 2) = share for a standard normal z."""
    place = NormalDist().inv_cdf(share)
    return math.sqrt(place**2 + 2 * math.log(2)) - place


def spread_both_ways(share: float) -> float:
    """Return the spread with this share of predictions within a factor of two, for a correct median."""
    return math.log(2) / NormalDist().inv_cdf((1 + share) / 2)


def resampled(log_ratios: Sequence[float], *, unknown_share: float = 0.0) -> Predict:
    """Draw an error for each job. Jobs without an estimate (`unknown_share`) have the median prediction."""

    def predict(durations_s: Sequence[float], chance: Stream) -> list[float]:
        median_s = statistics.median(durations_s)
        return [
            duration_s * math.exp(log_ratios[int(chance.uniform(2 * number) * len(log_ratios))])
            if chance.uniform(2 * number + 1) >= unknown_share
            else median_s
            for number, duration_s in enumerate(durations_s)
        ]

    return predict


@lru_cache(maxsize=1)
def our_log_ratios() -> dict[str, list[float]]:
    return dict(json.loads(OUR_ERRORS.read_text())["log_ratios"])


def error_shares(durations_s: Sequence[float], predictions_s: Sequence[float]) -> tuple[float, float]:
    """Return the share of relative errors under 100 %, and the share within a factor of two."""
    pairs = list(zip(durations_s, predictions_s, strict=True))
    under = sum(abs(said - true) < true for true, said in pairs) / len(pairs)
    return under, sum(true / 2 <= said <= 2 * true for true, said in pairs) / len(pairs)


PAPER, LUCID = (
    lognormal(spread, shift=spread**2 / 2) for spread in map(spread_of, (settings.PAPER_SHARE, settings.LUCID_SHARE))
)


def main() -> None:
    side_options(__doc__)
    about = "log(estimate / truth) of run times, collection B; made by benchmarks/papers/schedmate/scheduling/errors.py"
    history, rows = estimates.collection(), estimates.collection(estimates.HELD_OUT)
    said = estimates.estimate_rows(rows, history, estimates.facts_of([*history, *rows]))
    log_ratios = {
        name: [round(math.log(said[row["name"]][what] / row["run_s"]), 4) for row in rows if said[row["name"]][what]]
        for name, what in (("estimates", "run_s"), ("average", "average"))
    }
    OUR_ERRORS.write_text(json.dumps({"about": about, "log_ratios": log_ratios}) + "\n")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.papers.schedmate.scheduling.our_errors`: take the errors of our estimates from their
evaluation.

Collection B of `benchmarks/papers/schedmate/estimates.md`: 108 recipes that were measured after the method was fixed,
each estimated from the 108 of collection A. Writes log(prediction / truth) of run times, in `our_errors.json`.
"""

from __future__ import annotations

import json
import math

from benchmarks.papers.schedmate import estimates
from benchmarks.papers.schedmate.scheduling.errors import OUR_ERRORS


def log_ratios() -> dict[str, list[float]]:
    history, rows = estimates.collection(), estimates.collection(estimates.HELD_OUT)
    facts = estimates.facts_of([*history, *rows])
    said = estimates.estimated(rows, history, facts, apart=lambda row, other: row is not other)
    return {
        name: [
            round(math.log(said[row["name"]][what] / row["run_s"]), 4) for row in rows if said[row["name"]][what] > 0
        ]
        for name, what in (("estimates", "run_s"), ("average", "average"))
    }


def main() -> None:
    about = (
        "log(estimate / truth) of run times, collection B; made by benchmarks/papers/schedmate/scheduling/our_errors.py"
    )
    OUR_ERRORS.write_text(json.dumps({"about": about, "log_ratios": log_ratios()}) + "\n")


if __name__ == "__main__":
    main()

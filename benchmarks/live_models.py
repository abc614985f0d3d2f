"""Eight small models on two CPU devices under `slinfer`: the share of requests in time, live and simulated.

Each run is a session of its own (`live_models_side`). Its step times are what its engines tell as calls run. Two
rehearsals give the objectives, and the rate at which the simulator then predicts that three quarters of the requests
are in time: where all or none are, agreement would say nothing. The trace is simulated with the steps of the trace
itself, and with the lengths of the texts that the models wrote.

Pilots of a session judge offers by time and memory (decision 061), and so do the simulated ones on the line with the
bar; what the simulator says of pilots that judge by memory alone stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.live_models_world import WITHIN
from benchmarks.paired import missing, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "live_models", "eight models on two devices, live and simulated: requests in time"
SIDE = "benchmarks.live_models_side"
SEEDS, FOR_S = (1, 2, 3), 30.0
BAR_POINTS = 5.0


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """One session for each seed."""
    if reason := missing("torch", "transformers", "tokenizers", "safetensors", "pytest"):
        return Table(name=NAME, title=TITLE, skipped=reason)
    runs = []
    for seed in SEEDS[:1] if quick else SEEDS:
        run = run_side(SIDE, "--seed", str(seed), "--for", str(10.0 if quick else FOR_S), timeout_s=1800.0)
        say(told(run))
        runs.append(run)
    return table_of(runs)


def told(run: dict[str, Any]) -> str:
    """A run in a line."""
    load = ", ".join(f"{each:.0f}" for each in run["load_in_run"])
    return (
        f"seed {run['seed']}: {run['requests']} requests at {run['rate']:.1f} a second, ttft {run['ttft_s']:.2f} s,"
        f" tpot {1000 * run['tpot_s']:.0f} ms; in time: predicted {run['predicted']:.3f}, live {run['live']:.3f},"
        f" simulated {run['simulated']:.3f} ({run['simulated_other']:.3f} if pilots judge otherwise);"
        f" medians, s: ttft {run['live_first_s']:.2f} and {run['simulated_first_s']:.2f} simulated, tpot"
        f" {run['live_tpot_s']:.3f} and {run['simulated_tpot_s']:.3f};"
        f" {run['loads']} loads; failed {run['failed']}; steps of {1000 * run['step_s'][0]:.1f} and"
        f" {1000 * run['step_s'][1]:.1f} ms; load {load}"
    )


def table_of(runs: list[dict[str, Any]]) -> Table:
    """Shares in percent, and how far apart they are in points."""
    live, simulated, other, predicted = (
        [100 * run[name] for run in runs] for name in ("live", "simulated", "simulated_other", "predicted")
    )
    apart = [abs(there - here) for there, here in zip(simulated, live, strict=True)]
    notes = [told(run) for run in runs]
    notes += [
        f"seed {run['seed']}: no rate was found at which {WITHIN[0]:.0%} to {WITHIN[1]:.0%} are predicted to be in time"
        for run in runs
        if not run["chosen_well"]
    ]
    return Table(
        name=NAME,
        title=TITLE,
        lines=[
            Line(
                what="in time, %",
                cells={"live": live, "simulated": simulated, "apart, points": apart},
                bar=Bar(at_most=BAR_POINTS),
                digits=1,
            ),
            Line(what="what was predicted before, %", cells={"predicted": predicted}, digits=1),
            Line(what="simulated pilots judge by memory alone, %", cells={"simulated": other}, digits=1),
        ],
        notes=notes,
    )

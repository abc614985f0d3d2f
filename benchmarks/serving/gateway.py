"""A gateway's extra time to the first token, with many concurrent streams (bars: 5 ms at p50, 20 ms at p99).

    python -m benchmarks.serving.gateway --pairs 3 --streams 200

Each pair runs both sides of `gateway_side.py`. An engine without computation writes 20 tokens a second of each stream.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, run_side, side_options, spread

SIDE = "benchmarks.serving.gateway_side"
SIDES = ("direct", "gateway")
BARS_MS = {50: 5, 99: 20}


def main() -> None:
    asked = side_options(__doc__, pairs=3, streams=[200], rounds=3, tokens=100, json="")
    record: dict[str, Any] = {"machine": machine(), "rounds": asked.rounds, "tokens": asked.tokens, "runs": []}
    sys.stdout.write(f"{record['machine']}\n")
    for streams in asked.streams:
        options = ["--streams", str(streams), "--rounds", str(asked.rounds), "--tokens", str(asked.tokens)]
        runs = []
        for _ in range(asked.pairs):
            for side in SIDES:
                load = os.getloadavg()[0]
                runs.append({"streams": streams, "side": side, "load": load, **run_side(SIDE, side, *options)})
        sys.stdout.write(table_of(runs, streams=streams, pairs=asked.pairs))
        sys.stdout.flush()
        record["runs"] += runs
    if asked.json:
        Path(asked.json).write_text(json.dumps(record) + "\n")


def table_of(runs: list[dict[str, Any]], *, streams: int, pairs: int) -> str:
    by_side = {side: [run for run in runs if run["side"] == side] for side in SIDES}
    loads = spread([run["load"] for run in runs], digits=1)
    lines = [f"{streams} streams at once; median (min-max) of {pairs} pairs; load before each side {loads}"]
    for percent, bar_ms in BARS_MS.items():
        times = {side: [percentile(run["ttft_ms"], percent) for run in theirs] for side, theirs in by_side.items()}
        added = [a - b for a, b in zip(times["gateway"], times["direct"], strict=True)]
        sides = ", ".join(f"{side} {spread(each, digits=1)}" for side, each in times.items())
        verdict = "met" if statistics.median(added) <= bar_ms else "missed"
        lines.append(
            f"  first token, p{percent}, ms: {sides}; added {spread(added, digits=1)}; bar {bar_ms}: {verdict}"
        )
    for side, theirs in by_side.items():
        late = spread([100 * percentile(run["late"], 50) for run in theirs], digits=1)
        parts = {part: statistics.median([run["cpu_us"][part] for run in theirs]) for part in theirs[0]["cpu_us"]}
        cpu = ", ".join(f"{part} {us:.0f}" for part, us in parts.items())
        lines.append(f"  {side}: streams take {late} % longer than their pace; processor time a token, us: {cpu}")
    memory = spread([run["memory_bytes"] / 1e6 for run in by_side["gateway"]])
    return "\n".join([*lines, f"  the gateway's memory at the end, MB: {memory}\n"])


def percentile(numbers: list[float], percent: int) -> float:
    return numbers[min(len(numbers) - 1, len(numbers) * percent // 100)]


if __name__ == "__main__":
    main()

"""The prediction error of a model's step-time table: SLINFER's bars (§VI-B: 5.9 % for prefill, 3.9 % for decode).

The profiler samples powers of two; 100 random workloads test them. `python -m benchmarks.serving.step_times` measures
once.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.harness import MODEL, missing, run_side, side_options
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model, load_causal_lm

NAME, TITLE = "step_times", "seconds of a model's steps against what the profiler's table foretells: mean error in %"
BARS = {"prefill": 5.9, "decode": 3.9}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing(*MODEL):
        return Table(name=NAME, title=TITLE, skipped=reason)
    repeats, options = (1, ["--quick"]) if quick else (3, [])
    lines = []
    for dtype in ("bfloat16", "float32"):
        found: dict[str, list[float]] = {stage: [] for stage in BARS}
        for repeat in range(repeats):
            one = run_side("benchmarks.serving.step_times", "--dtype", dtype, *options, timeout_s=3600)
            for stage, numbers in found.items():
                numbers.append(one[stage])
            errors = ", ".join(f"{stage} {one[stage]:.1f} %" for stage in BARS)
            say(f"{dtype}, repeat {repeat + 1} of {repeats}: {errors}")
        lines += [
            Line(what=f"{stage}, {dtype}", cells={"error in %": found[stage]}, bar=Bar(at_most=bar), digits=1)
            for stage, bar in BARS.items()
        ]
    return Table(name=NAME, title=TITLE, lines=lines)


def main() -> None:
    given = side_options(__doc__, dtype="auto", model="", quick=False)
    times = load_causal_lm(given.model or default_model(), dtype=given.dtype).profile(quick=given.quick).times
    print(json.dumps({"prefill": 100 * times.prefill_error.mean, "decode": 100 * times.decode_error.mean}))


if __name__ == "__main__":
    main()

"""The prediction error of a model's step-time table: SLINFER's bars (§VI-B: 5.9 % for prefill, 3.9 % for decode).

The profiler samples powers of two; 100 random workloads test them. `python -m benchmarks.serving.step_times` measures
once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness import MODEL, in_turns, missing, run_side
from benchmarks.starting import print_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model, load_causal_lm

NAME, TITLE = "step_times", "seconds of a model's steps against what the profiler's table foretells: mean error in %"
BARS = {"prefill": 5.9, "decode": 3.9}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing(*MODEL):
        return Table(name=NAME, title=TITLE, skipped=reason)
    repeats, options = (1, ["--quick"]) if quick else (3, [])
    sides = {
        dtype: partial(run_side, "benchmarks.serving.step_times", "--dtype", dtype, *options, timeout_s=3600)
        for dtype in ("bfloat16", "float32")
    }

    def told(dtype: str, one: dict[str, float]) -> str:
        return f"{dtype}: " + ", ".join(f"{stage} {one[stage]:.1f} %" for stage in BARS)

    lines = [
        Line(
            what=f"{stage}, {dtype}", cells={"error in %": [one[stage] for one in several]}, bar=Bar(at_most=bar),
            digits=1,
        )
        for dtype, several in in_turns(sides, repeats, say, told).items()
        for stage, bar in BARS.items()
    ]  # fmt: skip
    return Table(name=NAME, title=TITLE, lines=lines)


def side(dtype: str = "auto", model: str = "", quick: bool = False) -> dict[str, float]:
    times = load_causal_lm(model or default_model(), dtype=dtype).profile(quick=quick).times
    return {"prefill": 100 * times.prefill_error.mean, "decode": 100 * times.decode_error.mean}


if __name__ == "__main__":
    print_side(side, __doc__)

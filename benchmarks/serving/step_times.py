"""Measure the error of a model's step-time table: SLINFER's bars (§VI-B: 5.9 % for prefill, 3.9 % for decode).

The profiler samples powers of two; 100 random workloads test the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness import MODEL, in_turns, need, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model, load_causal_lm

BARS = {"prefill": 5.9, "decode": 3.9}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    sides = {
        dtype: partial(run_side, side, dtype=dtype, quick=quick, timeout_s=3600) for dtype in ("bfloat16", "float32")
    }
    lines = [
        Line(
            what=f"{stage}, {dtype}", cells={"error in %": [one[stage] for one in several]}, bar=Bar(at_most=bar),
            digits=1,
        )
        for dtype, several in in_turns(sides, 1 if quick else 3, say).items()
        for stage, bar in BARS.items()
    ]  # fmt: skip
    return Table(lines=lines)


def side(dtype: str, quick: bool) -> dict[str, float]:
    times = load_causal_lm(default_model(), dtype=dtype).profile(quick=quick).times
    return {"prefill": 100 * times.prefill_error.mean, "decode": 100 * times.decode_error.mean}

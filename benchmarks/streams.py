"""From `yield` in a library until the program has the piece."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import run_side
from benchmarks.streams_side import SLOTS
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "streams", "from `yield` in a library until its program has the piece, 50 pieces a second and stream"
CASES = {
    "one stream": ("1", "0"),
    f"{SLOTS} streams of one library": (str(SLOTS), "0"),
    "one stream, calls in another slot": ("1", "1"),
}
P50_MS, P99_MS = 2, 5


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Milliseconds at the median and at the 99th percentile of pieces."""
    pieces, repeats = (25, 1) if quick else (500, 5)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for repeat in range(repeats):
        for case, (streams, calls) in CASES.items():
            side = run_side("benchmarks.streams_side", "--streams", streams, "--calls", calls, "--pieces", str(pieces))
            found[case].append(side)
            say(f"{repeat + 1} of {repeats}: {case}: {side['p50_ms']:.2f} and {side['p99_ms']:.2f} ms")
    lines = [
        Line(
            what=f"{case}, {name}, ms",
            cells={"ms": [side[f"{name}_ms"] for side in sides]},
            bar=Bar(at_most=bar),
            last_digits=2,
        )
        for case, sides in found.items()
        for name, bar in (("p50", P50_MS), ("p99", P99_MS))
    ]
    return Table(name=NAME, title=TITLE, lines=lines)

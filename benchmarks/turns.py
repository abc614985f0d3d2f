"""What it costs that libraries on one device take turns: iterations of 20 ms, computed by one, two and eight libraries.

What the whole takes beyond the iterations, in % of them: with one library, which takes no lock, what the loop and the
machine cost anyhow.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "turns", "libraries on one device take turns: time beside their iterations of 20 ms, in %"
SIDE = "benchmarks.turns_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Each number of libraries once per repeat, with as many iterations in all."""
    repeats, total = (1, 40) if quick else (5, 800)
    found: dict[int, list[float]] = {1: [], 2: [], 8: []}
    for repeat in range(repeats):
        for libraries, percents in found.items():
            one = run_side(SIDE, "--libraries", str(libraries), "--iterations", str(total // libraries))
            percents.append(100 * (one["seconds"] / one["computed_s"] - 1))
        latest = ", ".join(f"{libraries}: {percents[-1]:.2f} %" for libraries, percents in found.items())
        say(f"repeat {repeat + 1} of {repeats}: {latest}")
    lines = [
        Line(
            what=f"{libraries} libraries" if libraries > 1 else "a lone library",
            cells={"%": percents},
            bar=Bar(at_most=2.0) if libraries > 1 else None,
            last_digits=2,
        )
        for libraries, percents in found.items()
    ]
    return Table(name=NAME, title=TITLE, lines=lines)

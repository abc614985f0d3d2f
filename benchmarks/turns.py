"""What it costs that libraries on one device take turns: iterations of 20 ms, computed by one, two and eight libraries.

What the whole takes beyond the iterations, in % of them: with one library, which takes no lock, what the loop and the
machine cost anyhow; with two processes that hand on by a bare datagram, the least that a hand-over between processes
costs here. `idle us` is how long the device waits between two iterations, the median: a machine that has other work
stretches the iterations too, and so the whole, but hardly that.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "turns", "libraries on one device take turns: time beside their iterations of 20 ms, in %"
SIDE = "benchmarks.turns_side"
_CASES = {
    "a lone library": (1, ()),
    "two processes, by a bare datagram": (2, ("--bare",)),
    "2 libraries": (2, ()),
    "8 libraries": (8, ()),
}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Each case once per repeat, with as many iterations in all."""
    repeats, total = (1, 40) if quick else (5, 800)
    idle: dict[str, list[float]] = {case: [] for case in _CASES}
    beside: dict[str, list[float]] = {case: [] for case in _CASES}
    for repeat in range(repeats):
        for case, (count, how) in _CASES.items():
            one = run_side(SIDE, "--libraries", str(count), "--iterations", str(total // count), *how)
            idle[case].append(one["gap_us"])
            beside[case].append(100 * (one["seconds"] / one["computed_s"] - 1))
        latest = ", ".join(f"{case}: {beside[case][-1]:.2f} % ({idle[case][-1]:.0f} us)" for case in _CASES)
        say(f"repeat {repeat + 1} of {repeats}: {latest}")
    lines = [
        Line(
            what=case,
            cells={"idle us": idle[case], "%": beside[case]},
            bar=Bar(at_most=2.0) if "libraries" in case else None,
            last_digits=2,
        )
        for case in _CASES
    ]
    return Table(name=NAME, title=TITLE, lines=lines)

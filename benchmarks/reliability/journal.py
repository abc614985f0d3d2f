"""What the journal costs: coming back after a long past, its size, and syncing it in groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness import ratios, run_side, take_turns
from benchmarks.tables import Bar, Line, Table

BACK, BACK_TITLE = "journal", "a manager comes back after a day of idle pilots, and after millions of calls"
SYNC, SYNC_TITLE = "journal_sync", "calls/s through map with the journal synced in groups against no sync"
_SIDE = "benchmarks.reliability.journal_side"


def coming_back(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Seconds from the start of the manager's process until it listens, and the most that its journal's files took."""
    repeats = 1 if quick else 3
    hours, calls = ("0.1", "100000") if quick else ("24", "10000000")
    cases = {
        "after a day of 2,000 idle pilots": ("idle", "--hours", hours),
        "after 10,000,000 ended calls, 1,000 open": ("ended", "--calls", calls),
    }
    lines = []
    for what, arguments in cases.items():
        found = []
        for repeat in range(repeats):
            found.append(run_side(_SIDE, *arguments, timeout_s=3600))
            say(f"{what}, {repeat + 1} of {repeats}: {found[-1]['back_s']:.2f} s")
        back_s, megabytes = [one["back_s"] for one in found], [one["journal_bytes"] / 1e6 for one in found]
        lines.append(Line(what=f"{what}, s", cells={"s": back_s}, bar=Bar(at_most=5)))
        lines.append(Line(what="the journal's files, MB at most", cells={"MB": megabytes}, bar=Bar(at_most=50)))
    return Table(name=BACK, title=BACK_TITLE, lines=lines)


def group_sync(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Calls a second in pairs."""
    pairs, calls = (1, "2000") if quick else (5, "50000")
    rates: dict[str, list[float]] = {"synced in groups": [], "not synced": []}
    for pair in range(pairs):
        sides = {
            side: partial(run_side, _SIDE, "map", "--sync", sync, "--calls", calls)
            for side, sync in (("synced in groups", "true"), ("not synced", "false"))
        }
        for side, one in take_turns(pair, sides).items():
            rates[side].append(one["calls_per_s"])
        say(f"pair {pair + 1} of {pairs}: " + ", ".join(f"{some[-1]:,.0f}/s {side}" for side, some in rates.items()))
    cells = {**rates, "synced / not": ratios(*rates.values())}
    return Table(name=SYNC, title=SYNC_TITLE, lines=[Line(what="calls/s", cells=cells, bar=Bar(at_least=0.7))])

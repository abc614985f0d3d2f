"""What a live manager bears: thousands of connected pilots, and its own violent death."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.paired import ratios, run_side, take_turns
from benchmarks.table import Bar, Line, Table

MANY, MANY_TITLE = "many_pilots", "one live manager with 2,000 connected pilots against one pilot"
LOST, LOST_TITLE = "lost_pilot", "from the loss of a pilot until the call that it ran runs on another"
RESTART, RESTART_TITLE = "restart", "kill -9 of the manager with 100,000 calls queued and 200 running"


def many_pilots(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Calls a second in pairs, and the manager's memory."""
    pilots, calls, repeats = (50, 5000, 1) if quick else (2000, 200_000, 3)
    one, many = [], []
    for repeat in range(repeats):
        sides = {
            number: partial(run_side, "benchmarks.recovery_side", "rate", "--pilots", number, "--calls", str(calls))
            for number in ("1", str(pilots))
        }
        for some, side in zip((one, many), take_turns(repeat, sides).values(), strict=True):
            some.append(side)
        say(f"pair {repeat + 1} of {repeats}: {one[-1]['calls_per_s']:,.0f}/s, {many[-1]['calls_per_s']:,.0f}/s")
    rates = {
        f"{pilots:,} pilots": [side["calls_per_s"] for side in many],
        "one pilot": [side["calls_per_s"] for side in one],
    }
    lines = [
        Line(what="calls/s", cells={**rates, "many / one": ratios(*rates.values())}, bar=Bar(at_least=0.5)),
        Line(
            what="memory of the manager, MB",
            cells={f"{pilots:,} pilots": [side["manager_bytes"] / 1e6 for side in many]},
            bar=Bar(at_most=500),
            last_digits=0,
        ),
        Line(
            what="pilots lost meanwhile",
            cells={f"{pilots:,} pilots": [float(side["lost_pilots"]) for side in many]},
            bar=Bar(at_most=0),
            last_digits=0,
        ),
    ]
    return Table(name=MANY, title=MANY_TITLE, lines=lines)


def restart(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Seconds until calls that were queued run again, and whether any call ran or ended twice."""
    queued, repeats = (2000, 1) if quick else (100_000, 3)
    found = []
    for repeat in range(repeats):
        found.append(run_side("benchmarks.recovery_side", "restart", "--queued", str(queued)))
        say(f"{repeat + 1} of {repeats}: {found[-1]['at_work_s']:.1f} s")
    lines = [
        Line(what="until it is back at work, s", cells={"s": [one["at_work_s"] for one in found]}, bar=Bar(at_most=10)),
        Line(
            what="calls that had ended and were run again, or ended twice",
            cells={"calls": [float(one["ran_again"] + one["ended_twice"]) for one in found]},
            bar=Bar(at_most=0),
            last_digits=0,
        ),
    ]
    return Table(name=RESTART, title=RESTART_TITLE, lines=lines)


def lost_pilot(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Seconds, when its process is killed (the connection breaks), and when it is stopped (it falls silent)."""
    lines = []
    for how, bar, repeats in (("killed", 1.5, 5), ("frozen", 16.0, 3)):
        seconds = [
            run_side("benchmarks.lost_pilot_side", how)["seconds"]
            for _ in range(1 if quick else repeats)
            if not (quick and how == "frozen")
        ]
        if seconds:
            say(f"{how}: " + ", ".join(f"{one:.2f} s" for one in seconds))
            lines.append(Line(what=f"the pilot is {how}", cells={"s": seconds}, bar=Bar(at_most=bar)))
    return Table(name=LOST, title=LOST_TITLE, lines=lines)

"""One object of 256 MB to sixteen pilots on separate hosts, against the same to one pilot, at the same link speed.

Hosts are network namespaces on one switch, and `tc tbf` gives each of them, and the one with the object, a link so slow
that the network is the limit and not this machine's two cores (see `transfers_side`). Without peers the object would
cross the link of the host that has it sixteen times, and take sixteen times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.network import why_not
from benchmarks.paired import ratios, run_side, take_turns
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "transfers", "an object to pilots on separate hosts"
PILOTS, BYTES, RATE = 16, 256_000_000, "50mbit"
SIDE = "benchmarks.transfers_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Pairs: to one pilot, to all."""
    if reason := why_not():
        return Table(name=NAME, title=TITLE, skipped=reason)
    pilots, size, rate, repeats = (3, 8_000_000, "50mbit", 1) if quick else (PILOTS, BYTES, RATE, 3)

    def to(count: int) -> dict[str, Any]:
        found = run_side(SIDE, "--pilots", str(count), "--bytes", str(size), "--rate", rate)
        say(f"{count} pilots: {found['seconds']:.1f} s, {found['origin_bytes'] / size:.2f} copies read")
        return found

    alone, together = [], []
    for repeat in range(repeats):
        found = take_turns(repeat, {"one": lambda: to(1), "all": lambda: to(pilots)})
        alone.append(found["one"])
        together.append(found["all"])
    seconds = [found["seconds"] for found in together], [found["seconds"] for found in alone]
    lines = [
        Line(
            what=f"seconds to {pilots} pilots and to one",
            cells={f"{pilots} pilots": seconds[0], "one pilot": seconds[1], "ratio": ratios(*seconds)},
            bar=Bar(at_most=2.0, repeats=3),
            digits=1,
            last_digits=2,
        ),
        Line(
            what="copies that pilots read from where it lies",
            cells={"copies": [found["origin_bytes"] / size for found in together]},
            bar=Bar(at_most=1.1, repeats=3),
            last_digits=2,
        ),
        Line(
            what="copies that left the link of that host, all else included",
            cells={"copies": [found["link_bytes"] / size for found in together]},
            last_digits=2,
        ),
    ]
    note = f"{size / 1e6:.0f} MB; each link carries {rate} either way; pilots see no file of the session."
    return Table(name=NAME, title=TITLE, lines=lines, notes=[note])

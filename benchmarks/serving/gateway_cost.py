"""What `stoker serve` adds to a model: processor time per streamed token, and time to the first token.

An engine without computation writes at a fixed pace (`gateway_side.py`), so all processor time of the gateway, the
manager, the pilot and the library is Stoker's. 1, 8 and 50 streams have the pace of a tiny model; 200 streams
write 20 tokens/s each. At 200 streams the same requests also run in the session itself (`direct`), in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Line, Table

NAME, TITLE = "gateway_cost", "processor time per token, and time to the first token, that a gateway adds"
SIDE = "benchmarks.serving.gateway_side"
REPEATS = 3
PARTS = ("gateway", "manager", "pilot", "library")
ADDED_MS = {50: 5.0, 99: 20.0}
"""The bar of each percentile of the added time to the first token."""


class Load(msgspec.Struct, frozen=True):
    """Streams of `tokens` each, one token of each every `every_s` seconds. `bar_us`: of a token, all processes."""

    streams: int
    every_s: float
    tokens: int
    rounds: int
    bar_us: float

    def options(self, *, quick: bool) -> list[str]:
        tokens, rounds = (max(self.tokens // 4, 10), 1) if quick else (self.tokens, self.rounds)
        return [
            "--streams", str(self.streams), "--every", str(self.every_s), "--tokens", str(tokens), "--rounds",
            str(rounds),
        ]  # fmt: skip


LOADS = (
    Load(1, 0.0014, 2_000, 2, 553.0),
    Load(8, 0.0017, 1_600, 2, 280.0),
    Load(50, 0.004, 700, 2, 123.0),
    Load(200, 0.05, 100, 3, 83.0),
)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats = 1 if quick else REPEATS
    *fast, slow = LOADS
    found: dict[Any, list[dict[str, Any]]] = in_turns(
        {load: partial(run_side, SIDE, "gateway", *load.options(quick=quick)) for load in fast[: 1 if quick else None]},
        repeats,
        say,
        lambda load, run: f"{load.streams} streams {_sum_us(run):.0f} us",
    )
    pairs = in_turns(
        {side: partial(run_side, SIDE, side, *slow.options(quick=quick)) for side in ("gateway", "direct")},
        repeats,
        say,
        lambda side, run: f"{side}, p50 {at(run['ttft_ms'], 50):.1f} ms",
    )
    lines = [_cost(load, runs) for load, runs in {**found, slow: pairs["gateway"]}.items()]
    lines += [_added(percent, bar, slow.streams, pairs) for percent, bar in ADDED_MS.items()]
    notes = ["Processor time is in us per token. The sum leaves out the client."]
    return Table(name=NAME, title=TITLE, lines=lines, notes=notes)


def at(numbers: list[float], percent: int) -> float:
    """Return a percentile of sorted numbers."""
    return numbers[min(len(numbers) - 1, len(numbers) * percent // 100)]


def _sum_us(run: dict[str, Any]) -> float:
    return float(sum(run["cpu_us"][part] for part in PARTS))


def _cost(load: Load, runs: list[dict[str, Any]]) -> Line:
    parts = {f"{part}, us": [run["cpu_us"][part] for run in runs] for part in ("client", *PARTS)}
    late = {"late, %": [100 * at(run["late"], 50) for run in runs]}
    cells = {**late, **parts, "sum, us": [_sum_us(run) for run in runs]}
    what = f"{load.streams} streams, {load.streams / load.every_s:,.0f} tokens/s"
    return Line(what=what, cells=cells, bar=Bar(at_most=load.bar_us), last_digits=0)


def _added(percent: int, bar_ms: float, streams: int, pairs: dict[str, list[dict[str, Any]]]) -> Line:
    times = {side: [at(run["ttft_ms"], percent) for run in runs] for side, runs in pairs.items()}
    added = [ours - theirs for ours, theirs in zip(times["gateway"], times["direct"], strict=True)]
    what = f"first token of {streams} streams, p{percent}, ms"
    return Line(what=what, cells={**times, "added": added}, bar=Bar(at_most=bar_ms), digits=1, last_digits=1)

"""How far simulated runs are: a block that stands still on a terminal, a line a run elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from stoker.manager.cli import console
from stoker.manager.sim.workload import SweepCalls, Workload
from stoker.manager.study.running import FinishedRun
from stoker.manager.study.scenario import label
from stoker.units import show_seconds

_DRAW_EVERY_S = 0.2
_LINE_EVERY_S = 10.0
_FEW = 20
"""So many runs get a line each, also when they are quick."""
_WIDTH = 24
_FROM = 0.03
"""From this part on the time that is left is worth a guess."""


class SimulationProgress:
    """Runs that are done and runs that go on, and how many there are to be."""

    def __init__(self, place: console.Redrawn | None, *, total: int, calls: int) -> None:
        self._place = place
        self._total = total
        self._calls = calls
        self._done = 0
        self._going: dict[tuple[str, int], tuple[float, int]] = {}
        self._began = time.monotonic()
        self._drawn = 0.0
        if place is not None:
            self._draw(place)

    def goes_on(self, policy: str, seed: int, now_s: float, ended: int) -> None:
        """A run has come so far."""
        self._going[policy, seed] = now_s, ended
        if self._place is not None and time.monotonic() - self._drawn >= _DRAW_EVERY_S:
            self._draw(self._place)

    def done(self, run: FinishedRun) -> None:
        """A run is done."""
        self._done += 1
        self._going.pop((run.policy, run.seed), None)
        if self._place is not None:
            self._draw(self._place)
        elif self._total <= _FEW or self._done == self._total or time.monotonic() - self._drawn >= _LINE_EVERY_S:
            self._drawn = time.monotonic()
            how = "done" if run.outcome.complete else "cut off"
            left = self._time_left()
            console.note(
                f"{self._done}/{self._total} runs: {label(run.policy)}, seed {run.seed}, {how} after "
                f"{show_seconds(run.outcome.ended_at)}, simulated in {show_seconds(run.wall_s)}"
                + (f"; {left} left" if left else "")
            )

    def _draw(self, place: console.Redrawn) -> None:
        self._drawn = time.monotonic()
        left = self._time_left()
        lines = [f"  runs {bar(self._part())}  {self._done}/{self._total}" + (f"   left {left}" if left else "")]
        wide = max((len(label(policy)) for policy, _ in self._going), default=0)
        for (policy, seed), (now_s, ended) in self._going.items():
            calls = f"{ended:,} of {self._calls:,} calls" if self._calls else f"{ended:,} calls"
            lines.append(f"    {label(policy):{wide}}  seed {seed}   {calls}, {show_seconds(now_s)} simulated")
        place.show(lines)

    def _part(self) -> float:
        """How much of all is done; runs that go on count where it is known how many calls they have."""
        going = sum(min(1.0, ended / self._calls) for _, ended in self._going.values()) if self._calls else 0.0
        return min(1.0, (self._done + going) / self._total)

    def _time_left(self) -> str:
        part = self._part()
        passed_s = time.monotonic() - self._began
        return show_seconds(passed_s * (1 - part) / part) if _FROM < part < 1 else ""


@contextlib.contextmanager
def progress(workload: Workload, *, total: int, quiet: bool) -> Iterator[SimulationProgress]:
    """Show how far `total` runs are while the block runs; `quiet`: stdout is for something else."""
    calls = -(-workload.inputs // workload.items) if isinstance(workload, SweepCalls) else 0
    if quiet or not console.is_terminal():
        yield SimulationProgress(None, total=total, calls=calls)
        return
    with console.redrawn() as place:
        yield SimulationProgress(place, total=total, calls=calls)
        place.show([])


def bar(part: float) -> str:
    """A bar of which this part is full."""
    full = round(part * _WIDTH)
    return "━" * full + "╸" * (full < _WIDTH) + " " * max(0, _WIDTH - full - 1)

"""One progress bar for `stoker.map(..., progress=True)`: rate, hot contexts, time left.

Rates are of the last half minute, as in `stoker status`; the last line has that of the whole. On a terminal and in a
notebook it is a bar that stands still; on a pipe the same facts come as a line every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stoker.manager.executor.notebook import NotebookLine, bar_of, in_notebook
from stoker.manager.protocol import recent
from stoker.manager.protocol.to_client import Status
from stoker.units import show_about, show_seconds

Follow = Callable[[int, int | None], None]
"""Gets how many results were taken, of how many (None = not known)."""

REDRAW_S = 0.1
NOTEBOOK_S = 0.5
LINE_S = 10.0
STATUS_S = 1.0


_drawn: list[MapProgress] = []
"""Bars that stand on the terminal, the last one lowest."""


def above_the_bar(text: str) -> bool:
    """Print a line above the bar that stands on the terminal; False, and nothing is printed, if none does."""
    live = _drawn[-1].live if _drawn else None
    if live is None:
        return False
    live.console.print(text, markup=False, highlight=False, soft_wrap=True)
    return True


class MapProgress:
    """Shows how far a map is. Called with every result; draws seldom."""

    def __init__(self, name: str, total: int | None, ask_status: Callable[[float], Status | None]) -> None:
        self._name = name
        self._total = total
        self._ask_status = ask_status
        self._started = self._drawn = time.monotonic()
        self._asked = 0.0
        self._hot = ""
        self._done = 0
        self._counts: recent.Counts = deque()
        self._live: Progress | None = None
        self._task: Any = None
        self._line = NotebookLine() if in_notebook() else None
        console = Console(stderr=True)
        if self._line is None and console.is_terminal:
            self._live = Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}  {task.fields[hot]}  left"),
                TimeRemainingColumn(compact=True),
                console=console,
                auto_refresh=False,
            )
            self._task = self._live.add_task(name, total=total, rate="", hot="")
            self._live.start()
            _drawn.append(self)

    def __call__(self, done: int, total: int | None) -> None:  # noqa: ARG002
        """Results taken, of how many."""
        now = time.monotonic()
        if done > self._done:
            recent.add(self._counts, done - self._done, now=now)
        self._done = done
        if now - self._drawn >= self._pause_s:
            self._draw(now)

    @property
    def _pause_s(self) -> float:
        """Seconds between two pictures."""
        if self._live is not None:
            return REDRAW_S
        return NOTEBOOK_S if self._line is not None else LINE_S

    @property
    def live(self) -> Progress | None:
        """What stands on the terminal, as long as it does."""
        return self._live

    def close(self) -> None:
        """Draw the end."""
        self._draw(time.monotonic(), last=True)
        if self._live is not None:
            _drawn.remove(self)
            self._live.stop()
            self._live = None

    def _draw(self, now: float, *, last: bool = False) -> None:
        self._drawn = now
        if not last and now - self._asked > STATUS_S:
            self._asked = now
            status = self._ask_status(0.2)
            if status is not None:
                hot = sum(context.hot for context in status.contexts)
                loading = sum(context.loading for context in status.contexts)
                self._hot = f"hot {hot}" + (f" · loading {loading}" if loading else "")
        elapsed = now - self._started
        per_s = recent.per_second(self._counts, now=now) if not last else self._done / max(elapsed, 1e-9)
        rate = f"{per_s:,.1f}/s" if elapsed > 0.5 else ""
        if self._live is not None:
            self._live.update(self._task, completed=self._done, rate=rate, hot=self._hot, refresh=True)
        elif self._line is not None:
            facts = [f"{self._name} {bar_of(self._done, self._total)}", rate, self._hot, show_seconds(elapsed)]
            left = (self._total or 0) - self._done
            if left > 0 and per_s:
                facts.append(f"left {show_about(left / per_s)}")
            self._line.show("  ".join(fact for fact in facts if fact))
        else:
            of = "" if self._total is None else f"/{self._total}"
            sys.stderr.write(f"{self._name} {self._done}{of}  {rate}  {self._hot}  {show_seconds(elapsed)}\n")

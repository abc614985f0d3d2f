"""One progress bar for `stoker.map(..., progress=True)`: rate, hot contexts, time elapsed, time left.

The rate is smoothed (`protocol.pace`); the last line has the rate of the whole. Results that an earlier run has kept
count as done from the beginning, and not in the rate. A terminal and a notebook show one bar; a pipe gets a line every
ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console

from stoker.manager.executor.notebook import NotebookLine, bar_of, in_notebook
from stoker.progress import ProgressBar
from stoker.protocol.pace import WorkPace, left_in_words
from stoker.protocol.to_client import Status
from stoker.units import show_seconds

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
    """Shows how far a map is. Called with every result; draws seldom. `kept`: items whose results an earlier run has
    kept in the map's file."""

    def __init__(
        self, name: str, total: int | None, ask_status: Callable[[float], Status | None], *, kept: int = 0
    ) -> None:
        self._name = name
        self._total = total
        self._kept = kept if total is None else min(kept, total)
        self._kept_taken = 0
        self._ask_status = ask_status
        self._started = self._drawn = time.monotonic()
        self._asked = 0.0
        self._hot = ""
        self._done = 0
        self._pace = WorkPace(self._started)
        self._live: ProgressBar | None = None
        self._facts = f"{self._kept}/{total}" if total is not None else str(self._kept)
        self._line = NotebookLine() if in_notebook() else None
        console = Console(stderr=True)
        if self._line is None and console.is_terminal:
            self._live = ProgressBar(name, total=total, done=self._kept, facts=lambda: self._facts, console=console)
            self._live.start()
            _drawn.append(self)

    def __call__(self, done: int, total: int | None) -> None:  # noqa: ARG002
        """Results taken, of how many."""
        now = time.monotonic()
        done -= self._kept_taken
        self._pace.add(done - self._done, now)
        self._done = done
        if now - self._drawn >= self._pause_s:
            self._draw(now)

    def take_kept(self, items: int) -> None:
        """The map hands over a result that an earlier run has kept, of so many items."""
        self._kept_taken += items

    @property
    def shown(self) -> int:
        """Items that are done, those of earlier runs included."""
        shown = self._done + max(self._kept, self._kept_taken)
        return shown if self._total is None else min(shown, self._total)

    @property
    def _pause_s(self) -> float:
        """Seconds between two pictures."""
        if self._live is not None:
            return REDRAW_S
        return NOTEBOOK_S if self._line is not None else LINE_S

    @property
    def live(self) -> ProgressBar | None:
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
                if not hot:
                    self._pace.wait(now)
        elapsed = now - self._started
        per_s = self._pace.per_second(now) if not last else self._done / max(elapsed, 1e-9)
        rate = f"{per_s:,.1f}/s" if elapsed > 0.5 and per_s else ""
        shown = self.shown if not last else self._done + self._kept_taken
        rest = 0 if self._total is None else self._total - shown
        left = left_in_words(self._pace.left_s(rest, now)) if rest and not last else ""
        of = shown if self._total is None else f"{shown}/{self._total}"
        if self._live is not None:
            self._facts = "  ".join(filter(None, (str(of), rate, self._hot, left)))
            self._live.set_done(shown, refresh=True)
            return
        how_far = bar_of(shown, self._total) if self._line is not None else of
        text = "  ".join(filter(None, (f"{self._name} {how_far}", rate, self._hot, _elapsed(elapsed), left)))
        if self._line is not None:
            self._line.show(text)
        else:
            sys.stderr.write(f"{text}\n")


def _elapsed(seconds: float) -> str:
    return f"elapsed {show_seconds(seconds)}"

"""Output of applications on a terminal, a pipe or a notebook: lines, and a display of progress.

A terminal shows a progress bar (`progress_display`). A pipe receives plain lines with the same facts: every 10 s during
work, every minute of a wait, and when the cause of the wait changes.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from json import dumps
from typing import Any

from rich.console import Console
from rich.text import Text

from stoker.manager.cli.console import (
    ByteSize,
    Redrawn,
    WholeNumber,
    error,
    exit_silently_on_closed_pipe,
    is_terminal,
    json,
    line,
    lines,
    note,
    redrawn,
)
from stoker.progress_display import ProgressBar
from stoker.protocol.pace import WorkPace, format_rate, format_time_left
from stoker.sessions import ContextFacts
from stoker.units import show_seconds

__all__ = [
    "ByteSize", "Progress", "Redrawn", "Screen", "WholeNumber", "error", "is_terminal", "json", "line", "lines", "note",
    "redrawn",
]  # fmt: skip

_PROGRESS_LINE_EVERY_S = 10.0
_REFRESH_S = 0.5
_REPEAT_LINE_AFTER_S = 60.0
"""Seconds until the same line about a wait is printed again."""
_MOST_LOADS = 10
_TIMES = re.compile(r"(\d[\d.]* (ms|s|min|h|days?)\b *)+|\d+:\d\d")
"""Pattern of the times in a line. A line in which only times have changed is not printed again."""


class Screen:
    """The terminal, pipe or notebook that an application writes to.

    Args:
        json_only: True to write lines to stderr, and one JSON document to stdout.
        terminal: None to detect a terminal.
    """

    def __init__(self, *, json_only: bool = False, terminal: bool | None = None) -> None:
        self._console = Console(
            file=sys.stderr if json_only else sys.stdout, highlight=False, soft_wrap=True, force_terminal=terminal
        )
        self.is_terminal = self._console.is_terminal

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print a line.

        Args:
            text: The line, without a line end.
            style: A style of Rich, for terminals (`bold red`).
        """
        with exit_silently_on_closed_pipe():
            self._console.print(Text(text, style=style))

    def json(self, value: Any) -> None:
        """Print a value as a JSON document on stdout.

        Args:
            value: A JSON value.
        """
        if sys.stdout is None:  # stdout was closed before the program started
            return
        with exit_silently_on_closed_pipe():
            sys.stdout.write(dumps(value, indent=1, ensure_ascii=False) + "\n")
            sys.stdout.flush()

    @contextlib.contextmanager
    def progress(
        self, *, total: int, done: int, noun: str, facts: Callable[[], ContextFacts | None], also: str = ""
    ) -> Iterator[Progress]:
        """Show progress while the block runs.

        Args:
            total, done: Number of all items, and number of items already done.
            noun: Plural name of the items (`claims`).
            facts: Function that another thread calls for the facts of the run's contexts.
            also: Name of a second count, shown as a rate (`tokens`).

        Yields:
            The `Progress` to `advance`.
        """
        progress = Progress(total=total, done=done, noun=noun, facts=facts, also=also, console=self._console)
        stop = threading.Event()
        watch: Callable[[str], None] | None = None if self.is_terminal else self.line
        watcher = threading.Thread(target=progress.watch, args=(stop, watch), daemon=True, name="stoker-progress")
        with progress.bar if self.is_terminal else contextlib.nullcontext():
            watcher.start()
            try:
                yield progress
            finally:
                stop.set()
                watcher.join(timeout=2.0)
                progress.end()


class Progress:
    """A progress display. Made by `Screen.progress`. One thread may call `advance` while another draws."""

    def __init__(
        self, *, total: int, done: int, noun: str, facts: Callable[[], ContextFacts | None], also: str = "",
        console: Console | None = None,
    ) -> None:  # fmt: skip
        self.total, self.done, self.noun = total, done, noun
        self.bar = ProgressBar(
            noun, total=max(1, total), done=done, facts=self.numbers,
            above=lambda: list(filter(None, [self.waiting()])), console=console or Console(), redraws=True,
        )  # fmt: skip
        self._also = also
        self._ask = facts
        self._facts: ContextFacts | None = None
        now = time.monotonic()
        self._pace, self._also_pace = WorkPace(now), WorkPace(now)
        self._ended = False
        self._had_pilots = False
        self._last_line = ""
        self._last_line_at = -math.inf

    def advance(self, count: int, *, also: int = 0) -> None:
        """Count items as done.

        Args:
            count: Number of items done since the last call.
            also: Increase of the second count.
        """
        now = time.monotonic()
        self.done += count
        self.bar.set_done(self.done)
        self._pace.add(count, now)
        self._also_pace.add(also, now)

    def end(self) -> None:
        """Mark the run as ended. Later drawings omit context loads and the time left."""
        self._ended = True

    @property
    def rate(self) -> float:
        """Items done per second, smoothed; 0 if unknown."""
        return self._pace.per_second(time.monotonic())

    def numbers(self) -> str:
        """Return counts and rates as text: `412/600   7.6 claims/s   hot 2/2   left 0:25`."""
        parts = [f"{self.done}/{self.total}"]
        now, rate = time.monotonic(), self.rate
        if rate and not self._ended:
            parts.append(format_rate(rate, self.noun))
            if self._also:
                parts.append(f"{self._also_pace.per_second(now):,.0f} {self._also}/s")
        facts = self._facts
        if facts is not None and not self._ended:
            parts.append(f"hot {facts.hot}/{facts.hot + facts.loading}")
            if facts.pilots != 1:
                parts.append(f"{facts.pilots} pilots")
            if rate:
                parts.append(format_time_left(self._pace.left_s(self.total - self.done, now)))
        return "   ".join(parts)

    def waiting(self) -> str:
        """Return the reason why the run waits, or the state of its contexts."""
        facts = self._facts
        if facts is None or self._ended:
            return ""
        names = ", ".join(facts.names)
        if facts.loading:
            return f"context {names}   loading on {', '.join(facts.loading_on) or 'its devices'} …"
        if not facts.hot and facts.pilots == 0:
            which = "a pilot" if self._had_pilots else "the first pilot"
            return f"waiting for {which}" + (f": {facts.waits_for}" if facts.waits_for else "")
        if not facts.hot and facts.waits_for:
            return f"context {names}   waits: {facts.waits_for}"
        if facts.hot and facts.loads:
            times = "1 load" if facts.loads == 1 else f"{facts.loads} loads"
            return f"context {names}   hot, {times} of {show_seconds(facts.load_s)}"
        return ""

    def refresh(self) -> None:
        """Fetch the state of the contexts. If this fails, keep the previous state."""
        with contextlib.suppress(Exception):
            self._facts = self._ask() or self._facts
            self._had_pilots |= self._facts is not None and self._facts.pilots > 0
            if self._facts is None or not self._facts.hot:
                self._pace.record_wait(time.monotonic())
                self._also_pace.record_wait(time.monotonic())

    def due_line(self, now: float) -> str:
        """Return the line about the wait when its words change, and every minute while no context is hot.

        Args:
            now: Time of the monotonic clock in seconds.
        """
        facts, text = self._facts, self.waiting()
        words = _TIMES.sub("", text)
        if facts is None or not text:
            return ""
        due = not self._last_line or facts.loads < _MOST_LOADS or not (facts.hot or facts.loading)
        if words == self._last_line:
            due = not facts.hot and now - self._last_line_at >= _REPEAT_LINE_AFTER_S
        if due:
            self._last_line, self._last_line_at = words, now
        return text if due else ""

    def watch(self, stop: threading.Event, line: Callable[[str], None] | None) -> None:
        """Update the facts and print lines until `stop` is set.

        Args:
            stop: Ends the loop.
            line: Prints a plain line.
        """
        last, pause_s = time.monotonic(), _REFRESH_S
        while not stop.wait(pause_s):
            began = time.monotonic()
            self.refresh()
            # A status of 1,000 pilots takes long to compute. Spend at most 1/20 of this thread's time on it.
            pause_s = max(_REFRESH_S, 20 * (time.monotonic() - began))
            if line is None:
                continue
            if due := self.due_line(time.monotonic()):
                line(f"  {due}")
            if self.done and time.monotonic() - last >= _PROGRESS_LINE_EVERY_S:
                last = time.monotonic()
                line(f"  {self.noun}  {self.numbers()}")

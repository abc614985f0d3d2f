"""Jobs while somebody waits for them: a block that stands still on a terminal, what changes on a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from stoker import console
from stoker.apps.prompt_tuning import show
from stoker.apps.prompt_tuning.board import BoardEntry, Phase
from stoker.console import Screen

_LINE_EVERY_S = 10.0


class Display:
    """Shows jobs again and again; `drops` says what becomes of those that will be late."""

    def __init__(self, screen: Screen, *, drops: bool, place: console.Redrawn | None) -> None:
        self._screen = screen
        self._drops = drops
        self._place = place
        self._before: dict[str, BoardEntry] = {}
        self._said_at: dict[str, float] = {}
        self._late: dict[str, str] = {}
        self._told: set[str] = set()

    def show(self, entries: Sequence[BoardEntry]) -> None:
        """Show them as they are now."""
        now = time.time()
        for entry in entries:
            if entry.phase.is_over or entry.in_time(now) is not False:
                self._late.pop(entry.name, None)
            else:
                self._tell_late(entry, now=now)
        if self._place is not None:
            self._place.show([*show.table(entries, now=now), *(f"  {line}" for line in self._late.values())])
            return
        for entry in entries:
            before = self._before.get(entry.name)
            aged = time.monotonic() - self._said_at.get(entry.name, 0.0) >= _LINE_EVERY_S
            moved = before is not None and entry.iteration != before.iteration
            if before is None or before.phase is not entry.phase or (moved and aged and entry.phase is Phase.TUNING):
                self._before[entry.name], self._said_at[entry.name] = entry, time.monotonic()
                self._screen.line(f"  {show.one_line(entry, now=now)}")

    def tell(self, line: str) -> None:
        """Say this line, once."""
        if line not in self._told:
            self._told.add(line)
            self._screen.line(f"  {line}")

    def _tell_late(self, entry: BoardEntry, *, now: float) -> None:
        if entry.name not in self._late:
            self._late[entry.name] = line = show.told_late(entry, now=now, drops=self._drops)
            if self._place is None and entry.name not in self._told:
                self._screen.line(f"  {line}")
            self._told.add(entry.name)


@contextlib.contextmanager
def display(screen: Screen, *, drops: bool, json: bool) -> Iterator[Display]:
    """Where jobs are shown for as long as the block runs."""
    if json or not console.is_terminal():
        yield Display(screen, drops=drops, place=None)
        return
    with console.redrawn() as place:
        yield Display(screen, drops=drops, place=place)

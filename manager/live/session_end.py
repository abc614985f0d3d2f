"""Two reasons to end a session that do not come as messages: no program uses it, and `stoker down` touches a file."""

from __future__ import annotations

import os

from stoker.manager.core.state import State
from stoker.protocol.session import SessionFolder
from stoker.units import show_seconds


class IdleCheck:
    """Measures how long a detached session goes without clients and calls. `limit_s`: 0 = it may be idle forever."""

    def __init__(self, limit_s: float, *, now: float) -> None:
        self._limit_s = limit_s
        self._used_at = self._checked_at = now

    def why_end(self, state: State, now: float) -> str:
        """Why the session ends; empty while it goes on. Checked four times in the limit, once a minute at least."""
        if not (state.kept and self._limit_s and now - self._checked_at >= min(self._limit_s / 4, 60)):
            return ""
        self._checked_at = now
        if state.calls or any(not client.gone and not client.observer for client in state.clients.values()):
            self._used_at = now
        elif now - self._used_at >= self._limit_s:
            return f"no program has used it for {show_seconds(now - self._used_at)}"
        return ""


class EndRequest:
    """The file that `stoker down` touches if the manager may be unable to read messages."""

    def __init__(self, folder: SessionFolder) -> None:
        self._path = folder.asked_to_end
        self._touched_ns = 0
        """When the file was touched last; 0 while there is none."""

    def is_new(self) -> bool:
        """True if the file was touched since the last call. A file that a killed `stoker down` left does not change."""
        before = self._touched_ns
        try:
            with self._path.open("rb") as file:  # opened: a network file system then looks again
                self._touched_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            self._touched_ns = 0
        return 0 != before != self._touched_ns != 0

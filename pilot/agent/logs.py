"""Logs of libraries are looked at now and then: what user code prints has no limit, the disk has.

In a thread, since the session folder may lie on a file system that hangs.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from stoker.log_files import OUTPUT_BYTES, drop_middle
from stoker.pilot.agent.agent import Agent

log = logging.getLogger("stoker.pilot")

EVERY_S = 10.0


class LogWatch:
    """Keeps the libraries' logs of one pilot within `most_bytes` each. The agent's loop calls it."""

    def __init__(self, agent: Agent, *, most_bytes: int = OUTPUT_BYTES) -> None:
        self._agent = agent
        self._most_bytes = most_bytes
        self._thread: threading.Thread | None = None
        self._due_at = 0.0
        self._refused: set[Path] = set()
        """Logs whose file system cannot give back their middle."""

    def shorten_if_due(self, now: float) -> None:
        """Drop the middle of logs that have grown too long, in a thread, if that is due and the last one has ended."""
        if now < self._due_at or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_at = now + EVERY_S
        paths = [self._agent.log_file(number) for number in self._agent.processes]
        if paths:
            self._thread = threading.Thread(target=self._bound, args=(paths,), name="logs", daemon=True)
            self._thread.start()

    def _bound(self, paths: list[Path]) -> None:
        for path in paths:
            if path in self._refused:
                continue
            try:
                if drop_middle(path, most_bytes=self._most_bytes):
                    log.warning("%s has grown long: its middle is dropped", path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._refused.add(path)
                log.warning("%s grows, and its file system cannot give back its middle: %s", path, error)

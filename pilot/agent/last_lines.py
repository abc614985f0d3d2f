"""What a library that loads for long has printed last, told to the manager, so that no user wonders what it does."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from stoker.manager.protocol.to_manager import LibraryNews, LibraryPhase
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.usage import tail
from stoker.pilot.core.library import State

if TYPE_CHECKING:
    from stoker.pilot.agent.agent import Agent

FIRST_S = 4.0
"""A load that takes less says nothing."""
_END_BYTES = 4096
_LONGEST = 160
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def tell(agent: Agent) -> None:
    """Tell the last line of each library that has been loading for some seconds, if it has changed."""
    now = time.monotonic()
    for library in agent.libraries.values():
        if library.state.state is State.LOADING and now - library.started_at >= FIRST_S:
            line = last_line(library)
            if line and line != library.last_line:
                library.last_line = line
                agent.link.post(LibraryNews(library.state.library, LibraryPhase.LOADING, line))


def last_line(library: Library) -> str:
    """The last line that says something in a library's log, without terminal control; empty if there is none."""
    text = _ESCAPES.sub("", tail(library.log, most_bytes=_END_BYTES))
    for line in reversed(re.split(r"[\r\n]+", text)):
        shown = " ".join("".join(each for each in line if each.isprintable()).split())
        if shown:
            return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
    return ""

"""The stages of a library on its pilot, and which may follow which.

FETCHING -> (WAITING ->) STARTING -> LOADING -> READY -> (DRAINING ->) GONE      any stage may go to GONE
"""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """Where a library is between its order and its end."""

    FETCHING = "fetching"
    """Its folder is made, and its objects are on their way to the cache."""
    WAITING = "waiting"
    """Its files are here, and memory or a place on its devices is not free yet (`stoker.pilot.core.station`)."""
    STARTING = "starting"
    """Its process is being made."""
    LOADING = "loading"
    """Its loader runs."""
    READY = "ready"
    """It holds its context and serves calls."""
    DRAINING = "draining"
    """It finishes what it runs and takes nothing new."""
    GONE = "gone"
    """Its process has ended."""


NEXT = {
    Stage.FETCHING: {Stage.WAITING, Stage.STARTING, Stage.GONE},
    Stage.WAITING: {Stage.STARTING, Stage.GONE},
    Stage.STARTING: {Stage.LOADING, Stage.GONE},
    Stage.LOADING: {Stage.READY, Stage.GONE},
    Stage.READY: {Stage.DRAINING, Stage.GONE},
    Stage.DRAINING: {Stage.GONE},
    Stage.GONE: set(),
}
"""The one table of transitions."""
TAKES_CALLS = frozenset({Stage.FETCHING, Stage.WAITING, Stage.STARTING, Stage.LOADING, Stage.READY})
"""Stages in which a library may be given calls (those that are not ready hold them until they are)."""
SERVES = frozenset({Stage.READY, Stage.DRAINING})
"""Stages in which its process runs calls."""

"""Where calls, libraries and pilots are, as far as the manager knows."""

from __future__ import annotations

import enum


class CallState(enum.Enum):
    """Where a call is."""

    WAITING = "waiting"
    """In its context's queue."""
    HELD = "held"
    """Sent to a library (or a gang of them), which runs it or will."""
    ENDED = "ended"
    """Its one end has been made; the object lingers only for its story."""


class LibraryState(enum.Enum):
    """What a library is doing, as far as the manager knows."""

    LOADING = "loading"
    """Told to start; fetches, starts, loads."""
    READY = "ready"
    """Holds its context and serves calls."""
    STOPPING = "stopping"
    """Told to stop; it has its memory until the pilot says that it is gone, and what comes in its place waits there."""
    GONE = "gone"
    """Ended."""


class PilotState(enum.Enum):
    """What the manager knows of a pilot."""

    HERE = "here"
    """Connected."""
    CUT = "cut"
    """Its connection broke; it may come back with everything it held."""
    DRAINING = "draining"
    """Told to end when its running calls are done; gets nothing new."""
    GONE = "gone"
    """Ended or lost."""

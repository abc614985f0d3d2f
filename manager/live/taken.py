"""One session has one manager: what a second one says, and how it ends."""

from __future__ import annotations

from stoker.errors import SessionError

TAKEN_OVER = 3
"""The exit status of a manager that found that another one runs its session."""


class TakenError(SessionError):
    """Another manager runs the session."""

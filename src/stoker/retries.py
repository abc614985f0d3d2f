"""The pause before a retry. Uses only the standard library."""

from __future__ import annotations


class RetryPause:
    """A pause that doubles with each failure, up to a limit."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s, self.longest_s = first_s, longest_s
        self.seconds = first_s

    def next_pause_s(self) -> float:
        """Return the pause in seconds, and double the pause for the next failure."""
        pause_s, self.seconds = self.seconds, min(self.longest_s, 2 * self.seconds)
        return pause_s

    def reset(self) -> None:
        self.seconds = self.first_s

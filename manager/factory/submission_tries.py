"""Submissions that got no answer. Each may have made a job that cannot be found, and no queue may fill with such jobs.

The next submission waits, twice as long after each. After `MOST_UNANSWERED` in a row the block is refused, and so is
each later block after one try, until a submission is answered.
"""

from __future__ import annotations

MOST_UNANSWERED = 6
"""The most submissions in a row that may stay without an answer and without a job that is found."""
_LONGEST_DOUBLINGS = 6


class SubmissionTries:
    """Counts the submissions of one site in a row that got no answer and whose jobs were not found. `pause_s`: how long
    the next submission waits after the first of them."""

    def __init__(self, *, pause_s: float) -> None:
        self._pause_s = pause_s
        self._count = 0
        self.no_answer = ""
        """What the last of them said; empty after an answer."""
        self.submit_at = 0.0
        """Nothing is submitted before."""

    def answered(self) -> None:
        """A submission was answered, or the job of one was found."""
        self._count, self.no_answer, self.submit_at = 0, "", 0.0

    def unanswered(self, said: str, *, now: float) -> None:
        """A submission got no answer; the command said this."""
        self._count, self.no_answer = self._count + 1, said
        doublings = min(self._count - 1, _LONGEST_DOUBLINGS)
        self.submit_at = now + self._pause_s * 2**doublings

    @property
    def why_refused(self) -> str:
        """Why a block that was tried is not submitted again; empty while it may be."""
        if self._count < MOST_UNANSWERED:
            return ""
        return (
            f"{self._count} submissions in a row got no answer ({self.no_answer}), and none of their jobs is"
            " found: it is not submitted again, because each try may have made a job that is hidden from Stoker; look"
            " for such jobs in the queue and cancel them"
        )

"""Submissions that got no answer. Each may have made a job that cannot be found, and no queue may fill with such jobs.

After `MOST_UNANSWERED` in a row the block is refused, and so is each later block after one try, until a submission is
answered.
"""

from __future__ import annotations

MOST_UNANSWERED = 6
"""The most submissions in a row that may stay without an answer and without a job that is found."""


class SubmissionTries:
    """Counts the submissions of one site in a row that got no answer and whose jobs were not found."""

    def __init__(self) -> None:
        self._count = 0
        self.no_answer = ""
        """What the last of them said; empty after an answer."""

    def answered(self) -> None:
        """A submission was answered, or the job of one was found."""
        self._count, self.no_answer = 0, ""

    def unanswered(self, said: str) -> None:
        """A submission got no answer; the command said this."""
        self._count, self.no_answer = self._count + 1, said

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

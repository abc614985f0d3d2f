"""A block as its keeper holds it, from its order until it is over.

Jobs that a listing lacks. One listing without a job proves nothing: it may come from a cache, or be incomplete.

A job that the batch system does not account for is lost when `LISTINGS` listings in a row lack it, over the site's
`listing_lag` at least. The same holds for the job of a submission that got no answer: before that it may still appear,
and its block is not submitted again.

Submissions that got no answer. Each may have made a job that cannot be found, and no queue may fill with such jobs.

After `MOST_UNANSWERED` in a row the block is refused, and so is each later block after one try, until a submission is
answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.ids import BlockId

# ---- kept block


CANCEL_AGAIN_S = 30.0
"""A job that a cancellation did not end is cancelled again after this long."""


@dataclass(slots=True)
class KeptBlock:
    """A block that is not over. `told` is what the manager was told last; `again` why it waits although it has run,
    `loss` the same as a reason; `cancel` why it is to be cancelled."""

    block: BlockId
    job: str = ""
    phase: BlockPhase = BlockPhase.ASKED
    told: tuple[BlockPhase, str, str, LossReason | None, int] | None = None
    expected_at: float = 0.0
    again: str = ""
    loss: LossReason | None = None
    cause: str = ""
    advice: str = ""
    holds: int = 0
    is_unknown: bool = False
    """Whether the manager did not know of it: it is told the source."""
    cancel: str = ""
    cancelled_at: float = 0.0
    tried: bool = False
    """Whether it was submitted, with or without an answer."""

    def is_to_cancel(self, now: float) -> bool:
        """Whether a cancellation is due: the first one, or another one because the last had no effect."""
        if not self.cancel:
            return False
        return not self.job or not self.cancelled_at or now - self.cancelled_at >= CANCEL_AGAIN_S


# ---- absences


LISTINGS = 3


class Absences:
    """Counts the listings in a row that lack a job. `lag_s`: how long a listing may lack a job that exists; 0 where one
    listing is proof."""

    def __init__(self, *, lag_s: float, clock: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._clock = clock
        self._missed: dict[Hashable, tuple[int, float]] = {}
        """How many listings in a row lacked a job, and when the first of them was read."""

    def listed(self, job: Hashable) -> None:
        """Note that a listing has this job, or that its end is known."""
        self._missed.pop(job, None)

    def missed(self, job: Hashable) -> bool:
        """Note that a listing lacks this job; True once that proves that there is no such job."""
        now = self._clock()
        count, since = self._missed.get(job, (0, now))
        self._missed[job] = count + 1, since
        if self._lag_s and (count + 1 < LISTINGS or now - since < self._lag_s):
            return False
        del self._missed[job]
        return True


# ---- submission tries


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

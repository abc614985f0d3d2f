"""What the factory needs of a batch system: four commands, each bounded in time.

A `Batch` belongs to one session and one site, and to the one thread that calls it: its methods block, for at most
`site.provider.command_limit_s` a command (`commands.run` sees to that). It keeps nothing that could not be found again:
a factory that was killed is followed by another, which asks `find` what is there.

The job of block `b7` of session `k3v9` is named `stoker-k3v9-b7` (`job_name`), or carries both where a batch system
has attributes. That name is how a job is found that was submitted by a factory that did not live to report it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from stoker.errors import StokerError
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.ids import BlockId

JOBS_LEFT = "jobs-left"
"""The file in a session folder that its factory writes when the session is over: jobs that are still there, a site a
line; mostly none."""


class BatchTrouble(StokerError):
    """The batch system does not answer, or takes no more jobs just now: the same will be tried again. The message is in
    its own words."""


class Unanswered(BatchTrouble):
    """A command got no answer that says what has come of it: a submission may have made a job all the same."""


class UnnamedJob(Unanswered):
    """The batch system has taken a job, and what it printed does not tell the job's id for certain."""


class SubmissionRefused(StokerError):
    """The batch system does not take this job, and would not take it a second time. The message is in its words."""


class BatchJobStatus(msgspec.Struct, frozen=True):
    """A job as its batch system sees it: PENDING (held, too), RUNNING or ENDED.

    `reason`, in the batch system's words: why it waits, on which node it runs, how it ended. `expected_in_s`: the time
    until the batch system expects to start it, 0 = it does not say. `loss`: why a job that ran no longer runs, None =
    it runs, or the batch system does not say. `again`: why a job that has run was queued again, where `reason` does not
    tell. `cause` names what a job is or was held for: two holds in a row for the same cause are no accident; `advice`
    says what to do about it, and `holds` counts the holds of this job. `leaving`: it was cancelled, and has not ended
    yet. `absent`: the listing lacks the job, and nothing says that it ended; it counts as ENDED only if that stays so
    (`absences`).
    """

    phase: BlockPhase
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    again: str = ""
    cause: str = ""
    advice: str = ""
    holds: int = 0
    leaving: bool = False
    absent: bool = False


class Batch(Protocol):
    """A batch system, for one session and one site. Every method may raise BatchTrouble."""

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; the job's id. Raises SubmissionRefused.

        After BatchTrouble the job may or may not be there: `find` tells.
        """

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the present state of these jobs, with as few commands as possible. A job of which nothing can be said
        at the moment is left out; one that the batch system does not list, and whose end it does not tell, is
        `absent`."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel these jobs. Those that are over, or unknown, are no error."""

    def find(self) -> Mapping[str, BlockId]:
        """Return every listed job of the session that has not ended, by its id, whichever process submitted it. Two
        jobs of one block show that it was submitted twice: the caller cancels one."""


@runtime_checkable
class CancelsByName(Protocol):
    """A batch system that can cancel jobs by their names, also jobs that its listings lack."""

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        """Cancel every job of these blocks. Raises BatchTrouble."""


_LOSSES = {
    "preempted": LossReason.PREEMPTED,
    "cancelled": LossReason.CANCELLED,
    "node failed": LossReason.NODE_LOST,
    "out of walltime": LossReason.WALLTIME,
    "out of memory": LossReason.OUT_OF_MEMORY,
    "revoked": LossReason.CANCELLED,
}
"""How the reasons of ended jobs begin, in the words that our readers of listings write."""


def loss_of(how: str) -> LossReason | None:
    """The loss that the reason of an ended job stands for; None where it explains nothing (`exit code 1`)."""
    return next((loss for words, loss in _LOSSES.items() if how.startswith(words)), None)


def job_name(session: str, block: str) -> str:
    """The name of a block's job. Characters that some batch system would not take become dashes."""
    return f"{job_prefix(session)}{block}"


def job_prefix(session: str) -> str:
    """How the names of a session's jobs begin."""
    return f"stoker-{re.sub(r'[^A-Za-z0-9_]', '-', session)}-"


def block_of(name: str, *, session: str) -> BlockId | None:
    """The block whose job has this name; None for a job that is not of the session."""
    prefix = job_prefix(session)
    block = name.removeprefix(prefix)
    return BlockId(block) if name.startswith(prefix) and re.fullmatch(r"[A-Za-z0-9]+", block) else None

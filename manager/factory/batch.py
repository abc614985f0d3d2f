"""The interface to a batch system: four commands, each bounded in time.

A `Batch` belongs to one session, one site and the one thread that calls it: a method blocks for at most
`site.provider.command_limit_s` a command. Everything it keeps can be found again: after a factory was killed, the next
one asks `find`.

The job of block `b7` of session `k3v9` is named `stoker-k3v9-b7` (`job_name`), or carries both as attributes. By that
name a factory finds a job whose factory did not live to report it.
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
"""In a session folder: jobs that are still there after the session, a line for each site."""


class BatchTrouble(StokerError):
    """The batch system does not answer, or takes no more jobs at the moment."""


class Unanswered(BatchTrouble):
    """No answer tells the outcome: a submission may have made a job."""


class UnnamedJob(Unanswered):
    """The batch system has taken a job; its output does not tell the job's id for certain."""


class SubmissionRefused(StokerError):
    """The batch system would not take this job a second time either."""


class BatchJobStatus(msgspec.Struct, frozen=True):
    """A job as its batch system sees it: PENDING (also held), RUNNING or ENDED.

    `reason`: why it waits, where it runs, how it ended. `expected_in_s`: until its start, 0 = unknown. `loss`: why a
    job that ran no longer runs. `again`: why it was queued again. `cause`: of its hold; `advice`: what to do about it;
    `holds`: how often it was held. `leaving`: it was cancelled and has not ended yet. `absent`: the listing lacks it,
    and nothing says that it ended.
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
        """Submit the job of a block; return the job's id. Raises SubmissionRefused.

        After BatchTrouble the job may or may not be there: `find` tells.
        """

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the state of these jobs, with as few commands as possible. Leaves out a job of unknown state."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Those that are over, or unknown, are no error."""

    def find(self) -> Mapping[str, BlockId]:
        """Return every listed job of the session that has not ended, whichever process submitted it."""


@runtime_checkable
class CancelsByName(Protocol):
    """A batch system that can cancel jobs by their names, also those that its listings lack."""

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
"""How the reasons of ended jobs begin."""


def loss_of(how: str) -> LossReason | None:
    return next((loss for words, loss in _LOSSES.items() if how.startswith(words)), None)


def job_name(session: str, block: str) -> str:
    """Characters that some batch systems reject become dashes."""
    return f"{job_prefix(session)}{block}"


def job_prefix(session: str) -> str:
    return f"stoker-{re.sub(r'[^A-Za-z0-9_]', '-', session)}-"


def block_of(name: str, *, session: str) -> BlockId | None:
    """None for a job of another session."""
    prefix = job_prefix(session)
    block = name.removeprefix(prefix)
    return BlockId(block) if name.startswith(prefix) and re.fullmatch(r"[A-Za-z0-9]+", block) else None

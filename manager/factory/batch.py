"""The interface to a batch system: four commands, each with a time limit.

Only one thread uses a `BatchSystem`. A method waits at most `site.provider.command_limit_s` seconds for each command.
The job of block `b7` in session `k3v9` is named `stoker-k3v9-b7` (`job_name`). HTCondor jobs contain session and block
as attributes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from stoker.errors import StokerError
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, LossReason
from stoker.protocol.ids import BlockId

JOBS_LEFT = "jobs-left"


class BatchSystemError(StokerError):
    """The batch system does not answer, or currently accepts no jobs."""


class CommandUnanswered(BatchSystemError):
    """A command got no answer. If it was a submission, it may have created a job."""


class JobIdUnknown(CommandUnanswered):
    """The batch system accepted a job, but its answer contains no job id."""


class SubmissionRefused(StokerError):
    """The batch system rejected a job, and would reject it again."""


class NoNodeForJob(SubmissionRefused):
    """The batch system has no node on which the job may run."""


class BatchJobStatus(msgspec.Struct, frozen=True):
    """State of a batch job. `reason`: why the job waits, where it runs, or how it ended. `expected_in_s`: seconds until
    its expected start (0: unknown). `loss`: why the job stopped running. `requeue_reason`: why the batch system
    requeued it. `cause`, `advice`: why the batch system holds the job, and what the user can do. `holds`: how often it
    was held. `is_being_cancelled`: True if the job was cancelled but has not ended. `is_unlisted`: True if the batch
    system does not list the job, and nothing shows how it ended. `no_node`: True if no node remains for the job.
    """

    phase: BlockPhase
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    requeue_reason: str = ""
    cause: str = ""
    advice: str = ""
    holds: int = 0
    is_being_cancelled: bool = False
    is_unlisted: bool = False
    no_node: bool = False


class BatchSystem(Protocol):
    """Interface to a batch system. Every method may raise BatchSystemError."""

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        """Submit the job of a block, on the allowed nodes if the batch system can choose nodes. Return the job's id.

        Raises SubmissionRefused. After BatchSystemError the job may exist; `find` returns existing jobs.
        """

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs, by job id, with few commands. Omit jobs whose state is unknown."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. Jobs that are unknown or have ended are ignored."""

    def find(self) -> Mapping[str, BlockId]:
        """Return the blocks of the session's unfinished jobs that the batch system lists, by job id."""


@runtime_checkable
class CancelsByName(Protocol):
    """A batch system that can cancel jobs by name, even jobs that it does not list."""

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        """Cancel every job of these blocks. Raises BatchSystemError."""


_LOSS_REASONS = {
    "preempted": LossReason.PREEMPTED,
    "cancelled": LossReason.CANCELLED,
    "node failed": LossReason.NODE_LOST,
    "out of walltime": LossReason.WALLTIME,
    "out of memory": LossReason.OUT_OF_MEMORY,
    "revoked": LossReason.CANCELLED,
}
"""Reasons for the end of a job, by the first words of the text that describes the end."""


def loss_reason_from_text(how: str) -> LossReason | None:
    return next((loss for words, loss in _LOSS_REASONS.items() if how.startswith(words)), None)


def job_name(session: str, block: str) -> str:
    """Return the name of a block's job. Characters that some batch systems reject are replaced by dashes."""
    return f"{job_prefix(session)}{block}"


def job_prefix(session: str) -> str:
    return f"stoker-{re.sub(r'[^A-Za-z0-9_]', '-', session)}-"


def block_of_job_name(name: str, *, session: str) -> BlockId | None:
    prefix = job_prefix(session)
    block = name.removeprefix(prefix)
    return BlockId(block) if name.startswith(prefix) and re.fullmatch(r"[A-Za-z0-9]+", block) else None

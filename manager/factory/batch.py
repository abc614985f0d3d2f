"""The interface to a batch system: four commands, each with a time limit.

A `Batch` belongs to one thread. A method waits at most `site.provider.command_limit_s` per command. With `find`, a
factory finds a dead factory's jobs.

The job of block `b7` of session `k3v9` is named `stoker-k3v9-b7` (`job_name`), or has both as attributes.
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
"""File in a session folder with the jobs that still exist after the session's end, one line per site."""


class BatchTrouble(StokerError):
    """The batch system does not answer, or accepts no jobs at present."""


class Unanswered(BatchTrouble):
    """The command's outcome is unknown: a submission may have made a job."""


class UnnamedJob(Unanswered):
    """The batch system has accepted a job, but its id is unknown."""


class SubmissionRefused(StokerError):
    """The batch system rejects this job permanently."""


class NoNodeLeft(SubmissionRefused):
    """The batch system rejects this job because it has no node on which the job may run."""


class BatchJobStatus(msgspec.Struct, frozen=True):
    """The state of a job in its batch system: PENDING (also held), RUNNING or ENDED.

    `reason`: why it waits, where it runs, or how it ended. `expected_in_s`: seconds until its start, 0 = unknown.
    `loss`: why a job that ran no longer runs. `again`: why it was queued again. `cause`: of its hold; `advice`: the
    remedy; `holds`: number of holds. `leaving`: cancelled but not ended. `absent`: not listed, and its end is unknown.
    `no_node`: no node is left on which the job may run.
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
    no_node: bool = False


class Batch(Protocol):
    """A batch system. Every method may raise BatchTrouble."""

    def submit(self, block: BlockId) -> str:
        """Submit the job of a block; return the job's id. Raises SubmissionRefused.

        After BatchTrouble the job may exist; `find` shows it.
        """

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs, with few commands. Omit jobs of unknown state."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. Ignore unknown or ended jobs."""

    def find(self) -> Mapping[str, BlockId]:
        """Return the session's listed jobs that have not ended, whichever process submitted them."""


@runtime_checkable
class CancelsByName(Protocol):
    """A batch system that can cancel jobs by name, even unlisted ones."""

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        """Cancel every job of these blocks. Raises BatchTrouble."""


@runtime_checkable
class ChoosesNodes(Protocol):
    """A batch system that can keep a job on some nodes."""

    def submit_placed(self, block: BlockId, allowed: AllowedNodes) -> str:
        """Submit the job of a block as `Batch.submit` does, for these nodes only. Raises NoNodeLeft."""


def submit(batch: Batch, block: BlockId, allowed: AllowedNodes) -> str:
    """Submit the job of a block, on the allowed nodes if the batch system can choose nodes."""
    if allowed != ANYWHERE and isinstance(batch, ChoosesNodes):
        return batch.submit_placed(block, allowed)
    return batch.submit(block)


_LOSSES = {
    "preempted": LossReason.PREEMPTED,
    "cancelled": LossReason.CANCELLED,
    "node failed": LossReason.NODE_LOST,
    "out of walltime": LossReason.WALLTIME,
    "out of memory": LossReason.OUT_OF_MEMORY,
    "revoked": LossReason.CANCELLED,
}
"""The loss that each beginning of an ended job's reason means."""


def loss_of(how: str) -> LossReason | None:
    return next((loss for words, loss in _LOSSES.items() if how.startswith(words)), None)


def job_name(session: str, block: str) -> str:
    """Return a job's name. Characters that some batch systems reject become dashes."""
    return f"{job_prefix(session)}{block}"


def job_prefix(session: str) -> str:
    return f"stoker-{re.sub(r'[^A-Za-z0-9_]', '-', session)}-"


def block_of(name: str, *, session: str) -> BlockId | None:
    prefix = job_prefix(session)
    block = name.removeprefix(prefix)
    return BlockId(block) if name.startswith(prefix) and re.fullmatch(r"[A-Za-z0-9]+", block) else None

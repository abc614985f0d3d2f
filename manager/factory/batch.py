"""The interface to a batch system: four commands, each with a time limit.

Only one thread uses a `Batch`. A method waits at most `site.provider.command_limit_s` seconds per command. The job of
block `b7` of session `k3v9` is named `stoker-k3v9-b7` (`job_name`). HTCondor jobs have session and block as attributes.
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


class BatchTrouble(StokerError):
    """The batch system does not answer, or accepts no jobs at the moment."""


class Unanswered(BatchTrouble):
    """A command got no answer. A submission may have created a job."""


class UnnamedJob(Unanswered):
    """A job was accepted, but its id is unknown."""


class SubmissionRefused(StokerError):
    """The job is rejected permanently."""


class NoNodeLeft(SubmissionRefused):
    """No node remains on which the job may run."""


class BatchJobStatus(msgspec.Struct, frozen=True):
    """`reason`: why the job waits, where it runs, or how it ended. `expected_in_s`: seconds until the job's expected
    start (0: unknown). `loss`: why the job stopped running. `again`: why the job was requeued. `cause`, `advice`: cause
    and remedy of a hold. `holds`: number of holds. `leaving`: True if the job is cancelled but has not ended. `absent`:
    True if the job is not listed and its end is unknown. `no_node`: True if no node remains for the job.
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
    """Interface to a batch system. Every method may raise BatchTrouble."""

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        """Submit the job of a block, on the allowed nodes if the batch system can choose nodes. Return the job's id.

        Raises SubmissionRefused. After BatchTrouble the job may exist; `find` returns existing jobs.
        """

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs, by job id, with few commands. Omit jobs whose state is unknown."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. Ignore unknown or ended jobs."""

    def find(self) -> Mapping[str, BlockId]:
        """Return the blocks of the session's unfinished jobs that the batch system lists, by job id."""


@runtime_checkable
class CancelsByName(Protocol):
    """A batch system that can cancel jobs by name, even jobs that it does not list."""

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
"""Loss reasons, by the first words of the text that says why a job ended."""


def loss_reason_from_text(how: str) -> LossReason | None:
    return next((loss for words, loss in _LOSSES.items() if how.startswith(words)), None)


def job_name(session: str, block: str) -> str:
    """Return a job's name, with dashes for characters that some batch systems reject."""
    return f"{job_prefix(session)}{block}"


def job_prefix(session: str) -> str:
    return f"stoker-{re.sub(r'[^A-Za-z0-9_]', '-', session)}-"


def block_of(name: str, *, session: str) -> BlockId | None:
    prefix = job_prefix(session)
    block = name.removeprefix(prefix)
    return BlockId(block) if name.startswith(prefix) and re.fullmatch(r"[A-Za-z0-9]+", block) else None

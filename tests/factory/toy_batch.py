"""An in-memory batch system and a clock for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.manager.factory.batch import (
    BatchJobStatus,
    BatchSystemError,
    CommandUnanswered,
    JobIdUnknown,
    SubmissionRefused,
)
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId

OVER = BatchJobStatus(BlockPhase.ENDED, "done")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ToyBatch:
    """`down`: the error that requests raise."""

    def __init__(self) -> None:
        self.jobs: dict[str, BlockId] = {}
        self.statuses: dict[str, BatchJobStatus] = {}
        self.submitted: list[BlockId] = []
        self.cancelled: list[str] = []
        self.cancelled_names: list[BlockId] = []
        self.down = ""
        self.lossy = False
        self.noisy = False
        self.hides = False
        self.refuses = ""

    def put(self, block: str, look: BatchJobStatus = BatchJobStatus(BlockPhase.PENDING)) -> str:  # noqa: B008
        job = str(len(self.jobs) + 1)
        self.jobs[job], self.statuses[job] = BlockId(block), look
        return job

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:  # as in the protocol `Batch`
        self._answer()
        if self.refuses:
            raise SubmissionRefused(self.refuses)
        self.submitted.append(block)
        job = self.put(block)
        if self.lossy:
            raise CommandUnanswered("submit has not answered for 30 s")
        if self.noisy:
            raise JobIdUnknown("the output contains no unique job id: bye")
        return job

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        self._answer()
        return {job: self.statuses.get(job, OVER) for job in jobs}

    def cancel(self, jobs: Sequence[str]) -> None:
        self._answer()
        self.cancelled += jobs

    def cancel_named(self, blocks: Sequence[BlockId]) -> None:
        self._answer()
        self.cancelled_names += blocks

    def find(self) -> Mapping[str, BlockId]:
        self._answer()
        return {} if self.hides else dict(self.jobs)

    def _answer(self) -> None:
        if self.down:
            raise BatchSystemError(self.down)

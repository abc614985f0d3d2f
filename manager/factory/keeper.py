"""Manages the blocks of one site: submits, queries and cancels their jobs, and reports changes.

Each step does up to four things:

1. *Search* for jobs by name: at the start, after a submission with unknown outcome, and every minute. A found job is
   adopted if its block has no job, and otherwise cancelled. Jobs of blocks that the manager did not name are reported.
2. *Cancel* blocks, and repeat this later if their jobs still exist.
3. *Query* all jobs in one command, every `poll_s` seconds, and sooner after a change. A job counts as over if
   `LISTINGS` listings lack the job. For a cancelled job, one listing without the job suffices.
4. *Submit* one block, unless a submission has an unknown outcome.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from stoker.errors import StokerError
from stoker.manager.factory.batch import (
    Batch,
    BatchJobStatus,
    BatchTrouble,
    CancelsByName,
    NoNodeLeft,
    SubmissionRefused,
    Unanswered,
    UnnamedJob,
)
from stoker.manager.factory.pacing import FOR_QUERIES, FOR_SUBMISSIONS, Pacer, unlimited
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, KnownBlock, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble
from stoker.retries import RetryPause

log = logging.getLogger("stoker.factory")

FactoryUpdate = BlockUpdate | SourceTrouble

SOON_S = 1.0
_LONGEST_PAUSE = 6.0
"""Maximum pause after an error, in poll periods."""
_OVERDUE = 6.0
"""A query that is late by this many poll periods has priority over submissions."""
SEARCH_EVERY_S = 60.0
EXPECTED_SLACK_S = 60.0
CANCEL_AGAIN_S = 30.0
LISTINGS = 3
MOST_UNANSWERED = 6


_NEW = BatchJobStatus(BlockPhase.ASKED)


@dataclass(slots=True)
class KeptBlock:
    """A block that has not ended. `told`: last update sent to the manager. `again`: why the batch system requeued the
    job. `is_unknown`: True if the manager did not name the block. `cancel`: why the block is cancelled. `tried`: True
    if the block was submitted before.
    """

    block: BlockId
    job: str = ""
    phase: BlockPhase = BlockPhase.ASKED
    told: tuple[BlockPhase, str, str, LossReason | None, int] | None = None
    expected_at: float = 0.0
    again: str = ""
    loss: LossReason | None = None
    status: BatchJobStatus = _NEW
    is_unknown: bool = False
    cancel: str = ""
    cancelled_at: float = 0.0
    tried: bool = False
    allowed: AllowedNodes = ANYWHERE

    def is_cancel_due(self, now: float) -> bool:
        if not self.cancel:
            return False
        return not self.job or not self.cancelled_at or now - self.cancelled_at >= CANCEL_AGAIN_S


class MissingJobCounter:
    """Counts listings that lack a job, because a listing may come from a cache. A job is lost after `LISTINGS` such
    listings over at least `lag_s` seconds. If `lag_s` is 0, one listing suffices.
    """

    def __init__(self, *, lag_s: float, clock: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._clock = clock
        self._missed: dict[Hashable, tuple[int, float]] = {}
        """By job: number of listings that lack the job, and time of the first of these."""

    def listed(self, job: Hashable) -> None:
        self._missed.pop(job, None)

    def missed(self, job: Hashable) -> bool:
        """Count a listing that lacks the job. Return True if the job is lost."""
        now = self._clock()
        count, since = self._missed.get(job, (0, now))
        self._missed[job] = count + 1, since
        if self._lag_s and (count + 1 < LISTINGS or now - since < self._lag_s):
            return False
        del self._missed[job]
        return True


class BlockKeeper:
    """Manages the blocks of one site in one thread. `make`: function that opens the batch system. `owners`: site name
    by block. `was_tried`: True if an earlier factory may have submitted the block.
    """

    def __init__(
        self,
        name: str,
        *,
        make: Callable[[], Batch],
        owners: Mapping[BlockId, str],
        poll_s: float,
        lag_s: float,
        was_tried: Callable[[BlockId], bool] = lambda _: False,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.blocks: dict[BlockId, KeptBlock] = {}
        self.trouble = ""
        self.opening_since: float | None = None
        self._make = make
        self._batch: Batch | None = None
        self._owners = owners
        self._poll_s = poll_s
        self._pacer = pacer or unlimited()
        self._clock = clock
        self._over: dict[BlockId, BlockUpdate] = {}
        """Last updates of ended blocks, in case the manager loses these updates."""
        self._updates: list[FactoryUpdate] = []
        self._told = False
        """True after the manager has sent its list of blocks, with which the keeper matches jobs."""
        self._sure = False
        self._search_at = self._query_at = self._not_before = 0.0
        self._pause = RetryPause(SOON_S, max(_LONGEST_PAUSE * poll_s, SOON_S))
        self._cancel_poll = RetryPause(SOON_S, math.inf)
        self._unanswered, self._no_answer = 0, ""
        """Number of consecutive submissions without an answer, and the output of the last."""
        self._was_tried = was_tried
        self._absences = MissingJobCounter(lag_s=lag_s, clock=clock)
        self._unresolved: set[BlockId] = set()
        """Blocks with an unanswered submission, whose jobs a listing may still show."""
        self._given_up: set[str] = set()
        """Jobs that count as over because listings lack them. The factory cancels them again at the end."""

    # ---- orders

    def sync(self, known: Iterable[KnownBlock]) -> None:
        """Match the keeper's blocks with the manager's `known` blocks after each new connection."""
        self._told = True
        theirs = {block.block: block for block in known}
        for id, block in theirs.items():
            if id in self._over:
                self._updates.append(self._over[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id, block.job, block.phase, allowed=block.allowed)
                if not block.job and self._was_tried(id):
                    self._unresolved.add(id)
        for kept in self.blocks.values():
            kept.told, kept.is_unknown = None, kept.block not in theirs
        last = max(self._over, key=_number, default=None)
        if last is not None and last not in theirs:  # without this report, the manager may reuse the block's number
            self._updates.append(self._over[last])
        if self.trouble:
            self._updates.append(SourceTrouble(self.name, self.trouble))
        self._sure, self._query_at = False, self._clock()

    def order(self, blocks: Iterable[BlockId], allowed: AllowedNodes = ANYWHERE) -> None:
        for id in blocks:
            if id in self._over:
                self._updates.append(self._over[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id, allowed=allowed)

    def cancel(self, blocks: Iterable[BlockId], reason: str) -> None:
        for id in blocks:
            if id in self.blocks:
                self.blocks[id].cancel = self.blocks[id].cancel or reason or "no longer wanted"

    def cancel_waiting(self, reason: str) -> None:
        self.cancel([kept.block for kept in self.blocks.values() if kept.phase is not BlockPhase.RUNNING], reason)

    def due_in(self) -> float | None:
        """Return the seconds until the next step; None to wait for an order."""
        now = self._clock()
        if self._told and self._updates:
            return 0.0
        if not self._told or (not self.blocks and not self._unresolved and self._sure):
            return None
        at = max(self._query_at, now + self._query_delay_s())
        if not self._sure or any(kept.is_cancel_due(now) for kept in self.blocks.values()):
            at = now
        elif self._unresolved:
            at = min(at, max(self._search_at, now + self._query_delay_s()))
        elif self._has_to_submit():
            at = min(at, now + self._submission_delay_s())
        return max(0.0, max(at, self._not_before) - now)

    def step(self) -> list[FactoryUpdate]:
        try:
            self._step()
        except (BatchTrouble, SubmissionRefused) as error:
            self._report_trouble_and_back_off(str(error))
        except Exception as error:  # an error of a provider must not stop the other blocks
            log.exception("source %s", self.name)
            self._report_trouble_and_back_off(f"{type(error).__name__}: {error}")
        else:
            self._pause.reset()
            self._report_trouble(self._no_answer if self._has_to_submit() else "")
        updates, self._updates = self._updates, []
        return updates

    def end(self, *, until: float) -> list[str]:
        """Cancel every job of the session on this site. Return the jobs that still exist at time `until`."""
        left = {kept.job for kept in self.blocks.values() if kept.job} | self._given_up
        cancelled: set[str] = set()
        told_at, pause = -math.inf, RetryPause(min(SOON_S, self._poll_s), self._poll_s)
        while True:
            try:
                batch = self._open_batch_system()
                if self._clock() - told_at >= CANCEL_AGAIN_S / 3:  # try again, because listings may lack jobs
                    self._cancel_named(batch, self._unresolved)
                    cancelled, told_at = set(), self._clock()
                if left - cancelled:
                    batch.cancel(sorted(left - cancelled))
                    cancelled |= left
                jobs = sorted(left | {job for job, block in batch.find().items() if self._is_block_of_this_site(block)})
                statuses = batch.query(jobs) if jobs else {}
                left = {job for job in jobs if not _is_over(statuses.get(job), cancelled=job in cancelled)}
                if not left:
                    return []
                if left - cancelled:
                    continue
            except StokerError as error:
                log.warning("source %s: %s", self.name, error)
                if self._batch is None:
                    return sorted(left)
            if self._clock() >= until:
                return sorted(left)
            time.sleep(max(0.0, min(pause.grow(), until - self._clock())))

    # ---- a step

    def _step(self) -> None:
        now = self._clock()
        if not self._told or now < self._not_before:
            return
        try:
            batch = self._open_batch_system()
        except StokerError as error:
            if any(kept.job for kept in self.blocks.values()):
                raise
            for kept in list(self.blocks.values()):
                self._end(kept, BlockPhase.REFUSED, str(error))
            self._sure = True
            return
        may_query = not self._query_delay_s()
        search_due = now >= self._search_at and (now >= self._query_at or self._unresolved) and may_query
        if not self._sure or search_due:
            self._search(batch)
        self._cancel_requested_blocks(batch)
        if self._clock() >= self._query_at and may_query:
            self._query_all(batch)
        if not self._unresolved and not self._submission_delay_s():
            self._submit_next_block(batch)

    def _has_to_submit(self) -> bool:
        return any(kept.phase is BlockPhase.ASKED for kept in self.blocks.values())

    def _query_delay_s(self) -> float:
        overdue = self._clock() - self._query_at > _OVERDUE * self._poll_s
        return self._pacer.wait_s(leaving=0.0 if overdue else FOR_QUERIES)

    def _submission_delay_s(self) -> float:
        return self._pacer.wait_s(leaving=FOR_SUBMISSIONS)

    def _open_batch_system(self) -> Batch:
        if self._batch is None:
            log.info("source %s: opening its batch system", self.name)
            self.opening_since = self._clock()
            try:
                self._batch = self._make()
            finally:
                self.opening_since = None
        return self._batch

    def _search(self, batch: Batch) -> None:
        found = {job: block for job, block in batch.find().items() if self._is_block_of_this_site(block)}
        owned = {kept.job for kept in self.blocks.values() if kept.job}
        strange = [job for job in found if job not in owned]
        statuses = batch.query(strange) if strange else {}
        strange = [job for job in strange if job not in statuses or not statuses[job].leaving]
        phases = {job: statuses[job].phase for job in strange if job in statuses}
        over = {job for job in strange if _is_over(statuses.get(job))}
        strays = []
        # If a block has two jobs, keep a running job rather than a waiting or ended job.
        for job in sorted(strange, key=lambda job: (job in over, phases.get(job) is not BlockPhase.RUNNING)):
            kept = self.blocks.get(found[job])
            if kept is not None and not kept.job:
                log.info("block %s: found as job %s", kept.block, job)
                self._submitted(kept, job)
            elif kept is None and found[job] not in self._over and job not in over:
                log.warning("block %s: its job %s was found, but the manager did not name the block", found[job], job)
                self.blocks[found[job]] = KeptBlock(found[job], job, BlockPhase.PENDING, is_unknown=True)
                self._query_at = self._clock()
            elif job not in over:
                strays.append(job)
        if strays:
            text = "source %s: jobs %s are not jobs of requested blocks and are cancelled"
            log.warning(text, self.name, ", ".join(strays))
            batch.cancel(strays)
        self._resolve_submissions(set(found.values()))
        self._sure = True
        self._search_at = self._clock() + (self._poll_s if self._unresolved else SEARCH_EVERY_S)

    def _resolve_submissions(self, found: set[BlockId]) -> None:
        for block in sorted(self._unresolved):
            if block in found:
                self._absences.listed(block)
                self._unresolved.discard(block)
            elif self._absences.missed(block):
                log.info("block %s: the submission created no job", block)
                self._unresolved.discard(block)

    def _is_block_of_this_site(self, block: BlockId) -> bool:
        return self._owners.get(block, self.name) == self.name

    def _cancel_requested_blocks(self, batch: Batch) -> None:
        now = self._clock()
        unsubmitted = [kept for kept in self.blocks.values() if kept.cancel and not kept.job]
        self._cancel_named(batch, self._unresolved.intersection(kept.block for kept in unsubmitted))
        for kept in unsubmitted:
            self._end(kept, BlockPhase.ENDED, f"cancelled before it was submitted: {kept.cancel}")
        due = [kept for kept in self.blocks.values() if kept.is_cancel_due(now)]
        if due:
            batch.cancel([kept.job for kept in due])
            for kept in due:
                kept.cancelled_at = self._clock()
            self._cancel_poll.reset()
            self._query_at = min(self._query_at, now + min(SOON_S, self._poll_s))

    def _cancel_named(self, batch: Batch, blocks: Collection[BlockId]) -> None:
        if blocks and isinstance(batch, CancelsByName):
            log.info("source %s: jobs of %s are cancelled by their names", self.name, ", ".join(sorted(blocks)))
            batch.cancel_named(sorted(blocks))

    def _query_all(self, batch: Batch) -> None:
        jobs = {kept.job: kept for kept in self.blocks.values() if kept.job}
        began = self._clock()
        if jobs:
            for job, status in batch.query(list(jobs)).items():
                if job in jobs and self._is_status_confirmed(jobs[job], status):
                    self._apply_status(jobs[job], status)
        now = self._clock()
        every_s = self._pacer.poll_period_s(self._poll_s, took_s=now - began)
        if any(kept.cancel for kept in self.blocks.values()):
            every_s = min(self._cancel_poll.grow(), every_s)
        self._query_at = now + every_s

    def _is_status_confirmed(self, kept: KeptBlock, status: BatchJobStatus) -> bool:
        if not status.absent:
            self._absences.listed(kept.job)
            return True
        is_over = self._absences.missed(kept.job) or bool(kept.cancelled_at)
        if is_over:
            self._given_up.add(kept.job)
        return is_over

    def _apply_status(self, kept: KeptBlock, status: BatchJobStatus) -> None:
        kept.status = status
        if status.phase is BlockPhase.ENDED:
            by_us = kept.cancelled_at and status.reason != "done"  # the batch system may report a different reason
            kept.loss = None if by_us else status.loss
            self._end(kept, status.phase, f"cancelled: {kept.cancel}" if by_us else status.reason)
            return
        if status.phase is BlockPhase.RUNNING:
            kept.loss = None
        elif status.loss is not None or status.again:
            kept.again, kept.loss = status.again, status.loss
        elif kept.phase is BlockPhase.RUNNING:
            kept.again, kept.loss = "queued again, because the job was preempted or its node failed", LossReason.VACATED
        is_again = kept.again and status.phase is BlockPhase.PENDING
        reason = f"{kept.again}: {status.reason}" if is_again else status.reason
        expected_at = self._clock() + status.expected_in_s if status.expected_in_s else 0.0
        moved = abs(expected_at - kept.expected_at) > EXPECTED_SLACK_S
        kept.phase = status.phase
        if moved or kept.told != (status.phase, kept.job, reason, kept.loss, status.holds):
            kept.expected_at = expected_at
            self._queue_block_update(kept, reason, expected_in_s=status.expected_in_s)

    def _submit_next_block(self, batch: Batch) -> None:
        kept = next((kept for kept in self.blocks.values() if kept.phase is BlockPhase.ASKED and not kept.job), None)
        if kept is None or kept.cancel:
            return
        if kept.tried and self._unanswered >= MOST_UNANSWERED:  # from now on, submit each block only once
            text = (
                f"{self._unanswered} submissions in a row got no answer ({self._no_answer}), and none of their jobs is"
                " found: the block is not submitted again, because each try may have made a job that Stoker does not"
                " see; look for these jobs in the queue and cancel them"
            )
            self._end(kept, BlockPhase.REFUSED, text)
            return
        self._sure = False
        self._unresolved.add(kept.block)
        kept.tried = True
        try:
            job = batch.submit(kept.block, kept.allowed)
        except SubmissionRefused as error:
            kept.status = BatchJobStatus(BlockPhase.REFUSED, no_node=isinstance(error, NoNodeLeft))
            self._unresolved.discard(kept.block)
            self._unanswered, self._no_answer = 0, ""
            self._end(kept, BlockPhase.REFUSED, str(error))
        except Unanswered as error:
            self._unanswered, self._no_answer = self._unanswered + 1, str(error)
            if isinstance(error, UnnamedJob):
                self._search(batch)
            if not kept.job:
                raise
        except BatchTrouble:
            self._unresolved.discard(kept.block)
            raise
        else:
            log.info("block %s: submitted as job %s", kept.block, job)
            self._submitted(kept, job)
        self._sure = True

    def _submitted(self, kept: KeptBlock, job: str) -> None:
        self._unanswered, self._no_answer = 0, ""
        self._unresolved.discard(kept.block)
        kept.job, kept.phase = job, BlockPhase.PENDING
        if not self._has_to_submit():
            self._query_at = min(self._query_at, self._clock() + min(SOON_S, self._poll_s))
        self._queue_block_update(kept, "")

    # ---- updates

    def _queue_block_update(self, kept: KeptBlock, reason: str, *, expected_in_s: float = 0.0) -> BlockUpdate:
        now = kept.status
        kept.told = (kept.phase, kept.job, reason, kept.loss, now.holds)
        source = self.name if kept.is_unknown else ""
        why = (kept.loss, source, now.cause, now.advice, now.holds, now.no_node)
        update = BlockUpdate(kept.block, kept.phase, kept.job, reason, expected_in_s, *why)
        self._updates.append(update)
        return update

    def _end(self, kept: KeptBlock, phase: BlockPhase, reason: str) -> None:
        kept.phase = phase
        update = self._queue_block_update(kept, reason)
        log.info("block %s%s: %s: %s", kept.block, f" (job {kept.job})" if kept.job else "", phase.value, reason)
        del self.blocks[kept.block]
        self._over[kept.block] = msgspec.structs.replace(update, source=self.name)

    def _report_trouble_and_back_off(self, text: str) -> None:
        self._not_before = self._clock() + self._pause.grow()
        self._report_trouble(text)

    def _report_trouble(self, text: str) -> None:
        if text != self.trouble:
            self.trouble = text
            log.warning("source %s: %s", self.name, text or "works again")
            self._updates.append(SourceTrouble(self.name, text))


def _is_over(status: BatchJobStatus | None, *, cancelled: bool = False) -> bool:
    return status is not None and status.phase is BlockPhase.ENDED and (cancelled or not status.absent)


def _number(block: BlockId) -> int:
    digits = block.removeprefix("b")
    return int(digits) if digits.isdigit() else 0

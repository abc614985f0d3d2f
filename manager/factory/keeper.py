"""Manages the blocks of one site: submits, queries and cancels their jobs, and reports changes.

Each step does up to four things:

1. *Search* for jobs by name: at the start, after a submission without an answer, and every minute. If the block of a
   found job has no job, it gets this job. If it has another job, the found job is cancelled. A job of a block that the
   manager does not know is reported to the manager.
2. *Cancel* blocks, and repeat this later if their jobs still exist.
3. *Query* all jobs with one command, every `poll_s` seconds, and sooner after a change. A job counts as over if it is
   missing in `LISTINGS_UNTIL_JOB_IS_OVER` listings or, if it was cancelled, in one listing.
4. *Submit* one block, unless it is unknown whether an earlier submission has created a job.
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
    BatchJobStatus,
    BatchSystem,
    BatchSystemError,
    CancelsByName,
    CommandUnanswered,
    JobIdUnknown,
    NoNodeForJob,
    SubmissionRefused,
)
from stoker.manager.factory.pacing import (
    TOKENS_LEFT_BY_QUERIES,
    TOKENS_LEFT_BY_SUBMISSIONS,
    RequestPacer,
    unlimited_pacer,
)
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, KnownBlock, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble
from stoker.retries import RetryPause

log = logging.getLogger("stoker.factory")

FactoryUpdate = BlockUpdate | SourceTrouble

SHORT_PAUSE_S = 1.0
_MAX_PAUSE_POLLS = 6.0
"""Maximum pause after an error of the batch system, in poll periods."""
_OVERDUE_POLLS = 6.0
"""A query that is late by this many poll periods has priority over submissions."""
SEARCH_INTERVAL_S = 60.0
MIN_REPORTED_START_SHIFT_S = 60.0
CANCEL_INTERVAL_S = 30.0
LISTINGS_UNTIL_JOB_IS_OVER = 3
MAX_UNANSWERED_SUBMISSIONS = 6


_NEW_JOB_STATUS = BatchJobStatus(BlockPhase.ASKED)


@dataclass(slots=True)
class KeptBlock:
    """A block that has not ended. `last_sent_update`: last update sent to the manager. `requeue_reason`: why the batch
    system requeued the job. `is_unknown`: True if the manager did not list the block. `cancel_reason`: why the block
    is cancelled. `was_submitted`: True after the first attempt to submit the block.
    """

    block: BlockId
    job: str = ""
    phase: BlockPhase = BlockPhase.ASKED
    last_sent_update: tuple[BlockPhase, str, str, LossReason | None, int] | None = None
    expected_at: float = 0.0
    requeue_reason: str = ""
    loss: LossReason | None = None
    status: BatchJobStatus = _NEW_JOB_STATUS
    is_unknown: bool = False
    cancel_reason: str = ""
    cancelled_at: float = 0.0
    was_submitted: bool = False
    allowed: AllowedNodes = ANYWHERE

    def is_cancel_due(self, now: float) -> bool:
        if not self.cancel_reason:
            return False
        return not self.job or not self.cancelled_at or now - self.cancelled_at >= CANCEL_INTERVAL_S


class MissingJobCounter:
    """Counts listings in which a job is missing. One is not enough, because a listing may come from a cache.

    A job is lost if it is missing in `LISTINGS_UNTIL_JOB_IS_OVER` listings over at least `lag_s` seconds. If `lag_s` is
    0, one listing is enough.
    """

    def __init__(self, *, lag_s: float, clock: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._clock = clock
        self._missed: dict[Hashable, tuple[int, float]] = {}
        """By job: number of listings in which it was missing, and time of the first of these listings."""

    def reset(self, job: Hashable) -> None:
        self._missed.pop(job, None)

    def count_missing(self, job: Hashable) -> bool:
        """Count a listing in which the job is missing. Return True if the job now counts as lost."""
        now = self._clock()
        count, since = self._missed.get(job, (0, now))
        self._missed[job] = count + 1, since
        if self._lag_s and (count + 1 < LISTINGS_UNTIL_JOB_IS_OVER or now - since < self._lag_s):
            return False
        del self._missed[job]
        return True


class BlockKeeper:
    """Manages the blocks of one site in one thread. `make`: function that opens the batch system. `owners`: name of the
    site of each block. `was_tried`: function that returns True if an earlier factory may have submitted a block.
    """

    def __init__(
        self,
        name: str,
        *,
        make: Callable[[], BatchSystem],
        owners: Mapping[BlockId, str],
        poll_s: float,
        lag_s: float,
        was_tried: Callable[[BlockId], bool] = lambda _: False,
        pacer: RequestPacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.blocks: dict[BlockId, KeptBlock] = {}
        self.trouble = ""
        self.opening_since: float | None = None
        self._open_batch = make
        self._batch: BatchSystem | None = None
        self._owners = owners
        self._poll_s = poll_s
        self._pacer = pacer or unlimited_pacer()
        self._clock = clock
        self._ended_updates: dict[BlockId, BlockUpdate] = {}
        """Last updates of ended blocks, to send them again if the manager has lost them."""
        self._updates: list[FactoryUpdate] = []
        self._has_manager_blocks = False
        """True after the manager has sent its list of blocks. Until then, the keeper does nothing."""
        self._has_matched_jobs = False
        self._search_at = self._query_at = self._paused_until = 0.0
        self._pause = RetryPause(SHORT_PAUSE_S, max(_MAX_PAUSE_POLLS * poll_s, SHORT_PAUSE_S))
        self._cancel_poll = RetryPause(SHORT_PAUSE_S, math.inf)
        self._unanswered_submissions, self._last_unanswered_text = 0, ""
        """Number of consecutive submissions that got no answer, and the error of the last one."""
        self._was_tried = was_tried
        self._missing_counter = MissingJobCounter(lag_s=lag_s, clock=clock)
        self._unresolved: set[BlockId] = set()
        """Blocks whose submission got no answer. The batch system may have a job for them that it does not list yet."""
        self._unlisted_jobs: set[str] = set()
        """Jobs that count as over because they are not listed any more. The factory cancels them again at the end."""

    # ---- orders

    def match_manager_blocks(self, known: Iterable[KnownBlock]) -> None:
        """After each new connection to the manager, compare the manager's blocks (`known`) with the keeper's blocks."""
        self._has_manager_blocks = True
        theirs = {block.block: block for block in known}
        for id, block in theirs.items():
            if id in self._ended_updates:
                self._updates.append(self._ended_updates[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id, block.job, block.phase, allowed=block.allowed)
                if not block.job and self._was_tried(id):
                    self._unresolved.add(id)
        for kept in self.blocks.values():
            kept.last_sent_update, kept.is_unknown = None, kept.block not in theirs
        last = max(self._ended_updates, key=_block_number, default=None)
        if last is not None and last not in theirs:  # without this report, the manager may reuse the block's number
            self._updates.append(self._ended_updates[last])
        if self.trouble:
            self._updates.append(SourceTrouble(self.name, self.trouble))
        self._has_matched_jobs, self._query_at = False, self._clock()

    def add_ordered_blocks(self, blocks: Iterable[BlockId], allowed: AllowedNodes = ANYWHERE) -> None:
        for id in blocks:
            if id in self._ended_updates:
                self._updates.append(self._ended_updates[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id, allowed=allowed)

    def mark_for_cancellation(self, blocks: Iterable[BlockId], reason: str) -> None:
        for id in blocks:
            if id in self.blocks:
                self.blocks[id].cancel_reason = self.blocks[id].cancel_reason or reason or "no longer wanted"

    def mark_waiting_for_cancellation(self, reason: str) -> None:
        self.mark_for_cancellation(
            [kept.block for kept in self.blocks.values() if kept.phase is not BlockPhase.RUNNING], reason
        )

    def seconds_until_step(self) -> float | None:
        """Return the seconds until the next step; None to wait for an order."""
        now = self._clock()
        if self._has_manager_blocks and self._updates:
            return 0.0
        if not self._has_manager_blocks or (not self.blocks and not self._unresolved and self._has_matched_jobs):
            return None
        at = max(self._query_at, now + self._query_delay_s())
        if not self._has_matched_jobs or any(kept.is_cancel_due(now) for kept in self.blocks.values()):
            at = now
        elif self._unresolved:
            at = min(at, max(self._search_at, now + self._query_delay_s()))
        elif self._has_to_submit():
            at = min(at, now + self._submission_delay_s())
        return max(0.0, max(at, self._paused_until) - now)

    def run_step(self) -> list[FactoryUpdate]:
        try:
            self._search_cancel_query_and_submit()
        except (BatchSystemError, SubmissionRefused) as error:
            self._report_trouble_and_back_off(str(error))
        except Exception as error:  # an unexpected error of one batch system must not end the thread
            log.exception("source %s", self.name)
            self._report_trouble_and_back_off(f"{type(error).__name__}: {error}")
        else:
            self._pause.reset()
            self._report_trouble(self._last_unanswered_text if self._has_to_submit() else "")
        updates, self._updates = self._updates, []
        return updates

    def cancel_all_jobs(self, *, until: float) -> list[str]:
        """Cancel every job of the session on this site. Return the jobs that still exist at time `until`."""
        left = {kept.job for kept in self.blocks.values() if kept.job} | self._unlisted_jobs
        cancelled: set[str] = set()
        told_at, pause = -math.inf, RetryPause(min(SHORT_PAUSE_S, self._poll_s), self._poll_s)
        while True:
            try:
                batch = self._open_batch_system()
                # cancel all jobs again, because a listing may lack jobs
                if self._clock() - told_at >= CANCEL_INTERVAL_S / 3:
                    self._cancel_named(batch, self._unresolved)
                    cancelled, told_at = set(), self._clock()
                if left - cancelled:
                    batch.cancel(sorted(left - cancelled))
                    cancelled |= left
                jobs = sorted(left | {job for job, block in batch.find().items() if self._is_block_of_this_site(block)})
                statuses = batch.query(jobs) if jobs else {}
                left = {job for job in jobs if not _is_job_over(statuses.get(job), cancelled=job in cancelled)}
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
            time.sleep(max(0.0, min(pause.next_pause_s(), until - self._clock())))

    # ---- a step

    def _search_cancel_query_and_submit(self) -> None:
        now = self._clock()
        if not self._has_manager_blocks or now < self._paused_until:
            return
        try:
            batch = self._open_batch_system()
        except StokerError as error:
            if any(kept.job for kept in self.blocks.values()):
                raise
            for kept in list(self.blocks.values()):
                self._end_block(kept, BlockPhase.REFUSED, str(error))
            self._has_matched_jobs = True
            return
        may_query = not self._query_delay_s()
        search_due = now >= self._search_at and (now >= self._query_at or self._unresolved) and may_query
        if not self._has_matched_jobs or search_due:
            self._search_jobs(batch)
        self._cancel_requested_blocks(batch)
        if self._clock() >= self._query_at and may_query:
            self._query_all(batch)
        if not self._unresolved and not self._submission_delay_s():
            self._submit_next_block(batch)

    def _has_to_submit(self) -> bool:
        return any(kept.phase is BlockPhase.ASKED for kept in self.blocks.values())

    def _query_delay_s(self) -> float:
        overdue = self._clock() - self._query_at > _OVERDUE_POLLS * self._poll_s
        return self._pacer.seconds_until_request(remaining_tokens=0.0 if overdue else TOKENS_LEFT_BY_QUERIES)

    def _submission_delay_s(self) -> float:
        return self._pacer.seconds_until_request(remaining_tokens=TOKENS_LEFT_BY_SUBMISSIONS)

    def _open_batch_system(self) -> BatchSystem:
        if self._batch is None:
            log.info("source %s: opening its batch system", self.name)
            self.opening_since = self._clock()
            try:
                self._batch = self._open_batch()
            finally:
                self.opening_since = None
        return self._batch

    def _search_jobs(self, batch: BatchSystem) -> None:
        found = {job: block for job, block in batch.find().items() if self._is_block_of_this_site(block)}
        owned = {kept.job for kept in self.blocks.values() if kept.job}
        strange = [job for job in found if job not in owned]
        statuses = batch.query(strange) if strange else {}
        strange = [job for job in strange if job not in statuses or not statuses[job].is_being_cancelled]
        phases = {job: statuses[job].phase for job in strange if job in statuses}
        over = {job for job in strange if _is_job_over(statuses.get(job))}
        strays = []
        # If a block has two jobs, keep a running job rather than a waiting or ended job.
        for job in sorted(strange, key=lambda job: (job in over, phases.get(job) is not BlockPhase.RUNNING)):
            kept = self.blocks.get(found[job])
            if kept is not None and not kept.job:
                log.info("block %s: found as job %s", kept.block, job)
                self._record_submission(kept, job)
            elif kept is None and found[job] not in self._ended_updates and job not in over:
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
        self._has_matched_jobs = True
        self._search_at = self._clock() + (self._poll_s if self._unresolved else SEARCH_INTERVAL_S)

    def _resolve_submissions(self, found: set[BlockId]) -> None:
        for block in sorted(self._unresolved):
            if block in found:
                self._missing_counter.reset(block)
                self._unresolved.discard(block)
            elif self._missing_counter.count_missing(block):
                log.info("block %s: the submission created no job", block)
                self._unresolved.discard(block)

    def _is_block_of_this_site(self, block: BlockId) -> bool:
        return self._owners.get(block, self.name) == self.name

    def _cancel_requested_blocks(self, batch: BatchSystem) -> None:
        now = self._clock()
        unsubmitted = [kept for kept in self.blocks.values() if kept.cancel_reason and not kept.job]
        self._cancel_named(batch, self._unresolved.intersection(kept.block for kept in unsubmitted))
        for kept in unsubmitted:
            self._end_block(kept, BlockPhase.ENDED, f"cancelled before it was submitted: {kept.cancel_reason}")
        due = [kept for kept in self.blocks.values() if kept.is_cancel_due(now)]
        if due:
            batch.cancel([kept.job for kept in due])
            for kept in due:
                kept.cancelled_at = self._clock()
            self._cancel_poll.reset()
            self._query_at = min(self._query_at, now + min(SHORT_PAUSE_S, self._poll_s))

    def _cancel_named(self, batch: BatchSystem, blocks: Collection[BlockId]) -> None:
        if blocks and isinstance(batch, CancelsByName):
            log.info("source %s: jobs of %s are cancelled by their names", self.name, ", ".join(sorted(blocks)))
            batch.cancel_named(sorted(blocks))

    def _query_all(self, batch: BatchSystem) -> None:
        jobs = {kept.job: kept for kept in self.blocks.values() if kept.job}
        began = self._clock()
        if jobs:
            for job, status in batch.query(list(jobs)).items():
                if job in jobs and self._is_status_confirmed(jobs[job], status):
                    self._apply_status(jobs[job], status)
        now = self._clock()
        every_s = self._pacer.poll_period_s(self._poll_s, took_s=now - began)
        if any(kept.cancel_reason for kept in self.blocks.values()):
            every_s = min(self._cancel_poll.next_pause_s(), every_s)
        self._query_at = now + every_s

    def _is_status_confirmed(self, kept: KeptBlock, status: BatchJobStatus) -> bool:
        if not status.is_unlisted:
            self._missing_counter.reset(kept.job)
            return True
        is_over = self._missing_counter.count_missing(kept.job) or bool(kept.cancelled_at)
        if is_over:
            self._unlisted_jobs.add(kept.job)
        return is_over

    def _apply_status(self, kept: KeptBlock, status: BatchJobStatus) -> None:
        kept.status = status
        if status.phase is BlockPhase.ENDED:
            # Stoker has cancelled the job, so ignore the reason that the batch system reports
            by_us = kept.cancelled_at and status.reason != "done"
            kept.loss = None if by_us else status.loss
            self._end_block(kept, status.phase, f"cancelled: {kept.cancel_reason}" if by_us else status.reason)
            return
        if status.phase is BlockPhase.RUNNING:
            kept.loss = None
        elif status.loss is not None or status.requeue_reason:
            kept.requeue_reason, kept.loss = status.requeue_reason, status.loss
        elif kept.phase is BlockPhase.RUNNING:
            kept.requeue_reason, kept.loss = (
                "queued again, because the job was preempted or its node failed",
                LossReason.VACATED,
            )
        is_again = kept.requeue_reason and status.phase is BlockPhase.PENDING
        reason = f"{kept.requeue_reason}: {status.reason}" if is_again else status.reason
        expected_at = self._clock() + status.expected_in_s if status.expected_in_s else 0.0
        moved = abs(expected_at - kept.expected_at) > MIN_REPORTED_START_SHIFT_S
        kept.phase = status.phase
        if moved or kept.last_sent_update != (status.phase, kept.job, reason, kept.loss, status.holds):
            kept.expected_at = expected_at
            self._queue_block_update(kept, reason, expected_in_s=status.expected_in_s)

    def _submit_next_block(self, batch: BatchSystem) -> None:
        kept = next((kept for kept in self.blocks.values() if kept.phase is BlockPhase.ASKED and not kept.job), None)
        if kept is None or kept.cancel_reason:
            return
        # no second attempt for this block until another gets an answer
        if kept.was_submitted and self._unanswered_submissions >= MAX_UNANSWERED_SUBMISSIONS:
            text = (
                f"{self._unanswered_submissions} submissions in a row got no answer ({self._last_unanswered_text}), and"
                " none of their jobs is found: the block is not submitted again, because each try may have made a job"
                " that Stoker does not see; look for these jobs in the queue and cancel them"
            )
            self._end_block(kept, BlockPhase.REFUSED, text)
            return
        self._has_matched_jobs = False
        self._unresolved.add(kept.block)
        kept.was_submitted = True
        try:
            job = batch.submit(kept.block, kept.allowed)
        except SubmissionRefused as error:
            kept.status = BatchJobStatus(BlockPhase.REFUSED, no_node=isinstance(error, NoNodeForJob))
            self._unresolved.discard(kept.block)
            self._unanswered_submissions, self._last_unanswered_text = 0, ""
            self._end_block(kept, BlockPhase.REFUSED, str(error))
        except CommandUnanswered as error:
            self._unanswered_submissions, self._last_unanswered_text = self._unanswered_submissions + 1, str(error)
            if isinstance(error, JobIdUnknown):
                self._search_jobs(batch)
            if not kept.job:
                raise
        except BatchSystemError:
            self._unresolved.discard(kept.block)
            raise
        else:
            log.info("block %s: submitted as job %s", kept.block, job)
            self._record_submission(kept, job)
        self._has_matched_jobs = True

    def _record_submission(self, kept: KeptBlock, job: str) -> None:
        self._unanswered_submissions, self._last_unanswered_text = 0, ""
        self._unresolved.discard(kept.block)
        kept.job, kept.phase = job, BlockPhase.PENDING
        if not self._has_to_submit():
            self._query_at = min(self._query_at, self._clock() + min(SHORT_PAUSE_S, self._poll_s))
        self._queue_block_update(kept, "")

    # ---- updates

    def _queue_block_update(self, kept: KeptBlock, reason: str, *, expected_in_s: float = 0.0) -> BlockUpdate:
        now = kept.status
        kept.last_sent_update = (kept.phase, kept.job, reason, kept.loss, now.holds)
        source = self.name if kept.is_unknown else ""
        why = (kept.loss, source, now.cause, now.advice, now.holds, now.no_node)
        update = BlockUpdate(kept.block, kept.phase, kept.job, reason, expected_in_s, *why)
        self._updates.append(update)
        return update

    def _end_block(self, kept: KeptBlock, phase: BlockPhase, reason: str) -> None:
        kept.phase = phase
        update = self._queue_block_update(kept, reason)
        log.info("block %s%s: %s: %s", kept.block, f" (job {kept.job})" if kept.job else "", phase.value, reason)
        del self.blocks[kept.block]
        self._ended_updates[kept.block] = msgspec.structs.replace(update, source=self.name)

    def _report_trouble_and_back_off(self, text: str) -> None:
        self._paused_until = self._clock() + self._pause.next_pause_s()
        self._report_trouble(text)

    def _report_trouble(self, text: str) -> None:
        if text != self.trouble:
            self.trouble = text
            log.warning("source %s: %s", self.name, text or "works again")
            self._updates.append(SourceTrouble(self.name, text))


def _is_job_over(status: BatchJobStatus | None, *, cancelled: bool = False) -> bool:
    return status is not None and status.phase is BlockPhase.ENDED and (cancelled or not status.is_unlisted)


def _block_number(block: BlockId) -> int:
    digits = block.removeprefix("b")
    return int(digits) if digits.isdigit() else 0

"""Looks after the blocks of one site: submits, watches, cancels, and says what has changed.

A keeper is a small control loop, stepped by one thread (`worker`). It holds what should be (blocks that were ordered,
blocks that are to be cancelled) against what is (what the batch system says), and each step closes some of the gap:

1. *Search* for jobs by their names: at the start, after a submission whose outcome is unknown (a command that hung may
   have reached the batch system), and every minute. The keeper adopts the job of a block that has none, and cancels a
   block's second job. It submits a block again only after several listings lacked its job (`absences`), whatever was
   killed in between. It reports the job of a block that the manager did not name: the manager lost a part of its
   journal, and adopts the block or cancels it.
2. *Cancel* blocks, and again after a while if a cancellation had no effect.
3. *Query* all jobs at once, every `poll_s`, and sooner after a change. A job that the batch system does not account for
   is over when several listings lack it, or one listing after its cancellation.
4. *Submit* one block, so that a cancellation does not wait for a hundred submissions. While the outcome of a submission
   is unknown, nothing else is submitted.

When the batch system does not answer, a step ends there. The keeper reports the trouble once, in the batch system's
words, and waits a little longer before each next step.

One thread a site: a batch system that hangs holds up nobody but itself.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from stoker.errors import StokerError
from stoker.manager.factory.batch import (
    Batch,
    BatchJobStatus,
    BatchTrouble,
    CancelsByName,
    SubmissionRefused,
    Unanswered,
    UnnamedJob,
)
from stoker.manager.factory.kept_blocks import CANCEL_AGAIN_S, Absences, KeptBlock, SubmissionTries
from stoker.manager.factory.pacing import FOR_QUERIES, FOR_SUBMISSIONS, Pacer, poll_period_s
from stoker.protocol.blocks import BlockPhase, KnownBlock, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble

# ---- keeper


log = logging.getLogger("stoker.factory")

FactoryUpdate = BlockUpdate | SourceTrouble

SOON_S = 1.0
"""After a change the next query comes this soon."""
_LONGEST_PAUSE = 6.0
"""The longest pause, in polls, before a batch system that refused or did not answer is asked again."""
_OVERDUE = 6.0
"""A query that is overdue by this many polls comes before submissions."""
SEARCH_EVERY_S = 60.0
EXPECTED_SLACK_S = 60.0
"""An expected start that moves by less is not told."""


class BlockKeeper:
    """The blocks of one site. Not for several threads.

    `make` gives its batch system; `owners` tells which site a block of the session belongs to, where that is known.
    `was_tried`: whether an earlier factory may have submitted a block. `lag_s`: how long a listing may lack a job that
    exists; 0 where one listing is proof.
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
        """Since when its batch system is being opened: modules are imported, files read."""
        self._make = make
        self._batch: Batch | None = None
        self._owners = owners
        self._poll_s = poll_s
        self._pacer = pacer
        self._hurry_s = SOON_S
        self._clock = clock
        self._over: dict[BlockId, BlockUpdate] = {}
        """How each block ended: said again to a manager that has lost that."""
        self._updates: list[FactoryUpdate] = []
        self._told = False
        """Whether the manager has said which blocks there are. Before that every job looks like a stray."""
        self._sure = False
        self._search_at = 0.0
        self._query_at = 0.0
        self._not_before = 0.0
        self._pause_s = SOON_S
        self._tries = SubmissionTries()
        self._was_tried = was_tried
        self._absences = Absences(lag_s=lag_s, clock=clock)
        self._unresolved: set[BlockId] = set()
        """Blocks that were submitted, with no answer and no job found: a job of theirs may still appear."""
        self._given_up: set[str] = set()
        """Jobs that count as over because listings lack them: cancelled again at the end, to be sure."""

    # ---- what should be

    def sync(self, known: Iterable[KnownBlock]) -> None:
        """What the manager knows of this site's blocks, at its start or after a break."""
        self._told = True
        theirs = {block.block: block for block in known}
        for id, block in theirs.items():
            if id in self._over:
                self._updates.append(self._over[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id, block.job, block.phase)
                if not block.job and self._was_tried(id):
                    self._unresolved.add(id)
        for kept in self.blocks.values():
            kept.told, kept.is_unknown = None, kept.block not in theirs
        last = max(self._over, key=_number, default=None)
        if last is not None and last not in theirs:  # so that no number is given twice
            self._updates.append(self._over[last])
        if self.trouble:
            self._updates.append(SourceTrouble(self.name, self.trouble))
        self._sure, self._query_at = False, self._clock()

    def order(self, blocks: Iterable[BlockId]) -> None:
        """Submit these blocks; an order that is heard twice is one."""
        for id in blocks:
            if id in self._over:
                self._updates.append(self._over[id])
            elif id not in self.blocks:
                self.blocks[id] = KeptBlock(id)

    def cancel(self, blocks: Iterable[BlockId], reason: str) -> None:
        """Cancel these blocks."""
        for id in blocks:
            if id in self.blocks:
                self.blocks[id].cancel = self.blocks[id].cancel or reason or "no longer wanted"

    def cancel_waiting(self, reason: str) -> None:
        """Cancel every block that does not run yet."""
        self.cancel([kept.block for kept in self.blocks.values() if kept.phase is not BlockPhase.RUNNING], reason)

    # ---- what is done about it

    def due_in(self) -> float | None:
        """Seconds until there is something to do; None = nothing before the next order."""
        now = self._clock()
        if self._told and self._updates:
            return 0.0
        if not self._told or (not self.blocks and not self._unresolved and self._sure):
            return None
        at = max(self._query_at, now + self._query_waits_s())
        if not self._sure or any(kept.is_to_cancel(now) for kept in self.blocks.values()):
            at = now
        elif self._unresolved:
            at = min(at, max(self._search_at, now + self._query_waits_s()))
        elif self._has_to_submit():
            at = min(at, now + self._submission_waits_s())
        return max(0.0, max(at, self._not_before) - now)

    def step(self) -> list[FactoryUpdate]:
        """Do what is due; what the manager should hear."""
        try:
            self._step()
        except (BatchTrouble, SubmissionRefused) as error:
            self._troubled(str(error))
        except Exception as error:  # a provider's own fault: it must not stop the other blocks
            log.exception("source %s", self.name)
            self._troubled(f"{type(error).__name__}: {error}")
        else:
            self._pause_s = SOON_S
            self._tell_trouble(self._tries.no_answer if self._has_to_submit() else "")
        updates, self._updates = self._updates, []
        return updates

    def end(self, *, until: float) -> list[str]:
        """Cancel every job of the session on this site and wait until they are gone; the ids of those that are left at
        `until` (on this keeper's clock)."""
        left = {kept.job for kept in self.blocks.values() if kept.job} | self._given_up
        cancelled: set[str] = set()
        told_at, pause_s = float("-inf"), min(SOON_S, self._poll_s)
        while True:
            try:
                batch = self._batch_system()
                if self._clock() - told_at >= CANCEL_AGAIN_S / 3:  # before any listing, which may lack jobs
                    self._cancel_named(batch, self._unresolved)
                    cancelled, told_at = set(), self._clock()
                if left - cancelled:
                    batch.cancel(sorted(left - cancelled))
                    cancelled |= left
                jobs = sorted(left | {job for job, block in batch.find().items() if self._is_mine(block)})
                statuses = batch.query(jobs) if jobs else {}
                left = {job for job in jobs if not _is_over(statuses.get(job), cancelled=job in cancelled)}
                if not left:
                    return []
                if left - cancelled:
                    continue
            except StokerError as error:
                log.warning("source %s: %s", self.name, error)
                if self._batch is None:  # it was never there, so that nothing was ever submitted
                    return sorted(left)
            if self._clock() >= until:
                return sorted(left)
            time.sleep(max(0.0, min(pause_s, until - self._clock())))
            pause_s = min(1.5 * pause_s, self._poll_s)

    # ---- a step

    def _step(self) -> None:
        now = self._clock()
        if not self._told or now < self._not_before:
            return
        try:
            batch = self._batch_system()
        except StokerError as error:
            if any(kept.job for kept in self.blocks.values()):
                raise
            self._refuse_all(str(error))
            return
        may_query = not self._query_waits_s()
        search_due = now >= self._search_at and (now >= self._query_at or self._unresolved) and may_query
        if not self._sure or search_due:
            self._search(batch)
        self._carry_out_cancels(batch)
        if self._clock() >= self._query_at and may_query:
            self._query_all(batch)
        if not self._unresolved and not self._submission_waits_s():
            self._submit_one(batch)

    def _has_to_submit(self) -> bool:
        return any(kept.phase is BlockPhase.ASKED for kept in self.blocks.values())

    def _query_waits_s(self) -> float:
        """How long a query has to wait for the budget of requests. One that is long overdue needs only one token."""
        if self._pacer is None:
            return 0.0
        overdue = self._clock() - self._query_at > _OVERDUE * self._poll_s
        return self._pacer.wait_s(leaving=0.0 if overdue else FOR_QUERIES)

    def _submission_waits_s(self) -> float:
        return 0.0 if self._pacer is None else self._pacer.wait_s(leaving=FOR_SUBMISSIONS)

    def _batch_system(self) -> Batch:
        if self._batch is None:
            log.info("source %s: opening its batch system", self.name)
            self.opening_since = self._clock()
            try:
                self._batch = self._make()
            finally:
                self.opening_since = None
        return self._batch

    def _search(self, batch: Batch) -> None:
        """Find what is there."""
        found = {job: block for job, block in batch.find().items() if self._is_mine(block)}
        owned = {kept.job for kept in self.blocks.values() if kept.job}
        strange = [job for job in found if job not in owned]
        statuses = batch.query(strange) if strange else {}
        gone = {job for job, status in statuses.items() if status.leaving}
        strange = [job for job in strange if job not in gone]
        phases = {job: statuses[job].phase for job in strange if job in statuses}
        over = {job for job in strange if _is_over(statuses.get(job))}
        strays = []
        # Of two jobs of a block the one that runs is kept, sooner than one that waits or is over.
        for job in sorted(strange, key=lambda job: (job in over, phases.get(job) is not BlockPhase.RUNNING)):
            kept = self.blocks.get(found[job])
            if kept is not None and not kept.job:
                log.info("block %s: found as job %s", kept.block, job)
                self._submitted(kept, job)
            elif kept is None and found[job] not in self._over and job not in over:
                log.warning("block %s: job %s is of a block that the manager did not name", found[job], job)
                self.blocks[found[job]] = KeptBlock(found[job], job, BlockPhase.PENDING, is_unknown=True)
                self._query_at = self._clock()
            elif job not in over:
                strays.append(job)
        if strays:
            log.warning("source %s: jobs %s are of no block that is wanted: cancelled", self.name, ", ".join(strays))
            batch.cancel(strays)
        self._resolve(set(found.values()))
        self._sure = True
        self._search_at = self._clock() + (self._poll_s if self._unresolved else SEARCH_EVERY_S)

    def _resolve(self, found: set[BlockId]) -> None:
        """Note which submissions have made a job after all, and which certainly have not."""
        for block in sorted(self._unresolved):
            if block in found:
                self._absences.listed(block)
                self._unresolved.discard(block)
            elif self._absences.missed(block):
                log.info("block %s: its submission has made no job", block)
                self._unresolved.discard(block)

    def _is_mine(self, block: BlockId) -> bool:
        return self._owners.get(block, self.name) == self.name

    def _carry_out_cancels(self, batch: Batch) -> None:
        now = self._clock()
        unsubmitted = [kept for kept in self.blocks.values() if kept.cancel and not kept.job]
        self._cancel_named(batch, self._unresolved.intersection(kept.block for kept in unsubmitted))
        for kept in unsubmitted:
            self._end(kept, BlockPhase.ENDED, f"cancelled before it was submitted: {kept.cancel}")
        due = [kept for kept in self.blocks.values() if kept.is_to_cancel(now)]
        if due:
            batch.cancel([kept.job for kept in due])
            for kept in due:
                kept.cancelled_at = self._clock()
            self._hurry_s = SOON_S
            self._query_at = min(self._query_at, now + min(SOON_S, self._poll_s))

    def _cancel_named(self, batch: Batch, blocks: Collection[BlockId]) -> None:
        """Cancel jobs that these blocks may have, and that no listing has shown."""
        if blocks and isinstance(batch, CancelsByName):
            log.info("source %s: jobs of %s are cancelled by their names", self.name, ", ".join(sorted(blocks)))
            batch.cancel_named(sorted(blocks))

    def _query_all(self, batch: Batch) -> None:
        jobs = {kept.job: kept for kept in self.blocks.values() if kept.job}
        began = self._clock()
        if jobs:
            for job, status in batch.query(list(jobs)).items():
                if job in jobs and self._is_certain(jobs[job], status):
                    self._saw(jobs[job], status)
        now = self._clock()
        every_s = poll_period_s(self._poll_s, self._pacer, took_s=now - began)
        if any(kept.cancel for kept in self.blocks.values()):  # soon, and then less and less soon
            every_s, self._hurry_s = min(self._hurry_s, every_s), 2 * self._hurry_s
        self._query_at = now + every_s

    def _is_certain(self, kept: KeptBlock, status: BatchJobStatus) -> bool:
        """Whether a status tells how the job is: not if one listing lacks the job, which others may have."""
        if not status.absent:
            self._absences.listed(kept.job)
            return True
        is_over = self._absences.missed(kept.job) or bool(kept.cancelled_at)
        if is_over:
            self._given_up.add(kept.job)
        return is_over

    def _saw(self, kept: KeptBlock, status: BatchJobStatus) -> None:
        kept.cause, kept.advice, kept.holds = status.cause, status.advice, status.holds
        if status.phase is BlockPhase.ENDED:
            by_us = kept.cancelled_at and status.reason != "done"  # whatever else the batch system may call it
            kept.loss = None if by_us else status.loss
            self._end(kept, status.phase, f"cancelled: {kept.cancel}" if by_us else status.reason)
            return
        if status.phase is BlockPhase.RUNNING:
            kept.loss = None
        elif status.loss is not None or status.again:
            kept.again, kept.loss = status.again, status.loss
        elif kept.phase is BlockPhase.RUNNING:
            kept.again, kept.loss = "queued again, since it was preempted or its node failed", LossReason.VACATED
        reason = (
            f"{kept.again}: {status.reason}" if kept.again and status.phase is BlockPhase.PENDING else status.reason
        )
        expected_at = self._clock() + status.expected_in_s if status.expected_in_s else 0.0
        moved = abs(expected_at - kept.expected_at) > EXPECTED_SLACK_S
        kept.phase = status.phase
        if moved or kept.told != (status.phase, kept.job, reason, kept.loss, kept.holds):
            kept.expected_at = expected_at
            self._tell(kept, reason, expected_in_s=status.expected_in_s)

    def _submit_one(self, batch: Batch) -> None:
        kept = next((kept for kept in self.blocks.values() if kept.phase is BlockPhase.ASKED and not kept.job), None)
        if kept is None or kept.cancel:
            return
        if kept.tried and (reason := self._tries.why_refused):
            self._end(kept, BlockPhase.REFUSED, reason)
            return
        self._sure = False  # until it is known what has come of it
        self._unresolved.add(kept.block)
        kept.tried = True
        try:
            job = batch.submit(kept.block)
        except SubmissionRefused as error:
            self._unresolved.discard(kept.block)
            self._tries.answered()
            self._end(kept, BlockPhase.REFUSED, str(error))
        except Unanswered as error:
            self._tries.unanswered(str(error))
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
        self._tries.answered()
        self._unresolved.discard(kept.block)
        kept.job, kept.phase = job, BlockPhase.PENDING
        if not any(other.phase is BlockPhase.ASKED for other in self.blocks.values()):
            self._query_at = min(self._query_at, self._clock() + min(SOON_S, self._poll_s))
        self._tell(kept, "")

    # ---- what is said

    def _tell(self, kept: KeptBlock, reason: str, *, expected_in_s: float = 0.0) -> BlockUpdate:
        kept.told = (kept.phase, kept.job, reason, kept.loss, kept.holds)
        source = self.name if kept.is_unknown else ""
        why = (kept.loss, source, kept.cause, kept.advice, kept.holds)
        update = BlockUpdate(kept.block, kept.phase, kept.job, reason, expected_in_s, *why)
        self._updates.append(update)
        return update

    def _end(self, kept: KeptBlock, phase: BlockPhase, reason: str) -> None:
        kept.phase = phase
        update = self._tell(kept, reason)
        log.info("block %s%s: %s: %s", kept.block, f" (job {kept.job})" if kept.job else "", phase.value, reason)
        del self.blocks[kept.block]
        self._over[kept.block] = msgspec.structs.replace(update, source=self.name)

    def _refuse_all(self, reason: str) -> None:
        for kept in list(self.blocks.values()):
            self._end(kept, BlockPhase.REFUSED, reason)
        self._sure = True

    def _troubled(self, text: str) -> None:
        if text:
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, max(_LONGEST_PAUSE * self._poll_s, SOON_S))
        self._tell_trouble(text)

    def _tell_trouble(self, text: str) -> None:
        if text != self.trouble:
            self.trouble = text
            log.warning("source %s: %s", self.name, text or "works again")
            self._updates.append(SourceTrouble(self.name, text))


def _is_over(status: BatchJobStatus | None, *, cancelled: bool = False) -> bool:
    """Whether a job is over. One that the batch system does not account for is, if it was cancelled before."""
    return status is not None and status.phase is BlockPhase.ENDED and (cancelled or not status.absent)


def _number(block: BlockId) -> int:
    digits = block.removeprefix("b")
    return int(digits) if digits.isdigit() else 0


# ---- worker


class Sync(msgspec.Struct, frozen=True):
    """What the manager knows of the site's blocks."""

    blocks: tuple[KnownBlock, ...]


class BlockOrders(msgspec.Struct, frozen=True):
    """Submit these blocks."""

    blocks: tuple[BlockId, ...]


class BlockCancels(msgspec.Struct, frozen=True):
    """Cancel these blocks."""

    blocks: tuple[BlockId, ...]
    reason: str


class CancelWaiting(msgspec.Struct, frozen=True):
    """Cancel every block that does not run yet, and stop when that is done, or after `limit_s`."""

    reason: str
    limit_s: float


class CancelAll(msgspec.Struct, frozen=True):
    """Cancel everything, and stop when it is gone, or after `limit_s`."""

    limit_s: float


class BatchThreadEnded(msgspec.Struct, frozen=True):
    """A worker has done what `CancelAll` or `CancelWaiting` wanted; `left` are ids of jobs that are still there."""

    source: str
    left: tuple[str, ...]


Message = Sync | BlockOrders | BlockCancels | CancelWaiting | CancelAll


class BatchThread(threading.Thread):
    """Steps a keeper. `say` is called on this thread with updates for the manager, and at the end with
    `BatchThreadEnded`."""

    def __init__(self, keeper: BlockKeeper, *, say: Callable[[FactoryUpdate | BatchThreadEnded], None]) -> None:
        super().__init__(name=f"stoker-source-{keeper.name}", daemon=True)
        self.keeper = keeper
        self._say = say
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def tell(self, message: Message) -> None:
        """Give an order, from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Until `CancelAll` or `CancelWaiting`."""
        while True:
            try:
                message: Message | None = self._inbox.get(timeout=self.keeper.due_in())
            except queue.Empty:
                message = None
            while message is not None:
                if isinstance(message, CancelAll | CancelWaiting):
                    self._say(BatchThreadEnded(self.keeper.name, tuple(self._finish(message))))
                    return
                self._take(message)
                message = None if self._inbox.empty() else self._inbox.get()
            self._step()

    def _take(self, message: Sync | BlockOrders | BlockCancels) -> None:
        match message:
            case Sync(blocks):
                self.keeper.sync(blocks)
            case BlockOrders(blocks):
                self.keeper.order(blocks)
            case BlockCancels(blocks, reason):
                self.keeper.cancel(blocks, reason)

    def _step(self) -> None:
        for update in self.keeper.step():
            self._say(update)

    def _finish(self, message: CancelAll | CancelWaiting) -> list[str]:
        until = time.monotonic() + message.limit_s
        if isinstance(message, CancelAll):
            return self.keeper.end(until=until)
        self.keeper.cancel_waiting(message.reason)
        while waiting := [kept.job for kept in self.keeper.blocks.values() if kept.cancel]:
            if time.monotonic() >= until:
                return waiting
            time.sleep(min(self.keeper.due_in() or 0.0, 1.0))
            self._step()
        return []

"""Pass the manager's orders to one thread per site, and the updates of these threads to the manager.

The factory process ends with the session, or if a new manager has started another factory. If no manager answers for
longer than the session's lease, the factory first cancels the blocks that have not started. Updates are sent in
numbered frames. The factory keeps a frame until the manager has acknowledged it, and sends it again after each
reconnection.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from stoker.dealer import CurveKeys, Dealer
from stoker.errors import ProtocolError, SessionError
from stoker.log_files import RateLimitedLog
from stoker.manager.factory.batch import JOBS_LEFT, BatchSystem, job_name
from stoker.manager.factory.batches import open_batch_system
from stoker.manager.factory.keeper import BlockKeeper, FactoryUpdate
from stoker.manager.factory.pacing import RequestPacer
from stoker.manager.factory.pilot_command import is_block_key_issued, revoke_block_key
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.blocks import BlockOrder, BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble
from stoker.protocol.wire import Outbox
from stoker.site import KINDS_THAT_EXCLUDE_NODES, ProviderKind, Site, node_exclusion_warning

log = logging.getLogger("stoker.factory")

CANCELLATION_LIMIT_S = 30.0
_THREAD_ANSWER_S = 5.0
ADDRESS_REFRESH_INTERVAL_S = 1.0
OPENING_LIMIT_S = 60.0
"""If opening a batch system takes longer than this, the factory reports it to the manager."""
_LIST_NEW_JOBS_AT_ONCE = (ProviderKind.LOCAL, ProviderKind.KUBERNETES)
HELLO_ANSWER_LIMIT_S = 20.0
"""If the manager has not answered a hello for this many seconds, the factory sends the hello again."""


class FactoryEnd(enum.IntEnum):
    OVER = 0
    FAILED = 1
    REFUSED = 2
    JOBS_LEFT = 3
    MANAGER_AWAY = 4


class FactoryManagerLink:
    def __init__(self, folder: SessionFolder) -> None:
        self._folder = folder
        self.session = folder.read()
        self.outbox = Outbox()
        self._refusals = RateLimitedLog(log)
        self._decode = wire.to_client_decoder()
        pair = folder.read_key("client")
        keys = CurveKeys(self.session.server_key, pair.public, pair.secret)
        self.dealer = Dealer(self.session.address, name=f"factory-{uuid4().hex[:12]}", keys=keys, log=log)

    def handle_connection_changes(self) -> bool:
        """Return True if the connection to the manager is new, so that a hello must be sent. Raises SessionError if the
        manager rejects the factory's key.
        """
        failed = self.dealer.failed_handshakes
        fresh = self.dealer.handle_connection_changes()
        if failed == 0 < self.dealer.failed_handshakes and not self.dealer.refused:
            text = "the process that listens at %s is not the session's manager, or is exiting"
            log.warning(text, self.dealer.address)
        if self.dealer.refused:
            raise SessionError(
                f"the manager of session {self.session.session} refused this factory's key; "
                f"is {self._folder.path} the session's own folder?"
            )
        return fresh

    def send_hello_and_unacknowledged(self) -> None:
        hello = to_manager.ClientHello(
            wire.VERSION, self.session.session, observer=True, factory=True, acknowledged=self.outbox.acknowledged
        )
        for frame in [wire.encode([hello]), *self.outbox.unacknowledged_frames()]:
            self.dealer.send(frame)

    def receive_messages(self) -> list[to_client.ToClient]:
        out: list[to_client.ToClient] = []
        for data in self.dealer.receive():
            try:
                out += self._decode(data).messages
            except ProtocolError as error:
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
        return out

    def send_updates(self, messages: list[FactoryUpdate]) -> None:
        """Send updates to the manager now or, if it is not connected, after the next connection."""
        if messages:
            sequence = self.outbox.take_next_number()
            frame = wire.encode(messages, sequence=sequence)
            self.outbox.keep(sequence, frame)
            if self.dealer.connected:
                self.dealer.send(frame)

    def refresh_address(self) -> None:
        """Read the manager's address again, because a restart may change it."""
        try:
            address = self._folder.read().address
        except SessionError as error:  # the next call reads the file again
            log.debug("session file: %s", error)
            return
        self.dealer.reconnect_to(address)


class BatchThread(threading.Thread):
    """Runs the `BlockKeeper` of one site, so that a batch system that hangs delays no other site.

    An order is a function. The last order returns the jobs that still exist (`remaining_jobs`), the others return None.
    """

    def __init__(self, keeper: BlockKeeper, *, say: Callable[[FactoryUpdate | None], None]) -> None:
        super().__init__(name=f"stoker-source-{keeper.name}", daemon=True)
        self.keeper = keeper
        self.remaining_jobs: list[str] | None = None
        self._send_update = say
        self._inbox: queue.SimpleQueue[Callable[[], list[str] | None]] = queue.SimpleQueue()

    def add_order(self, order: Callable[[], list[str] | None]) -> None:
        self._inbox.put(order)

    def run(self) -> None:
        while self.remaining_jobs is None:
            try:
                self.remaining_jobs = self._inbox.get(timeout=self.keeper.seconds_until_step())()
                while self.remaining_jobs is None and not self._inbox.empty():
                    self.remaining_jobs = self._inbox.get()()
            except queue.Empty:
                pass
            if self.remaining_jobs is None:
                self._run_keeper_step()
        self._send_update(None)

    def _run_keeper_step(self) -> None:
        for update in self.keeper.run_step():
            self._send_update(update)

    def cancel_all_jobs(self, limit_s: float) -> list[str]:
        return self.keeper.cancel_all_jobs(until=time.monotonic() + limit_s)

    def cancel_waiting_blocks(self, reason: str, limit_s: float) -> list[str]:
        """Cancel the blocks that have not started. Return the jobs that still exist after `limit_s` seconds."""
        until = time.monotonic() + limit_s
        self.keeper.mark_waiting_for_cancellation(reason)
        while waiting := [kept.job for kept in self.keeper.blocks.values() if kept.cancel_reason]:
            if time.monotonic() >= until:
                return waiting
            time.sleep(min(self.keeper.seconds_until_step() or 0.0, 1.0))
            self._run_keeper_step()
        return []


class BatchJobFactory:
    """Submits, watches and cancels the batch jobs (blocks) of a session, as the manager orders.

    `parent`: process id of the manager. `python_path`: folders from which pilots import. `end_limit_s`: seconds for
    which the factory tries to cancel all jobs at the end.
    """

    def __init__(
        self,
        folder: SessionFolder,
        *,
        sites: Mapping[str, Site],
        parent: int,
        python_path: str = "",
        end_limit_s: float = CANCELLATION_LIMIT_S,
    ) -> None:
        self._folder = folder
        self._link = FactoryManagerLink(folder)
        self._lease_s = max((site.session.lease_s for site in sites.values()), default=60.0)
        self._owners: dict[BlockId, str] = {}
        self._queued_updates: deque[FactoryUpdate] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._parent = parent
        self._hello_at: float | None = None
        self._has_reported_absence = False
        self._end: FactoryEnd | None = None
        self._slowly_opening_sources: set[str] = set()
        self._has_ordered_end = False
        """True if the threads were ordered to end."""
        polls: dict[ProviderKind, float] = {}
        for site in sites.values():
            if not site.is_local:
                kind = site.provider.kind
                polls[kind] = min(site.provider.poll_s, polls.get(kind, site.provider.poll_s))
        pacers = {kind: RequestPacer(poll_s=poll_s) for kind, poll_s in polls.items()}
        self._threads = {name: self._make_batch_thread(name, site, python_path, pacers) for name, site in sites.items()}
        self._end_limit_s = end_limit_s

    def _make_batch_thread(
        self, name: str, site: Site, python_path: str, pacers: Mapping[ProviderKind, RequestPacer]
    ) -> BatchThread:
        pacer = None if site.is_local else pacers[site.provider.kind]

        def make() -> BatchSystem:
            session = self._link.session.session
            return open_batch_system(site, session=session, folder=self._folder, python_path=python_path, pacer=pacer)

        if not site.is_local and site.provider.kind not in KINDS_THAT_EXCLUDE_NODES:
            log.info("source %s: %s", name, node_exclusion_warning(site.provider.kind))
        keeper = BlockKeeper(
            name,
            make=make,
            owners=self._owners,
            poll_s=site.provider.poll_s,
            was_tried=partial(is_block_key_issued, self._folder),
            lag_s=0.0 if site.is_local or site.provider.kind in _LIST_NEW_JOBS_AT_ONCE else site.provider.listing_lag_s,
            pacer=pacer,
        )
        return BatchThread(keeper, say=self._enqueue)

    def run(self) -> FactoryEnd:
        for worker in self._threads.values():
            worker.start()
        poll = select.poll()
        for descriptor in (*self._link.dealer.filenos(), self._wake_fd):
            poll.register(descriptor, select.POLLIN)
        stop_at = 0.0
        while True:
            if not self._link.dealer.has_input() and not self._queued_updates:
                poll.poll(ADDRESS_REFRESH_INTERVAL_S * 1000)
            self._run_once()
            if self._end is not None:
                stop_at = stop_at or time.monotonic() + self._end_limit_s + _THREAD_ANSWER_S
                is_done = not self._has_ordered_end or all(
                    worker.remaining_jobs is not None for worker in self._threads.values()
                )
                if is_done or time.monotonic() >= stop_at:
                    return self._build_end()

    def close(self) -> None:
        self._link.dealer.close()
        os.close(self._wake_fd)

    def _run_once(self) -> None:
        if self._link.handle_connection_changes():
            if os.getppid() != self._parent:
                log.info("a new manager has started another factory: this factory exits")
                self._end = self._end or FactoryEnd.OVER
                return
            self._send_hello()
        for message in self._link.receive_messages():
            self._handle_message(message)
        self._send_queued_updates()
        self._report_slow_openings()
        if not self._link.dealer.connected:
            self._handle_missing_manager()
        elif self._hello_at is not None and time.monotonic() - self._hello_at > HELLO_ANSWER_LIMIT_S:
            log.warning(
                "the manager has not answered a hello for %.0f s: the hello is sent again", HELLO_ANSWER_LIMIT_S
            )
            self._send_hello()

    def _send_hello(self) -> None:
        log.info("connected to the manager at %s: sending a hello", self._link.dealer.address)
        self._hello_at, self._has_reported_absence = time.monotonic(), False
        self._link.send_hello_and_unacknowledged()

    def _send_queued_updates(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        updates = []
        while self._queued_updates:
            said = self._queued_updates.popleft()
            updates.append(said)
            if isinstance(said, BlockUpdate):
                if said.source:  # the factory needs the block's site to cancel the block
                    self._owners.setdefault(said.block, said.source)
                if said.phase in (BlockPhase.ENDED, BlockPhase.REFUSED):
                    revoke_block_key(self._folder, said.block)
        self._link.send_updates(updates)

    def _report_slow_openings(self) -> None:
        now = time.monotonic()
        for name, worker in self._threads.items():
            since = worker.keeper.opening_since
            if since is None and name in self._slowly_opening_sources:
                self._slowly_opening_sources.discard(name)
                self._link.send_updates([SourceTrouble(name, worker.keeper.trouble)])
            elif since is not None and now - since > OPENING_LIMIT_S and name not in self._slowly_opening_sources:
                self._slowly_opening_sources.add(name)
                text = f"its batch system has not been ready for {OPENING_LIMIT_S:.0f} s; does a file system hang?"
                log.warning("source %s: %s", name, text)
                self._link.send_updates([SourceTrouble(name, text)])

    def _enqueue(self, said: FactoryUpdate | None) -> None:
        if said is not None:
            self._queued_updates.append(said)
        os.eventfd_write(self._wake_fd, 1)

    # ---- orders of the manager

    def _handle_message(self, message: to_client.ToClient) -> None:
        match message:
            case to_client.KnownBlocks(blocks):
                self._adopt_known_blocks(blocks)
            case to_client.SubmitBlocks(orders):
                self._order_submissions(orders)
            case to_client.CancelBlocks(blocks, reason):
                self._order_cancellations(blocks, reason)
            case to_client.SessionOver(reason):
                log.info("the session is over: %s", reason or "it was ended")
                self._begin_shutdown(FactoryEnd.OVER, lambda worker: worker.cancel_all_jobs(self._end_limit_s))
            case to_client.Ack(sequence):
                self._link.outbox.acknowledge(sequence)
            case to_client.ClientRefused(reason):
                log.critical("the manager refused this factory: %s", reason)
                self._end = self._end or FactoryEnd.REFUSED
            case to_client.Rejected(reason):
                log.warning("the manager did not accept a message: %s", reason)

    def _adopt_known_blocks(self, blocks: tuple[KnownBlock, ...]) -> None:
        log.info("the manager reports %d blocks that have not ended", len(blocks))
        self._hello_at = None
        ours = [block for block in blocks if self._assign_owner(block.block, block.source)]
        for name, worker in self._threads.items():
            worker.add_order(
                partial(worker.keeper.match_manager_blocks, [block for block in ours if block.source == name])
            )

    def _order_submissions(self, orders: tuple[BlockOrder, ...]) -> None:
        for order in orders:
            if self._assign_owner(order.block, order.source):
                worker = self._threads[order.source]
                worker.add_order(partial(worker.keeper.add_ordered_blocks, [order.block], order.allowed))

    def _assign_owner(self, block: BlockId, source: str) -> bool:
        if source in self._threads:
            self._owners[block] = source
            return True
        there = ", ".join(sorted(self._threads)) or "none"
        reason = f"the session has no site file named {source}; its site files: {there}"
        self._link.send_updates([BlockUpdate(block, BlockPhase.REFUSED, reason=reason)])
        return False

    def _order_cancellations(self, blocks: tuple[BlockId, ...], reason: str) -> None:
        for block in blocks:
            owner = self._owners.get(block)
            if owner is None:
                self._link.send_updates(
                    [BlockUpdate(block, BlockPhase.ENDED, reason="cancelled: it was never submitted")]
                )
            else:
                self._threads[owner].add_order(
                    partial(self._threads[owner].keeper.mark_for_cancellation, [block], reason)
                )

    # ---- the end

    def _begin_shutdown(self, ending: FactoryEnd, order: Callable[[BatchThread], list[str]]) -> None:
        if self._end is None:
            self._end, self._has_ordered_end = ending, True
            for worker in self._threads.values():
                worker.add_order(partial(order, worker))

    def _handle_missing_manager(self) -> None:
        if self._end is not None:
            return
        self._link.refresh_address()
        if why := self._folder.end_reason():
            self._handle_message(to_client.SessionOver(why))
            return
        away_s = time.monotonic() - self._link.dealer.lost_at
        if away_s > self._lease_s:
            reason = f"the manager has been away for {away_s:.0f} s"
            log.warning("%s: waiting blocks are cancelled", reason)
            self._begin_shutdown(
                FactoryEnd.MANAGER_AWAY, lambda worker: worker.cancel_waiting_blocks(reason, self._end_limit_s)
            )
        elif away_s > HELLO_ANSWER_LIMIT_S and not self._has_reported_absence:
            self._has_reported_absence = True
            text = "no manager has answered at %s for %.0f s: after %.0f s waiting blocks are cancelled"
            log.warning(text, self._link.dealer.address, away_s, self._lease_s)

    def _build_end(self) -> FactoryEnd:
        ending = self._end or FactoryEnd.OVER
        if not self._has_ordered_end:
            return ending
        left = []
        for name, worker in sorted(self._threads.items()):
            jobs = worker.remaining_jobs
            if jobs is None:
                log.error("source %s did not answer before the factory's end", name)
                # While a job is being submitted, its id is unknown, but its name is known.
                session = self._link.session.session
                jobs = [block.job or job_name(session, block.block) for block in list(worker.keeper.blocks.values())]
            if jobs:
                left.append(f"{name}: {' '.join(sorted(jobs))}")
        if left:
            log.error("cancel the remaining jobs by hand: %s", "; ".join(left))
        if ending is FactoryEnd.OVER:
            write_jobs_left(self._folder.path / JOBS_LEFT, left)
            return FactoryEnd.JOBS_LEFT if left else ending
        return ending


def write_jobs_left(file: Path, left: Sequence[str]) -> None:
    """Write the remaining jobs. On failure remove the file, because an empty file would mean that no job remains."""
    try:
        file.write_text("".join(f"{line}\n" for line in left))
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error.strerror)
        with suppress(OSError):
            file.unlink(missing_ok=True)

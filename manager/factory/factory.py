"""The factory's loop passes the manager's orders to the threads of the sites, and the threads' updates to the manager.

The loop ends with the session, or if a new manager has started another factory. If the manager is absent for longer
than the session's lease, waiting blocks are cancelled first. The factory sends updates in numbered frames. It keeps
each frame until acknowledged, and resends it after every connection.
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

from stoker.dealer import Dealer, Keys
from stoker.errors import ProtocolError, SessionError
from stoker.log_files import RateLimitedLog
from stoker.manager.factory.batch import JOBS_LEFT, Batch, job_name
from stoker.manager.factory.batches import make_batch
from stoker.manager.factory.keeper import BlockKeeper, FactoryUpdate
from stoker.manager.factory.pacing import Pacer
from stoker.manager.factory.pilot_command import is_block_key_issued, revoke_block_key
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.blocks import BlockOrder, BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble
from stoker.protocol.wire import Outbox
from stoker.site import EXCLUDES_NODES, ProviderKind, Site, node_exclusion_warning

log = logging.getLogger("stoker.factory")

END_LIMIT_S = 30.0
_ANSWER_S = 5.0
REFRESH_ADDRESS_S = 1.0
OPEN_LIMIT_S = 60.0
"""Seconds after which the factory reports that opening a batch system takes too long."""
_LIST_ALL = (ProviderKind.LOCAL, ProviderKind.KUBERNETES)
HELLO_LIMIT_S = 20.0
"""Seconds until the factory repeats an unanswered hello."""


class Ending(enum.IntEnum):
    OVER = 0
    FAILED = 1
    REFUSED = 2
    JOBS_LEFT = 3
    MANAGER_AWAY = 4


class FactoryLink:
    def __init__(self, folder: SessionFolder) -> None:
        self._folder = folder
        self.session = folder.read()
        self.outbox = Outbox()
        self._refusals = RateLimitedLog(log)
        self._decode = wire.to_client_decoder()
        pair = folder.read_key("client")
        keys = Keys(self.session.server_key, pair.public, pair.secret)
        self.dealer = Dealer(self.session.address, name=f"factory-{uuid4().hex[:12]}", keys=keys, log=log)

    def came_back(self) -> bool:
        """Return True if the manager connection is new and needs a hello. Raises SessionError if the manager rejects
        the factory's key.
        """
        failed = self.dealer.failed_handshakes
        fresh = self.dealer.came_back()
        if failed == 0 < self.dealer.failed_handshakes and not self.dealer.refused:
            text = "the process that listens at %s is not the session's manager, or is exiting"
            log.warning(text, self.dealer.address)
        if self.dealer.refused:
            raise SessionError(
                f"the manager of session {self.session.session} refused this factory's key; "
                f"is {self._folder.path} the session's own folder?"
            )
        return fresh

    def greet(self) -> None:
        hello = to_manager.ClientHello(
            wire.VERSION, self.session.session, observer=True, factory=True, acknowledged=self.outbox.acknowledged
        )
        for frame in [wire.encode([hello]), *self.outbox.unacked()]:
            self.dealer.send(frame)

    def receive(self) -> list[to_client.ToClient]:
        out: list[to_client.ToClient] = []
        for data in self.dealer.receive():
            try:
                out += self._decode(data).messages
            except ProtocolError as error:
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
        return out

    def tell(self, messages: list[FactoryUpdate]) -> None:
        """Send updates to the manager now or, without a connection, after the next connection."""
        if messages:
            sequence = self.outbox.next()
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
        self.dealer.move_to(address)


class BatchThread(threading.Thread):
    """Runs the `BlockKeeper` of one site, so that a hanging batch system delays no other site. The last order returns
    the jobs that still exist (`left`). Other orders return None.
    """

    def __init__(self, keeper: BlockKeeper, *, say: Callable[[FactoryUpdate | None], None]) -> None:
        super().__init__(name=f"stoker-source-{keeper.name}", daemon=True)
        self.keeper = keeper
        self.left: list[str] | None = None
        self._say = say
        self._inbox: queue.SimpleQueue[Callable[[], list[str] | None]] = queue.SimpleQueue()

    def tell(self, order: Callable[[], list[str] | None]) -> None:
        self._inbox.put(order)

    def run(self) -> None:
        while self.left is None:
            try:
                self.left = self._inbox.get(timeout=self.keeper.due_in())()
                while self.left is None and not self._inbox.empty():
                    self.left = self._inbox.get()()
            except queue.Empty:
                pass
            if self.left is None:
                self._step()
        self._say(None)

    def _step(self) -> None:
        for update in self.keeper.step():
            self._say(update)

    def end(self, limit_s: float) -> list[str]:
        return self.keeper.end(until=time.monotonic() + limit_s)

    def cancel_waiting(self, reason: str, limit_s: float) -> list[str]:
        """Cancel the blocks that do not run yet. Return jobs that still exist after `limit_s` seconds."""
        until = time.monotonic() + limit_s
        self.keeper.cancel_waiting(reason)
        while waiting := [kept.job for kept in self.keeper.blocks.values() if kept.cancel]:
            if time.monotonic() >= until:
                return waiting
            time.sleep(min(self.keeper.due_in() or 0.0, 1.0))
            self._step()
        return []


class Factory:
    """Submits the blocks of a session. `parent`: process id of the manager. `python_path`: folders from which pilots
    import.
    """

    def __init__(
        self,
        folder: SessionFolder,
        *,
        sites: Mapping[str, Site],
        parent: int,
        python_path: str = "",
        end_limit_s: float = END_LIMIT_S,
    ) -> None:
        self._folder = folder
        self._link = FactoryLink(folder)
        self._lease_s = max((site.session.lease_s for site in sites.values()), default=60.0)
        self._owners: dict[BlockId, str] = {}
        self._said: deque[FactoryUpdate] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._parent = parent
        self._hello_at: float | None = None
        self._spoke_of_it = False
        self._ending: Ending | None = None
        self._stuck: set[str] = set()
        self._stopped = False
        """True if the threads have an order to end."""
        polls: dict[ProviderKind, float] = {}
        for site in sites.values():
            if not site.is_local:
                kind = site.provider.kind
                polls[kind] = min(site.provider.poll_s, polls.get(kind, site.provider.poll_s))
        pacers = {kind: Pacer(poll_s=poll_s) for kind, poll_s in polls.items()}
        self._workers = {name: self._make_batch_thread(name, site, python_path, pacers) for name, site in sites.items()}
        self._end_limit_s = end_limit_s

    def _make_batch_thread(
        self, name: str, site: Site, python_path: str, pacers: Mapping[ProviderKind, Pacer]
    ) -> BatchThread:
        pacer = None if site.is_local else pacers[site.provider.kind]

        def make() -> Batch:
            session = self._link.session.session
            return make_batch(site, session=session, folder=self._folder, python_path=python_path, pacer=pacer)

        if not site.is_local and site.provider.kind not in EXCLUDES_NODES:
            log.info("source %s: %s", name, node_exclusion_warning(site.provider.kind))
        keeper = BlockKeeper(
            name,
            make=make,
            owners=self._owners,
            poll_s=site.provider.poll_s,
            was_tried=partial(is_block_key_issued, self._folder),
            lag_s=0.0 if site.is_local or site.provider.kind in _LIST_ALL else site.provider.listing_lag_s,
            pacer=pacer,
        )
        return BatchThread(keeper, say=self._enqueue)

    def run(self) -> Ending:
        for worker in self._workers.values():
            worker.start()
        poll = select.poll()
        for descriptor in (*self._link.dealer.filenos(), self._wake_fd):
            poll.register(descriptor, select.POLLIN)
        stop_at = 0.0
        while True:
            if not self._link.dealer.readable() and not self._said:
                poll.poll(REFRESH_ADDRESS_S * 1000)
            self._run_once()
            if self._ending is not None:
                stop_at = stop_at or time.monotonic() + self._end_limit_s + _ANSWER_S
                is_done = not self._stopped or all(worker.left is not None for worker in self._workers.values())
                if is_done or time.monotonic() >= stop_at:
                    return self._final_ending()

    def close(self) -> None:
        self._link.dealer.close()
        os.close(self._wake_fd)

    def _run_once(self) -> None:
        if self._link.came_back():
            if os.getppid() != self._parent:
                log.info("a new manager has started another factory: this factory exits")
                self._ending = self._ending or Ending.OVER
                return
            self._send_hello()
        for message in self._link.receive():
            self._handle(message)
        self._send_queued_updates()
        self._watch()
        if not self._link.dealer.connected:
            self._handle_missing_manager()
        elif self._hello_at is not None and time.monotonic() - self._hello_at > HELLO_LIMIT_S:
            log.warning("the manager has not answered a hello for %.0f s: the hello is sent again", HELLO_LIMIT_S)
            self._send_hello()

    def _send_hello(self) -> None:
        log.info("connected to the manager at %s: sending a hello", self._link.dealer.address)
        self._hello_at, self._spoke_of_it = time.monotonic(), False
        self._link.greet()

    def _send_queued_updates(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        updates = []
        while self._said:
            said = self._said.popleft()
            updates.append(said)
            if isinstance(said, BlockUpdate):
                if said.source:  # the factory needs the block's site to cancel the block
                    self._owners.setdefault(said.block, said.source)
                if said.phase in (BlockPhase.ENDED, BlockPhase.REFUSED):
                    revoke_block_key(self._folder, said.block)
        self._link.tell(updates)

    def _watch(self) -> None:
        now = time.monotonic()
        for name, worker in self._workers.items():
            since = worker.keeper.opening_since
            if since is None and name in self._stuck:
                self._stuck.discard(name)
                self._link.tell([SourceTrouble(name, worker.keeper.trouble)])
            elif since is not None and now - since > OPEN_LIMIT_S and name not in self._stuck:
                self._stuck.add(name)
                text = f"its batch system has not been ready for {OPEN_LIMIT_S:.0f} s; does a file system hang?"
                log.warning("source %s: %s", name, text)
                self._link.tell([SourceTrouble(name, text)])

    def _enqueue(self, said: FactoryUpdate | None) -> None:
        if said is not None:
            self._said.append(said)
        os.eventfd_write(self._wake_fd, 1)

    # ---- what the manager says

    def _handle(self, message: to_client.ToClient) -> None:
        match message:
            case to_client.KnownBlocks(blocks):
                self._adopt_known_blocks(blocks)
            case to_client.SubmitBlocks(orders):
                self._submit(orders)
            case to_client.CancelBlocks(blocks, reason):
                self._cancel(blocks, reason)
            case to_client.SessionOver(reason):
                log.info("the session is over: %s", reason or "it was ended")
                self._begin_shutdown(Ending.OVER, lambda worker: worker.end(self._end_limit_s))
            case to_client.Ack(sequence):
                self._link.outbox.acked(sequence)
            case to_client.ClientRefused(reason):
                log.critical("the manager refused this factory: %s", reason)
                self._ending = self._ending or Ending.REFUSED
            case to_client.Rejected(reason):
                log.warning("the manager did not accept a message: %s", reason)

    def _adopt_known_blocks(self, blocks: tuple[KnownBlock, ...]) -> None:
        log.info("the manager reports %d blocks that have not ended", len(blocks))
        self._hello_at = None
        ours = [block for block in blocks if self._assign_owner(block.block, block.source)]
        for name, worker in self._workers.items():
            worker.tell(partial(worker.keeper.sync, [block for block in ours if block.source == name]))

    def _submit(self, orders: tuple[BlockOrder, ...]) -> None:
        for order in orders:
            if self._assign_owner(order.block, order.source):
                worker = self._workers[order.source]
                worker.tell(partial(worker.keeper.order, [order.block], order.allowed))

    def _assign_owner(self, block: BlockId, source: str) -> bool:
        if source in self._workers:
            self._owners[block] = source
            return True
        there = ", ".join(sorted(self._workers)) or "none"
        reason = f"the session has no site file named {source}; its site files: {there}"
        self._link.tell([BlockUpdate(block, BlockPhase.REFUSED, reason=reason)])
        return False

    def _cancel(self, blocks: tuple[BlockId, ...], reason: str) -> None:
        for block in blocks:
            owner = self._owners.get(block)
            if owner is None:
                self._link.tell([BlockUpdate(block, BlockPhase.ENDED, reason="cancelled: it was never submitted")])
            else:
                self._workers[owner].tell(partial(self._workers[owner].keeper.cancel, [block], reason))

    # ---- the end

    def _begin_shutdown(self, ending: Ending, order: Callable[[BatchThread], list[str]]) -> None:
        if self._ending is None:
            self._ending, self._stopped = ending, True
            for worker in self._workers.values():
                worker.tell(partial(order, worker))

    def _handle_missing_manager(self) -> None:
        if self._ending is not None:
            return
        self._link.refresh_address()
        if why := self._folder.over():
            self._handle(to_client.SessionOver(why))
            return
        away_s = time.monotonic() - self._link.dealer.lost_at
        if away_s > self._lease_s:
            reason = f"the manager has been away for {away_s:.0f} s"
            log.warning("%s: waiting blocks are cancelled", reason)
            self._begin_shutdown(Ending.MANAGER_AWAY, lambda worker: worker.cancel_waiting(reason, self._end_limit_s))
        elif away_s > HELLO_LIMIT_S and not self._spoke_of_it:
            self._spoke_of_it = True
            text = "no manager has answered at %s for %.0f s: after %.0f s waiting blocks are cancelled"
            log.warning(text, self._link.dealer.address, away_s, self._lease_s)

    def _final_ending(self) -> Ending:
        ending = self._ending or Ending.OVER
        if not self._stopped:
            return ending
        left = []
        for name, worker in sorted(self._workers.items()):
            jobs = worker.left
            if jobs is None:
                log.error("source %s did not answer before the factory's end", name)
                # A job whose submission is in progress has no id yet, but has a name.
                session = self._link.session.session
                jobs = [block.job or job_name(session, block.block) for block in list(worker.keeper.blocks.values())]
            if jobs:
                left.append(f"{name}: {' '.join(sorted(jobs))}")
        if left:
            log.error("cancel the remaining jobs by hand: %s", "; ".join(left))
        if ending is Ending.OVER:
            write_jobs_left(self._folder.path / JOBS_LEFT, left)
            return Ending.JOBS_LEFT if left else ending
        return ending


def write_jobs_left(file: Path, left: Sequence[str]) -> None:
    """Write the remaining jobs. On a full disk, remove the file, because an empty file means no jobs."""
    try:
        file.write_text("".join(f"{line}\n" for line in left))
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error.strerror)
        with suppress(OSError):
            file.unlink(missing_ok=True)

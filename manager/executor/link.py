"""The client's end of the wire: one socket, one thread that reads it, and calls that leave on the caller's thread.

How a call leaves. `submit` puts it in a queue. While few calls are in flight, the caller's thread sends the queue: a
program that waits for one result at a time pays no thread switch. While many are in flight, it wakes the I/O thread,
which sends all that has piled up as one frame: consecutive calls of one submission are one `Submit`. Nothing waits to
form a batch; batches form because the interpreter runs one thread at a time.

Why the lock. Several threads may use a ZeroMQ socket if a fence separates their uses. `_lock` is the fence; a thread
holds it to send or to read frames, never to settle a future. The I/O thread sleeps in `poll(2)` on the socket's file
descriptor, which is edge-triggered: a send by another thread may swallow the edge of a frame that came in meanwhile. So
a thread that has sent checks ZMQ_EVENTS, and wakes the I/O thread if there is something to read.

What survives. Frames are numbered and kept until the manager has them in its journal. A manager that has lost a part of
that journal asks for everything again (`Outgoing.resubmit_everything`). After a reconnection the hello goes first, and
after the welcome all unacknowledged frames, in order. Results are numbered too, and repeated ones are dropped. While
the manager is away, the session file tells where it listens when it was started again (`membership`).
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from stoker.dealer import COPY_BELOW, ConnectionChange, Dealer, Keys
from stoker.errors import ProtocolError, SessionError, StreamDiffersError
from stoker.log_files import SeldomLog
from stoker.manager.executor.clocks import on_this_clock
from stoker.manager.executor.describing import describe
from stoker.manager.executor.membership import CHECK_EVERY_S, Membership
from stoker.manager.executor.outgoing import Outgoing, Replaced, Submission, Waiter
from stoker.manager.executor.packing import LargeArguments
from stoker.manager.executor.piece_inbox import PieceInbox, wake_tasks
from stoker.manager.executor.questions import Questions
from stoker.manager.executor.session_errors import forked_process, other_python, refused_key, session_over
from stoker.manager.executor.settling import Settling, callbacks
from stoker.manager.executor.waiting import WaitingCalls
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallSpec, Features, Payload
from stoker.protocol.ids import CLIENT_SHIFT, CallId, ClientId, FunctionKey
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import JOURNAL

logger = logging.getLogger(__name__)

DIRECT_BELOW = 8
"""With fewer calls in flight than this, the submitting thread sends by itself."""
MANY, GATHER_S = 128, 0.001
"""With `MANY` calls in flight, the I/O thread waits a millisecond so that more of them share a frame."""
SETTLE_LIMIT_S = 2.0
"""`close` waits so long for the next result or callback to be done."""


class Link:
    """A client's connection to its manager. Any thread may call every method; only those with a time limit block.

    With `observer`, the client asks and never submits; the session does not depend on it.
    """

    def __init__(self, folder: SessionFolder, *, observer: bool = False) -> None:
        self.folder = folder
        self.membership = Membership(folder)
        self.session = self.membership.session
        if not observer and not self.session.is_for_this_python:
            raise other_python(self.session)
        self.large = LargeArguments(folder.objects)
        self.waiting = WaitingCalls(self.large)
        self.settling = Settling("results")
        self._observer = observer
        self._client = ClientId(f"client-{uuid4().hex[:12]}")
        self._out = Outgoing(self.waiting.waiters, describe=lambda recipe: describe(recipe, folder.objects))
        self._questions = Questions()
        self._taken: deque[to_manager.PiecesTaken] = deque()
        """Acknowledgements of pieces that have not left."""
        self._may_lack_pieces = False
        """Whether pieces may have been lost with a connection, and are to be asked for."""
        self._first_id = 0
        """This client's number, in the upper bits of its calls' ids."""
        self._sequence = itertools.count()
        self._joined = self.membership.joined
        self.journal_trouble = ""
        """Why the manager cannot write its journal, as it said last; empty while it can. Calls and results wait."""
        self._over: Exception | None = None
        self._finished = threading.Event()
        self._stop = False
        self._woken = False
        self._lock = threading.Lock()
        self._decode = wire.to_client_decoder()
        self._refusals = SeldomLog(logger)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        pair = folder.read_key("client")
        self._dealer = Dealer(
            self.session.address,
            name=self._client,
            keys=Keys(self.session.server_key, pair.public, pair.secret),
            log=logger,
            reconnect_ms=(50, 1000),
        )
        self._socket = self._dealer.socket
        self._socket_fd, self._monitor_fd = self._dealer.filenos()
        _links.add(self)
        self._thread = threading.Thread(target=self._run, name="stoker-link", daemon=True)
        self._thread.start()

    # ---- what the rest of the client calls

    def wait_joined(self, timeout_s: float) -> None:
        """Wait for the manager's welcome. A wait of several seconds is logged with its reason. Raises SessionError."""
        if self._over is None:
            self.membership.wait(timeout_s, journal_trouble=lambda: self.journal_trouble)
        if self._over is not None:
            raise self._over

    def has_sent(self, key: str) -> bool:
        """True if calls of this client have used the context of this key."""
        return self._out.has_sent(key)

    def why_silent(self) -> str:
        """Why the manager may not answer although the connection to it stands; empty if there is no connection."""
        if self._over is not None or not self._joined.is_set():
            return ""
        return self.membership.why_silent()

    def submit(
        self,
        submission: Submission,
        payload: Payload,
        waiter: Waiter,
        *,
        features: Features | None = None,
        inbox: PieceInbox | None = None,
    ) -> CallId:
        """Send a call; `waiter` gets its end, and `inbox` its pieces. Raises SessionError if the session is over; where
        it ends meanwhile, the waiter gets that error."""
        if self._over is not None:
            raise self._over
        call = CallId(self._first_id | next(self._sequence))
        self.waiting.add(call, payload, waiter, members=submission.members, inbox=inbox)
        self._out.queue.append((submission, CallSpec(call, payload, features)))
        if len(self.waiting.waiters) < DIRECT_BELOW:
            self._send_now()
        elif not self._woken:
            self.wake()
        self._fail_if_over()
        return call

    def submit_many(
        self, submission: Submission | Sequence[Submission], payloads: Iterable[Payload], waiter: Waiter
    ) -> list[CallId]:
        """Send calls of one submission, or each of its own, with one waiter for all. Raises SessionError if the session
        is over."""
        if self._over is not None:
            raise self._over
        first_id, sequence = self._first_id, self._sequence
        specs = [CallSpec(CallId(first_id | next(sequence)), payload) for payload in payloads]
        calls = self.waiting.add_all(specs, waiter)
        if isinstance(submission, Submission):
            self._out.queue.extend([(submission, spec) for spec in specs])
        else:
            self._out.queue.extend(zip(submission, specs, strict=True))
        self._send_now()
        self._fail_if_over()
        return calls

    def cancel(self, calls: Iterable[CallId], *, running: bool = True) -> None:
        """Cancel these calls. Their waiters are not called."""
        gone = self.waiting.give_up(calls)
        if gone and self._over is None:
            self.tell(to_manager.Cancel(gone, running))

    def acknowledge(self, taken: to_manager.PiecesTaken) -> None:
        """Tell the manager that there is room for more pieces of a call."""
        self._taken.append(taken)
        self._send_now()

    def replace_function(self, function: FunctionKey, *, by: FunctionKey) -> None:
        """Let the manager forget a function after the calls submitted so far: further calls name another one. The next
        frame says so."""
        self._out.queue.append(Replaced(function, by))

    def tell(self, message: Any) -> None:
        """Send a message, after all that was submitted before it."""
        self._out.queue.append(message)
        self._send_now()

    def tell_later(self, message: Any) -> None:
        """Send a message with the next frame, whatever makes that one leave."""
        self._out.queue.append(message)

    def ask_status(self) -> Future[to_client.Status]:
        """Ask for the state of the session. Cancelling the future gives the question up."""
        return self._ask(to_manager.AskStatus(), answer=to_client.Status)

    def ask_story(self, subject: str) -> Future[to_client.Story]:
        """Ask why a call, pilot, library or context is where it is. Cancelling the future gives the question up."""
        return self._ask(to_manager.AskStory(subject), answer=to_client.Story)

    def _fail_if_over(self) -> None:
        """If the session ended while something was added, fail that: the end has failed only what was there before."""
        if self._over is not None:
            self.fail_all(self._over)

    def fail_all(self, error: Exception) -> None:
        """End the session for this client: open calls and later ones fail with this error."""
        self._over = self._over or error
        self._joined.set()
        self.waiting.fail_all(error)
        self._questions.fail_all(error)

    @property
    def over(self) -> Exception | None:
        """Why this client has no session any more; None while it has one."""
        return self._over

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until the manager says that the session is over. False if it does not in time."""
        return self._finished.wait(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Cancel this client's calls through the manager, and wait until it has done so. The session goes on."""
        if self.waiting and self._over is None:
            self._out.queue.append(to_manager.Cancel(list(self.waiting.waiters), True))
        self._send_now()
        until = time.monotonic() + timeout_s
        while self._over is None and (self.waiting or self._has_unsent()) and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the thread and close the socket. Open calls fail."""
        self.fail_all(SessionError("the session was closed before this call ended", session=self.session.session))
        self._stop = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.settling.close(limit_s=SETTLE_LIMIT_S)
        callbacks.wait_done(limit_s=SETTLE_LIMIT_S)

    def wake(self) -> None:
        """Wake the I/O thread."""
        self._woken = True
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):  # closed: there is no thread to wake
            pass

    def forked(self) -> None:
        """Disable the link in a forked child of the program: the socket and its thread are the parent's, and so are the
        open calls and the files of their arguments."""
        self._over = forked_process(self.session.session)
        self.waiting.waiters.clear()  # so nothing that the child drops cancels a call of its parent
        self._lock = threading.Lock()
        self._lock.acquire()  # no thread of this process may use the socket

    # ---- sending

    def _ask(self, question: Any, *, answer: type[Any]) -> Future[Any]:
        if self._over is not None:
            future: Future[Any] = Future()
            future.set_exception(self._over)
            return future
        with self._lock:
            future = self._questions.ask(question, answer=answer)
        self._send_now()
        self._fail_if_over()
        return future

    def _send_now(self) -> None:
        """Send the queue from this thread. If another thread uses the socket, leave it to the I/O thread."""
        if not self._lock.acquire(blocking=False):
            self.wake()
            return
        try:
            self._flush()
            more = not self._socket.closed and self._dealer.has_frames()
        finally:
            self._lock.release()
        if more:
            self.wake()

    def _has_unsent(self) -> bool:
        with self._lock:
            return bool(self._out.queue) or self._out.has_unacknowledged

    def _flush(self) -> None:
        """Send everything in the queue. The caller holds the lock."""
        if not self._joined.is_set() or self._socket.closed:
            return
        for frame in self._out.frames(time.monotonic()):
            self._socket.send(frame, 0, len(frame) < COPY_BELOW)
        if self._may_lack_pieces:  # after the calls that may have to be submitted again
            self._may_lack_pieces = False
            asked = [inbox.ask_again() for inbox in tuple(self.waiting.inboxes.values())]
            self._taken.extend(each for each in asked if each is not None)
        if self._taken:
            latest: dict[tuple[CallId, bool], to_manager.PiecesTaken] = {}
            while self._taken:
                taken = self._taken.popleft()
                latest[taken.call, taken.again] = taken
            self._socket.send(wire.encode(list(latest.values())))
        if self._questions.has_unsent:
            self._socket.send(wire.encode(self._questions.take_unsent()))

    # ---- the I/O thread

    def _run(self) -> None:
        poll = select.poll()
        everything = {self._socket_fd, self._monitor_fd, self._wake_fd}
        for fd in everything:
            poll.register(fd, select.POLLIN)
        try:
            self._turn(everything)
            while not self._stop:  # checked after each turn, because a turn takes away the wake-up of `close`
                now = time.monotonic()
                wait_s = self._out.due_in(now) if self._joined.is_set() else CHECK_EVERY_S
                self._turn({fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)})
        except Exception as error:
            logger.exception("the link to session %s failed", self.session.session)
            self.fail_all(SessionError(f"the link to the manager failed: {error!r}", session=self.session.session))
        finally:
            with self._lock:
                self._dealer.close()
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)

    def _turn(self, ready: set[int]) -> None:
        """Read frames and events, and send the queue. It reads `ready` descriptors alone, so that results pass fast."""
        if self._wake_fd in ready:
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass
        if len(self.waiting.waiters) >= MANY:
            time.sleep(GATHER_S)
        self._woken = False  # after the read, so that no wake-up is lost
        if self._monitor_fd in ready:
            self._read_monitor()
        if not self._joined.is_set():
            self._find_manager()
        with self._lock:
            frames = self._dealer.receive()
        fed: list[PieceInbox] = []
        for data in frames:
            self._take(data, fed)
        wake_tasks(waiter for inbox in fed for waiter in inbox.take_waiters())
        with self._lock:
            self._flush()
            again = self._dealer.has_frames()
        if again:
            self.wake()

    def _read_monitor(self) -> None:
        """React to changes of the connection."""
        for change in self._dealer.changes():
            if change is ConnectionChange.MADE:
                with self._lock:
                    self._socket.send(wire.encode([self._hello()]))
            elif change is ConnectionChange.CUT_OFF:  # ZeroMQ tries again
                continue
            elif change is ConnectionChange.BROKEN or self.membership.was_joined:  # or a stranger has its address
                self.membership.connection_lost(time.monotonic())
            else:
                self.fail_all(refused_key(self.folder, self.session.session))

    def _hello(self) -> to_manager.ClientHello:
        return to_manager.ClientHello(
            wire.VERSION,
            self.session.session,
            self._out.received,
            self._observer,
            acknowledged=self._out.acknowledged,
            number=self._first_id >> CLIENT_SHIFT if self.membership.was_joined and not self._observer else -1,
        )

    def _find_manager(self) -> None:
        """Connect to the address that the session file names now. If the session's folder says that the session is
        over, end as when the manager says so."""
        try:
            found = self.membership.find_manager(time.monotonic())
        except SessionError as error:
            self.fail_all(error)
            return
        if self.membership.why_over:
            self._session_over(self.membership.why_over)
        if found is not None:
            with self._lock:
                self._dealer.move_to(found.address)
            self.session = found

    def _take(self, data: bytes, fed: list[PieceInbox]) -> None:
        """Handle a frame. Inboxes that get pieces are added to `fed`."""
        try:
            messages = self._decode(data).messages
        except ProtocolError as error:
            self._refusals.warning("manager", f"a frame of the manager was refused: {error}")
            return
        for message in messages:
            if type(message) is to_client.Pieces:
                self._take_pieces(message, fed)
            else:
                self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case to_client.Results():
                self.waiting.settle(self._out.receive(message, time.monotonic()))
            case to_client.Ack():
                with self._lock:
                    self._out.acked(message.sequence)
            case to_client.ProgressReports():
                self.waiting.report(message.reports)
            case to_client.Forecasts():
                self.waiting.report(on_this_clock(message, now=time.time()))
            case to_client.ClientWelcome():
                self._welcome(message)
            case to_client.Rejected():
                logger.warning("the manager did not accept a message: %s", message.reason)
                self.waiting.reject(message.calls, message.reason)
            case to_client.Status() | to_client.Story():
                if isinstance(message, to_client.Status):
                    self.journal_trouble = message.trouble.get(JOURNAL, "")
                self._questions.answer(message)
            case to_client.ClientRefused():
                self.fail_all(SessionError(f"the manager refused this client: {message.reason}"))
            case to_client.SessionOver():
                self._session_over(message.reason)

    def _session_over(self, reason: str) -> None:
        self._finished.set()
        self.fail_all(session_over(self.session.session, reason))

    def _take_pieces(self, message: to_client.Pieces, fed: list[PieceInbox]) -> None:
        inbox = self.waiting.inboxes.get(message.call)
        if inbox is None:  # it was cancelled, or has ended
            return
        try:
            fed.append(inbox)
            taken = inbox.add(message)
        except StreamDiffersError as error:
            waiter = self.waiting.waiters.get(message.call)
            self.cancel([message.call])
            if waiter is not None:
                waiter.fail(message.call, error)
            return
        if taken is not None:
            self._taken.append(taken)  # it leaves at the end of this turn

    def _welcome(self, message: to_client.ClientWelcome) -> None:
        with self._lock:
            self._first_id = message.number << CLIENT_SHIFT
            self.journal_trouble = ""  # a manager that cannot write its journal says so after the welcome
            if message.again:
                self.membership.log_lost_journal(open_calls=len(self.waiting))
                self._out.resubmit_everything()
            for frame in self._out.again(time.monotonic()):
                self._socket.send(frame)
            self._questions.ask_all_again()
            self._may_lack_pieces = True
            self.membership.welcomed()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link.forked()


os.register_at_fork(after_in_child=_after_fork)

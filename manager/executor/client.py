"""The client's connection to the manager: one ZeroMQ socket, and one I/O thread that reads from it.

A thread holds `_lock` to send or read frames. The I/O thread polls the socket's edge-triggered descriptor. A send by
another thread may consume the edge of a received frame. Therefore a thread that has sent frames wakes the I/O thread if
frames have arrived.

The client keeps each numbered frame until the manager has written it to the journal, and sends the frame again after a
reconnection.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from uuid import uuid4

import msgspec

from stoker.dealer import COPY_BELOW, ConnectionChange, CurveKeys, Dealer
from stoker.errors import ProtocolError, SessionError, StreamDiffersError
from stoker.log_files import RateLimitedLog
from stoker.manager.executor.membership import CHECK_EVERY_S, SessionMembership
from stoker.manager.executor.outgoing import (
    OpenCall,
    OpenCallTable,
    OpenQuestions,
    OutgoingFrames,
    ResultReceiver,
    Submission,
)
from stoker.manager.executor.pieces import PieceInbox, wake_tasks
from stoker.manager.executor.session_files import LargeArgumentFiles, publish_files_and_create_manifests
from stoker.manager.executor.settling import WorkerThreads, callbacks
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallSpec, Features, Payload
from stoker.protocol.ids import CLIENT_SHIFT, CallId, ClientId
from stoker.protocol.session import PYTHON, SessionFile, SessionFolder
from stoker.protocol.status import JOURNAL

logger = logging.getLogger(__name__)

SEND_DIRECTLY_BELOW_CALLS = 8
"""Below this number of calls in flight, the thread that submits a call also sends the call."""
GATHER_ABOVE_CALLS, GATHER_S = 128, 0.001
"""With this many calls in flight, the I/O thread waits `GATHER_S` seconds, so that more calls share a frame."""
SETTLE_LIMIT_S = 2.0
"""`close` stops waiting if no result has been delivered for this many seconds."""


class ClientLink:
    """A client's connection to the manager. Every method is thread-safe. Only methods with a time limit block."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self.membership = SessionMembership(folder)
        if not self.session.is_for_this_python:
            theirs = self.session.python
            raise self._session_error(
                f"uses Python {theirs}, and this program runs under Python {PYTHON} ({sys.executable}), whose functions"
                f" cannot run there; run the program with Python {theirs}, or start another session with this Python"
                " (`stoker up`)"
            )
        self.large_arguments = LargeArgumentFiles(folder.objects)
        self.open_calls = OpenCallTable(self.large_arguments)
        self.result_threads = WorkerThreads("results")
        self.over: Exception | None = None
        self.journal_trouble = ""
        """Why the manager cannot write its journal; else empty."""
        self._out = OutgoingFrames(
            self.open_calls.calls,
            create_manifests=lambda recipe: publish_files_and_create_manifests(recipe, folder.objects),
        )
        self._questions = OpenQuestions()
        self._unsent_acks: deque[to_manager.PiecesTaken] = deque()
        self._may_lack_pieces = False
        self._first_id = 0
        self._sequence = itertools.count()
        self._joined = self.membership.joined
        self._finished = threading.Event()
        self._stop = self._woken = False
        self._lock = threading.Lock()
        self._decode = wire.to_client_decoder()
        self._refusals = RateLimitedLog(logger)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        pair = folder.read_key("client")
        self._dealer = Dealer(
            self.session.address, name=ClientId(f"client-{uuid4().hex[:12]}"),
            keys=CurveKeys(self.session.server_key, pair.public, pair.secret), log=logger, reconnect_ms=(50, 1000),
        )  # fmt: skip
        self._socket = self._dealer.socket
        self._socket_fd, self._monitor_fd = self._dealer.filenos()
        _links.add(self)
        self._thread = threading.Thread(target=self._run_io_thread, name="stoker-link", daemon=True)
        self._thread.start()

    # ---- for other modules of the client

    @property
    def session(self) -> SessionFile:
        return self.membership.session

    def wait_joined(self, timeout_s: float) -> None:
        if self.over is None:
            self.membership.wait_until_joined(timeout_s, journal_trouble=lambda: self.journal_trouble)
        if self.over is not None:
            raise self.over

    def has_sent_recipe(self, key: str) -> bool:
        return key in self._out.sent_definitions

    def explain_silence(self) -> str:
        return self.membership.explain_silence() if self.over is None and self._joined.is_set() else ""

    def submit(
        self, submission: Submission, payload: Payload, waiter: ResultReceiver, *, features: Features | None = None,
        inbox: PieceInbox | None = None,
    ) -> CallId:  # fmt: skip
        """Send a call; `inbox` receives its pieces. Raises SessionError if the session has ended."""
        if self.over is not None:
            raise self.over
        number = CallId(self._first_id | next(self._sequence))
        call = OpenCall(submission, CallSpec(number, payload, features), waiter, inbox)
        self.open_calls.add(call)
        self._out.queue.append(call)
        if len(self.open_calls.calls) < SEND_DIRECTLY_BELOW_CALLS:
            self._send_queued_messages()
        elif not self._woken:
            self.wake()
        self._fail_calls_if_session_over()
        return number

    def submit_many(
        self, submission: Submission | Sequence[Submission], payloads: Iterable[Payload], waiter: ResultReceiver
    ) -> list[CallId]:
        if self.over is not None:
            raise self.over
        first_id, sequence = self._first_id, self._sequence
        each = itertools.repeat(submission) if isinstance(submission, Submission) else submission
        calls = [
            OpenCall(of, CallSpec(CallId(first_id | next(sequence)), payload), waiter)
            for of, payload in zip(each, payloads, strict=False)
        ]
        self.open_calls.add_all(calls)
        self._out.queue.extend(calls)
        self._send_queued_messages()
        self._fail_calls_if_session_over()
        return [call.spec.call for call in calls]

    def cancel(self, calls: Iterable[CallId]) -> None:
        gone = self.open_calls.drop_calls(calls)
        if gone and self.over is None:
            self.send_message(to_manager.Cancel(gone, True))

    def acknowledge_pieces(self, taken: to_manager.PiecesTaken) -> None:
        self._unsent_acks.append(taken)
        self._send_queued_messages()

    def send_message(self, message: Any) -> None:
        self._out.queue.append(message)
        self._send_queued_messages()

    def queue_message(self, message: Any) -> None:
        self._out.queue.append(message)

    def ask_status(self) -> Future[to_client.Status]:
        return self._send_question(to_manager.AskStatus(), to_client.Status)

    def ask_for_story(self, subject: str) -> Future[to_client.Story]:
        return self._send_question(to_manager.AskStory(subject), to_client.Story)

    def fail_all(self, error: Exception) -> None:
        self.over = self.over or error
        self._joined.set()
        self.open_calls.fail_all(error)
        self._questions.fail_all(error)

    def wait_finished(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def cancel_calls_and_wait(self, timeout_s: float) -> None:
        if self.open_calls and self.over is None:
            self._out.queue.append(to_manager.Cancel(list(self.open_calls.calls), True))
        self._send_queued_messages()
        until = time.monotonic() + timeout_s
        while self.over is None and time.monotonic() < until:
            with self._lock:
                if not (self.open_calls or self._out.queue or self._out.has_unacknowledged):
                    return
            time.sleep(0.01)

    def close(self) -> None:
        self.fail_all(self._session_error("was closed before this call ended"))
        self._stop = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.result_threads.close(limit_s=SETTLE_LIMIT_S)
        callbacks.wait_for_open_work(limit_s=SETTLE_LIMIT_S)

    def wake(self) -> None:
        self._woken = True
        with suppress(OSError, ValueError):  # after `close`, the descriptor is closed, and no thread needs to wake
            os.eventfd_write(self._wake_fd, 1)

    def disable_after_fork(self) -> None:
        session = self.session.session
        self.over = SessionError(
            f"this process was forked from the program that loaded session {session}, and cannot use that session;"
            " make calls in that program, or load a session here",
            session=session,
        )
        self.open_calls.calls.clear()  # a forked child must not cancel the calls of its parent
        self._lock = threading.Lock()
        self._lock.acquire()  # never released: a forked child must not use the socket

    def _session_error(self, what: str) -> SessionError:
        return SessionError(f"session {self.session.session} {what}", session=self.session.session)

    def _fail_calls_if_session_over(self) -> None:
        """Fail calls that were added while the session ended."""
        if self.over is not None:
            self.fail_all(self.over)

    def _send_question(self, question: Any, answer: type[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.over is not None:
            future.set_exception(self.over)
            return future
        with self._lock:
            self._questions.add_question(question, answer, future)
        self._send_queued_messages()
        self._fail_calls_if_session_over()
        return future

    # ---- sending

    def _send_queued_messages(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.wake()
            return
        try:
            more = self._send_frames() and self._dealer.has_frames()
        finally:
            self._lock.release()
        if more:
            self.wake()

    def _send_frames(self) -> bool:
        """Send the queued frames. Return True if any was sent. The caller must hold `_lock`."""
        if not self._joined.is_set() or self._socket.closed:
            return False
        sent = False
        for frame in self._out.encode_queued_frames(time.monotonic()):
            self._socket.send(frame, 0, len(frame) < COPY_BELOW)
            sent = True
        if self._may_lack_pieces:  # request the lost pieces after the resubmitted calls were sent
            self._may_lack_pieces = False
            for call in tuple(self.open_calls.calls.values()):
                if call.inbox is not None and (asked := call.inbox.request_lost_pieces()) is not None:
                    self._unsent_acks.append(asked)
        if self._unsent_acks:
            latest: dict[tuple[CallId, bool], to_manager.PiecesTaken] = {}
            while self._unsent_acks:
                taken = self._unsent_acks.popleft()
                latest[taken.call, taken.again] = taken
            self._socket.send(wire.encode(list(latest.values())))
            sent = True
        if self._questions.unsent:
            self._socket.send(wire.encode(self._questions.take_unsent()))
            sent = True
        return sent

    # ---- the I/O thread

    def _run_io_thread(self) -> None:
        poll = select.poll()
        everything = {self._socket_fd, self._monitor_fd, self._wake_fd}
        for fd in everything:
            poll.register(fd, select.POLLIN)
        try:
            self._handle_ready_descriptors(everything)
            while not self._stop:  # checked after each wake-up, because the call below consumes the wake-up of `close`
                wait_s = self._out.seconds_until_ack(time.monotonic()) if self._joined.is_set() else CHECK_EVERY_S
                self._handle_ready_descriptors({fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)})
        except Exception as error:
            logger.exception("the link to session %s failed", self.session.session)
            self.fail_all(SessionError(f"the link to the manager failed: {error!r}", session=self.session.session))
        finally:
            with self._lock:
                self._dealer.close()
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)

    def _handle_ready_descriptors(self, ready: set[int]) -> None:
        if self._wake_fd in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if len(self.open_calls.calls) >= GATHER_ABOVE_CALLS:
            time.sleep(GATHER_S)
        self._woken = False  # reset after the eventfd read, so that no wake-up is lost
        if self._monitor_fd in ready:
            self._handle_connection_changes()
        if not self._joined.is_set():
            self._update_manager_address()
        with self._lock:
            frames = self._dealer.receive()
        updated_inboxes: list[PieceInbox] = []
        for data in frames:
            self._handle_frame(data, updated_inboxes)
        if updated_inboxes:
            wake_tasks(waiter for inbox in updated_inboxes for waiter in inbox.take_waiters())
        with self._lock:
            again = self._send_frames() and self._dealer.has_frames()
        if again:
            self.wake()

    def _handle_connection_changes(self) -> None:
        for change in self._dealer.read_connection_changes():
            if change is ConnectionChange.MADE:
                number = self._first_id >> CLIENT_SHIFT if self.membership.was_joined else -1
                hello = to_manager.ClientHello(
                    wire.VERSION, self.session.session, self._out.received, acknowledged=self._out.acknowledged,
                    number=number,
                )  # fmt: skip
                with self._lock:
                    self._socket.send(wire.encode([hello]))
            elif change is ConnectionChange.CUT_OFF:  # ZeroMQ reconnects by itself
                continue
            # After a join, a refused key is no fault: another process may now listen at the manager's old address.
            elif change is ConnectionChange.BROKEN or self.membership.was_joined:
                self.membership.handle_lost_connection(time.monotonic())
            else:
                what = f"{self.folder.path} is a copy of another session's folder, or its keys were changed"
                self.fail_all(self._session_error(f"has a manager that refused this client's key; {what}"))

    def _update_manager_address(self) -> None:
        try:
            found = self.membership.read_session_file_if_due(time.monotonic())
        except SessionError as error:
            self.fail_all(error)
            return
        if self.membership.session_end_reason:
            self._handle_session_end(self.membership.session_end_reason)
        if found is not None:
            with self._lock:
                self._dealer.reconnect_to(found.address)

    def _handle_frame(self, data: bytes, updated_inboxes: list[PieceInbox]) -> None:
        try:
            messages = self._decode(data).messages
        except ProtocolError as error:
            self._refusals.warning("manager", f"a frame of the manager was refused: {error}")
            return
        for message in messages:
            if type(message) is to_client.Pieces:
                self._receive_pieces(message, updated_inboxes)
            else:
                self._handle_message(message)

    def _handle_message(self, message: Any) -> None:
        match message:
            case to_client.Results():
                self.open_calls.settle(self._out.accept_results(message, time.monotonic()))
            case to_client.Ack():
                with self._lock:
                    self._out.handle_ack(message.sequence)
            case to_client.ProgressReports():
                self.open_calls.report(message.reports)
            case to_client.Forecasts():
                # Convert the forecasts to this machine's clock.
                ahead_s = time.time() - message.said_at if message.said_at else 0.0
                replace = msgspec.structs.replace
                self.open_calls.report([replace(each, ends_at=each.ends_at + ahead_s) for each in message.forecasts])
            case to_client.ClientWelcome():
                self._handle_welcome(message)
            case to_client.Rejected():
                logger.warning("the manager did not accept a message: %s", message.reason)
                self.open_calls.fail_rejected_calls(message.calls, message.reason)
            case to_client.Status():
                self.journal_trouble = message.trouble.get(JOURNAL, "")
                self._questions.handle_answer(message)
            case to_client.Story():
                self._questions.handle_answer(message)
            case to_client.ClientRefused():
                self.fail_all(SessionError(f"the manager refused this client: {message.reason}"))
            case to_client.SessionOver():
                self._handle_session_end(message.reason)

    def _handle_session_end(self, reason: str) -> None:
        self._finished.set()
        advice = "load a new session with stoker.load(), and submit the calls that have no result again"
        self.fail_all(self._session_error(f"is over: {reason or 'it was ended'}; {advice}"))

    def _receive_pieces(self, message: to_client.Pieces, updated_inboxes: list[PieceInbox]) -> None:
        call = self.open_calls.calls.get(message.call)
        if call is None or call.inbox is None:
            return
        try:
            updated_inboxes.append(call.inbox)
            taken = call.inbox.add_pieces(message)
        except StreamDiffersError as error:
            self.cancel([message.call])
            call.waiter.fail(message.call, error)
            return
        if taken is not None:
            self._unsent_acks.append(taken)  # the end of `_handle_ready_descriptors` sends the acknowledgement

    def _handle_welcome(self, message: to_client.ClientWelcome) -> None:
        with self._lock:
            self._first_id = message.number << CLIENT_SHIFT
            self.journal_trouble = ""  # after the welcome, the manager reports the error again if it persists
            if message.again:
                text = "session %s: its manager lost a part of its journal; %d calls are submitted again, "
                logger.warning(text + "and running calls continue", self.session.session, len(self.open_calls))
                self._out.resubmit_everything()
            for frame in self._out.unacknowledged_frames(time.monotonic()):
                self._socket.send(frame)
            self._questions.requeue_sent_questions()
            self._may_lack_pieces = True
            self.membership.handle_welcome()


_links: weakref.WeakSet[ClientLink] = weakref.WeakSet()


def _disable_links_after_fork() -> None:
    for link in list(_links):
        link.disable_after_fork()


os.register_at_fork(after_in_child=_disable_links_after_fork)

"""The client's end of the wire: one socket, one thread that reads it, and submits go out on the caller's thread.

How a call leaves. `submit` puts it in a queue and, while few calls are in flight, sends the queue itself: a caller who
waits for one result at a time pays no thread switch on the way out. While many are in flight it wakes the I/O thread
instead, and what has piled up until that thread runs leaves as one frame: consecutive calls of the same job are one
`Submit`. Nothing waits to form a batch; batches form because the interpreter runs one thread at a time.

Why the lock. A ZeroMQ socket may be used from several threads if each use is fenced; `_lock` is the fence, held for a
send or for a drain, never while a future is settled. The I/O thread sleeps in `poll(2)` on the socket's file
descriptor, which is edge-triggered: a send by another thread may swallow the edge of a frame that came in meanwhile, so
whoever sends looks at ZMQ_EVENTS afterwards and wakes the I/O thread when there is something to read.

What survives. Frames are numbered and kept until the manager has them in its journal. A manager that has lost a part of
that journal asks for everything again (`Outgoing.say_everything_again`). When a connection comes back,
the hello goes first, and after the welcome everything unacknowledged goes again, in order. Results are numbered too:
those that were had already are dropped. While the manager is away the session folder says whether it was started again
at another address.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from stoker.dealer import COPY_BELOW, Change, Dealer, Keys
from stoker.errors import ProtocolError, SessionError
from stoker.manager.executor.clocks import on_this_clock
from stoker.manager.executor.describing import describe
from stoker.manager.executor.large import LargeArguments
from stoker.manager.executor.outgoing import Job, Outgoing, Unused, Waiter
from stoker.manager.executor.processes import removed
from stoker.manager.executor.questions import Questions
from stoker.manager.executor.settling import Settling, callbacks
from stoker.manager.executor.waiting import WaitingCalls
from stoker.manager.live.interfaces import is_listening, no_way_to
from stoker.manager.live.presence import elsewhere
from stoker.manager.protocol import to_client, to_manager, wire
from stoker.manager.protocol.calls import CallSpec, Features, Payload
from stoker.manager.protocol.ids import CLIENT_SHIFT, CallId, ClientId, FunctionKey
from stoker.manager.protocol.session import PYTHON, SessionFolder
from stoker.manager.protocol.status import JOURNAL
from stoker.seldom import SeldomLog

logger = logging.getLogger(__name__)

DIRECT_BELOW = 8
"""With fewer calls in flight than this, the submitting thread sends by itself."""
MANY = 128
GATHER_S = 0.001
"""With many calls in flight nobody waits for one in particular: those of a millisecond travel together."""
LOOK_EVERY_S = 1.0
"""How often a link whose manager is away looks where it is now."""
SETTLE_LIMIT_S = 2.0
"""How long a link that is closed waits for results that have come and for callbacks, while none of them ends."""
SLOW_S = 5.0
"""A program that has waited for its manager's welcome for so long says why."""
AWAY_S = 30.0
"""A manager that is away for longer is said to be; if its folder is gone too, the session is over."""


class Link:
    """A client's connection to its manager. Every method may be called from any thread; none of them blocks.

    With `observer`, the client asks and never submits; the session does not depend on it.
    """

    def __init__(self, folder: SessionFolder, *, observer: bool = False) -> None:
        self.folder = folder
        self.session = folder.read()
        if not observer and not self.session.is_for_this_python:
            raise SessionError(
                f"session {self.session.session} is one of Python {self.session.python}, and this program runs under"
                f" Python {PYTHON} ({sys.executable}), whose functions cannot run there; run the program with Python"
                f" {self.session.python}, or start another session with this one (`stoker up`)",
                session=self.session.session,
            )
        self.large = LargeArguments(folder.objects)
        self.waiting = WaitingCalls(self.large)
        self.settling = Settling("results")
        self._observer = observer
        self._client = ClientId(f"client-{uuid4().hex[:12]}")
        self._out = Outgoing(self.waiting.waiters, describe=lambda recipe: describe(recipe, folder.objects))
        self._questions = Questions()
        self._base = 0
        self._sequence = itertools.count()
        self._joined = threading.Event()
        self._was_joined = False
        self._look_at = 0.0
        self._say_away_at = math.inf
        self._said_away = False
        self.journal_trouble = ""
        """Why the manager cannot write its journal, so that calls and results wait; empty while it can, as far as the
        manager has said."""
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
        """Wait until the manager has said welcome; a wait of several seconds is told with its reason. Raises
        SessionError."""
        told_s = min(timeout_s, SLOW_S)
        if not self._joined.wait(told_s) and told_s < timeout_s:
            why = self._why_not_joined()
            logger.warning("%s; this program waits up to %.0f s for it", why, timeout_s)
            self._joined.wait(timeout_s - told_s)
        if self._over is not None:
            raise self._over
        if not self._joined.is_set():
            raise self._not_joined(f"{self._why_not_joined()}; that lasted for {timeout_s:.0f} s")

    def has_sent(self, key: str) -> bool:
        """Whether calls of this client have wanted the context of this key."""
        return self._out.has_sent(key)

    def was_joined(self, *, within_s: float) -> bool:
        """Whether the manager has said welcome, or does so now."""
        return self._was_joined or self._joined.wait(within_s)

    def why_silent(self) -> str:
        """Why the manager may not answer although the connection to it stands; empty where it does not stand."""
        if self._over is not None or not self._joined.is_set():
            return ""
        return (
            f"session {self.session.session}: its manager does not answer: it is stopped, or the file system of"
            f" {self.folder.path} hangs; calls and results wait for it, and what runs goes on"
        )

    def _why_not_joined(self) -> str:
        """Why the manager has not said welcome. Raises SessionError where waiting cannot help."""
        address = self.session.address
        session = f"session {self.session.session}: its manager{elsewhere(self.folder)} at {address}"
        if self.journal_trouble:
            return f"{session} lets no program in: {self.journal_trouble}"
        if why := no_way_to(address):
            raise self._not_joined(f"{session} cannot be reached: {why}")
        if is_listening(address):
            return f"{session} accepts connections and does not answer; its log may say why: {self.folder.manager_log}"
        return f"{session} does not listen there any more; its log may say why: {self.folder.manager_log}"

    def _not_joined(self, why: str) -> SessionError:
        return SessionError(why, session=self.session.session, log=str(self.folder.manager_log))

    def submit(self, job: Job, payload: Payload, waiter: Waiter, *, features: Features | None = None) -> CallId:
        """Send a call; `waiter` hears of its end. Raises SessionError when the session is over."""
        if self._over is not None:
            raise self._over
        call = CallId(self._base | next(self._sequence))
        self.waiting.add(call, payload, waiter, members=job.members)
        self._out.queue.append((job, CallSpec(call, payload, features)))
        if len(self.waiting.waiters) < DIRECT_BELOW:
            self._send_now()
        elif not self._woken:
            self.wake()
        return call

    def submit_many(self, job: Job, payloads: Iterable[Payload], waiter: Waiter) -> list[CallId]:
        """Send calls of one job, with one waiter for all of them. Raises SessionError when the session is over."""
        if self._over is not None:
            raise self._over
        base, sequence = self._base, self._sequence
        specs = [CallSpec(CallId(base | next(sequence)), payload) for payload in payloads]
        calls = self.waiting.add_all(specs, waiter)
        self._out.queue.extend([(job, spec) for spec in specs])
        self._send_now()
        return calls

    def cancel(self, calls: Iterable[CallId], *, running: bool = True) -> None:
        """Cancel these calls; their waiters hear nothing."""
        gone = self.waiting.give_up(calls)
        if gone and self._over is None:
            self.tell(to_manager.Cancel(gone, running))

    def will_not_name(self, function: FunctionKey, *, instead: FunctionKey) -> None:
        """Let the manager forget a function when it hears the next thing, after the calls that were submitted. Another
        one has taken its place."""
        self._out.queue.append(Unused(function, instead))

    def tell(self, message: Any) -> None:
        """Send one message, after everything that was submitted before it."""
        self._out.queue.append(message)
        self._send_now()

    def ask_status(self) -> Future[to_client.Status]:
        """The session at this moment, when the manager answers."""
        return self._ask(to_manager.AskStatus(), answer=to_client.Status)

    def ask_story(self, subject: str) -> Future[to_client.Story]:
        """Why a call, pilot, library or context is where it is, when the manager answers."""
        return self._ask(to_manager.AskStory(subject), answer=to_client.Story)

    def fail_all(self, error: Exception) -> None:
        """The session is over for this client: every call that waits, and every later one, fails with this error."""
        self._over = self._over or error
        self._joined.set()
        self.waiting.fail_all(error)
        self._questions.fail_all(error)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until the manager says that the session is over. False if it did not."""
        return self._finished.wait(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """End this client's calls, whose waiters hear of it, and see that the manager knows. The session goes on."""
        if self.waiting and self._over is None:
            self._out.queue.append(to_manager.Cancel(list(self.waiting.waiters), True))
        self._send_now()
        until = time.monotonic() + timeout_s
        while self._over is None and (self.waiting or self._unsaid()) and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the thread and close the socket. What still waits fails."""
        self.fail_all(SessionError("the session was closed before this call ended", session=self.session.session))
        self._stop = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.settling.close(limit_s=SETTLE_LIMIT_S)
        callbacks.wait_done(limit_s=SETTLE_LIMIT_S)

    def wake(self) -> None:
        """Make the I/O thread look around."""
        self._woken = True
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):  # closed: there is no thread to wake
            pass

    def forked(self) -> None:
        """In a child that was forked from the program: the socket and its thread are the parent's."""
        self._over = SessionError(
            f"this process was forked from the program that loaded session {self.session.session}, and cannot use it; "
            "make calls in that program, or load a session here",
            session=self.session.session,
        )
        self._lock = threading.Lock()
        self._lock.acquire()  # so that nobody here ever comes to the socket

    # ---- sending

    def _ask(self, question: Any, *, answer: type[Any]) -> Future[Any]:
        if self._over is not None:
            future: Future[Any] = Future()
            future.set_exception(self._over)
            return future
        with self._lock:
            future = self._questions.ask(question, answer=answer)
        self._send_now()
        return future

    def _send_now(self) -> None:
        """Send the queue from this thread, unless another one is at the socket: then the I/O thread will."""
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

    def _unsaid(self) -> bool:
        with self._lock:
            return bool(self._out.queue) or self._out.has_unacknowledged

    def _flush(self) -> None:
        """Send everything in the queue. The caller holds the lock."""
        if not self._joined.is_set() or self._socket.closed:
            return
        for frame in self._out.frames(time.monotonic()):
            self._socket.send(frame, 0, len(frame) < COPY_BELOW)
        if self._questions.unsaid:
            self._socket.send(wire.encode(self._questions.unsaid))
            self._questions.unsaid.clear()

    # ---- the I/O thread

    def _run(self) -> None:
        poll = select.poll()
        everything = {self._socket_fd, self._monitor_fd, self._wake_fd}
        for fd in everything:
            poll.register(fd, select.POLLIN)
        try:
            self._turn(everything)
            while not self._stop:  # asked after each turn, which may have read what woke the thread for that
                now = time.monotonic()
                wait_s = self._out.due_in(now) if self._joined.is_set() else LOOK_EVERY_S
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
        """Do what has come. Descriptors that are not `ready` are not looked at: a result is on its way through here."""
        if self._wake_fd in ready:
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass
        if len(self.waiting.waiters) >= MANY:
            time.sleep(GATHER_S)
        self._woken = False  # after the read: a wake-up between the two is still in the descriptor
        if self._monitor_fd in ready:
            self._watch()
        if not self._joined.is_set() and time.monotonic() >= self._look_at:
            self._look_again()
        with self._lock:
            frames = self._dealer.receive()
        for data in frames:
            self._take(data)
        with self._lock:
            self._flush()
            again = self._dealer.has_frames()
        if again:
            self.wake()

    def _watch(self) -> None:
        """What has happened to the connection."""
        for change in self._dealer.changes():
            if change is Change.MADE:
                with self._lock:
                    self._socket.send(wire.encode([self._hello()]))
            elif change is Change.CUT_OFF:  # and is tried again
                continue
            elif change is Change.BROKEN or self._was_joined:  # or somebody else listens where it was
                if self._joined.is_set():
                    self._joined.clear()
                    self._say_away_at, self._said_away = time.monotonic() + AWAY_S, False
            else:
                self.fail_all(
                    SessionError(
                        f"the manager of session {self.session.session} refused this client's key; "
                        f"{self.folder.path} is a copy of another session's folder, or its keys were changed",
                        session=self.session.session,
                    )
                )

    def _hello(self) -> to_manager.ClientHello:
        return to_manager.ClientHello(
            wire.VERSION,
            self.session.session,
            self._out.received,
            self._observer,
            acknowledged=self._out.acknowledged,
            number=self._base >> CLIENT_SHIFT if self._was_joined and not self._observer else -1,
        )

    def _look_again(self) -> None:
        """While the manager is away: one that was started again may listen elsewhere."""
        now = time.monotonic()
        self._look_at = now + LOOK_EVERY_S
        if now >= self._say_away_at:
            if not os.path.isdir(self.folder.path):
                self.fail_all(removed(self.folder))
                return
            self._say_away_at = now + AWAY_S
            say = logger.debug if self._said_away else logger.warning
            self._said_away = True
            say(
                "session %s: its manager is away; what runs goes on. If it does not come back: stoker attach %s",
                self.session.session,
                self.session.session,
            )
        try:
            found = self.folder.read()
        except SessionError as error:  # the file system is away: look again later
            logger.debug("session file: %s", error)
            return
        with self._lock:
            self._dealer.move_to(found.address)
        self.session = found

    def _take(self, data: bytes) -> None:
        try:
            messages = self._decode(data).messages
        except ProtocolError as error:
            self._refusals.warning("manager", f"a frame of the manager was refused: {error}")
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case to_client.Results():
                self.waiting.settle(self._out.receive(message, time.monotonic()))
            case to_client.Ack():
                with self._lock:
                    self._out.acked(message.sequence)
            case to_client.Progress():
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
                self._finished.set()
                self.fail_all(
                    SessionError(
                        f"session {self.session.session} is over: {message.reason or 'it was ended'}; "
                        "load a new one with stoker.load(), and submit the calls again that have no result",
                        session=self.session.session,
                    )
                )

    def _welcome(self, message: to_client.ClientWelcome) -> None:
        with self._lock:
            self._base = message.number << CLIENT_SHIFT
            self.journal_trouble = ""  # of the manager before; one that cannot write its journal says so again
            if message.again:
                logger.warning(
                    "session %s: its manager has lost a part of its journal; %d calls are submitted again, "
                    "and those that run go on",
                    self.session.session,
                    len(self.waiting),
                )
                self._out.say_everything_again()
            for frame in self._out.again(time.monotonic()):
                self._socket.send(frame)
            self._questions.again()
            self._joined.set()
            self._was_joined = True


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link.forked()


os.register_at_fork(after_in_child=_after_fork)

"""The manager's end of the advisor, a process that is asked and never waited for.

It is started a while after the first question, since a short session is over before an answer would help, and again
when it has died. A question over which it has died twice is dropped, and so is one that it does not answer within
`LIMIT_S`: then it is killed, since those behind it wait as well. Questions and answers are small messages on a socket
pair, on which neither side waits for the other.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from stoker import descriptors
from stoker.manager.core.advice_channel import LONGEST_MESSAGE, decode_answer, encode
from stoker.manager.core.commands import AskAdvice
from stoker.manager.core.events import AdviceArrived
from stoker.manager.core.subjects import About
from stoker.manager.protocol.session import SessionFolder

log = logging.getLogger("stoker.manager")

ADVISOR = "stoker.manager.advice.main"
MOST_OPEN = 512
"""Of more questions that are not answered yet, none is asked."""
MOST_TRIES = 2
LIMIT_S = 180.0
GATHER_S = 2.0
"""So long after the first question it is started."""
PAUSE_S = 2.0
"""How long after its start one that died is started again at the soonest; doubles while it dies at once."""
LONGEST_PAUSE_S = 300.0
_IN_FLIGHT = 16
"""So many questions are on the channel at once: it holds a bounded number of bytes."""


class _Question:
    __slots__ = ("asked_at", "data", "tries")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked_at: float | None = None
        self.tries = 0


class AdvisorLink:
    """One session's advisor. `watch` and `unwatch` tell the manager's loop on which descriptor answers come. Times are
    in seconds, on any clock that goes on."""

    def __init__(self, folder: SessionFolder, *, watch: Callable[[int], None], unwatch: Callable[[int], None]) -> None:
        self._folder = folder
        self._watch = watch
        self._unwatch = unwatch
        self._open: dict[About, _Question] = {}
        self._in_flight = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._start_at = 0.0
        self._pause_s = PAUSE_S

    def ask(self, question: AskAdvice, now: float) -> None:
        """Ask, if not too much is asked already and the subject is not. A question that is too long is not asked."""
        data = encode(question)
        if question.about in self._open or len(self._open) >= MOST_OPEN or len(data) > LONGEST_MESSAGE:
            return
        if self._process is None and not self._open:
            self._start_at = now + GATHER_S
        self._open[question.about] = _Question(data)
        self.keep_up(now)

    def answers(self, now: float) -> list[AdviceArrived]:
        """What has been found since the last look."""
        found: list[AdviceArrived] = []
        while self._open and self._channel is not None:
            try:
                data = self._channel.recv(LONGEST_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._died(now)
                break
            self._take(data, found)
        if self._open:
            self.keep_up(now)
        return found

    def keep_up(self, now: float) -> None:
        """Start it if something is asked, send it what there is room for, and end it if it does not answer."""
        if not self._open:
            return
        if self._channel is None and (now < self._start_at or not self._start(now)):
            return
        oldest = min((q.asked_at for q in self._open.values() if q.asked_at is not None), default=now)
        if now - oldest > LIMIT_S and self._process is not None:
            log.warning("the advisor has not answered for %.0f s: it is killed", now - oldest)
            self._process.kill()
            return
        self._send(now)

    @property
    def due_in_s(self) -> float:
        """How soon `keep_up` wants to be called again; infinite when nothing is asked."""
        return 1.0 if self._open else float("inf")

    def close(self) -> None:
        """Let go of the advisor, which ends by that."""
        self._close_channel()

    # ---- inside

    def _take(self, data: bytes, found: list[AdviceArrived]) -> None:
        try:
            answer = decode_answer(data)
        except msgspec.MsgspecError as error:
            log.warning("an answer of the advisor cannot be read: %s", error)
            return
        question = self._open.pop(answer.about, None)
        if question is None:
            return
        self._in_flight -= 1
        self._pause_s = PAUSE_S
        if answer.found is not None:
            found.append(answer.found)

    def _start(self, now: float) -> bool:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self._start_at = now + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        command = [sys.executable, "-P", "-m", ADVISOR, "--session", str(self._folder.path)]
        try:
            with its, open(self._folder.path / "advisor.log", "ab") as output:
                self._process = subprocess.Popen(
                    [*command, "--channel", str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
        except OSError as error:  # out of descriptors, memory or processes, for a while
            mine.close()
            log.warning("the advisor cannot be started (%s); it is tried again", error)
            return False
        descriptors.restore_limit(self._process.pid)
        self._channel = mine
        self._watch(mine.fileno())
        return True

    def _send(self, now: float) -> None:
        for question in self._open.values():
            if self._channel is None or self._in_flight >= _IN_FLIGHT:
                return
            if question.asked_at is not None:
                continue
            try:
                self._channel.send(question.data)
            except BlockingIOError:
                return
            except OSError:  # it is gone: the next look at the channel says so
                return
            question.asked_at = now
            question.tries += 1
            self._in_flight += 1

    def _died(self, now: float) -> None:
        """Its end of the channel is closed. What it was asked is asked again, once."""
        self._close_channel()
        code = self._process.wait() if self._process is not None and self._process.poll() is not None else None
        dropped = [about for about, question in self._open.items() if question.tries >= MOST_TRIES]
        for about in dropped:
            del self._open[about]
        for question in self._open.values():
            question.asked_at = None
        log.warning("the advisor ended (%s): %d questions open, %d dropped", code, len(self._open), len(dropped))
        self._start_at = max(self._start_at, now)

    def _close_channel(self) -> None:
        self._in_flight = 0
        if self._channel is not None:
            with contextlib.suppress(KeyError, OSError):
                self._unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.poll()

"""Answer the core's questions from the history of earlier sessions and the advisor process.

The manager never waits for the advisor. It starts the advisor `GATHER_S` after the first question, and again when the
advisor dies. After a death, the manager sends one question at a time until an answer arrives. If the advisor dies twice
during a question, the manager drops the question.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from stoker.contexts.folders import state_folder
from stoker.contexts.performance import AvailabilityStore, DeviceSet, Estimate, PerformanceStore
from stoker.contexts.step_times import StepTimes
from stoker.manager.core import events
from stoker.manager.core.events import About, AdviceArrived, AskAdvice, ContextAdvice, OfContext, OfPace
from stoker.manager.live.helper_processes import start_helper
from stoker.manager.live.node_store import NodeRecordStore
from stoker.protocol.session import SessionFolder
from stoker.retries import RetryPause

log = logging.getLogger("stoker.manager")

ADVISOR = "stoker.manager.advice.main"
_NOT_STARTED = "the advisor cannot be started (%s); the manager tries again"
MOST_OPEN = 512
MOST_PACES = 64
MOST_TRIES = 2
LIMIT_S = 180.0
GATHER_S = 10.0
PAUSE_S = 2.0
"""Seconds before a restart of the advisor, doubled after each exit without an answer."""
LONGEST_PAUSE_S = 300.0
_MOST_SENT, _MOST_SLOW_SENT = 16, 2
"""Maximum number of unanswered questions, and of unanswered slow questions, at the advisor."""


def open_performance_store() -> PerformanceStore:
    return PerformanceStore(state_folder() / "performance.sqlite")


def open_availability_store() -> AvailabilityStore:
    return AvailabilityStore(state_folder() / "availability.sqlite")


class SessionHistory:
    """The user's records of earlier sessions; empty if they cannot be opened."""

    def __init__(self, *, session: str) -> None:
        self._store = open_performance_store()
        self._sources = open_availability_store()
        self.nodes = NodeRecordStore()
        self._session = session

    def store_record(self, command: events.Record) -> None:
        facts = msgspec.structs.asdict(command)
        key = facts.pop("recipe", "") or facts.pop("source", "")
        match command:
            case events.RecordLoad():
                del facts["name"]
                self._store.record_load(key, **facts)
            case events.RecordRuns(calls=calls, run_s=run_s, items=items):
                if calls:
                    self._store.record_runs(key, **(facts | {"run_s": [run_s / calls], "items": items / calls}))
            case events.RecordPace():
                self._store.record_pace(key, **facts)
            case events.RecordSpeed():
                self._store.record_time_ratio(key, **facts)
            case events.RecordSteps():
                self._store.record_step_times(key, **facts)
            case events.RecordWait(wait_s=wait_s, boot_s=boot_s):
                devices = DeviceSet(command.kind, command.devices, command.memory_bytes)
                self._sources.record_pilot_wait(key, wait_s=wait_s, boot_s=boot_s, devices=devices)
            case events.RecordStay(stay_s=stay_s, end=end, loss=loss):
                self._sources.record_pilot_stay(key, stay_s=stay_s, ended=end.value, why=loss.value if loss else "")
            case events.RecordPilots():
                self._sources.record_session_pilot_count(key, session=self._session, **facts)
            case events.RecordNode(record=record):
                self.nodes.store_record(record)
            case _:
                assert_never(command)

    def find_advice(self, ask: AskAdvice) -> AdviceArrived | None:
        if not isinstance(ask.about, OfContext):
            return None
        known, steps = self._store.estimates(ask.about.recipe), self._store.step_times(ask.about.recipe)
        by_kind = {
            kind: _context_advice(kind, known.get(kind, Estimate()), steps.get(kind)) for kind in {**known, **steps}
        }
        return AdviceArrived(ask.about, events.CostAdvice(by_kind)) if by_kind else None

    def close(self) -> None:
        self._store.close()
        self._sources.close()
        self.nodes.close()


def _context_advice(kind: str, known: Estimate, steps: StepTimes | None) -> ContextAdvice:
    on_host = kind.startswith("cpu")
    return ContextAdvice(
        load_s=known.load_s + known.start_s, run_s=known.run_s,
        resident_bytes=known.resident_bytes if on_host else known.device_bytes,
        peak_bytes=known.peak_bytes if on_host else known.device_bytes,
        paces={size: measured.mean for size, measured in known.paces.items()}, slots=known.slots, steps=steps,
        speed=known.speed,
    )  # fmt: skip


@dataclass(slots=True)
class _Question:
    about: About
    data: bytes
    tries: int = 0

    @property
    def is_slow(self) -> bool:
        return isinstance(self.about, OfContext | events.OfFunction)


class AdvisorLink:
    """Sends questions to the advisor. `watch`, `unwatch`: add the advisor's descriptor to the manager's event loop, and
    remove it.
    """

    def __init__(self, folder: SessionFolder, *, watch: Callable[[int], None], unwatch: Callable[[int], None]) -> None:
        self.limit_s = LIMIT_S
        self._folder = folder
        self._watch = watch
        self._unwatch = unwatch
        self._waiting: dict[About, _Question] = {}
        self._sent: dict[About, _Question] = {}
        self._open_pace_questions = 0
        self._heard_at = 0.0
        """Time at which the advisor last started, answered, or received a question while it was idle."""
        self._one_at_a_time = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._start_at = 0.0
        self._pause = RetryPause(PAUSE_S, LONGEST_PAUSE_S)

    def queue_question(self, question: AskAdvice, now: float) -> None:
        """Queue a question, unless it is too long, the same one is open, or too many are open."""
        about, data = question.about, events.encode(question)
        is_pace = isinstance(about, OfPace)
        if about in self._waiting or about in self._sent or len(data) > events.LONGEST_MESSAGE:
            return
        if self.open_question_count >= MOST_OPEN or (is_pace and self._open_pace_questions >= MOST_PACES):
            return
        if self._process is None and not self.open_question_count:
            self._start_at = now + GATHER_S
        self._open_pace_questions += is_pace
        self._waiting[about] = _Question(about, data)
        self.start_or_kill_advisor(now)

    @property
    def open_question_count(self) -> int:
        return len(self._waiting) + len(self._sent)

    def receive_answers(self, now: float) -> list[AdviceArrived]:
        found: list[AdviceArrived] = []
        while self._channel is not None:
            try:
                data = self._channel.recv(events.LONGEST_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._handle_advisor_exit(now)
                break
            self._handle_answer(data, found, now)
        if self.open_question_count:
            self.start_or_kill_advisor(now)
        return found

    def start_or_kill_advisor(self, now: float) -> None:
        """Start the advisor if questions are open, send the questions, and kill an advisor that does not answer."""
        if not self.open_question_count or (
            self._channel is None and (now < self._start_at or not self._start_process(now))
        ):
            return
        if self._sent and now - self._heard_at > self.limit_s and self._process is not None:
            log.warning("the advisor has not answered for %.0f s: it is killed", now - self._heard_at)
            self._process.kill()
            self._handle_advisor_exit(now)  # do not wait for the advisor's exit: it may hang in a file read
            return
        self._send_questions(now)

    @property
    def due_in_s(self) -> float:
        return 1.0 if self.open_question_count else float("inf")

    def close(self) -> None:
        self._close_channel()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def _handle_answer(self, data: bytes, found: list[AdviceArrived], now: float) -> None:
        try:
            answer = events.decode_answer(data)
        except msgspec.MsgspecError as error:
            log.warning("an answer of the advisor cannot be read: %s", error)
            return
        question = self._sent.pop(answer.about, None)
        if question is None:
            return
        self._open_pace_questions -= isinstance(answer.about, OfPace)
        self._heard_at, self._one_at_a_time = now, False
        self._pause.reset()
        if answer.found is not None:
            found.append(answer.found)

    def _start_process(self, now: float) -> bool:
        self._start_at = now + self._pause.next_pause_s()
        if self._process is not None:
            self._process.poll()
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            log.warning(_NOT_STARTED, error)
            return False
        channel = its.fileno()
        try:
            with its:
                self._process = start_helper(
                    ADVISOR, self._folder, "--channel", str(channel), log="advisor.log", pass_fds=[channel]
                )
        except OSError as error:
            mine.close()
            log.warning(_NOT_STARTED, error)
            return False
        mine.setblocking(False)
        self._channel, self._heard_at = mine, now
        self._watch(mine.fileno())
        return True

    def _send_questions(self, now: float) -> None:
        if not self._waiting or self._channel is None:
            return
        most = 1 if self._one_at_a_time else _MOST_SENT
        slow = sum(question.is_slow for question in self._sent.values())
        for about, question in list(self._waiting.items()):
            if len(self._sent) >= most:
                return
            if question.is_slow and slow >= _MOST_SLOW_SENT:
                continue
            try:
                self._channel.send(question.data)
            except OSError:  # the channel is full or closed; the next read detects a closed channel
                return
            if not self._sent:
                self._heard_at = now
            del self._waiting[about]
            self._sent[about] = question
            slow += question.is_slow
            question.tries += 1

    def _handle_advisor_exit(self, now: float) -> None:
        self._close_channel()
        code = self._process.poll() if self._process is not None else None
        again = {about: question for about, question in self._sent.items() if question.tries < MOST_TRIES}
        dropped = [about for about in self._sent if about not in again]
        self._open_pace_questions -= sum(isinstance(about, OfPace) for about in dropped)
        self._one_at_a_time = bool(self._sent)
        self._sent = {}
        self._waiting = again | self._waiting
        self._start_at = max(self._start_at, now)
        how = f" ({code})" if code is not None else ""
        log.warning("the advisor ended%s: %d questions open, %d dropped", how, self.open_question_count, len(dropped))

    def _close_channel(self) -> None:
        if self._channel is None:
            return
        with contextlib.suppress(KeyError, OSError):
            self._unwatch(self._channel.fileno())
        self._channel.close()
        self._channel = None

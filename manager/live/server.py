"""The manager's one loop.

A turn: wait until something comes or is due; drain every socket; give each frame to the core; write the turn's events
to the journal with one write; then send one frame a peer. Nothing is delayed to form a batch: batches form by
themselves while a turn is under way.

What a turn decided waits until its events are safe in the journal (`Journal.safe`): at once, or after a sync, or when
the disk has room again. Meanwhile the loop goes on, and answers questions. Only calls that pilots are to run do not
wait for a sync. The end of the session waits for the journal for `ENDING_S` alone: a full disk keeps no process alive.

Time counts from the epoch, so that times in the journal and in stories mean the same after a restart; it does not jump
when somebody sets the wall clock (`clock`).
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

import msgspec

from stoker.errors import ProtocolError, SessionError
from stoker.manager.core import report
from stoker.manager.core.blocks import factory_of
from stoker.manager.core.commands import (
    AskAdvice,
    Command,
    DiscardObject,
    EndManager,
    Record,
    SetTimer,
    ToClient,
    ToPilot,
)
from stoker.manager.core.core import Core
from stoker.manager.core.events import (
    ClientGone,
    EndsKept,
    Event,
    FactoryTrouble,
    FramesRefused,
    FromClient,
    FromPilot,
    ManagerRestarted,
    Noticed,
    PilotCut,
    PilotLost,
    SessionDefined,
    SessionEnded,
    SessionKept,
    TimerFired,
)
from stoker.manager.core.heartbeats import is_heartbeat, is_news
from stoker.manager.core.phases import PilotState
from stoker.manager.core.refusing import refusal_of
from stoker.manager.core.seams import Policies
from stoker.manager.live.acks import CLIENT_ACK_S, PILOT_ACK_S, Acks
from stoker.manager.live.admission import Role, User, foreign
from stoker.manager.live.attendants import Attendants, sites_of, source_of
from stoker.manager.live.clock import Clock
from stoker.manager.live.comeback import come_back
from stoker.manager.live.compaction import Compaction
from stoker.manager.live.decisions import check_of
from stoker.manager.live.doors import PORTS, Doors, name_of
from stoker.manager.live.history import History
from stoker.manager.live.journal import Journal
from stoker.manager.live.journal_trouble import JournalTrouble
from stoker.manager.live.raised import raised
from stoker.manager.live.restarts import RestartProgress
from stoker.manager.protocol import to_client, to_pilot, wire
from stoker.manager.protocol.ids import ClientId, PilotId
from stoker.manager.protocol.session import PYTHON, SessionFile, SessionFolder
from stoker.manager.protocol.to_manager import AskCalls, AskStatus, AskStory, ClientHello
from stoker.seldom import SeldomLog
from stoker.units import show_seconds

log = logging.getLogger("stoker.manager")

MOST_FAILURES, FAILURES_S = 20, 600.0
"""Events that make the core raise are refused, one by one; so many within so many seconds end the session."""
_LONGEST_REASON = 500

FULL_BYTES = 256 << 20
"""While so much waits for room on the disk nothing is read from the sockets."""
FULL_S = 0.1

ENDING_S = 2.0
"""A session that is to end waits for its journal for so long; then it ends without the journal's last records."""

LISTEN_S = 0.5
"""Silence is noticed this late, at most."""


# The core is told at most this often, in seconds, of frames that were refused, unless a client comes.
REFUSALS_S = 5.0


class Patience(msgspec.Struct, frozen=True):
    """How long the manager waits for whom, in seconds.

    `idle_s`: how long a session that is kept goes on without clients and calls (0 = as long as it takes).
    """

    heartbeat_s: float = 5.0
    silence_s: float = 15.0
    pilot_back_s: float = 1.0
    client_back_s: float = 5.0
    first_client_s: float = 120.0
    restart_s: float = 20.0
    pilot_lease_s: float = 60.0
    idle_s: float = 0.0


class CoreFailedError(Exception):
    """The core raised on this event; the journal says so in its place."""


class ManagerServer:
    """A manager process: the core, its doors, journal and history."""

    def __init__(
        self,
        folder: SessionFolder,
        *,
        session: str,
        policies: Policies,
        patience: Patience,
        interface: str = "127.0.0.1",
        ports: tuple[int, int] = PORTS,
        any_port: bool = False,
        detached: bool = False,
        parent: int = 0,
        sync: bool = False,
        sure: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.patience = patience
        self._wait_until_sure = sure
        """Returns once it is known that no other manager runs the session."""
        self._parent = parent
        """The process id of the program that started this one; 0 = not known."""
        self._due: list[tuple[float, str, str]] = []
        self._heard: dict[str, float] = {}
        self._absent: dict[str, float] = {}
        """Who is cut off, and until when they may come back."""
        self._listen_at = 0.0
        """When it is looked next who has been silent for too long."""
        self._ended = ""
        self._refusals = SeldomLog(log)
        self._acks = {Role.CLIENT: Acks(CLIENT_ACK_S), Role.PILOT: Acks(PILOT_ACK_S)}
        self._read_client = wire.from_client()
        self._read_pilot = wire.from_pilot()
        before = folder.read() if folder.file.exists() else None
        back = come_back(folder.journal, session, policies)
        core = back.core
        self.clock = Clock(not_before=core.state.now if core else 0.0, file=folder.clock)
        self.journal = Journal(folder.journal, sync=sync, end=back.end)
        self.compaction = Compaction(
            self.journal, snapshot_bytes=back.snapshot_bytes, tail_bytes=back.tail_bytes, now=back.compact,
            tell=lambda text: self._notice(text),
        )  # fmt: skip
        address = before.address if before else ""
        self.doors = Doors(folder, address=address, interface=interface, ports=ports, any_port=any_port)
        if self.journal.wake_fd >= 0:
            self.doors.watch(self.journal.wake_fd)
        self.history = History(session=session)
        now = self.clock.now()
        self._used_at = self._looked_at = now
        self.core = core or Core(session, policies, now=now)
        self.core.configure(heartbeat_s=patience.heartbeat_s, lease_s=patience.pilot_lease_s)
        self._refused: Counter[str] = Counter()
        """What was refused before it reached the core, which has not been told yet."""
        self._refusals_told_at = now
        self._unsaid: deque[tuple[int, list[Command]]] = deque()
        """What turns decided, and how far the journal must be safe before it is carried out."""
        self._waiting: Counter[PilotId] = Counter()
        """How many of these messages are for each pilot, acknowledgements not counted."""
        self._trouble = JournalTrouble(self.journal, folder.path)
        self._ends_by = math.inf
        """When the session ends though its journal cannot be written; infinite while it is not to end."""
        self._carry_out(self.core.start())
        self._progress = RestartProgress(folder.progress, done=self.core.state.done)
        self._told: dict[str, float] = {}
        """Notices of the session that are in the log."""
        self._asked_to_end_ns = 0
        """When the file by which `stoker down` ends a session was touched last; 0 while there is none."""
        first: list[Command] = []
        if back.ends:
            self._give(EndsKept(back.ends), now, first)
        if before is not None:  # whatever is left of its journal
            self._come_back(now, lost=back.lost)
        if detached and not self.core.state.kept:
            self._give(SessionKept(), now, first)
        if not detached and not self.core.state.clients_by_number:
            self._absent["client "] = now + patience.first_client_s
        for text in back.notices:
            self._give(Noticed(text), now, first)
        self._turn_ends(first)
        self._address = SessionFile(
            session, wire.VERSION, self.doors.address, folder.read_key("server").public,
            created_at=before.created_at if before else now, python=before.python if before else PYTHON,
        )  # fmt: skip
        self._write_address(before)
        log.info("session %s listens on %s", session, self.doors.address)
        self._factory_trouble = self.core.state.factory_trouble
        """What the core was told of a factory that does not come."""
        self._define_session(now)

    def _write_address(self, before: SessionFile | None) -> None:
        """Write `session.json`. On a full disk the file of `before` stays if it says the same; its new time tells that
        the manager listens. Raises OSError."""
        try:
            self.folder.write(self._address)
        except OSError:
            if before != self._address:
                raise
            os.utime(self.folder.file)

    def write_address_again(self) -> None:
        """Write `session.json` anew if somebody has removed or damaged it: programs and pilots find the session by it.
        On any thread. Raises OSError."""
        try:
            if self.folder.read() == self._address:
                return
        except SessionError as error:
            what = str(error) if self.folder.file.exists() else f"{self.folder.file} was removed"
            log.warning("%s; it is written again", what)
        self.folder.write(self._address)

    def run(self) -> str:
        """Serve until the session is over; returns why."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        if self.core.state.ending:
            self._ended = self.core.state.ending
        doors = self.doors
        while not self._ended:
            gone = doors.wait(self._wait_ms())
            self._wait_until_sure()
            commands: list[Command] = []
            now = self.clock.now()
            for peer in gone:
                self._left(peer.decode(), now, commands)
            if self.journal.pending_bytes < FULL_BYTES:
                for user, peer, data in doors.frames():
                    self._frame(user, peer, data, now, commands)
            else:
                self._wait_for_room(now, commands)
            self._timers(now, commands)
            self._look_after(now, commands)
            self._log_notices()
            self._turn_ends(commands)
            self._progress.look(self.core.state.done)
            self.compaction.look(self.core)
        log.info("session over: %s", self._ended)
        return self._ended

    def _wait_for_room(self, now: float, commands: list[Command]) -> None:
        """Read no messages for a moment. Peers do not count as silent meanwhile, and `stoker down` has a file to say
        that the session is to end."""
        time.sleep(FULL_S)
        self._heard = dict.fromkeys(self._heard, now)
        if not self.core.state.ending and self._is_asked_to_end():
            self._give(SessionEnded("stoker down"), now, commands)

    def _is_asked_to_end(self) -> bool:
        """True while `stoker down` touches its file. A file that a killed `stoker down` left behind does not change."""
        before = self._asked_to_end_ns
        try:
            with self.folder.asked_to_end.open("rb") as file:  # opened: a network file system then looks again
                self._asked_to_end_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            self._asked_to_end_ns = 0
        return 0 != before != self._asked_to_end_ns != 0

    def _log_notices(self) -> None:
        """What `status` says of the session itself stands in the log too."""
        notices = self.core.state.notices
        if len(notices) == len(self._told) and notices == self._told:
            return
        for text, at in notices.items():
            if self._told.get(text) != at:
                log.warning("%s", text)
        self._told = dict(notices)

    def close(self) -> None:
        """Let go of everything, and send what is still to be sent. Raises SessionError where the journal's last records
        cannot be written."""
        with contextlib.ExitStack() as last_first:
            for part in (self.doors, self.history, self.journal, self.compaction):
                last_first.callback(part.close)

    # ---- what comes in

    def _frame(self, user: User, peer: bytes, data: memoryview, now: float, commands: list[Command]) -> None:
        state, role = self.core.state, user.role
        try:
            name = name_of(peer).decode()
            if role is Role.PILOT:
                frame = self._read_pilot(data)
                event: FromPilot | FromClient = FromPilot(PilotId(name), frame.sequence, frame.messages)
            else:
                asked = self._read_client(data)
                event = FromClient(ClientId(name), asked.sequence, asked.messages)
        except (ProtocolError, UnicodeDecodeError) as error:
            stranger = wire.hello_of_another(data)
            if stranger is not None:
                why = wire.why_not(stranger, session=state.session)
                refused = to_pilot.PilotRefused(why) if role is Role.PILOT else to_client.ClientRefused(why)
                self.doors.answer(peer, wire.encode([refused]))
            self._refused[f"{role.value} of another version" if stranger else "frame that is not in the protocol"] += 1
            self._refusals.warning(f"{role.value} {peer!r}", f"refused a frame of {role.value} {peer!r}: {error}")
            return
        if user.block and isinstance(event, FromPilot):
            why = foreign(state, event.pilot, event.messages, block=user.block)
            if why:
                self.doors.answer(peer, wire.encode([to_pilot.PilotRefused(why)]))
                self._refused["frame with the key of another block"] += 1
                self._refusals.warning(f"block {user.block}", f"refused a frame: {why}")
                return
        self.doors.take(name_of(peer), peer)
        key = f"{role.value} {name}"
        self._heard[key] = now
        if self._absent:
            self._absent.pop(key, None)
            if role is Role.CLIENT:
                self._absent.pop("client ", None)
        if isinstance(event, FromClient):
            self._tell_refused(now, commands)
        if isinstance(event, FromPilot):
            if not is_heartbeat(event):
                self._give(event, now, commands)
            elif is_news(state, event, now) or event.pilot not in state.pilots:
                self._give(event, now, commands, keep=event.pilot in state.pilots)
        elif not event.sequence and _only_looks(event.messages):  # it is welcomed though the disk may be full
            seen: list[Command] = []
            self._give(event, now, seen)
            self._carry_out(seen)
        else:
            self._give(event, now, commands, keep=bool(event.sequence) or not _only_asks(event.messages))
            if self._trouble.text and event.messages and isinstance(event.messages[0], ClientHello):
                self._trouble.program_came()

    def _tell_refused(self, now: float, commands: list[Command]) -> None:
        """Tell the core what the shell has refused: whoever asks for the session's status hears of it."""
        if self._refused:
            counts, self._refused = dict(self._refused), Counter()
            self._refusals_told_at = now
            self._give(FramesRefused(counts), now, commands)

    def _give(self, event: Event, now: float, commands: list[Command], *, keep: bool = True) -> None:
        if not keep:  # an answer says what is, whether the disk has it or not
            self._carry_out(self._answer(event, now))
            return
        self.journal.write(now, event)
        try:
            decided = self.core.handle(event, now)
        except Exception as error:
            self.journal.take_back()
            self._refuse(event, now, error)
            raise CoreFailedError(event) from error
        self.journal.decided(check_of(decided))
        commands += decided

    def _answer(self, event: Event, now: float) -> list[Command]:
        """What the core says to an event that changes nothing and is not in the journal."""
        try:
            return self.core.handle(event, now)
        except Exception as error:
            self._refusals.warning(type(event).__name__, f"the manager could not answer {event}: {error!r}")
            self._refused["question that the manager could not answer"] += 1
            self.core.forget_half()
            return []

    def _refuse(self, event: Event, now: float, error: Exception) -> None:
        """The core has failed on an event, and may have done half of it. The journal gets word of that in place of the
        event, and the manager comes back from it; unless this happens again and again."""
        recent = [at for at in self.core.state.failed_at if now - at < FAILURES_S]
        if len(recent) < MOST_FAILURES:
            lines = raised(error)
            where = f" ({lines[0].strip()})" if lines else ""
            self.journal.write(now, refusal_of(event, f"{type(error).__name__}: {error}{where}"[:_LONGEST_REASON]))
            self.journal.flush()

    def _left(self, peer: str, now: float, commands: list[Command]) -> None:
        """A connection broke: its owner has a moment to come back."""
        for role, patience in (("pilot", self.patience.pilot_back_s), ("client", self.patience.client_back_s)):
            if f"{role} {peer}" in self._heard:
                self._absent[f"{role} {peer}"] = now + patience
                if role == "pilot":
                    log.info("connection to pilot %s broke", peer)
                    self._give(PilotCut(PilotId(peer)), now, commands)

    # ---- what is due

    def _wait_ms(self) -> int:
        now = self.clock.now()
        soonest = min(now + self.patience.heartbeat_s, self._listen_at if self._heard else math.inf)
        if self._due:
            soonest = min(soonest, self._due[0][0])
        if self._absent:
            soonest = min(soonest, *self._absent.values())
        soonest = min(soonest, *(acks.due_at for acks in self._acks.values()))
        soonest = min(soonest, now + self.attendants.wait_s)
        soonest = min(soonest, now + self.journal.wait_s, now + self.compaction.wait_s, self._ends_by)
        return max(0, min(5000, int((soonest - now) * 1000) + 1))

    def _timers(self, now: float, commands: list[Command]) -> None:
        for acks in self._acks.values():
            for peer, message in acks.overdue(now):
                self.doors.send(peer.encode(), wire.encode([message]))
        due, timers = self._due, self.core.state.timers
        while due and due[0][0] <= now:
            at, key, _ = heapq.heappop(due)
            if timers.get(key) == at:
                self._give(TimerFired(key), now, commands)
        if "client " in self._absent and self._parent and os.getppid() != self._parent:
            self._absent["client "] = now  # it never joined, and its process has ended
        for key, until in list(self._absent.items()):
            if until <= now:
                del self._absent[key]
                self._give_up(key, "did not come back", now, commands)
        if now - self._refusals_told_at >= REFUSALS_S:
            self._tell_refused(now, commands)
        if now >= self._listen_at:
            self._listen_at = now + LISTEN_S
            for key, heard in list(self._heard.items()):
                if key.startswith("pilot ") and now - heard > self.patience.silence_s and key not in self._absent:
                    self._give_up(key, f"silent for {now - heard:.0f} s", now, commands)
        if self.core.state.kept and self.patience.idle_s and now - self._looked_at >= min(self.patience.idle_s / 4, 60):
            self._look_idle(now, commands)

    def _look_after(self, now: float, commands: list[Command]) -> None:
        """See to the processes that the session needs, and tell the core of a factory that does not come."""
        self.attendants.look()
        trouble = self.attendants.factory_trouble
        if trouble != self._factory_trouble:
            self._factory_trouble = trouble
            self._give(FactoryTrouble(trouble), now, commands)

    def _look_idle(self, now: float, commands: list[Command]) -> None:
        """Whether anybody has used the session lately; end it if not."""
        self._looked_at = now
        state = self.core.state
        if state.calls or any(not client.gone and not client.observer for client in state.clients.values()):
            self._used_at = now
        elif now - self._used_at >= self.patience.idle_s:
            idle = show_seconds(now - self._used_at)
            self._give(SessionEnded(f"no program has used it for {idle}"), now, commands)

    def _give_up(self, key: str, why: str, now: float, commands: list[Command]) -> None:
        role, _, name = key.partition(" ")
        self._heard.pop(key, None)
        self.doors.forget(name.encode())
        log.log(logging.WARNING if role == "pilot" else logging.INFO, "%s %s", key, why)
        if not name:
            self._ended = "no client ever came"
        elif role == "pilot":
            self._give(PilotLost(PilotId(name), why), now, commands)
        else:
            self._give(ClientGone(ClientId(name)), now, commands)

    # ---- what goes out

    def _turn_ends(self, commands: list[Command]) -> None:
        """Put what happened on disk, and carry out what is decided on events that are safe there."""
        self.journal.flush()
        if self.journal.is_synced:
            commands = self._hand_out(commands)
        if commands:
            self._unsaid.append((self.journal.position, commands))
        if not self._trouble.is_none:
            self._tell_of_journal()
        unsaid = self._unsaid
        self._wait_until_sure()  # what was written may have hung
        ends_now = bool(unsaid and self.core.state.ending) and self._ends_now()
        while unsaid and (ends_now or unsaid[0][0] <= self.journal.safe):
            said = unsaid.popleft()[1]
            for command in said if self._waiting else ():
                if _keeps_place(command):
                    self._waiting[command.pilot] -= 1
            self._carry_out(said)
            if not unsaid:
                self._waiting.clear()

    def _ends_now(self) -> bool:
        """Whether a session that is to end has waited for its journal for long enough."""
        now = self.clock.now()
        self._ends_by = min(self._ends_by, now + ENDING_S)
        return now >= self._ends_by

    def _hand_out(self, commands: list[Command]) -> list[Command]:
        """Send pilots the calls that they are to run. That need not wait for a sync: after a crash of this host the
        pilots say what runs there. Ends, acknowledgements and all else wait; so do calls for a pilot for which
        something else waits, since they would overtake it. Returns the commands that are left."""
        is_written = self.journal.position <= self.journal.written
        now: list[Command] = []
        later: list[Command] = []
        for command in commands:
            if not _keeps_place(command):
                later.append(command)
            elif is_written and type(command.message) is to_pilot.RunCalls and not self._waiting[command.pilot]:
                now.append(command)
            else:
                self._waiting[command.pilot] += 1
                later.append(command)
        if now:
            self._carry_out(now)
        return later

    def _tell_of_journal(self) -> None:
        """Tell the session and its programs if the journal cannot be written, or can be again."""
        trouble, now = self._trouble, self.clock.now()
        if notice := trouble.changed_notice(now):
            self._notice(notice)
        if trouble.is_untold(now):
            told = report.status(self.core.state)
            clients = [each for each in self.core.state.clients.values() if each.connected and not each.observer]
            self._carry_out(ToClient(client.id, told) for client in clients)

    def _notice(self, text: str) -> None:
        """Tell the people of the session something: `status` shows it."""
        commands: list[Command] = []
        self._give(Noticed(text), self.clock.now(), commands)
        self._unsaid.append((self.journal.position, commands))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        frames: dict[str, list[object]] = {}
        peer: str
        advice: list[AskAdvice] = []
        for command in commands:
            match command:
                case ToPilot(peer, message) | ToClient(peer, message):
                    if type(message) is to_client.Status:
                        message = self._trouble.added_to(message)
                    if type(message) is to_client.ClientWelcome:  # its frames may have other numbers from now on
                        self._acks[Role.CLIENT].along(peer)
                    if type(message) is to_pilot.Ack and PilotId(peer) in self.core.state.pilots:
                        self._acks[Role.PILOT].add(peer, message, self.clock.now())
                    elif type(message) is to_client.Ack:
                        self._acks[Role.CLIENT].add(peer, message, self.clock.now())
                    else:
                        frames.setdefault(peer, []).append(message)
                case SetTimer(at, key):
                    heapq.heappush(self._due, (at, key, ""))
                case AskAdvice():
                    advice.append(command)
                case _ if isinstance(command, Record):
                    self.history.record(command)
                case DiscardObject(path):
                    self._discard(path)
                case EndManager(reason):
                    self._ended = reason
        for peer, messages in frames.items():
            for acks in self._acks.values():
                messages += acks.along(peer)
            if not self.doors.send(peer.encode(), wire.encode(messages)):
                log.info("nobody is connected as %s", peer)
        for ask in advice:
            self._advise(ask)

    def _discard(self, path: str) -> None:
        """Remove a file of the session's objects, and nothing else, whatever a pilot calls it."""
        file = Path(path)
        if file.parent == self.folder.objects and file.name.startswith("result-"):
            file.unlink(missing_ok=True)

    def _advise(self, ask: AskAdvice) -> None:
        answer = self.history.answer(ask)
        if answer is not None:
            more: list[Command] = []
            self._give(answer, self.clock.now(), more)
            self._turn_ends(more)

    # ---- the beginning

    def _define_session(self, now: float) -> None:
        """Tell the core where pilots come from, and see to the processes that this needs."""
        sites = sites_of(self.folder)
        state = self.core.state
        self.attendants = Attendants(self.folder, sites, is_factory_here=lambda: factory_of(state) is not None)
        sources = tuple(source_of(site, kept=self.core.state.kept) for site in sites)
        if sources or self.core.state.sources:
            commands: list[Command] = []
            self._give(SessionDefined(sources, lease_s=self.patience.pilot_lease_s), now, commands)
            self._turn_ends(commands)

    # ---- after a restart

    def _come_back(self, now: float, *, lost: int) -> None:
        commands: list[Command] = []
        state = self.core.state
        for key, at in state.timers.items():
            heapq.heappush(self._due, (at, key, ""))
        for pilot in state.pilots.values():
            if pilot.state is not PilotState.GONE:
                self._absent[f"pilot {pilot.id}"] = now + self.patience.restart_s
        for client in state.clients.values():
            if not client.gone:
                self._absent[f"client {client.id}"] = now + self.patience.restart_s
        self._give(ManagerRestarted(lost), now, commands)
        self._turn_ends(commands)
        log.warning(
            "came back from the journal: %d calls open, %d done, %d pilots",
            len(state.calls),
            state.done,
            len(state.pilots),
        )


def _keeps_place(command: Command) -> TypeGuard[ToPilot]:
    """Whether a command is a message to a pilot that later ones must not overtake."""
    return type(command) is ToPilot and type(command.message) is not to_pilot.Ack


def _only_asks(messages: Sequence[object]) -> bool:
    return bool(messages) and all(isinstance(message, AskStatus | AskStory | AskCalls) for message in messages)


def _only_looks(messages: Sequence[object]) -> bool:
    """Whether somebody says hello who only asks questions, and perhaps asks the first."""
    hello = messages[0] if messages else None
    return isinstance(hello, ClientHello) and hello.observer and (len(messages) == 1 or _only_asks(messages[1:]))


def check_folder(folder: SessionFolder) -> None:
    """Raise SessionError unless the folder can hold a session."""
    if not folder.key_file("server").exists():
        raise SessionError(f"{folder.path} is not a session folder: it has no keys; `stoker.load()` makes one")

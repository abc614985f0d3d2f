"""The manager's loop.

One turn waits for a message or due work, reads every socket, and passes each frame to the core. It ends with one write
to the journal and one frame to each peer. The core's commands wait until the events that caused them are safe in the
journal (`HeldCommands`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from stoker.log_files import RateLimitedLog
from stoker.manager.core import events, report
from stoker.manager.core.blocks import find_connected_factory
from stoker.manager.core.clients import build_refused_event, has_only_result_pieces
from stoker.manager.core.events import Command, Event, ToClient, ToPilot
from stoker.manager.core.pilot_reports import is_heartbeat, needs_heartbeat_record
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live.admission import KeyOwner, PeerRole
from stoker.manager.live.advisor import LIMIT_S, AdvisorLink, SessionHistory
from stoker.manager.live.clock import CLIENT_ACK_S, PILOT_ACK_S, Clock, PendingAcks, TimerHeap
from stoker.manager.live.compaction import JournalCompaction
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.helper_processes import HelperProcesses, create_source, load_session_sites
from stoker.manager.live.journal import HeldCommands, Journal, JournalTroubleReporter
from stoker.manager.live.keeper import RestartProgress
from stoker.manager.live.peer_watch import PeerTimeLimits, PeerWatch
from stoker.manager.live.presence import write_session_file
from stoker.manager.live.restore import restore_manager
from stoker.manager.live.sockets import EventReader, ManagerSockets, has_only_questions, is_from_observer, peer_name
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol.ids import ClientId, PilotId
from stoker.protocol.session import PYTHON, SessionFile, SessionFolder
from stoker.protocol.to_manager import ClientHello
from stoker.tracebacks import user_traceback_lines
from stoker.units import show_seconds

log = logging.getLogger("stoker.manager")

PAUSE_READING_BYTES = 256 << 20
"""Bytes of unwritten journal data above which the manager reads no messages."""
READ_PAUSE_S = 0.1
MOST_FAILURES, FAILURES_S = 20, 600.0
"""The session ends after this many failures of the core within these seconds."""
_LONGEST_REASON = 500
_discard_log = RateLimitedLog(log)


class CoreFailedError(Exception):
    """The core raised an exception. The journal may contain a record of the refusal in place of the event."""


class ManagerServer:
    """The manager of a session. `wait_until_sure`: function that waits until no other manager can run the session.
    `parent`: process that started this manager (0 = unknown).
    """

    def __init__(
        self,
        folder: SessionFolder,
        *,
        session: str,
        policies: Policies,
        patience: PeerTimeLimits,
        interface: str,
        ports: tuple[int, int],
        any_port: bool,
        detached: bool,
        parent: int,
        sync: bool,
        wait_until_sure: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.patience = patience
        self._wait_until_sure = wait_until_sure
        self._timers = TimerHeap()
        self._end_reason = ""
        self._acks = {PeerRole.CLIENT: PendingAcks(CLIENT_ACK_S), PeerRole.PILOT: PendingAcks(PILOT_ACK_S)}
        self._peer_watch = PeerWatch(patience, parent=parent)
        before = folder.read() if folder.file.exists() else None
        back = restore_manager(folder.journal, session, policies)
        core = back.core
        self.clock = Clock(not_before=core.state.now if core else 0.0, file=folder.clock)
        self.journal = Journal(folder.journal, sync=sync, end=back.end)
        self.compaction = JournalCompaction(
            self.journal, snapshot_bytes=back.snapshot_bytes, tail_bytes=back.tail_bytes, starts_now=back.compact,
            tell=lambda text: self._add_notice(text),
        )  # fmt: skip
        address = before.address if before else ""
        self.sockets = ManagerSockets(folder, address=address, interface=interface, ports=ports, any_port=any_port)
        if self.journal.wake_fd >= 0:
            self.sockets.watch_descriptor(self.journal.wake_fd)
        self.history = SessionHistory(session=session)
        self.advisor = AdvisorLink(folder, watch=self.sockets.watch_descriptor, unwatch=self.sockets.unwatch_descriptor)
        now = self.clock.now()
        self._last_used_at = self._idle_checked_at = now
        self._asked_to_end_ns = 0
        self.core = core or Core(session, policies, now=now)
        self.core.configure(heartbeat_s=patience.heartbeat_s, lease_s=patience.pilot_lease_s)
        self._event_reader = EventReader(self.sockets, self.core.state, now=now)
        self._held_commands = HeldCommands(self.journal)
        self._forwarded_pieces: list[Command] = []
        self._trouble_reporter = JournalTroubleReporter(self.journal, folder.path)
        self._execute(self.core.start())
        self._progress = RestartProgress(folder.progress, done=self.core.state.done)
        self._logged_notices: dict[str, float] = {}
        first: list[Command] = []
        if back.ends:
            self._handle_event(events.EndsKept(back.ends), now, first)
        if before is not None:  # the manager restarted, perhaps without a journal
            self._resume_after_restart(now, lost=back.lost)
        if detached and not self.core.state.outlives_clients:
            self._handle_event(events.SessionKept(), now, first)
        if not detached and not self.core.state.clients_by_number:
            self._peer_watch.expect_first_client(now)
        for text in back.notices:
            self._handle_event(events.Noticed(text), now, first)
        self._read_node_records(now, first)  # the core must know failed nodes before it requests blocks
        self._flush_journal_and_execute(first)
        self.session_file = SessionFile(
            session, wire.VERSION, self.sockets.address, folder.read_key("server").public,
            created_at=before.created_at if before else now, python=before.python if before else PYTHON,
        )  # fmt: skip
        write_session_file(folder, self.session_file, before=before)
        log.info("session %s listens on %s", session, self.sockets.address)
        self._define_session()

    def run(self) -> str:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        if self.core.state.end_reason:
            self._end_reason = self.core.state.end_reason
        sockets = self.sockets
        while not self._end_reason:
            gone = sockets.wait(self._poll_timeout_ms())
            self._wait_until_sure()
            commands: list[Command] = []
            now = self.clock.now()
            for name in gone:
                self._handle_broken_connection(name, now, commands)
            if self.journal.pending_bytes < PAUSE_READING_BYTES:
                for user, peer, data in sockets.read_frames():
                    self._handle_frame(user, peer, data, now, commands)
                if self._forwarded_pieces:
                    passing, self._forwarded_pieces = self._forwarded_pieces, []
                    self._execute(passing)
            else:
                self._pause_reading_messages(now, commands)
            self._do_due_work(now, commands)
            self._start_helpers(now, commands)
            for advice in self.advisor.receive_answers(now):
                self._handle_event(advice, now, commands)
            self._log_new_notices()
            self._flush_journal_and_execute(commands)
            self._progress.mark_first_completed_call(self.core.state.done)
            self.compaction.start_or_check(self.core)
        log.info("session over: %s", self._end_reason)
        return self._end_reason

    def _pause_reading_messages(self, now: float, commands: list[Command]) -> None:
        """Read no messages for `READ_PAUSE_S`, and restart the silence limits of peers."""
        time.sleep(READ_PAUSE_S)
        self._peer_watch.restart_silence_limits(now, may_have_reconnected=self.sockets.has_unread_connection)
        before, self._asked_to_end_ns = self._asked_to_end_ns, _mtime_ns(self.folder.end_request)
        if not self.core.state.end_reason and 0 != before != self._asked_to_end_ns != 0:
            self._handle_event(events.SessionEnded("stoker down"), now, commands)

    def close(self) -> None:
        with contextlib.ExitStack() as last_first:
            for part in (self.sockets, self.advisor, self.history, self.journal, self.compaction):
                last_first.callback(part.close)

    # ---- incoming messages

    def _handle_frame(self, user: KeyOwner, peer: bytes, data: memoryview, now: float, commands: list[Command]) -> None:
        event = self._event_reader.decode_peer_frame(user, peer, data)
        if event is None:
            return
        self.sockets.remember_connection(peer_name(peer), peer)
        if isinstance(event, events.FromPilot):
            self._peer_watch.note_message(PeerRole.PILOT, event.pilot, now)
        else:
            self._peer_watch.note_message(PeerRole.CLIENT, event.client, now)
        if has_only_result_pieces(event):
            self._forward_pieces(event, now)
        elif isinstance(event, events.FromPilot):
            known = event.pilot in self.core.state.pilots
            if not is_heartbeat(event):
                self._handle_event(event, now, commands)
            elif not known or needs_heartbeat_record(self.core.state, event, now):
                self._handle_event(event, now, commands, keep=known)
        else:
            self._handle_client_event(event, now, commands)

    def _handle_client_event(self, event: events.FromClient, now: float, commands: list[Command]) -> None:
        self._report_refused_frames(now, commands, at_once=True)
        if not event.sequence and is_from_observer(event.messages):  # observers get a welcome even if the disk is full
            welcome: list[Command] = []
            self._handle_event(event, now, welcome)
            self._execute(welcome)
            return
        self._handle_event(event, now, commands, keep=bool(event.sequence) or not has_only_questions(event.messages))
        if event.messages and isinstance(event.messages[0], ClientHello):
            self._trouble_reporter.repeat_for_new_program()

    def _forward_pieces(self, event: events.FromPilot | events.FromClient, now: float) -> None:
        try:
            self._forwarded_pieces += self.core.pass_on(event, now)
        except Exception as error:
            self._event_reader.log.warning("pieces", f"the manager could not pass on {type(event).__name__}: {error!r}")
            self._event_reader.count_refused_frame("pieces that the manager could not pass on")

    def _report_refused_frames(self, now: float, commands: list[Command], *, at_once: bool = False) -> None:
        if counts := self._event_reader.take_refusal_counts(now, at_once=at_once):
            self._handle_event(events.FramesRefused(counts), now, commands)

    def _handle_event(self, event: Event, now: float, commands: list[Command], *, keep: bool = True) -> None:
        """Pass an event to the core. `keep`: write it to the journal; False for a question."""
        if not keep:
            self._execute(self._handle_question(event, now))
            return
        self.journal.add_event(now, event)
        try:
            decided = self.core.handle(event, now)
        except Exception as error:
            self.journal.remove_last_event()
            if sum(now - at < FAILURES_S for at in self.core.state.core_failure_times) < MOST_FAILURES:
                lines = user_traceback_lines(error)
                where = f" ({lines[0].strip()})" if lines else ""
                refusal = build_refused_event(event, f"{type(error).__name__}: {error}{where}"[:_LONGEST_REASON])
                self.journal.add_event(now, refusal)
                self.journal.flush()
            raise CoreFailedError(event) from error
        self.journal.add_decision_checksum(decision_checksum(decided))
        commands += decided

    def _handle_question(self, event: Event, now: float) -> list[Command]:
        try:
            return self.core.handle(event, now)
        except Exception as error:
            self._event_reader.log.warning(type(event).__name__, f"the manager could not answer {event}: {error!r}")
            self._event_reader.count_refused_frame("question that the manager could not answer")
            self.core.discard_pending_commands()
            return []

    def _handle_broken_connection(self, name: str, now: float, commands: list[Command]) -> None:
        if self._peer_watch.note_disconnection(PeerRole.PILOT, name, now):
            log.info("connection to pilot %s broke", name)
            self._handle_event(events.PilotCut(PilotId(name)), now, commands)
        self._peer_watch.note_disconnection(PeerRole.CLIENT, name, now)

    # ---- due work

    def _poll_timeout_ms(self) -> int:
        now = self.clock.now()
        soonest = min(now + self.patience.heartbeat_s, self._peer_watch.next_limit_at(), self._timers.next_due_at())
        soonest = min(soonest, *(acks.due_at for acks in self._acks.values()))
        soonest = min(soonest, now + self.helpers.wait_s, now + self.advisor.due_in_s)
        soonest = min(soonest, now + self.journal.wait_s, now + self.compaction.wait_s, self._held_commands.ends_by)
        return max(0, min(5000, int((soonest - now) * 1000) + 1))

    def _do_due_work(self, now: float, commands: list[Command]) -> None:
        for acks in self._acks.values():
            for peer, message in acks.take_overdue_acks(now):
                self.sockets.send(peer.encode(), wire.encode([message]))
        for key in self._timers.pop_due_timers(now, current=self.core.state.timers):
            self._handle_event(events.TimerFired(key), now, commands)
        for role, name, why in self._peer_watch.lost_peers(now):
            self._drop_peer(role, name, why, now, commands)
        self._report_refused_frames(now, commands)
        self._read_node_records(now, commands)
        self._end_unused_session(now, commands)

    def _end_unused_session(self, now: float, commands: list[Command]) -> None:
        state, limit_s = self.core.state, self.patience.idle_s
        if not (state.outlives_clients and limit_s and now - self._idle_checked_at >= min(limit_s / 4, 60)):
            return
        self._idle_checked_at = now
        if state.calls or any(not client.gone and not client.observer for client in state.clients.values()):
            self._last_used_at = now
        elif now - self._last_used_at >= limit_s:
            why = f"no program has used it for {show_seconds(now - self._last_used_at)}"
            self._handle_event(events.SessionEnded(why), now, commands)

    def _start_helpers(self, now: float, commands: list[Command]) -> None:
        self.helpers.start_missing_processes()
        trouble = self.helpers.factory_trouble
        if trouble != self.core.state.factory_trouble:
            self._handle_event(events.FactoryTrouble(trouble), now, commands)

    def _read_node_records(self, now: float, commands: list[Command]) -> None:
        known = self.core.state.nodes
        heard = [
            record
            for record in self.history.nodes.records_if_changed(now)
            if (before := known.get((record.source, record.node))) is None or record.at > before.at
        ]
        if heard:
            self._handle_event(events.NodesHeard(tuple(heard)), now, commands)

    def _drop_peer(self, role: PeerRole, name: str, why: str, now: float, commands: list[Command]) -> None:
        self.sockets.forget_connection(name.encode())
        log.log(logging.WARNING if role is PeerRole.PILOT else logging.INFO, "%s %s %s", role.value, name, why)
        if not name:
            self._end_reason = "no client ever connected"
        elif role is PeerRole.PILOT:
            self._handle_event(events.PilotLost(PilotId(name), why), now, commands)
        else:
            self._handle_event(events.ClientGone(ClientId(name)), now, commands)

    # ---- outgoing messages

    def _flush_journal_and_execute(self, commands: list[Command]) -> None:
        self.journal.flush()
        if self.journal.wake_fd >= 0:
            ready, commands = self._held_commands.split_by_sync_need(commands)
            self._execute(ready)
        self._held_commands.hold(commands)
        self._report_journal_to_clients()
        self._wait_until_sure()  # check again, because the journal write may have hung
        while self._held_commands.may_release_oldest(self.clock.now(), ending=bool(self.core.state.end_reason)):
            self._execute(self._held_commands.release_oldest())

    def _report_journal_to_clients(self) -> None:
        notice, tell = self._trouble_reporter.take_notice(self.clock.now())
        if notice:
            self._add_notice(notice)
        if tell:
            told = report.build_session_status(self.core.state)
            clients = [each for each in self.core.state.clients.values() if each.connected and not each.observer]
            self._execute(ToClient(client.id, told) for client in clients)

    def _add_notice(self, text: str) -> None:
        commands: list[Command] = []
        self._handle_event(events.Noticed(text), self.clock.now(), commands)
        self._held_commands.hold(commands)

    def _log_new_notices(self) -> None:
        notices = self.core.state.notices
        if notices != self._logged_notices:
            for text in [text for text, at in notices.items() if self._logged_notices.get(text) != at]:
                log.warning("%s", text)
            self._logged_notices = dict(notices)

    def _execute(self, commands: Iterable[Command]) -> None:
        """Execute commands. All messages to a peer share one frame, which also contains pending acknowledgements."""
        frames: dict[str, list[object]] = {}
        peer: str
        advice: list[events.AskAdvice] = []
        claims: list[events.ClaimProbe] = []
        for command in commands:
            match command:
                case ToPilot(peer, message) | ToClient(peer, message):
                    if type(message) is to_client.Status:
                        message = self._trouble_reporter.add_trouble_to_status(message)
                    if type(message) is to_client.ClientWelcome:  # drop the acknowledgement of the old frame numbers
                        self._acks[PeerRole.CLIENT].take_ack_for_frame(peer)
                    if type(message) is to_pilot.Ack and PilotId(peer) in self.core.state.pilots:
                        self._acks[PeerRole.PILOT].add(peer, message, self.clock.now())
                    elif type(message) is to_client.Ack:
                        self._acks[PeerRole.CLIENT].add(peer, message, self.clock.now())
                    else:
                        frames.setdefault(peer, []).append(message)
                case events.SetTimer(at, key):
                    self._timers.set_timer(key, at=at)
                case events.AskAdvice():
                    advice.append(command)
                case _ if isinstance(command, events.Record):
                    self.history.store_record(command)
                case events.ClaimProbe():
                    claims.append(command)
                case events.DiscardObject(path):
                    remove_result_file(self.folder, path)
                case events.EndManager(reason):
                    self._end_reason = reason
        for peer, messages in frames.items():
            for acks in self._acks.values():
                messages += acks.take_ack_for_frame(peer)
            if not self.sockets.send(peer.encode(), wire.encode(messages)):
                log.info("no peer is connected as %s", peer)
        for ask in advice:
            self.advisor.queue_question(ask, self.clock.now())
            if (answer := self.history.find_advice(ask)) is not None:
                self._handle_and_execute(answer)
        for claim in claims:
            if self.history.nodes.claim_probe(claim.record, every_s=claim.every_s, now=self.clock.now()):
                self._handle_and_execute(events.ProbeClaimed(claim.record.source, claim.record.node))

    def _handle_and_execute(self, event: Event) -> None:
        commands: list[Command] = []
        self._handle_event(event, self.clock.now(), commands)
        self._flush_journal_and_execute(commands)

    # ---- the beginning

    def _define_session(self) -> None:
        sites = load_session_sites(self.folder)
        state = self.core.state
        models_s = [float(site.advice.time_limit_s) for site in sites if site.advice.url]
        self.advisor.limit_s = max(LIMIT_S, 2 * max(models_s, default=0.0))
        self.helpers = HelperProcesses(
            self.folder, sites, is_factory_here=lambda: find_connected_factory(state) is not None
        )
        sources = tuple(create_source(site, kept=self.core.state.outlives_clients) for site in sites)
        if sources or self.core.state.sources:
            self._handle_and_execute(events.SessionDefined(sources, lease_s=self.patience.pilot_lease_s))

    def _resume_after_restart(self, now: float, *, lost: int) -> None:
        state = self.core.state
        for key, at in state.timers.items():
            self._timers.set_timer(key, at=at)
        self._peer_watch.expect_all_peers_to_reconnect(state, now)
        self._handle_and_execute(events.ManagerRestarted(lost))
        counts = len(state.calls), state.done, len(state.pilots)
        log.warning("restored from the journal: %d calls open, %d done, %d pilots", *counts)


def remove_result_file(folder: SessionFolder, path: str) -> None:
    """Remove a result file. Ignore other paths, because the path comes from a pilot."""
    file = Path(path)
    if file.parent != folder.objects or not file.name.startswith("result-"):
        return
    try:
        file.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # a name may contain a zero byte, or be too long
        _discard_log.warning("results", f"cannot remove an unused result file, {path!r:.300}: {error}")


def _mtime_ns(file: Path) -> int:
    try:
        with file.open("rb") as opened:  # on a network file system, opening the file refreshes the cached file time
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return 0

"""The agent's connection to the manager.

Messages that change the manager's records travel in numbered frames, which are kept until they are acknowledged. After
each reconnect the pilot sends a hello, then these frames again in order. So the hello describes the state *before*
them: a call whose end is in one of them still counts as held (`UnacknowledgedFacts`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from stoker.dealer import Dealer, Keys
from stoker.errors import ProtocolError
from stoker.log_files import SeldomLog
from stoker.pilot.core.events import ManagerAway, UnacknowledgedFacts
from stoker.protocol import to_manager, wire
from stoker.protocol.session import IDENTITY_MARK, SessionFolder
from stoker.protocol.to_pilot import ToPilot
from stoker.protocol.wire import Outbox

log = logging.getLogger("stoker.pilot")

FRAME_BYTES = 16_000_000  # messages that are larger together travel in several frames
_REFUSED_HANDSHAKES = 10  # after this number of them in a row the manager does not accept the pilot's key
_PART_S = 1.0  # how long a pilot that ends waits until the manager has taken its last frames
_SEARCH_S = 1.0  # how often the session's folder is read while the manager is away


class ManagerLink:
    """The connection (`dealer`), its messages, and the outbox."""

    def __init__(self, folder: SessionFolder, *, pilot: str, block: str = "") -> None:
        self._folder = folder
        self.session = folder.read()
        self.refused_frames = 0
        self._search_at = 0.0
        self._refusals = SeldomLog(log)
        self._batch: list[to_manager.FromPilot] = []
        self._passing: list[to_manager.CallYielded] = []  # CallYielded of results that leave with this turn
        self._outbox = Outbox()
        self._decode = wire.to_pilot_decoder()
        pair = folder.read_pilot_key(block)
        self.dealer = Dealer(
            self.session.address,
            name=f"{pilot}{IDENTITY_MARK.decode()}{secrets.token_hex(8)}",
            keys=Keys(self.session.server_key, pair.public, pair.secret),
            log=log,
        )

    def receive(self) -> Iterator[ToPilot]:
        """All messages that have come."""
        for data in self.dealer.receive():
            try:
                messages = self._decode(data).messages
            except ProtocolError as error:
                self.refused_frames += 1
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
                continue
            yield from messages

    def post(self, message: to_manager.FromPilot) -> None:
        """Say something that must arrive, with this turn's frame."""
        self._batch.append(message)

    def pass_on(self, pieces: to_manager.CallYielded) -> None:
        """Send pieces with this turn's frames, if there is a connection: the core says them again."""
        self._passing.append(pieces)

    def flush(self) -> None:
        """Send this turn's frames; keep the one that must arrive until there is a connection."""
        if self._passing:
            passing, self._passing = self._passing, []
            if self.dealer.connected:
                self._send_passing(passing)
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        self._send(batch)

    def _send(self, batch: list[to_manager.FromPilot]) -> None:
        """Number, keep and send messages: in one frame, or in several where the manager would refuse one so large."""
        frame = wire.encode(batch, sequence=self._outbox.sequence + 1)
        if len(frame) > FRAME_BYTES and len(batch) > 1:
            half = len(batch) // 2
            self._send(batch[:half])
            self._send(batch[half:])
            return
        self._outbox.keep(self._outbox.next(), frame)
        if self.dealer.connected:
            self.dealer.send(frame)

    def _send_passing(self, passing: list[to_manager.CallYielded]) -> None:
        frame = wire.encode(passing)
        if len(frame) > FRAME_BYTES and len(passing) > 1:
            half = len(passing) // 2
            self._send_passing(passing[:half])
            self._send_passing(passing[half:])
        else:
            self.dealer.send(frame)

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number for good."""
        self._outbox.acked(sequence)

    @property
    def all_acked(self) -> bool:
        """Whether the manager has everything."""
        return not self._batch and not self._outbox.unacked()

    def say(self, message: to_manager.FromPilot) -> None:
        """Say something now that need not arrive twice: a heartbeat."""
        if self.dealer.connected:
            self.dealer.send(wire.encode([message]))

    @property
    def acknowledged(self) -> int:
        """Frames up to this number are acknowledged, and not kept."""
        return self._outbox.acknowledged

    def greet(self, hello: to_manager.PilotHello) -> None:
        """Say hello, then everything that was not acknowledged."""
        self.dealer.send(wire.encode([hello]))
        for frame in self._outbox.unacked():
            self.dealer.send(frame)

    def before(self) -> UnacknowledgedFacts:
        """Return what unacknowledged frames say (see the module's text). Call `flush` first."""
        return said_in(self._outbox.unacked())

    def away(self, now: float) -> ManagerAway:
        """Return the facts about a manager without a connection."""
        session_over = ""
        if now >= self._search_at:
            self._search_at = now + _SEARCH_S
            session_over = self._folder.over()  # a pilot without shared files cannot know
            if not session_over:
                self._refresh_address()
        refuses_key = self.dealer.failed_handshakes >= _REFUSED_HANDSHAKES
        return ManagerAway(now - self.dealer.lost_at, refuses_key=refuses_key, session_over=session_over)

    def part(self, hear: Callable[[ToPilot], None], *, pause: Callable[[], object]) -> None:
        """Give the manager a moment to take the last frames; `pause` waits until something may have come."""
        if not self.dealer.connected:
            return
        self.flush()
        until = time.monotonic() + _PART_S
        while self.dealer.connected and not self.all_acked and time.monotonic() < until:
            if not self.dealer.readable():
                pause()
            self.dealer.came_back()
            for message in self.receive():
                hear(message)

    def _refresh_address(self) -> None:
        """A manager that was started again may listen elsewhere."""
        try:
            address = self._folder.read().address
        except Exception as error:  # the file is being replaced, or the file system is away: look again later
            log.debug("session file: %s", error)
            return
        self.dealer.move_to(address)


def said_in(frames: Iterable[bytes]) -> UnacknowledgedFacts:
    """Return what a pilot's frames change in its manager's records."""
    known = UnacknowledgedFacts()
    decode = wire.from_pilot()
    for frame in frames:
        for message in decode(frame).messages:
            match message:
                case to_manager.CallsEnded(library=library, ends=ends):
                    known.left.setdefault(library, []).extend(end.call for end in ends)
                case to_manager.CallsReturned(library=library, calls=calls):
                    known.left.setdefault(library, []).extend(calls)
                case to_manager.CallEvicted(library=library, progress=progress):
                    known.left.setdefault(library, []).append(progress.call)
                case to_manager.LibraryGone(library=library, running=running, unstarted=unstarted):
                    known.gone[library] = [*running, *unstarted]
                case to_manager.LibraryReady(library=library):
                    known.ready.add(library)
                case _:
                    pass
    return known

"""Makes events of the frames that peers send, and refuses frames of other sessions.

A frame is refused if it is not in the protocol, if its sender has no readable name, if it is the hello of another
version or session, or if the key of one block sends it for a pilot of another. Refused frames are counted; the core
hears of the counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from stoker.errors import ProtocolError
from stoker.log_files import SeldomLog
from stoker.manager.core.events import FromClient, FromPilot
from stoker.manager.core.state import State
from stoker.manager.live.admission import Role, User, foreign
from stoker.manager.live.doors import Doors, name_of, text_of
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol.ids import ClientId, PilotId
from stoker.protocol.to_manager import AskCalls, AskStatus, AskStory, ClientHello

log = logging.getLogger("stoker.manager")

TELL_S = 5.0
"""The core hears of refused frames at most this often, unless a client speaks."""


class EventReader:
    """Decodes frames that came through these doors. `state` is the core's, for reading."""

    def __init__(self, doors: Doors, state: State, *, now: float) -> None:
        self.log = SeldomLog(log)
        self._doors = doors
        self._state = state
        self._read_client = wire.from_client()
        self._read_pilot = wire.from_pilot()
        self._refused: Counter[str] = Counter()
        """Refusals that the core has not been told of, by kind."""
        self._told_at = now

    def event_of(self, user: User, peer: bytes, data: memoryview) -> FromPilot | FromClient | None:
        """The event that a frame is; None if it is refused. `user`: the owner of the key that the peer used."""
        role = user.role
        try:
            name = text_of(name_of(peer))
            if not name:
                raise ProtocolError("its identity is not the name of a peer: printable UTF-8, one character at least")
            if role is Role.CLIENT:
                asked = self._read_client(data)
                return FromClient(ClientId(name), asked.sequence, asked.messages)
            frame = self._read_pilot(data)
        except ProtocolError as error:
            self._refuse_unreadable(role, peer, data, error)
            return None
        event = FromPilot(PilotId(name), frame.sequence, frame.messages)
        if user.block:
            why = foreign(self._state, event.pilot, event.messages, block=user.block)
            if why:
                self._doors.answer(peer, wire.encode([to_pilot.PilotRefused(why)]))
                self.count("frame with the key of another block")
                self.log.warning(f"block {user.block}", f"refused a frame: {why}")
                return None
        return event

    def _refuse_unreadable(self, role: Role, peer: bytes, data: memoryview, error: Exception) -> None:
        stranger = wire.hello_of_another(data)
        if stranger is not None:
            why = wire.why_not(stranger, session=self._state.session)
            refused = to_pilot.PilotRefused(why) if role is Role.PILOT else to_client.ClientRefused(why)
            self._doors.answer(peer, wire.encode([refused]))
        self.count(f"{role.value} of another version" if stranger else "frame that is not in the protocol")
        self.log.warning(f"{role.value} {peer!r}", f"refused a frame of {role.value} {peer!r}: {error}")

    def count(self, kind: str) -> None:
        """Count a refusal."""
        self._refused[kind] += 1

    def take_refusals(self, now: float, *, at_once: bool) -> dict[str, int]:
        """The refusals since the last call by kind; empty if there were none, or if the last ones were told less than
        `TELL_S` ago and it is not to be `at_once`."""
        if not self._refused or (not at_once and now - self._told_at < TELL_S):
            return {}
        counts, self._refused = dict(self._refused), Counter()
        self._told_at = now
        return counts


def has_only_questions(messages: Sequence[object]) -> bool:
    """True if a client only asks: the frame changes nothing."""
    return bool(messages) and all(isinstance(message, AskStatus | AskStory | AskCalls) for message in messages)


def is_from_observer(messages: Sequence[object]) -> bool:
    """True for the hello of an observer, alone or with its first questions."""
    hello = messages[0] if messages else None
    is_hello = isinstance(hello, ClientHello) and hello.observer
    return is_hello and (len(messages) == 1 or has_only_questions(messages[1:]))

"""The agent's end of the connection to the manager.

ZeroMQ reconnects by itself; what it cannot know is what must be said again. Everything that changes the manager's
books travels in numbered frames that are kept until they are acknowledged. After every (re)connect the hello goes
first, then those frames again, in order. The hello must therefore speak of the state *before* those frames: a call
whose end is in one of them still counts as held, or the manager would run it again (`Before` finds these).
"""

from __future__ import annotations

import logging
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from stoker.errors import ProtocolError
from stoker.manager.protocol import wire
from stoker.manager.protocol.reliable import Outbox
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsReturned,
    FromPilot,
    LibraryGone,
    LibraryReady,
)
from stoker.manager.protocol.to_pilot import ToPilot

log = logging.getLogger("stoker.pilot")

_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Before(msgspec.Struct):
    """What the manager does not know yet of what has happened: what its unacknowledged frames say.

    `left` are calls that have left a library, in order; `gone` libraries that have ended, with the calls that they
    held then; `ready` those that have become ready.
    """

    left: dict[int, list[int]] = msgspec.field(default_factory=dict)
    gone: dict[int, list[int]] = msgspec.field(default_factory=dict)
    ready: set[int] = msgspec.field(default_factory=set)


class ManagerLink:
    """A DEALER socket with CURVE, its connection state, and the outbox."""

    def __init__(self, folder: SessionFolder, *, pilot: str) -> None:
        self._folder = folder
        self.session = folder.read()
        self._address = self.session.address
        self.connected = False
        self.lost_at = time.monotonic()
        """When the connection was lost (or first tried)."""
        self.refused_frames = 0
        self.failed_handshakes = 0
        self._batch: list[FromPilot] = []
        self._outbox = Outbox()
        self._decode = wire.to_pilot_decoder()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        keys = folder.read_key("pilot")
        socket.curve_serverkey = self.session.server_key.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.routing_id = pilot.encode()
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 15000
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_WATCHED)
        socket.connect(self._address)

    def filenos(self) -> tuple[int, int]:
        """For a poller. They are edge-triggered: ask `readable` before waiting."""
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether something waits to be received."""
        return _has_input(self._socket) or _has_input(self._monitor)

    def came_back(self) -> bool:
        """Take note of connection events; whether there is a new connection on which to say hello."""
        fresh = False
        while _has_input(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = fresh = True
                self.failed_handshakes = 0
            elif event == zmq.EVENT_DISCONNECTED:
                if self.connected:
                    self.lost_at = time.monotonic()
                    log.warning("the connection to the manager broke")
                self.connected = fresh = False
            else:
                self.failed_handshakes += 1
        return fresh

    def receive(self) -> list[ToPilot]:
        """All messages that have come."""
        out: list[ToPilot] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return out
            try:
                out += self._decode(data).messages
            except ProtocolError as error:
                self.refused_frames += 1
                log.warning("refused what the manager sent: %s", error)

    def post(self, message: FromPilot) -> None:
        """Say something that must arrive, with this turn's frame."""
        self._batch.append(message)

    def flush(self) -> None:
        """Send this turn's frame, or keep it until there is a connection."""
        if not self._batch:
            return
        sequence = self._outbox.next()
        frame = wire.encode(self._batch, sequence=sequence)
        self._batch = []
        self._outbox.keep(sequence, frame)
        if self.connected:
            self._send(frame)

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number for good."""
        self._outbox.acked(sequence)

    @property
    def all_acked(self) -> bool:
        """Whether the manager has everything."""
        return not self._batch and not self._outbox.unacked()

    def say(self, message: FromPilot) -> None:
        """Say something now that need not arrive twice: a heartbeat."""
        if self.connected:
            self._send(wire.encode([message]))

    def greet(self, hello: FromPilot) -> None:
        """Say hello, then everything that was not acknowledged."""
        self._send(wire.encode([hello]))
        for frame in self._outbox.unacked():
            self._send(frame)

    def before(self) -> Before:
        """What frames that are not acknowledged say (see the module's text). Call `flush` first."""
        known = Before()
        decode = wire.from_pilot()
        for frame in self._outbox.unacked():
            for message in decode(frame).messages:
                match message:
                    case CallsEnded(library=library, ends=ends):
                        known.left.setdefault(library, []).extend(end.call for end in ends)
                    case CallsReturned(library=library, calls=calls):
                        known.left.setdefault(library, []).extend(calls)
                    case CallEvicted(library=library, progress=progress):
                        known.left.setdefault(library, []).append(progress.call)
                    case LibraryGone(library=library, running=running, unstarted=unstarted):
                        known.gone[library] = [*running, *unstarted]
                    case LibraryReady(library=library):
                        known.ready.add(library)
                    case _:
                        pass
        return known

    def look_again(self) -> None:
        """While the manager is away: a manager that was started again may listen elsewhere."""
        try:
            address = self._folder.read().address
        except Exception as error:  # the file is being replaced, or the file system is away: look again later
            log.debug("session file: %s", error)
            return
        if address != self._address:
            log.info("the manager listens on %s now", address)
            self._socket.disconnect(self._address)
            self._socket.connect(address)
            self._address = address

    def close(self, *, linger_s: float = 0.0) -> None:
        """Hang up; what was sent gets `linger_s` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))
        self._context.term()

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:  # no connection after all; numbered frames go again after the next hello
            self.connected = False


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

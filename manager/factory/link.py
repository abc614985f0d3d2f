"""The factory's end of the connection to the manager: a client that carries out orders for blocks.

What it says changes the manager's books, so that it travels in numbered frames, which are kept until they are
acknowledged. After every (re)connect the hello goes first, then those frames again, in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from uuid import uuid4

import zmq
from zmq.utils.monitor import recv_monitor_message

from stoker.errors import ProtocolError, SessionError
from stoker.manager.factory.keeper import News
from stoker.manager.protocol import to_client, to_manager, wire
from stoker.manager.protocol.reliable import Outbox
from stoker.manager.protocol.session import SessionFolder

log = logging.getLogger("stoker.factory")

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """A DEALER socket with CURVE, its connection state, and the outbox."""

    def __init__(self, folder: SessionFolder) -> None:
        self._folder = folder
        self.session = folder.read()
        self.connected = False
        self.lost_at = time.monotonic()
        """When the connection was lost (or first tried)."""
        self._address = self.session.address
        self._outbox = Outbox()
        self._decode = wire.to_client_decoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        keys = folder.read_key("client")
        for option, value in (
            (zmq.ROUTING_ID, f"factory-{uuid4().hex[:12]}".encode()),
            (zmq.CURVE_SERVERKEY, self.session.server_key.encode()),
            (zmq.CURVE_PUBLICKEY, keys.public.encode()),
            (zmq.CURVE_SECRETKEY, keys.secret.encode()),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 15000),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(self._address)

    def filenos(self) -> tuple[int, int]:
        """For a poller. They are edge-triggered: ask `readable` before waiting."""
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether something waits to be received."""
        return _has_input(self._socket) or _has_input(self._monitor)

    def came_back(self) -> bool:
        """Take note of connection events; whether there is a new connection, on which to `greet`.

        Raises SessionError when the manager does not take our key.
        """
        fresh = False
        while _has_input(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = fresh = True
            elif event == zmq.EVENT_DISCONNECTED:
                if self.connected:
                    self.lost_at = time.monotonic()
                    log.warning("the connection to the manager broke")
                self.connected = fresh = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise SessionError(
                    f"the manager of session {self.session.session} refused this factory's key; "
                    f"is {self._folder.path} the session's own folder?"
                )
        return fresh

    def greet(self) -> None:
        """Say hello, then everything that was not acknowledged."""
        hello = to_manager.ClientHello(wire.VERSION, self.session.session, observer=True, factory=True)
        for frame in [wire.encode([hello]), *self._outbox.unacked()]:
            self._send(frame)

    def receive(self) -> list[to_client.ToClient]:
        """All messages that have come."""
        out: list[to_client.ToClient] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return out
            try:
                out += self._decode(data).messages
            except ProtocolError as error:
                log.warning("refused what the manager sent: %s", error)

    def tell(self, messages: Iterable[News]) -> None:
        """Say things that must arrive: now, or when there is a connection."""
        batch = list(messages)
        if batch:
            sequence = self._outbox.next()
            frame = wire.encode(batch, sequence=sequence)
            self._outbox.keep(sequence, frame)
            if self.connected:
                self._send(frame)

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number for good."""
        self._outbox.acked(sequence)

    def look_again(self) -> bool:
        """While the manager is away: one that was started again may listen elsewhere. Whether its file says so."""
        try:
            there = self._folder.read()
        except SessionError as error:  # the file is being replaced, or the file system is away: look again later
            log.debug("session file: %s", error)
            return False
        if there.address == self._address:
            return False
        log.info("the manager listens on %s now", there.address)
        self._socket.disconnect(self._address)
        self._socket.connect(there.address)
        self._address = there.address
        return True

    def close(self) -> None:
        """Hang up."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # no connection after all; numbered frames go again after the next hello
            self.connected = False


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

"""The connection of pilots, clients and the factory to the manager: a ZeroMQ DEALER socket with CURVE encryption.

ZeroMQ reconnects, and queues frames without limit. `stoker.protocol.wire` resends lost frames.
"""

from __future__ import annotations

import enum
import logging
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import zmq

_READABLE = int(zmq.POLLIN)
COPY_BELOW = 65_536
"""Number of bytes below which a frame is copied, because sharing its memory with ZeroMQ would take longer."""
_HEARTBEAT_MS, _SILENT_MS = 5_000, 15_000


class ConnectionChange(enum.Enum):
    MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED
    """The connection is made. Send a hello message first."""
    BROKEN = zmq.EVENT_DISCONNECTED
    """The connection broke. ZeroMQ reconnects by itself."""
    REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    """The peer refused the CURVE key of this process."""
    NOT_UNDERSTOOD = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    """The peer violates the protocol, or has an unexpected CURVE key."""
    CUT_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    """The connection broke during the handshake."""


_EVENT = struct.Struct("=Hi")
"""First frame of a monitor's message (zmq_socket_monitor(3)): event number and value."""
_ALL_CHANGES = sum(change.value for change in ConnectionChange)


class CurveKeys(msgspec.Struct, frozen=True):
    """CURVE keys as Z85 text: the server's public key, and the key pair of this process."""

    server: str
    public: str
    secret: str


def open_socket(context: zmq.Context[zmq.Socket[bytes]], *, name: str, keys: CurveKeys) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.routing_id = name.encode()
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.linger = 0
    return socket


def open_monitor_socket(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a socket that receives the `events` of `socket`. Its queue is unlimited: with pyzmq's limited queue,
    `disable_monitor` could wait forever for a lock of libzmq's thread.
    """
    address = f"inproc://stoker-monitor-{int(socket.getsockopt(zmq.FD))}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


def read_monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Read an event and its value. pyzmq's own function would import asyncio."""
    numbers, _address = monitor.recv_multipart()
    event, value = _EVENT.unpack(numbers)
    return event, value


class Dealer:
    """A connection to the manager that reconnects by itself. Not thread-safe. `reconnect_ms`: shortest and longest
    pause between attempts.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        keys: CurveKeys,
        log: logging.Logger,
        reconnect_ms: tuple[int, int] = (100, 2000),
    ) -> None:
        self.address = address
        self.connected = False
        self.lost_at = time.monotonic()
        """Monotonic time of the last connection loss, or of the first connection attempt."""
        self.failed_handshakes = 0
        """Number of consecutive failed handshakes."""
        self._has_stopped_reconnecting = False
        """True if ZeroMQ has stopped reconnecting because the peer refused the handshake."""
        self.refused = False
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = open_socket(self._context, name=name, keys=keys)
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = reconnect_ms
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_MS
        self._monitor = open_monitor_socket(self.socket, _ALL_CHANGES)
        self.socket.connect(address)

    def filenos(self) -> tuple[int, int]:
        """Return edge-triggered file descriptors for new frames and connection changes. Call `has_input` before each
        wait.
        """
        return int(self.socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def has_input(self) -> bool:
        return _has_input(self.socket) or _has_input(self._monitor)

    def has_frames(self) -> bool:
        return _has_input(self.socket)

    def read_connection_changes(self) -> Iterator[ConnectionChange]:
        while _has_input(self._monitor):
            change = ConnectionChange(read_monitor_event(self._monitor)[0])
            if change in (ConnectionChange.REFUSED, ConnectionChange.NOT_UNDERSTOOD):
                self._has_stopped_reconnecting = True
            yield change

    def handle_connection_changes(self) -> bool:
        """Handle all connection changes. Return True if a connection was made: the caller must then send a hello."""
        fresh = False
        for change in self.read_connection_changes():
            match change:
                case ConnectionChange.MADE:
                    self.connected = fresh = True
                    self.failed_handshakes = 0
                case ConnectionChange.BROKEN:
                    self._mark_disconnected()
                    fresh = False
                case _:
                    self.failed_handshakes += 1
                    self.refused = self.refused or change is ConnectionChange.REFUSED
        return fresh

    def receive(self) -> list[bytes]:
        frames: list[bytes] = []
        while _has_input(self.socket):  # this check is ten times faster than catching zmq.Again
            frames.append(self.socket.recv(zmq.NOBLOCK))
        return frames

    def send(self, frame: bytes) -> None:
        try:
            self.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < COPY_BELOW)
        except zmq.Again:
            self._mark_disconnected()

    def _mark_disconnected(self) -> None:
        if self.connected:
            self.lost_at = time.monotonic()
            self._log.warning("the connection to the manager broke")
        self.connected = False

    def reconnect_to(self, address: str) -> bool:
        """Connect to `address`. Return False if this object uses this address already."""
        if address == self.address and not self._has_stopped_reconnecting:
            return False
        if address != self.address:
            self._log.info("the manager listens on %s now", address)
        with suppress(zmq.ZMQError):  # ZeroMQ has already closed the connection
            self.socket.disconnect(self.address)
        self.socket.connect(address)
        self._has_stopped_reconnecting = False
        self.address = address
        return True

    def close(self, *, linger_s: float = 0.0) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(int(linger_s * 1000))
        self._context.term()


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)

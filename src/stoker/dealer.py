"""A connection to the manager, as all who connect to it have one: a ZeroMQ DEALER socket with CURVE.

ZeroMQ reconnects by itself, and queues without limit: what is lost with a connection is the business of whoever speaks
(`stoker.protocol.wire`). What has happened to the connection is read from the socket's monitor, in order.
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

COPY_BELOW = 65_536
"""Smaller frames are copied for ZeroMQ: that costs less than sharing them does."""

_HEARTBEAT_MS = 5_000
_SILENT_MS = 15_000
"""Who says nothing for so long, heartbeats included, is gone."""


class ConnectionChange(enum.Enum):
    """What can happen to a connection."""

    MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED
    """Frames can go out. A new connection: what must be said again has to be said."""
    BROKEN = zmq.EVENT_DISCONNECTED
    """It is gone, or could not be made. ZeroMQ tries again."""
    REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    """Who listens there does not take our key."""
    NOT_UNDERSTOOD = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    """Who listens there does not speak as it should, or has another key than we were told."""
    CUT_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    """The handshake ended before its end."""


_EVENT = struct.Struct("=Hi")
"""The first frame of a monitor's message, zmq_socket_monitor(3): an event and its value."""
_ALL_CHANGES = sum(change.value for change in ConnectionChange)


class Keys(msgspec.Struct, frozen=True):
    """Whom a socket speaks to, and as whom: CURVE keys as Z85 text."""

    server: str
    public: str
    secret: str


def open_socket(context: zmq.Context[zmq.Socket[bytes]], *, name: str, keys: Keys) -> zmq.Socket[bytes]:
    """A DEALER socket with a name and keys, which is not connected yet. What is unsent when it closes is dropped."""
    socket = context.socket(zmq.DEALER)
    socket.routing_id = name.encode()
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.linger = 0
    return socket


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that tells these events of another socket, in order.

    It holds any number of them. pyzmq's own monitor holds two thousand; after those libzmq's thread waits, with a lock,
    until one is read, and `disable_monitor` waits for that lock for ever.
    """
    address = f"inproc://stoker-monitor-{int(socket.getsockopt(zmq.FD))}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Read one event from a socket of `monitor_of`: the event, and its value (of most events a file descriptor).

    pyzmq has a function that does this; its module imports asyncio, a tenth of what a pilot takes to start.
    """
    numbers, _address = monitor.recv_multipart()
    event, value = _EVENT.unpack(numbers)
    return event, value


class Dealer:
    """A connection that is to last: no limit to what it holds, heartbeats, and when it breaks, another.

    `reconnect_ms` is how long it waits before it tries again: at first, and at most. For one thread: who uses it from
    several fences each use, of `socket` too.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        keys: Keys,
        log: logging.Logger,
        reconnect_ms: tuple[int, int] = (100, 2000),
    ) -> None:
        self.address = address
        self.connected = False
        self.lost_at = time.monotonic()
        """When the connection was lost (or first tried)."""
        self.failed_handshakes = 0
        """In a row."""
        self._given_up = False
        """Whether ZeroMQ tries no more, as is its way once it is not taken. It may be somebody else who listens there,
        as long as our manager is away."""
        self.refused = False
        """Whether who listens there has refused our key."""
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = open_socket(self._context, name=name, keys=keys)
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = reconnect_ms
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_MS
        self._monitor = monitor_of(self.socket, _ALL_CHANGES)
        self.socket.connect(address)

    def filenos(self) -> tuple[int, int]:
        """For a poller: of what is received, and of `changes`. Edge-triggered: ask `readable` before waiting."""
        return int(self.socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether something waits to be received, or something has happened."""
        return _has_input(self.socket) or _has_input(self._monitor)

    def has_frames(self) -> bool:
        """Whether something waits to be received."""
        return _has_input(self.socket)

    def changes(self) -> Iterator[ConnectionChange]:
        """What has happened to the connection, in order."""
        while _has_input(self._monitor):
            change = ConnectionChange(next_event(self._monitor)[0])
            if change in (ConnectionChange.REFUSED, ConnectionChange.NOT_UNDERSTOOD):
                self._given_up = True
            yield change

    def came_back(self) -> bool:
        """Take note of all `changes`; whether there is a new connection, on which to say hello."""
        fresh = False
        for change in self.changes():
            match change:
                case ConnectionChange.MADE:
                    self.connected = fresh = True
                    self.failed_handshakes = 0
                case ConnectionChange.BROKEN:
                    self._broke()
                    fresh = False
                case _:
                    self.failed_handshakes += 1
                    self.refused = self.refused or change is ConnectionChange.REFUSED
        return fresh

    def receive(self) -> list[bytes]:
        """All frames that have come."""
        frames: list[bytes] = []
        try:
            while True:
                frames.append(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames

    def send(self, frame: bytes) -> None:
        """Send a frame. It is dropped if there is no connection after all: numbered ones go again after a hello."""
        try:
            self.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < COPY_BELOW)
        except zmq.Again:
            self._broke()

    def _broke(self) -> None:
        if self.connected:
            self.lost_at = time.monotonic()
            self._log.warning("the connection to the manager broke")
        self.connected = False

    def move_to(self, address: str) -> bool:
        """Connect to this address instead. False if it is the one already, and ZeroMQ still tries it."""
        if address == self.address and not self._given_up:
            return False
        if address != self.address:
            self._log.info("the manager listens on %s now", address)
        with suppress(zmq.ZMQError):  # there may be nothing left to end
            self.socket.disconnect(self.address)
        self.socket.connect(address)
        self._given_up = False
        self.address = address
        return True

    def close(self, *, linger_s: float = 0.0) -> None:
        """Hang up; what was sent gets `linger_s` to leave."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(int(linger_s * 1000))
        self._context.term()


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

"""The manager's ROUTER socket: who may come in, who said what, who has left.

CURVE keeps everybody out who does not have one of the session's key pairs, before a byte of theirs is decoded; whose
pair a peer used (the client's, or a block's) goes with every frame of its (ZeroMQ's ZAP, RFC 27; `admission`). The
socket's monitor tells which connection broke, so that a killed pilot is noticed at once and not by its silence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from stoker.dealer import monitor_of
from stoker.errors import SessionError
from stoker.manager.live.admission import KnownKeys, User
from stoker.manager.live.ports_taken import ports_taken
from stoker.manager.live.unproven import UnprovenConnections
from stoker.manager.protocol.session import IDENTITY_MARK, SessionFolder

log = logging.getLogger("stoker.manager")

_ZAP = "inproc://zeromq.zap.01"
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FRAME_LIMIT_BYTES = 64 * 1024 * 1024
"""Larger frames are refused: payloads over 1 MB travel as objects."""
HANDSHAKE_MS = 5_000
"""A connection whose handshake takes longer is closed."""
PORTS = (21000, 21999)
"""The first and the last port that is tried, unless a site says otherwise."""


def name_of(identity: bytes) -> bytes:
    """A peer's name. A pilot's identity has a secret behind it, so that nobody else's connection can replace its."""
    return identity.partition(IDENTITY_MARK)[0]


class Doors:
    """The socket, its gate keeper, and its monitor."""

    def __init__(
        self,
        folder: SessionFolder,
        *,
        address: str = "",
        interface: str = "127.0.0.1",
        ports: tuple[int, int] = PORTS,
        any_port: bool = False,
    ) -> None:
        """Listen on `address` if it can be had here, else on a free one of these ports of `interface`; `any_port`: on
        another if they are all taken. Raises SessionError if that cannot be."""
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._keys = KnownKeys(folder)
        self._users: dict[str, User] = {}
        """Users by what ZeroMQ calls them."""
        self._identities: dict[bytes, bytes] = {}
        """By name of a peer that was taken: the identity of its connection, where that says more than the name."""
        server = folder.read_key("server")
        self.router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1), (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0), (zmq.LINGER, 2000), (zmq.MAXMSGSIZE, FRAME_LIMIT_BYTES), (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10), (zmq.TCP_KEEPALIVE_INTVL, 5), (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        ):  # fmt: skip
            self.router.setsockopt(option, value)
        self.router.setsockopt(zmq.CURVE_SECRETKEY, server.secret.encode())
        self.router.setsockopt(zmq.CURVE_PUBLICKEY, server.public.encode())
        self._monitor = monitor_of(self.router, _WATCHED)
        try:
            self.address = self._bind(folder, address, interface, ports, any_port=any_port)
        except SessionError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for socket in (self.router, self._zap, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._by_fd: dict[int, bytes] = {}
        self._fds: dict[bytes, int] = {}
        self._unproven = UnprovenConnections()
        self._closed: set[int] = set()
        """Connections that have broken; frames of theirs may still be waiting to be read."""
        self._late: list[bytes] = []
        """Who was read on such a connection: they look alive, and have left."""
        self.turned_away = 0

    def _bind(
        self, folder: SessionFolder, address: str, interface: str, ports: tuple[int, int], *, any_port: bool
    ) -> str:
        """Where it listens now: peers know the address of before, so that one is best."""
        if address:
            try:
                self.router.bind(address)
                return address
            except zmq.ZMQError as error:
                log.warning("cannot listen on %s again (%s); peers will find the new address", address, error)
        first, last = ports
        start = os.getpid()  # so that the managers of a host do not all try the same ones
        for turn in range(last - first + 1):
            address = f"tcp://{interface}:{first + (start + turn) % (last - first + 1)}"
            try:
                self.router.bind(address)
                return address
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise SessionError(f"the manager cannot listen on {address}: {error}") from error
        if any_port:
            self.router.bind(f"tcp://{interface}:*")
            return self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        raise ports_taken(folder, interface=interface, ports=ports)

    def watch(self, fd: int) -> None:
        """Have `wait` return when a descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> list[bytes]:
        """Wait until something comes or time is up; let in who may come in. Returns the peers whose connection has
        broken: look at them before `frames`, so that a peer that is back already is not taken for gone."""
        late = [peer for peer in dict.fromkeys(self._late) if peer not in self._fds]
        self._late.clear()
        ready = dict(self._poller.poll(0 if late else timeout_ms))
        if len(ready) == 1 and self.router in ready:
            return self._names_of(late)
        left = [*late, *self._left()]
        self._gate()
        return self._names_of(left)

    def _names_of(self, identities: Iterable[bytes]) -> list[bytes]:
        """The peers whose connections these are. A connection that was never taken (`take`) belongs to no peer."""
        pairs = [(name_of(identity), identity) for identity in identities]
        return [name for name, identity in pairs if self._identities.get(name, name) == identity]

    def _left(self) -> Iterator[bytes]:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._closed.discard(event["value"])
                self._unproven.accepted(event["value"])
                continue
            if event["event"] != zmq.EVENT_DISCONNECTED:
                self.turned_away += 1
                continue
            self._closed.add(event["value"])
            self._unproven.settled(event["value"])
            peer = self._by_fd.pop(event["value"], None)
            if peer is not None and self._fds.get(peer) == event["value"]:
                del self._fds[peer]
                yield peer

    def frames(self, most: int = 2000) -> Iterator[tuple[User, bytes, Any]]:
        """Waiting frames: whose key it is, the identity of the connection, bytes."""
        router, again = self.router, zmq.Again
        for _ in range(most):
            try:
                parts = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except again:
                return
            if len(parts) != 2:
                self.turned_away += 1
                continue
            peer, body = parts[0].bytes, parts[1]
            text = str(body.get("User-Id"))
            user = self._users.get(text)
            if user is None:
                user = self._users[text] = User.parse(text)
            fd = body.get(zmq.SRCFD)
            if fd in self._closed:
                self._late.append(peer)
            elif self._fds.get(peer) != fd:
                self._unproven.settled(fd)
                self._fds[peer] = fd
                self._by_fd[fd] = peer
            yield user, peer, body.buffer

    def _gate(self) -> None:
        """Answer ZeroMQ's question whether a peer may come in (ZAP)."""
        while self._zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
            user = self._keys.user_of(credentials[0]) if mechanism == b"CURVE" and credentials else None
            if user is None:
                self._zap.send_multipart([version, request, b"400", b"not a key of the session", b"", b""])
            else:
                self._zap.send_multipart([version, request, b"200", b"OK", str(user).encode(), b""])

    def take(self, name: bytes, identity: bytes) -> None:
        """What is for this peer goes to the connection of this identity from now on."""
        if name != identity and self._identities.get(name) != identity:
            self._identities[name] = identity

    def forget(self, name: bytes) -> None:
        """This peer is gone for good."""
        self._identities.pop(name, None)

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send a frame to a peer, by its name; False if it is not connected."""
        return self.answer(self._identities.get(peer, peer), frame)

    def answer(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame to the connection of this identity; False if there is none."""
        try:
            self.router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Send what is still to be sent (for two seconds at most) and close."""
        if hasattr(self, "_monitor"):
            self.router.disable_monitor()
            self._monitor.close(0)
        self._zap.close(0)
        self.router.close()
        self._context.term()

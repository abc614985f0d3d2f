"""The manager's ROUTER socket: check keys, read and send frames, and detect broken connections.

CURVE refuses a peer without a key pair of the session before any byte is decoded. ZeroMQ reports the key's owner with
each frame (ZAP, RFC 27). The manager refuses a frame that does not follow the protocol, from a sender without a
readable name, with a hello of another version or session, or from a pilot of one block with the key of another block.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import zmq

from stoker.contexts.folders import state_folder
from stoker.dealer import open_monitor_socket, read_monitor_event
from stoker.errors import ProtocolError, SessionError
from stoker.log_files import RateLimitedLog
from stoker.manager.core.events import FromClient, FromPilot
from stoker.manager.core.state import State
from stoker.manager.live import lease
from stoker.manager.live.admission import KeyOwner, KnownKeys, PeerRole, UnprovenConnections, explain_wrong_block
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol.ids import ClientId, PilotId
from stoker.protocol.session import IDENTITY_MARK, SessionFolder
from stoker.protocol.to_manager import AskCalls, AskStatus, AskStory, ClientHello

log = logging.getLogger("stoker.manager")

_ZAP = "inproc://zeromq.zap.01"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
FRAME_LIMIT_BYTES = 64 * 1024 * 1024
"""Maximum frame size. Payloads over 1 MB are sent as objects."""
HANDSHAKE_MS = 5_000
PORTS = (21000, 21999)
REFUSAL_REPORT_S = 5.0
"""Minimum seconds between reports of refused frames to the core. A client's message causes a report at once."""
_MAX_NAMED_SESSIONS = 5


class PortsTakenError(SessionError):
    """No port in the manager's range is free."""


def ports_taken_error(folder: SessionFolder, *, interface: str, ports: tuple[int, int]) -> PortsTakenError:
    """Return an error that names the sessions on these ports. A restarted manager keeps its range of ports."""
    names = list(_sessions_using_ports(ports, but=folder))
    by = f" (by session{'s' * (len(names) != 1)} {', '.join(names[:_MAX_NAMED_SESSIONS])})" if names else ""
    text = f"the manager cannot listen on {interface}: ports {ports[0]}-{ports[1]} are all taken{by}"
    if not folder.file.exists():
        return PortsTakenError(f"{text}; name other ports ([session] ports in the site file)")
    session = folder.read().session
    free = f"`stoker down {names[0]}`, or end another program" if names else "end a program"
    again = f", then `stoker attach {session}`" if folder.launch.exists() else ""
    text += f"; session {session} keeps the ports of its site file: free one of them ({free} that listens there){again}"
    return PortsTakenError(text, session=session)


def _sessions_using_ports(ports: tuple[int, int], *, but: SessionFolder) -> Iterator[str]:
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        if folder.path == but.path.resolve():
            continue
        with suppress(SessionError, ValueError):  # skip sessions that are gone or damaged
            holder, file = lease.read_lease_or_none(folder.lease), folder.read()
            port = urlsplit(file.address).port or 0
            if holder is not None and lease.is_holder_alive(holder) and ports[0] <= port <= ports[1]:
                yield file.session


def peer_name(identity: bytes) -> bytes:
    """Return a peer's name, without the secret of its connection."""
    return identity.partition(IDENTITY_MARK)[0]


def printable_name(name: bytes) -> str:
    """Return a peer's name as text; empty if it is not printable UTF-8."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


class ManagerSockets:
    def __init__(
        self,
        folder: SessionFolder,
        *,
        address: str = "",
        interface: str = "127.0.0.1",
        ports: tuple[int, int] = PORTS,
        any_port: bool = False,
    ) -> None:
        """Listen on `address` or, if that fails, on a free port of `ports` or, with `any_port`, on any port of
        `interface`.
        """
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._keys = KnownKeys(folder)
        self._users: dict[str, KeyOwner] = {}
        """Key owners by the text that ZeroMQ attaches to every frame."""
        self._identities: dict[bytes, bytes] = {}
        """By peer name: connection identity, if it differs from the name."""
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
        self._monitor = open_monitor_socket(self.router, _WATCHED)
        try:
            self.address = self._listen(folder, address, interface, ports, any_port=any_port)
        except SessionError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for socket in (self.router, self._zap, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._identity_of_fd: dict[int, bytes] = {}
        self._fd_of_identity: dict[bytes, int] = {}
        self._unproven = UnprovenConnections()
        self._broken_fds: set[int] = set()
        """Descriptors of broken connections, which may still have unread frames."""
        self._read_after_break: list[bytes] = []
        """Identities of disconnected peers whose frame was read from a broken connection."""

    def _listen(
        self, folder: SessionFolder, address: str, interface: str, ports: tuple[int, int], *, any_port: bool
    ) -> str:
        if address:
            try:
                self.router.bind(address)
                return address
            except zmq.ZMQError as error:
                log.warning("cannot listen on %s again (%s); peers will find the new address", address, error)
        first, last = ports
        start = os.getpid()  # managers on one host should try different ports first
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
        raise ports_taken_error(folder, interface=interface, ports=ports)

    @property
    def has_unread_connection(self) -> bool:
        return len(self._unproven.unproven) > 0

    def watch_descriptor(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def unwatch_descriptor(self, fd: int) -> None:
        self._poller.unregister(fd)

    def wait(self, timeout_ms: int) -> list[str]:
        """Wait for messages or `timeout_ms`. Return peers whose connection broke. Handle these peers before
        `read_frames`, because frames may come from a new connection.
        """
        broken = [peer for peer in dict.fromkeys(self._read_after_break) if peer not in self._fd_of_identity]
        self._read_after_break.clear()
        ready = dict(self._poller.poll(0 if broken else timeout_ms))
        if len(ready) != 1 or self.router not in ready:
            broken += self._read_broken_connections()
            self._answer_key_check_requests()
        pairs = [(peer_name(identity), identity) for identity in broken]
        taken = [printable_name(name) for name, identity in pairs if self._identities.get(name, name) == identity]
        return [name for name in taken if name]

    def _read_broken_connections(self) -> Iterator[bytes]:
        while self._monitor.poll(0):
            event, descriptor = read_monitor_event(self._monitor)
            if event == zmq.EVENT_ACCEPTED:
                self._broken_fds.discard(descriptor)
                self._unproven.add_connection(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._broken_fds.add(descriptor)
                self._unproven.remove_connection(descriptor)
                peer = self._identity_of_fd.pop(descriptor, None)
                if peer is not None and self._fd_of_identity.get(peer) == descriptor:
                    del self._fd_of_identity[peer]
                    yield peer

    def read_frames(self, most: int = 2000) -> Iterator[tuple[KeyOwner, bytes, Any]]:
        """Yield the key owner, connection identity and bytes of each frame."""
        router, again = self.router, zmq.Again
        for _ in range(most):
            try:
                parts = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except again:
                return
            if len(parts) != 2:
                continue
            peer, body = parts[0].bytes, parts[1]
            text = str(body.get("User-Id"))
            user = self._users.get(text)
            if user is None:
                user = self._users[text] = KeyOwner.parse(text)
            fd = body.get(zmq.SRCFD)
            if fd in self._broken_fds:
                self._read_after_break.append(peer)
            elif self._fd_of_identity.get(peer) != fd:
                self._unproven.remove_connection(fd)
                self._fd_of_identity[peer] = fd
                self._identity_of_fd[fd] = peer
            yield user, peer, body.buffer

    def _answer_key_check_requests(self) -> None:
        while self._zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
            user = self._keys.find_key_owner(credentials[0]) if mechanism == b"CURVE" and credentials else None
            if user is None:
                self._zap.send_multipart([version, request, b"400", b"not a key of the session", b"", b""])
            else:
                self._zap.send_multipart([version, request, b"200", b"OK", str(user).encode(), b""])

    def remember_connection(self, name: bytes, identity: bytes) -> None:
        if name != identity and self._identities.get(name) != identity:
            self._identities[name] = identity

    def forget_connection(self, name: bytes) -> None:
        self._identities.pop(name, None)

    def send(self, peer: bytes, frame: bytes) -> bool:
        return self.send_to_connection(self._identities.get(peer, peer), frame)

    def send_to_connection(self, identity: bytes, frame: bytes) -> bool:
        try:
            self.router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        if hasattr(self, "_monitor"):
            self.router.disable_monitor()
            self._monitor.close(0)
        self._zap.close(0)
        self.router.close()
        self._context.term()


class EventReader:
    """Decodes frames into events, and counts refused frames."""

    def __init__(self, sockets: ManagerSockets, state: State, *, now: float) -> None:
        self.log = RateLimitedLog(log)
        self._sockets = sockets
        self._state = state
        self._read_client = wire.from_client_decoder()
        self._read_pilot = wire.from_pilot_decoder()
        self._refused: Counter[str] = Counter()
        self._told_at = now

    def decode_peer_frame(self, user: KeyOwner, peer: bytes, data: memoryview) -> FromPilot | FromClient | None:
        """Return the event, or None for a refused frame. `user`: the owner of the sender's key."""
        role = user.role
        try:
            name = printable_name(peer_name(peer))
            if not name:
                raise ProtocolError("its identity is not a peer name: at least one character of printable UTF-8")
            if role is PeerRole.CLIENT:
                asked = self._read_client(data)
                return FromClient(ClientId(name), asked.sequence, asked.messages)
            frame = self._read_pilot(data)
        except ProtocolError as error:
            self._refuse_unreadable_frame(role, peer, data, error)
            return None
        event = FromPilot(PilotId(name), frame.sequence, frame.messages)
        if user.block:
            why = explain_wrong_block(self._state, event.pilot, event.messages, block=user.block)
            if why:
                self._sockets.send_to_connection(peer, wire.encode([to_pilot.PilotRefused(why)]))
                self.count_refused_frame("frame with the key of another block")
                self.log.warning(f"block {user.block}", f"refused a frame: {why}")
                return None
        return event

    def _refuse_unreadable_frame(self, role: PeerRole, peer: bytes, data: memoryview, error: Exception) -> None:
        stranger = wire.decode_other_version_hello(data)
        if stranger is not None:
            why = wire.explain_mismatch(stranger, session=self._state.session)
            refused = to_pilot.PilotRefused(why) if role is PeerRole.PILOT else to_client.ClientRefused(why)
            self._sockets.send_to_connection(peer, wire.encode([refused]))
        self.count_refused_frame(
            f"{role.value} of another version" if stranger else "frame that the protocol does not define"
        )
        self.log.warning(f"{role.value} {peer!r}", f"refused a frame of {role.value} {peer!r}: {error}")

    def count_refused_frame(self, kind: str) -> None:
        self._refused[kind] += 1

    def take_refusal_counts(self, now: float, *, at_once: bool) -> dict[str, int]:
        if not self._refused or (not at_once and now - self._told_at < REFUSAL_REPORT_S):
            return {}
        counts, self._refused = dict(self._refused), Counter()
        self._told_at = now
        return counts


def has_only_questions(messages: Sequence[object]) -> bool:
    return bool(messages) and all(isinstance(message, AskStatus | AskStory | AskCalls) for message in messages)


def is_from_observer(messages: Sequence[object]) -> bool:
    hello = messages[0] if messages else None
    is_hello = isinstance(hello, ClientHello) and hello.observer
    return is_hello and (len(messages) == 1 or has_only_questions(messages[1:]))

"""Serves objects to peers: complete objects, and the present pieces of partial objects.

One thread serves one connection, up to a limit. Further peers receive the answer `busy`. A piece is sent to one peer at
a time. The reader of an object's origin sends each piece once. It sends a piece again only if a peer still requests the
piece later, as in BitTorrent's super-seeding.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.connections import UnauthenticatedConnections, join_address
from stoker.contexts.manifest import Piece, piece_size_bytes
from stoker.log_files import RateLimitedLog
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectCopy

# ---- the order of sending

_SLOW_PEER_S = 3.0  # seconds after which another peer may get a piece that one peer receives slowly
_MIN_RESEND_S, _RESEND_FACTOR = 1.0, 8.0
"""A pilot that reads the origin refuses to send a piece again for 1 s plus 8 times the seconds of the last transfer."""
_POLL_S = 0.1
ResendDelay = Callable[[str, int, str], float]
"""Returns the seconds for which a host must wait for a piece. Arguments: object name, piece index, host address."""
_REMEMBERED = 256


class SentPieces:
    """The pieces that a server is sending or has sent. Thread-safe."""

    def __init__(self, *, resend_delay: ResendDelay) -> None:
        self._resend_delay = resend_delay
        self._lock = threading.Lock()
        self._objects: dict[str, _ObjectState] = {}

    def begin_sending(self, copy: ObjectCopy, index: int, *, host: str) -> bool:
        """Record that a piece is being sent. Return False if no further peer may receive the piece now."""
        with self._lock:
            object, sent, wait_s = self._piece_sending_state(copy, index, host)
            if wait_s > 0:
                return False
            object.pieces_in_transfer += sent.sending_since is None
            object.pieces_sent += not sent.was_sent
            sent.sending_since, sent.was_sent, sent.first_refused_at = time.monotonic(), True, None
            return True

    def end_sending(self, copy: ObjectCopy, index: int) -> None:
        now = time.monotonic()
        with self._lock:
            object = self._objects.setdefault(copy.name, _ObjectState())
            sent = object.pieces.setdefault(index, _PieceState())
            if sent.sending_since is not None:  # None if a simultaneous transfer of the piece has ended first
                object.last_transfer_s = now - sent.sending_since
                object.pieces_in_transfer -= 1
                sent.sending_since = None
            if len(self._objects) > _REMEMBERED:
                self._objects = {name: one for name, one in self._objects.items() if one.pieces_in_transfer}

    def seconds_until_free(self, copy: ObjectCopy, index: int, *, host: str) -> float:
        """Return the seconds until a further peer may receive a piece."""
        with self._lock:
            return self._piece_sending_state(copy, index, host)[2]

    def _piece_sending_state(self, copy: ObjectCopy, index: int, host: str) -> tuple[_ObjectState, _PieceState, float]:
        now = time.monotonic()
        object = self._objects.setdefault(copy.name, _ObjectState())
        sent = object.pieces.setdefault(index, _PieceState())
        return object, sent, object.free_at(copy, sent, now, spared_s=self._resend_delay(copy.name, index, host)) - now


@dataclass(slots=True)
class _PieceState:
    sending_since: float | None = None
    was_sent: bool = False
    first_refused_at: float | None = None


@dataclass(slots=True)
class _ObjectState:
    pieces: dict[int, _PieceState] = field(default_factory=dict)
    pieces_sent: int = 0  # number of pieces that were sent at least once
    pieces_in_transfer: int = 0
    last_transfer_s: float = 0.0

    def free_at(self, copy: ObjectCopy, sent: _PieceState, now: float, *, spared_s: float) -> float:
        if sent.sending_since is not None:
            return sent.sending_since + _SLOW_PEER_S
        if not sent.was_sent or not (spared_s or (copy.reads_origin and not copy.is_complete)):
            return now
        if not spared_s and self.pieces_sent >= len(copy.arrivals) and self.pieces_in_transfer <= 1:
            return now
        sent.first_refused_at = sent.first_refused_at or now
        due = sent.first_refused_at + (spared_s or _MIN_RESEND_S) + _RESEND_FACTOR * self.last_transfer_s
        return now if due <= now else min(due, now + _POLL_S)


# ---- the server

log = logging.getLogger("stoker.transfer")

MOST_PEERS = 4  # maximum number of peers served at one time
MOST_WAIT_S = 0.5  # seconds until the answer to a `wait` request, below the peer's time-out

_MOST_UNPROVEN = 32  # maximum number of connections without proof of the key (one thread each)
_MOST_ANNOUNCED_PIECES = 4000


class ServedObjects(Protocol):
    def lend_copy(self, name: str) -> AbstractContextManager[ObjectCopy | None]:
        """Yield a copy of an object, or None. The copy is not evicted during the `with` block."""

    def is_fetching(self, name: str) -> bool:
        """True if the object is absent but being fetched."""


class ObjectServer:
    """Serves objects at `address` until closed. `other_handlers`: handlers of other requests, by name. Raises
    OSError if the server cannot listen.
    """

    def __init__(
        self, served: ServedObjects, *, key: bytes, host: str = "", ports: tuple[int, int] = (0, 0),
        listener: socket.socket | None = None, most: int = MOST_PEERS, limits: wire.WireLimits = wire.LIMITS,
        other_handlers: Mapping[str, Callable[[wire.Channel, dict[str, Any]], None]] | None = None,
        resend_delay: ResendDelay = lambda _name, _index, _host: 0.0,
    ) -> None:  # fmt: skip
        self._served = served
        self._key = key
        self._limits = limits
        self._other_handlers = dict(other_handlers or {})
        self.lock = threading.Lock()
        self._unproven: UnauthenticatedConnections[socket.socket] = UnauthenticatedConnections(most=_MOST_UNPROVEN)
        self._lines = RateLimitedLog(log)
        self.served_peers = 0
        self._most = most
        self._open: set[wire.Channel] = set()
        self.sent_pieces = SentPieces(resend_delay=resend_delay)
        self._closed = threading.Event()
        self.sent_bytes = 0
        self._socket = listener or _listen(host, ports)
        bound = self._socket.getsockname()
        self.address = join_address(bound[0], bound[1])
        threading.Thread(target=self._accept_connections, name="transfer-accept", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self.lock:
            channels = list(self._open)
        for channel in channels:
            channel.close()

    # ---- connections

    def _accept_connections(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._lines.warning("accept", f"no connection could be accepted: {error}")
                time.sleep(0.2)  # wait, because all file descriptors may be in use
                continue
            with self.lock:  # too many connections: close the oldest one of the address with the most
                self._unproven.add(sock, address=str(peer[0]))
                surplus = self._unproven.remove_surplus_connection()
                if surplus is not None:
                    with suppress(OSError):  # the connection has ended
                        surplus[0].shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._serve_peer, args=(sock, peer), name="transfer-serve", daemon=True).start()
            except RuntimeError as error:  # no further thread could be started
                self._lines.warning("thread", f"{peer[0]} cannot be served: {error}")
                with self.lock:
                    self._unproven.remove(sock)
                sock.close()

    def _serve_peer(self, sock: socket.socket, peer: Any) -> None:
        try:
            channel = wire.accept_peer(sock, key=self._key, limits=self._limits)
        except wire.PeerError as error:
            self._lines.warning(peer[0], f"{peer[0]}: {error}")
            return
        finally:
            with self.lock:
                self._unproven.remove(sock)
        with self.lock:
            self._open.add(channel)
        try:
            if not self._closed.is_set():
                self._answer_requests(channel, peer[0])
        except wire.PeerError as error:
            log.info("%s: %s", peer[0], error)
        except Exception:
            log.exception("serving %s failed", peer[0])
        finally:
            with self.lock:
                self._open.discard(channel)
            channel.close()

    def _answer_requests(self, channel: wire.Channel, host: str) -> None:
        request = channel.receive()
        while True:
            what = str(request.get("op"))
            if what == "open":
                request = self._serve_object(channel, request, host)
                continue
            if what in self._other_handlers:
                self._other_handlers[what](channel, request)
            else:
                channel.send({"error": "unknown"})
            request = channel.receive()

    def _serve_object(self, channel: wire.Channel, request: dict[str, Any], host: str) -> dict[str, Any]:
        name = str(request.get("object"))
        with self._peer_slot() as free:
            if not free:
                channel.send({"error": "busy"})
                return channel.receive()
            until = time.monotonic() + MOST_WAIT_S
            while True:
                with self._served.lend_copy(name) as copy:
                    if copy is not None:
                        wants_manifest = bool(request.get("manifest"))
                        return _PeerService(self, channel, copy, host).answer_requests(wants_manifest=wants_manifest)
                if not self._served.is_fetching(name) or time.monotonic() > until:
                    channel.send({"error": "soon" if self._served.is_fetching(name) else "absent"})
                    return channel.receive()
                time.sleep(0.05)

    @contextmanager
    def _peer_slot(self) -> Iterator[bool]:
        with self.lock:
            free = self.served_peers < self._most
            self.served_peers += free
        try:
            yield free
        finally:
            with self.lock:
                self.served_peers -= free


@dataclass(eq=False)
class _PeerService:
    server: ObjectServer
    channel: wire.Channel
    copy: ObjectCopy
    host: str
    announced_count: int = 0
    delayed_pieces: set[int] = field(default_factory=set)

    def answer_requests(self, *, wants_manifest: bool) -> dict[str, Any]:
        copy, channel = self.copy, self.channel
        self._answer_open(wants_manifest)
        while True:
            request = channel.receive()
            what, index = request.get("op"), request.get("index")
            if what == "wait":
                self._wait_for_new_pieces()
                channel.send({"have": self._pieces_to_announce()})
            elif what == "piece" and type(index) is int and 0 <= index < len(copy.pieces):
                self._answer_piece_request(index)
            else:
                return request

    def _answer_open(self, wants_manifest: bool) -> None:
        copy = self.copy
        whole = copy.is_complete
        manifest = copy.manifest_bytes if wants_manifest else b""
        if len(copy.pieces) == 1 and whole:
            size = piece_size_bytes(copy.pieces[0])
            header = {"manifest": len(manifest), "have": 0, "whole": True, "data": size}
            self.channel.send_header(header, len(manifest) + size)
            self.channel.send_body(manifest)
            self._send_piece(copy.pieces[0])
            self.announced_count = 1
            return
        self.announced_count = len(copy.arrivals)
        bits = b"" if whole else pack_piece_bits(copy.arrivals[: self.announced_count], len(copy.pieces))
        header = {"manifest": len(manifest), "have": len(bits), "whole": whole, "data": 0}
        self.channel.send(header, manifest, bits)

    def _wait_for_new_pieces(self) -> None:
        copy, until = self.copy, time.monotonic() + MOST_WAIT_S
        while True:
            now = time.monotonic()
            soonest = min(map(self._seconds_until_piece_free, self.delayed_pieces), default=MOST_WAIT_S)
            if soonest <= 0 or now >= until:
                return
            with copy.changed:
                if len(copy.arrivals) > self.announced_count:
                    return
                copy.changed.wait(min(soonest, until - now))

    def _pieces_to_announce(self) -> list[int]:
        """Return the new pieces to announce to this peer, and a delayed piece that may be sent now."""
        told = list(self.copy.arrivals[self.announced_count : self.announced_count + _MOST_ANNOUNCED_PIECES])
        self.announced_count += len(told)
        for index in self.delayed_pieces:
            if self._seconds_until_piece_free(index) <= 0:
                self.delayed_pieces.discard(index)
                return [*told, index]
        return told

    def _seconds_until_piece_free(self, index: int) -> float:
        return self.server.sent_pieces.seconds_until_free(self.copy, index, host=self.host)

    def _answer_piece_request(self, index: int) -> None:
        copy, channel, sending = self.copy, self.channel, self.server.sent_pieces
        if not copy.has_piece(index):
            channel.send({"error": "absent", "index": index, "have": self._pieces_to_announce()})
        elif not sending.begin_sending(copy, index, host=self.host):
            self.delayed_pieces.add(index)
            channel.send({"error": "later", "index": index, "have": self._pieces_to_announce()})
        else:
            try:
                header = {"index": index, "have": self._pieces_to_announce()}
                channel.send_header(header, piece_size_bytes(copy.pieces[index]))
                self._send_piece(copy.pieces[index])
            finally:
                sending.end_sending(copy, index)

    def _send_piece(self, piece: Piece) -> None:
        try:
            for part in piece:
                with self.copy.open_file_of(part) as file:
                    self.channel.send_file(file, part.offset, part.size_bytes)
                with self.server.lock:
                    self.server.sent_bytes += part.size_bytes
        except OSError as error:  # the file was removed or damaged after the header
            raise wire.PeerError(f"{self.copy.name} cannot be read any more: {error}") from error


def pack_piece_bits(indices: Iterable[int], count: int) -> bytes:
    """Return `count` bits, set for the pieces in `indices`."""
    bits = bytearray(-(-count // 8))
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def _listen(host: str, ports: tuple[int, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(ports[0], ports[1]):
        with suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=128)
    return socket.create_server((host, ports[1]), family=family, backlog=128)

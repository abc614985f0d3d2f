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

from stoker.connections import UnprovenPeers, join_address
from stoker.contexts.manifest import Piece, piece_size_bytes
from stoker.log_files import RateLimitedLog
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectCopy

# ---- the order of sending

_SLOW_PEER_S = 3.0  # seconds after which another peer may get a piece that one peer receives slowly
_PATIENCE_S, _PATIENCE = 1.0, 8.0
"""A reader of the origin sends a piece again after 1 s plus 8 times the seconds of the last transfer."""
_POLL_S = 0.1
Spares = Callable[[str, int, str], float]
"""Returns the seconds that a host should wait for a piece. Arguments: object name, piece index, host address."""
_REMEMBERED = 256


class Sending:
    """The pieces that a server is sending or has sent. Thread-safe."""

    def __init__(self, *, spares: Spares) -> None:
        self._spares = spares
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    def begin(self, copy: ObjectCopy, index: int, *, host: str) -> bool:
        """Record that a piece is being sent. Return False if no further peer may receive the piece now."""
        with self._lock:
            object, sent, wait_s = self._piece_sending_state(copy, index, host)
            if wait_s > 0:
                return False
            object.under_way += sent.since is None
            object.given += not sent.before
            sent.since, sent.before, sent.asked_at = time.monotonic(), True, None
            return True

    def end(self, copy: ObjectCopy, index: int) -> None:
        now = time.monotonic()
        with self._lock:
            object = self._objects.setdefault(copy.name, _Object())
            sent = object.pieces.setdefault(index, _Sent())
            if sent.since is not None:  # None if a simultaneous transfer of the piece has ended first
                object.took_s = now - sent.since
                object.under_way -= 1
                sent.since = None
            if len(self._objects) > _REMEMBERED:
                self._objects = {name: one for name, one in self._objects.items() if one.under_way}

    def free_in(self, copy: ObjectCopy, index: int, *, host: str) -> float:
        """Return the seconds until a further peer may receive a piece."""
        with self._lock:
            return self._piece_sending_state(copy, index, host)[2]

    def _piece_sending_state(self, copy: ObjectCopy, index: int, host: str) -> tuple[_Object, _Sent, float]:
        now = time.monotonic()
        object = self._objects.setdefault(copy.name, _Object())
        sent = object.pieces.setdefault(index, _Sent())
        return object, sent, object.free_at(copy, sent, now, spared_s=self._spares(copy.name, index, host)) - now


@dataclass(slots=True)
class _Sent:
    since: float | None = None
    before: bool = False
    asked_at: float | None = None


@dataclass(slots=True)
class _Object:
    pieces: dict[int, _Sent] = field(default_factory=dict)
    given: int = 0  # number of pieces that were sent at least once
    under_way: int = 0
    took_s: float = 0.0

    def free_at(self, copy: ObjectCopy, sent: _Sent, now: float, *, spared_s: float) -> float:
        if sent.since is not None:
            return sent.since + _SLOW_PEER_S
        if not sent.before or not (spared_s or (copy.first_hand and not copy.complete)):
            return now
        if not spared_s and self.given >= len(copy.arrivals) and self.under_way <= 1:
            return now
        sent.asked_at = sent.asked_at or now
        due = sent.asked_at + (spared_s or _PATIENCE_S) + _PATIENCE * self.took_s
        return now if due <= now else min(due, now + _POLL_S)


# ---- the server

log = logging.getLogger("stoker.transfer")

MOST = 4  # maximum number of peers served at one time
WAIT_S = 0.5  # seconds until the answer to a `wait` request, below the peer's time-out

_MOST_UNPROVEN = 32  # maximum number of connections without proof of the key (one thread each)
_MOST_ANNOUNCED_PIECES = 4000


class ServedObjects(Protocol):
    def lend(self, name: str) -> AbstractContextManager[ObjectCopy | None]:
        """Yield a copy of an object, or None. The copy is not evicted during the `with` block."""

    def expects(self, name: str) -> bool:
        """True if the object is absent but being fetched."""


class ObjectServer:
    """Serves objects at `address` until closed. `more`: handlers of other requests, by name. Raises OSError if the
    server cannot listen.
    """

    def __init__(
        self, served: ServedObjects, *, key: bytes, host: str = "", ports: tuple[int, int] = (0, 0),
        listener: socket.socket | None = None, most: int = MOST, limits: wire.WireLimits = wire.LIMITS,
        more: Mapping[str, Callable[[wire.Channel, dict[str, Any]], None]] | None = None,
        spares: Spares = lambda _name, _index, _host: 0.0,
    ) -> None:  # fmt: skip
        self._served = served
        self._key = key
        self._limits = limits
        self._more = dict(more or {})
        self.lock = threading.Lock()
        self._unproven: UnprovenPeers[socket.socket] = UnprovenPeers(most=_MOST_UNPROVEN)
        self._lines = RateLimitedLog(log)
        self.serving = 0
        self._most = most
        self._open: set[wire.Channel] = set()
        self.sending = Sending(spares=spares)
        self._closed = threading.Event()
        self.sent_bytes = 0
        self._socket = listener or _listen(host, ports)
        bound = self._socket.getsockname()
        self.address = join_address(bound[0], bound[1])
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

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

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._lines.warning("accept", f"no connection could be accepted: {error}")
                time.sleep(0.2)  # probably, all file descriptors are in use
                continue
            with self.lock:  # above the limit, close the oldest connection of the address with most connections
                self._unproven.add(sock, address=str(peer[0]))
                surplus = self._unproven.surplus()
                if surplus is not None:
                    with suppress(OSError):  # the connection has ended
                        surplus[0].shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._begin, args=(sock, peer), name="transfer-serve", daemon=True).start()
            except RuntimeError as error:  # no further thread could be started
                self._lines.warning("thread", f"{peer[0]} cannot be served: {error}")
                with self.lock:
                    self._unproven.remove(sock)
                sock.close()

    def _begin(self, sock: socket.socket, peer: Any) -> None:
        try:
            channel = wire.accept(sock, key=self._key, limits=self._limits)
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
                self._converse(channel, peer[0])
        except wire.PeerError as error:
            log.info("%s: %s", peer[0], error)
        except Exception:
            log.exception("serving %s failed", peer[0])
        finally:
            with self.lock:
                self._open.discard(channel)
            channel.close()

    def _converse(self, channel: wire.Channel, host: str) -> None:
        request = channel.receive()
        while True:
            what = str(request.get("op"))
            if what == "open":
                request = self._opened(channel, request, host)
                continue
            if what in self._more:
                self._more[what](channel, request)
            else:
                channel.send({"error": "unknown"})
            request = channel.receive()

    def _opened(self, channel: wire.Channel, request: dict[str, Any], host: str) -> dict[str, Any]:
        name = str(request.get("object"))
        with self._slot() as free:
            if not free:
                channel.send({"error": "busy"})
                return channel.receive()
            until = time.monotonic() + WAIT_S
            while True:
                with self._served.lend(name) as copy:
                    if copy is not None:
                        wants_manifest = bool(request.get("manifest"))
                        return _PeerService(self, channel, copy, host).serve(wants_manifest=wants_manifest)
                if not self._served.expects(name) or time.monotonic() > until:
                    channel.send({"error": "soon" if self._served.expects(name) else "absent"})
                    return channel.receive()
                time.sleep(0.05)

    @contextmanager
    def _slot(self) -> Iterator[bool]:
        with self.lock:
            free = self.serving < self._most
            self.serving += free
        try:
            yield free
        finally:
            with self.lock:
                self.serving -= free


@dataclass(eq=False)
class _PeerService:
    server: ObjectServer
    channel: wire.Channel
    copy: ObjectCopy
    host: str
    announced: int = 0
    later: set[int] = field(default_factory=set)

    def serve(self, *, wants_manifest: bool) -> dict[str, Any]:
        copy, channel = self.copy, self.channel
        self._answer_open(wants_manifest)
        while True:
            request = channel.receive()
            what, index = request.get("op"), request.get("index")
            if what == "wait":
                self._wait()
                channel.send({"have": self._pieces_to_announce()})
            elif what == "piece" and type(index) is int and 0 <= index < len(copy.pieces):
                self._piece(index)
            else:
                return request

    def _answer_open(self, wants_manifest: bool) -> None:
        copy = self.copy
        whole = copy.complete
        manifest = copy.data if wants_manifest else b""
        if len(copy.pieces) == 1 and whole:
            size = piece_size_bytes(copy.pieces[0])
            header = {"manifest": len(manifest), "have": 0, "whole": True, "data": size}
            self.channel.send_header(header, len(manifest) + size)
            self.channel.send_body(manifest)
            self._send_piece(copy.pieces[0])
            self.announced = 1
            return
        self.announced = len(copy.arrivals)
        bits = b"" if whole else pack_piece_bits(copy.arrivals[: self.announced], len(copy.pieces))
        header = {"manifest": len(manifest), "have": len(bits), "whole": whole, "data": 0}
        self.channel.send(header, manifest, bits)

    def _wait(self) -> None:
        copy, until = self.copy, time.monotonic() + WAIT_S
        while True:
            now = time.monotonic()
            soonest = min(map(self._seconds_until_piece_free, self.later), default=WAIT_S)
            if soonest <= 0 or now >= until:
                return
            with copy.changed:
                if len(copy.arrivals) > self.announced:
                    return
                copy.changed.wait(min(soonest, until - now))

    def _pieces_to_announce(self) -> list[int]:
        """Return the new pieces to announce to this peer, and a delayed piece that may be sent now."""
        told = list(self.copy.arrivals[self.announced : self.announced + _MOST_ANNOUNCED_PIECES])
        self.announced += len(told)
        for index in self.later:
            if self._seconds_until_piece_free(index) <= 0:
                self.later.discard(index)
                return [*told, index]
        return told

    def _seconds_until_piece_free(self, index: int) -> float:
        return self.server.sending.free_in(self.copy, index, host=self.host)

    def _piece(self, index: int) -> None:
        copy, channel, sending = self.copy, self.channel, self.server.sending
        if not copy.has(index):
            channel.send({"error": "absent", "index": index, "have": self._pieces_to_announce()})
        elif not sending.begin(copy, index, host=self.host):
            self.later.add(index)
            channel.send({"error": "later", "index": index, "have": self._pieces_to_announce()})
        else:
            try:
                header = {"index": index, "have": self._pieces_to_announce()}
                channel.send_header(header, piece_size_bytes(copy.pieces[index]))
                self._send_piece(copy.pieces[index])
            finally:
                sending.end(copy, index)

    def _send_piece(self, piece: Piece) -> None:
        try:
            for part in piece:
                with self.copy.file_of(part) as file:
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

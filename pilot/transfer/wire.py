"""The protocol for object transfers between two hosts.

First, both sides prove that they know the session's transfer key, without sending the key:

    client                                      server
    MAGIC, 32 random bytes             ->
                                       <-       MAGIC, 32 random bytes, HMAC(key, "server", both random numbers)
    HMAC(key, "client", both)          ->
    request                            ->       (sent with the proof)
                                       <-       answer

A message is: length of the header (4 bytes) · MAC of the header (16) · header (JSON, with "body": length of the body) ·
body. The MAC has a key per connection and direction, and covers the message number. Bodies are not encrypted; the
receiver verifies their content. A peer is disconnected after `silence_s` seconds without bytes, or after `body_s`
seconds in one body.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stoker.connections import split_address
from stoker.errors import StokerError

Buffer = bytes | bytearray | memoryview

MAGIC = b"stoker-transfer1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAC_BYTES = 16
_HEAD = struct.Struct("!I")


class PeerError(StokerError):
    """A peer could not be reached, was disconnected, or violated the protocol."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Time limits in seconds, and the maximum header length in bytes."""

    connect_s: float = 5.0
    handshake_s: float = 5.0
    silence_s: float = 10.0
    body_s: float = 120.0
    header_bytes: int = 1 << 16


LIMITS = WireLimits()


class Channel:
    """A connection to a peer that has proven the key, for one thread at a time. Methods raise PeerError."""

    def __init__(self, sock: socket.socket, *, send_key: bytes, receive_key: bytes, limits: WireLimits) -> None:
        self._socket = sock
        self._keys = send_key, receive_key
        self._counts = [0, 0]
        self._limits = limits
        _set_timeout(sock, limits.silence_s)

    def send(self, header: dict[str, Any], *body: Buffer) -> None:
        self.send_header(header, sum(len(part) for part in body))
        for part in body:
            self.send_body(part)

    def send_header(self, header: dict[str, Any], body_bytes: int) -> None:
        """Send a header. A body of `body_bytes` bytes must follow."""
        data = json.dumps({**header, "body": body_bytes}, separators=(",", ":")).encode()
        if len(data) > self._limits.header_bytes:
            raise ValueError(f"a header of {len(data)} bytes is too long")
        self.send_body(_HEAD.pack(len(data)) + self._mac(0, data) + data)

    def send_body(self, data: Buffer) -> None:
        rest = memoryview(data)
        self._send_all(len(rest), lambda done: self._socket.send(rest[done:]))

    def _send_all(self, count: int, send: Callable[[int], int]) -> None:
        done, until = 0, time.monotonic() + self._limits.body_s
        while done < count:
            try:
                sent = send(done)
            except OSError as error:
                raise _make_connection_error(error, "accepted no bytes", self._limits.silence_s) from error
            if not sent:
                raise PeerError("the file became shorter while it was sent")
            done += sent
            if done < count and time.monotonic() > until:
                raise PeerError(
                    f"the other side is too slow: it did not accept its bytes within {self._limits.body_s:g} s"
                )

    def send_file(self, descriptor: int, offset: int, count: int) -> None:
        self._send_all(count, lambda done: os.sendfile(self._socket.fileno(), descriptor, offset + done, count - done))

    def receive(self) -> dict[str, Any]:
        """Return the next header. The caller must read the body before the next header."""
        head = memoryview(bytearray(_HEAD.size + _MAC_BYTES))
        self.receive_body(head)
        (size,) = _HEAD.unpack_from(head)
        if not 2 <= size <= self._limits.header_bytes:
            raise PeerError(f"the other side announced a header of {size} bytes")
        data = bytearray(size)
        self.receive_body(memoryview(data))
        if not hmac.compare_digest(self._mac(1, bytes(data)), bytes(head[_HEAD.size :])):
            raise PeerError("a header was changed in transit")
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or type(header.get("body")) is not int or header["body"] < 0:
            raise PeerError("the peer sent an invalid header")
        return header

    def receive_body(self, into: memoryview) -> None:
        until = time.monotonic() + self._limits.body_s
        got = 0
        while got < len(into):
            try:
                count = self._socket.recv_into(into[got:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _make_connection_error(error, "sent no bytes", self._limits.silence_s) from error
            if not count:
                raise PeerError("the other side closed the connection")
            got += count
            if got < len(into) and time.monotonic() > until:
                raise PeerError(f"the other side is too slow: {got} of {len(into)} bytes in {self._limits.body_s:g} s")

    def close(self) -> None:
        """Close the connection, even if another thread is waiting for data."""
        with suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, direction: int, data: bytes) -> bytes:
        count = self._counts[direction]
        self._counts[direction] += 1
        return hmac.digest(self._keys[direction], count.to_bytes(8, "big") + data, "sha256")[:_MAC_BYTES]


def connect_to_peer(address: str, *, key: bytes, limits: WireLimits = LIMITS) -> Channel:
    """Connect to `host:port` and exchange proofs of the key. Raises PeerError."""
    try:
        sock = socket.create_connection(split_address(address), timeout=limits.connect_s)
    except (OSError, ValueError) as error:
        raise PeerError(f"{address} cannot be reached: {error}") from error
    try:
        _set_socket_options(sock, limits)
        mine = os.urandom(_NONCE_BYTES)
        sock.sendall(MAGIC + mine)
        answer = _receive_exactly(sock, len(MAGIC) + _NONCE_BYTES + _PROOF_BYTES)
        theirs = _read_nonce(answer)
        if not hmac.compare_digest(_compute_proof(key, b"server", mine, theirs), answer[-_PROOF_BYTES:]):
            raise PeerError("it does not know the session's transfer key")
        sock.sendall(_compute_proof(key, b"client", mine, theirs))
        asks, answers = _compute_proof(key, b"asks", mine, theirs), _compute_proof(key, b"answers", mine, theirs)
        return Channel(sock, send_key=asks, receive_key=answers, limits=limits)
    except (OSError, PeerError) as error:
        sock.close()
        raise PeerError(f"{address}: {_describe_error(error)}") from error


def accept_peer(sock: socket.socket, *, key: bytes, limits: WireLimits = LIMITS) -> Channel:
    """Accept a connection that `connect_to_peer` opened. Raises PeerError."""
    try:
        _set_socket_options(sock, limits)
        theirs = _read_nonce(_receive_exactly(sock, len(MAGIC) + _NONCE_BYTES))
        mine = os.urandom(_NONCE_BYTES)
        sock.sendall(MAGIC + mine + _compute_proof(key, b"server", theirs, mine))
        if not hmac.compare_digest(_compute_proof(key, b"client", theirs, mine), _receive_exactly(sock, _PROOF_BYTES)):
            raise PeerError("it does not know the session's transfer key")
        asks, answers = _compute_proof(key, b"asks", theirs, mine), _compute_proof(key, b"answers", theirs, mine)
        return Channel(sock, send_key=answers, receive_key=asks, limits=limits)
    except (OSError, PeerError) as error:
        sock.close()
        raise PeerError(f"a peer was refused: {_describe_error(error)}") from error


def local_address_for_host(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _set_socket_options(sock: socket.socket, limits: WireLimits) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_timeout(sock, limits.handshake_s)


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    if sock.recv_into(data, count, socket.MSG_WAITALL) < count:
        raise PeerError("it closed the connection before it proved its key")
    return bytes(data)


def _read_nonce(hello: bytes) -> bytes:
    if not hello.startswith(MAGIC):
        raise PeerError("it does not speak this protocol")
    return hello[len(MAGIC) : len(MAGIC) + _NONCE_BYTES]


def _compute_proof(key: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(key, MAGIC + role + client + server, "sha256")


def _make_connection_error(error: OSError, what: str, seconds: float) -> PeerError:
    if isinstance(error, BlockingIOError):
        return PeerError(f"the other side {what} for {seconds:g} s")
    return PeerError(f"the connection broke: {error}")


def _describe_error(error: Exception) -> str:
    return "it did not answer in time" if isinstance(error, BlockingIOError) else str(error)

"""Connections that were accepted and have said nothing yet: how many there may be, and which gives way.

ZeroMQ accepts every TCP connection and waits for its handshake. A stranger who opens connections and says nothing would
take every descriptor of the manager. So the number of such connections has a limit, and a few descriptors stay free for
the manager itself. One connection too many: the oldest of the address that has the most of them is cut. An honest peer
proves its key within milliseconds, so it is cut only if hundreds of others come in that time.

ZeroMQ owns these connections. They are cut by a shutdown of the socket, which ZeroMQ reads as the peer's end.
"""

from __future__ import annotations

import logging
import socket

from stoker import connections
from stoker.connections import UnprovenPlaces
from stoker.errors import SessionError
from stoker.log_files import SeldomLog

log = logging.getLogger("stoker.manager")

KEPT_FREE = 64
"""Descriptors that connections leave to the manager itself: files, processes, the lease."""
_LEAST, _MOST = 32, 4096

Peer = tuple[str, int]
"""Address and port of the other side."""


class UnprovenConnections:
    """The connections of one listening socket that have proven nothing yet, by descriptor.

    Raises SessionError where this process may open too few files to have any.
    """

    def __init__(self) -> None:
        limit = connections.descriptor_limit()
        if limit < KEPT_FREE + _LEAST:  # every connection would be cut, and every program and pilot wait for ever
            raise SessionError(
                f"a process may open {limit} files here (ulimit -n), and the manager needs at least "
                f"{KEPT_FREE + _LEAST}, and one for each pilot and program; raise it, for example: ulimit -n 1024"
            )
        self.places: UnprovenPlaces[int] = UnprovenPlaces(most=max(_LEAST, min(_MOST, (limit - KEPT_FREE) // 2)))
        self._ceiling = limit - KEPT_FREE
        self._peers: dict[int, Peer] = {}
        self._lines = SeldomLog(log)
        self.cut = 0
        """Connections that were cut to make room."""

    def accepted(self, descriptor: int) -> None:
        """A connection has come. It is unproven; if it is one too many, another or this one is cut."""
        self.settled(descriptor)
        peer = _peer_of(descriptor)
        if peer is None:
            return
        self._peers[descriptor] = peer
        self.places.add(descriptor, address=peer[0])
        surplus = self.places.take_oldest() if descriptor >= self._ceiling else self.places.surplus()
        if surplus is not None:
            oldest, address = surplus
            self.cut += 1
            _shut(oldest, self._peers.pop(oldest))
            known = len(self._peers) + 1
            self._lines.warning(
                address, f"{address} opens connections and proves no key: the oldest of {known} was cut"
            )

    def settled(self, descriptor: int) -> None:
        """A connection has proven its key, or is closed. No-op if it is not known as unproven."""
        if self.places.remove(descriptor):
            del self._peers[descriptor]


def _peer_of(descriptor: int) -> Peer | None:
    """The other side of a connection; None if it is closed already. Needs no descriptor of its own."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        found = connection.getpeername()
        return (found[0], found[1]) if isinstance(found, tuple) else None
    except OSError:
        return None
    finally:
        connection.detach()


def _shut(descriptor: int, peer: Peer) -> None:
    """End a connection, if the descriptor is still that connection: its number may belong to another by now."""
    if _peer_of(descriptor) != peer:
        return
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it ended by itself
        pass
    finally:
        connection.detach()

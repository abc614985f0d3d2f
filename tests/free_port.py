"""Reserve ports for programs that listen later."""

from __future__ import annotations

import socket

import zmq
from polling import PATIENCE_S, polls

_kept: list[socket.socket] = []
"""Open sockets that reserve ports in the kernel."""


def free_port() -> int:
    """Return a port that stays reserved until this process ends."""
    _kept.append(keep_port())
    return int(_kept[-1].getsockname()[1])


def keep_port() -> socket.socket:
    """Return a socket that reserves a free loopback port without listening. Servers with SO_REUSEADDR may listen on the
    port repeatedly. While no server listens, the kernel refuses connections.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def listen_at(address: str, router: zmq.Socket[bytes]) -> None:
    """Make a ZeroMQ socket listen as soon as ZeroMQ's threads have closed the previous socket."""
    for more in polls(PATIENCE_S):
        try:
            router.bind(address)
            return
        except zmq.ZMQError:
            if not more:
                raise

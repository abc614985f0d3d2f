"""A port reserved for a program that listens on it seconds later."""

from __future__ import annotations

import socket

import zmq
from polling import PATIENCE_S, polls

_kept: list[socket.socket] = []
"""The kernel gives a bound port to no other program."""


def free_port() -> int:
    """The number of a port that is kept until this process ends."""
    _kept.append(keep_port())
    return int(_kept[-1].getsockname()[1])


def keep_port() -> socket.socket:
    """A socket that keeps a free port of the loopback network. Programs that listen with SO_REUSEADDR, as servers do,
    may listen there, since this one does not, also again when they have been killed. Until then the kernel refuses
    connections."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def listen_at(address: str, router: zmq.Socket[bytes]) -> None:
    """Have a socket of ZeroMQ listen, as soon as its threads have closed one that did so before."""
    for more in polls(PATIENCE_S):
        try:
            return router.bind(address)
        except zmq.ZMQError:
            if not more:
                raise

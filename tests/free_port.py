"""A port that a program is to listen on seconds later, and that nobody else gets until then."""

from __future__ import annotations

import socket

_kept: list[socket.socket] = []
"""Each keeps a port until this process ends: the kernel gives a bound port to no other program by itself."""


def free_port() -> int:
    """A free port on the loopback network. It stays free for programs that listen with SO_REUSEADDR, as servers do:
    they may listen where this process is bound and does not listen, also again when they have been killed. Until then
    the kernel refuses connections."""
    found = socket.socket()
    _kept.append(found)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return int(found.getsockname()[1])

"""Network addresses, and limits for processes with many connections.

Standard library only, as the pilot's starter requires. A process accepts every new connection, because a peer normally
authenticates within milliseconds. If too many connections are not authenticated, the process closes the oldest one of
the address that has most of them.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable
from contextlib import suppress
from typing import Generic, TypeVar


def split_address(address: str) -> tuple[str, int]:
    """Split an address `host:port` into host and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_MOST_DESCRIPTORS = 1 << 20
"""Highest limit that this module sets. A higher limit would slow programs that close every possible descriptor."""
_former_limits: list[tuple[int, int]] = []


def raise_descriptor_limit() -> int:
    """Raise the soft limit of file descriptors as far as the system allows. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _former_limits.append((soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def restore_descriptor_limit(pid: int) -> None:
    """Restore the former descriptor limit in a child process, because `select` fails with high descriptor numbers."""
    if _former_limits:
        with suppress(OSError):  # the child process has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _former_limits[0])


K = TypeVar("K", bound=Hashable)


class UnauthenticatedConnections(Generic[K]):
    """Connections whose peers have not authenticated yet. Not thread-safe."""

    def __init__(self, *, most: int) -> None:
        self.most = most
        self._addresses: dict[K, str] = {}
        self._by_address: dict[str, dict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: K, *, address: str) -> None:
        self.remove(connection)
        self._addresses[connection] = address
        self._by_address.setdefault(address, {})[connection] = None

    def remove(self, connection: K) -> bool:
        address = self._addresses.pop(connection, None)
        if address is None:
            return False
        there = self._by_address[address]
        del there[connection]
        if not there:
            del self._by_address[address]
        return True

    def remove_surplus_connection(self) -> tuple[K, str] | None:
        """If there are more than `most` connections, remove one. Return this connection and its address."""
        return self.pop_oldest_connection() if len(self) > self.most else None

    def pop_oldest_connection(self) -> tuple[K, str]:
        """Remove the oldest connection of the address with most connections. Return both."""
        address = max(self._by_address, key=lambda each: len(self._by_address[each]))
        connection = next(iter(self._by_address[address]))
        self.remove(connection)
        return connection, address

"""Check the keys of peers, and limit the connections whose peers have not yet proved a key.

Silent connections of strangers could use up all file descriptors. Above a limit, the manager closes the oldest unproven
connection of the address with the most unproven connections.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from zmq.utils import z85

from stoker import connections
from stoker.connections import UnauthenticatedConnections
from stoker.errors import SessionError
from stoker.log_files import RateLimitedLog
from stoker.manager.core.state import State
from stoker.protocol.ids import PilotId
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import FromPilot, PilotHello

log = logging.getLogger("stoker.manager")

_REREAD_S = 0.2
RESERVED_DESCRIPTORS = 64
"""File descriptors reserved for files, processes and the lease."""
_MIN_UNPROVEN, _MAX_UNPROVEN = 32, 4096


class PeerRole(enum.Enum):
    """The owner of a peer's key: a client, or a pilot (of one block, or started by hand)."""

    CLIENT = "client"
    PILOT = "pilot"


class KeyOwner(msgspec.Struct, frozen=True):
    """The owner of a key. `block`: the block whose pilots may use the key (empty: all pilots)."""

    role: PeerRole
    block: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.block}" if self.block else self.role.value

    @staticmethod
    def parse(text: str) -> KeyOwner:
        role, _, block = text.partition(" ")
        return KeyOwner(PeerRole(role), block)


class KnownKeys:
    def __init__(self, folder: SessionFolder) -> None:
        self._folder = folder
        self._client_keys = {z85.decode(folder.read_key(PeerRole.CLIENT.value).public): KeyOwner(PeerRole.CLIENT)}
        self._by_block: dict[str, bytes] = {}
        self._users: dict[bytes, KeyOwner] = {}
        self._seen_mtimes_ns: tuple[int, int] = (0, 0)
        self._read_at = 0.0
        self._lines = RateLimitedLog(log)
        self._read_keys()

    def find_key_owner(self, public: bytes) -> KeyOwner | None:
        if self._key_folder_mtimes_ns() != self._seen_mtimes_ns or (
            public not in self._users and time.monotonic() - self._read_at >= _REREAD_S
        ):
            self._read_keys()
        return self._users.get(public)

    def _key_folder_mtimes_ns(self) -> tuple[int, int]:
        return _mtime_ns(self._folder.key_file("pilot").parent), _mtime_ns(self._folder.block_keys)

    def _read_keys(self) -> None:
        self._read_at = time.monotonic()
        self._seen_mtimes_ns = self._key_folder_mtimes_ns()
        users = dict(self._client_keys)
        if self._folder.key_file(PeerRole.PILOT.value).exists():
            try:
                users[z85.decode(self._folder.read_key(PeerRole.PILOT.value).public)] = KeyOwner(PeerRole.PILOT)
            except (SessionError, ValueError) as error:
                self._lines.warning("", f"the session's pilot key cannot be read: {error}")
        try:
            names = [name for name in os.listdir(self._folder.block_keys) if name.endswith(".json")]
        except OSError:  # before the first block, the folder does not exist
            names = []
        blocks = {name.removesuffix(".json") for name in names if not name.startswith(".")}
        for block in self._by_block.keys() - blocks:
            del self._by_block[block]
        for block in blocks - self._by_block.keys():
            try:
                self._by_block[block] = z85.decode(self._folder.read_block_key(block).public)
            except (SessionError, ValueError) as error:
                self._lines.warning(block, f"the key of block {block} cannot be read: {error}")
        users.update({public: KeyOwner(PeerRole.PILOT, block) for block, public in self._by_block.items()})
        self._users = users


def explain_wrong_block(state: State, pilot: PilotId, messages: Sequence[FromPilot], *, block: str) -> str:
    """Return why the owner of a block's key may not act as this pilot; empty if the owner may."""
    first = messages[0] if messages else None
    said = first.block if isinstance(first, PilotHello) else block
    known = state.pilots.get(pilot) or state.gone_pilots.get(pilot)
    theirs = said if said != block else known.block if known is not None else block
    return (
        ""
        if theirs == block
        else f"pilot {pilot} belongs to block {theirs or 'none'}, but its key is for block {block}"
    )


def _mtime_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


# ---- silent connections

Peer = tuple[str, int]


class UnprovenConnections:
    """Connections whose peers have not proved their keys yet. Raises SessionError if this process may open too few
    files.
    """

    def __init__(self) -> None:
        limit = connections.descriptor_limit()
        if limit < RESERVED_DESCRIPTORS + _MIN_UNPROVEN:  # with fewer files, the manager would close every connection
            raise SessionError(
                f"a process may open {limit} files here (ulimit -n), but the manager needs at least "
                f"{RESERVED_DESCRIPTORS + _MIN_UNPROVEN}, and one for each pilot and program; raise the limit, for"
                " example: ulimit -n 1024"
            )
        self.unproven: UnauthenticatedConnections[int] = UnauthenticatedConnections(
            most=max(_MIN_UNPROVEN, min(_MAX_UNPROVEN, (limit - RESERVED_DESCRIPTORS) // 2))
        )
        self._ceiling = limit - RESERVED_DESCRIPTORS
        self._peers: dict[int, Peer] = {}
        self._lines = RateLimitedLog(log)

    def add_connection(self, descriptor: int) -> None:
        self.remove_connection(descriptor)
        peer = _connection_peer_address(descriptor)
        if peer is None:
            return
        self._peers[descriptor] = peer
        self.unproven.add(descriptor, address=peer[0])
        surplus = (
            self.unproven.pop_oldest_connection()
            if descriptor >= self._ceiling
            else self.unproven.remove_surplus_connection()
        )
        if surplus is not None:
            oldest, address = surplus
            _shut_down_connection(oldest, self._peers.pop(oldest))
            known = len(self._peers) + 1
            self._lines.warning(
                address, f"{address} opens connections without proving a key: one of {known} connections was closed"
            )

    def remove_connection(self, descriptor: int) -> None:
        if self.unproven.remove(descriptor):
            del self._peers[descriptor]


def _connection_peer_address(descriptor: int) -> Peer | None:
    """Return the peer's address and port, or None for a closed connection."""
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


def _shut_down_connection(descriptor: int, peer: Peer) -> None:
    """Shut down a connection, unless its descriptor was reused."""
    if _connection_peer_address(descriptor) != peer:
        return
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.detach()

"""Snapshots of a core: what a manager comes back from, instead of all events since the session began.

A file has a line that says what it is, lengths and checksums, and three parts: a head (which Stoker wrote it, before
which segment of the journal it belongs, and the fields of every class in it), what is certain (see `CertainFacts`), and
the core itself (`pickled`). A manager reads the core only if it would write the same fields. Otherwise, as after an
upgrade, it does not guess: what is certain is in messages that every version reads, and the rest is asked of the peers.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from stoker.manager.core.reactor import Core
from stoker.manager.core.state import State
from stoker.manager.live import pickled
from stoker.manager.live.pickled import Layout, Unreadable
from stoker.manager.live.records import SegmentHead
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import ClientId
from stoker.startup import RELEASE
from stoker.whole_files import draft_of

_MAGIC = b"stoker snapshot 1\n"
_PARTS = struct.Struct("<QIQIQI")
"""Length and CRC-32 of the head, of what is certain, and of the core."""


class SnapshotHead(msgspec.Struct, frozen=True):
    """What a snapshot says of itself. `segment` is the one that follows; `at`: the time of the last event before it."""

    session: str
    stoker: str
    segment: SegmentHead
    at: float
    layout: Layout


class Unconfirmed(msgspec.Struct, frozen=True, array_like=True):
    """Ends of a client's calls that it has not confirmed. `first`: how many results it had confirmed before."""

    client: ClientId
    number: int
    first: int
    ends: list[CallEnd]


class CertainFacts(msgspec.Struct, frozen=True):
    """What holds whatever another version thinks of the rest."""

    clients: list[Unconfirmed] = []


class CoreSnapshot(msgspec.Struct, frozen=True):
    """A snapshot's parts. `core` is still bytes, with a checksum that fits or not: `restored` makes one of it."""

    head: SnapshotHead
    certain: CertainFacts
    core: bytes
    is_whole: bool


def certain_of(state: State) -> CertainFacts:
    """What is certain of a state."""
    return CertainFacts(
        [
            Unconfirmed(client.id, client.number, client.first_unacked, list(client.unacked))
            for client in state.clients.values()
            if not client.observer
        ]
    )


def write(path: Path, core: Core, segment: SegmentHead, *, modules: Iterable[str] = ()) -> int:
    """Write a snapshot to a draft, make it last, and give it its name. Returns its size in bytes.

    Raises Unsaveable (see `pickled`), OSError.
    """
    state = core.state
    with (
        draft_of(path, draft=path.with_name(f"{path.name}.draft")) as draft,
        os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file,
    ):
        file.write(_MAGIC)
        file.write(bytes(_PARTS.size))
        certain = msgspec.msgpack.encode(certain_of(state))
        file.write(certain)
        body = _Counted(file)
        layout = pickled.dump(core, body, modules=modules)  # type: ignore[arg-type]
        head = msgspec.msgpack.encode(SnapshotHead(state.session, RELEASE, segment, state.now, layout))
        file.write(head)
        size = file.tell()
        file.seek(len(_MAGIC))
        file.write(
            _PARTS.pack(len(head), zlib.crc32(head), len(certain), zlib.crc32(certain), body.length, body.checksum)
        )
        file.flush()
        os.fsync(file.fileno())
    return size


class _Counted:
    """A file that counts what is written, for a pickler."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        self.length += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def read(path: Path) -> CoreSnapshot:
    """A snapshot's parts. Raises Unreadable where the head is damaged, or what is certain."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    start = len(_MAGIC) + _PARTS.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise Unreadable(f"{path} is no snapshot of this version")
    head_size, head_crc, certain_size, certain_crc, size, crc = _PARTS.unpack_from(data, len(_MAGIC))
    certain = data[start : start + certain_size]
    core = data[start + certain_size : start + certain_size + size]
    head = data[start + certain_size + size : start + certain_size + size + head_size]
    if len(head) != head_size or zlib.crc32(head) != head_crc or zlib.crc32(certain) != certain_crc:
        raise Unreadable(f"{path} is damaged")
    try:
        return CoreSnapshot(
            msgspec.msgpack.decode(head, type=SnapshotHead),
            msgspec.msgpack.decode(certain, type=CertainFacts),
            core,
            is_whole=zlib.crc32(core) == crc,
        )
    except ValueError as error:
        raise Unreadable(f"{path} is of another version: {error}") from error


def restored(snapshot: CoreSnapshot, *, modules: Iterable[str] = ()) -> Core:
    """The core of a snapshot. Raises Unreadable."""
    if not snapshot.is_whole:
        raise Unreadable("the core in it is damaged")
    core = pickled.load(snapshot.core, snapshot.head.layout, modules=modules)
    if not isinstance(core, Core):
        raise Unreadable("the snapshot holds no core")
    return core

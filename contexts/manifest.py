"""The manifest of an object: bytes whose digest is the object's name, so that every part can be verified.

A manifest has the SHA-256 digests of each file's 4 MiB parts (0.8 MB for 100 GB), a hash tree of one level as in
BitTorrent. Each field is encoded with its length:

    a file      "file" mode size digests
    a folder    "folder", then for each entry below the folder, sorted by name: name "file" mode size digests
                                                                               name "folder"
                                                                               name "link" target

A *piece* is the unit of sending: consecutive whole parts of at most 4 MiB together. For the pilot's starter, this
module imports only the standard library.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

PART_BYTES = 4 << 20
MOST_BYTES = 512 << 20

_DIGEST_BYTES = 32
_MAX_PARTS_PER_PIECE = 1024
"""Maximum number of parts in a piece, so that a pilot can check the piece quickly."""


class EntryKind(enum.Enum):
    FILE = b"file"
    FOLDER = b"folder"
    LINK = b"link"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or link. `name`: path in the object. `parts`: digests of its parts."""

    name: bytes
    kind: EntryKind
    executable: bool = False
    size_bytes: int = 0
    parts: bytes = b""
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of an object: one file (an entry without a name), or all entries below a folder."""

    kind: EntryKind
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ManifestPart:
    entry: int
    offset: int
    size_bytes: int
    digest: bytes


Piece = tuple[ManifestPart, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    if manifest.kind is EntryKind.FILE:
        return _join_fields(*_entry_fields(manifest.entries[0]))
    return _join_fields(b"folder") + b"".join(
        _join_fields(entry.name, *_entry_fields(entry)) for entry in manifest.entries
    )


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`. Raises ValueError, for example for a path outside of the object."""
    fields = _split_fields(data)
    try:
        kind = EntryKind(next(fields))
        if kind is EntryKind.FILE:
            manifest = Manifest(kind, (_decode_entry(b"", kind, fields),))
        else:
            manifest = Manifest(kind, tuple(_decode_entry(name, EntryKind(next(fields)), fields) for name in fields))
            _check_entry_names(manifest)
    except (StopIteration, RuntimeError):
        raise ValueError("the manifest is truncated") from None
    if kind is EntryKind.LINK or next(fields, None) is not None:
        raise ValueError("this is not a manifest")
    return manifest


def object_name_of_manifest(data: bytes, *, suffix: str = "") -> str:
    kind = "file" if data[8:12] == b"file" else "folder"
    return f"{kind}-{hashlib.sha256(data).hexdigest()}{suffix}"


def is_manifest_of(name: str, data: bytes) -> bool:
    return name.partition(".")[0] == object_name_of_manifest(data)


def read_manifest(name: str, data: bytes) -> Manifest:
    if not is_manifest_of(name, data):
        raise ValueError(f"these {len(data)} bytes are not the manifest of {name}")
    return decode_manifest(data)


def iterate_parts(manifest: Manifest) -> Iterator[ManifestPart]:
    for place, entry in enumerate(manifest.entries):
        for count in range(len(entry.parts) // _DIGEST_BYTES):
            offset = count * PART_BYTES
            digest = entry.parts[count * _DIGEST_BYTES : (count + 1) * _DIGEST_BYTES]
            yield ManifestPart(place, offset, min(PART_BYTES, entry.size_bytes - offset), digest)


def group_into_pieces(manifest: Manifest) -> list[Piece]:
    whole: list[list[ManifestPart]] = []
    size = 0
    for part in iterate_parts(manifest):
        if not whole or size + part.size_bytes > PART_BYTES or len(whole[-1]) == _MAX_PARTS_PER_PIECE:
            whole.append([])
            size = 0
        whole[-1].append(part)
        size += part.size_bytes
    return [tuple(piece) for piece in whole]


def piece_size_bytes(piece: Piece) -> int:
    return sum(part.size_bytes for part in piece)


def is_piece_intact(piece: Piece, data: memoryview) -> bool:
    offset = 0
    for part in piece:
        end = offset + part.size_bytes
        if hashlib.sha256(data[offset:end]).digest() != part.digest:
            return False
        offset = end
    return offset == len(data)


def _join_fields(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def _split_fields(data: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        end = place + 8 + int.from_bytes(data[place : place + 8], "big")
        if end > len(data):
            raise ValueError("the manifest is truncated")
        yield data[place + 8 : end]
        place = end


def _entry_fields(entry: Entry) -> tuple[bytes, ...]:
    if entry.kind is EntryKind.FILE:
        return b"file", b"x" if entry.executable else b"-", entry.size_bytes.to_bytes(8, "big"), entry.parts
    return (b"folder",) if entry.kind is EntryKind.FOLDER else (b"link", entry.target)


def _decode_entry(name: bytes, kind: EntryKind, fields: Iterator[bytes]) -> Entry:
    if kind is EntryKind.FOLDER:
        return Entry(name, kind)
    if kind is EntryKind.LINK:
        target = next(fields)
        if not target or target.startswith(b"/") or b"\0" in target:
            raise ValueError(f"the link {name!r} has the invalid target {target!r}")
        return Entry(name, kind, target=target)
    mode, size, parts = next(fields), next(fields), next(fields)
    length = int.from_bytes(size, "big")
    if mode not in (b"x", b"-") or len(size) != 8 or len(parts) != -(-length // PART_BYTES) * _DIGEST_BYTES:
        raise ValueError(f"the entry {name!r} is damaged")
    return Entry(name, kind, executable=mode == b"x", size_bytes=length, parts=parts)


def _check_entry_names(manifest: Manifest) -> None:
    folders, last = {b""}, b""
    for entry in manifest.entries:
        above, _, own = entry.name.rpartition(b"/")
        absolute = entry.name.startswith(b"/")
        if absolute or entry.name <= last or own in (b"", b".", b"..") or b"\0" in own or above not in folders:
            raise ValueError(f"the manifest has an entry {entry.name!r} at an invalid place")
        if entry.kind is EntryKind.FOLDER:
            folders.add(entry.name)
        last = entry.name

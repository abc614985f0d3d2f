"""The entries of an object cache: a small file with the facts of each object. An object without an entry is not there.

An entry is written once, as a new file, and its modification time is when the object was last used. So facts that were
read are kept, and read again only for another file.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.whole_files import draft_of


class EntryFacts(msgspec.Struct, frozen=True):
    """What an entry's file says: the object's cache name and length, and how its content looked when it came.

    `boot`: which boot of this machine the object was copied in, while a crash of the machine could lose its content;
    empty: it has another name elsewhere.
    """

    name: str
    size_bytes: int
    look: str
    boot: str = ""


class CacheEntry(msgspec.Struct, frozen=True):
    """An object that is listed: its entry's file, its facts, and when it was last used (seconds since the epoch)."""

    file: Path
    facts: EntryFacts
    used_at: float


class Entries:
    """The entries in a folder. The caller holds the cache's lock where that matters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listed: dict[str, tuple[tuple[int, int], EntryFacts]] = {}
        """The facts of entries that were listed before, with the inode and the length of the files that had them."""

    def read_all(self) -> list[CacheEntry]:
        """Every object's entry; entries that cannot be read are left out."""
        found, listed = [], {}
        try:
            entries = list(os.scandir(self.folder))
        except OSError:  # a batch system clears the scratch folder
            entries = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                found_at = entry.stat()
            except OSError:
                continue
            path = Path(entry.path)
            seen = found_at.st_ino, found_at.st_size
            before, facts = self._listed.get(entry.name, (None, None))
            if facts is None or before != seen:
                facts = read_facts(path)
            if facts is not None:
                listed[entry.name] = seen, facts
                found.append(CacheEntry(path, facts, found_at.st_mtime))
        self._listed = listed
        return found

    def write(self, file: Path, facts: EntryFacts) -> None:
        """Write an object's entry. Raises OSError."""
        write_small(file, msgspec.json.encode(facts))
        self.forget(file)

    def forget(self, file: Path) -> None:
        """Read this entry anew when it is listed next."""
        self._listed.pop(file.name, None)


def read_facts(file: Path) -> EntryFacts | None:
    """The facts in a file of an entry, or of a claim; None if it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=EntryFacts)
    except (OSError, *UNREADABLE):
        return None


def write_small(file: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with draft_of(file, draft=file.with_name(f".{file.name}"[:200])) as draft:  # a killed pilot leaves one at most
        draft.write_bytes(data)

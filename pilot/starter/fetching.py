"""Getting the archive of the packages: from the session's seed and from others that start, or from a path that is seen.

Everybody who fetches serves what he has already (`stoker.pilot.transfer`), and they find each other at the seed
(`stoker.pilot.transfer.meeting`): of a thousand nodes that start at once, a few read the session's own host. Each part
is checked when it comes, against the archive's name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from stoker.contexts.manifest import PART_BYTES, Entry, Kind, Manifest, encode, proves
from stoker.pilot.starter.place import StartError
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import Source
from stoker.pilot.transfer.client import SEED_FILE, read_key
from stoker.pilot.transfer.copy import Copy
from stoker.pilot.transfer.fetch import Fetch
from stoker.pilot.transfer.meeting import meet
from stoker.pilot.transfer.server import Server
from stoker.pilot.transfer.sources import Means

_MEET_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between looks for others: those who start at once find each other soon."""
_ALONE_S = 10.0
"""The seed and the others are tried for so long."""


def get(packages: dict[str, Any], archive: Path, *, session: Path) -> None:
    """Put the archive at that path, whole and proven. Raises StartError, and OSError if the disk does not take it."""
    name, source = str(packages["name"]), str(packages["source"])
    if archive.exists() and _is(archive, name):
        return
    reasons = []
    seed = session / SEED_FILE
    if seed.exists():
        try:
            _from_peers(name, archive, seed=seed.read_text().strip(), key=read_key(session / "keys" / "transfer.json"))
            return
        except (wire.PeerError, ValueError) as error:
            reasons.append(str(error))
    try:
        _from_path(Path(source), archive)
    except FileNotFoundError:
        reasons.append(f"{source} is not seen here")
    else:
        if _is(archive, name):
            return
        archive.unlink()
        reasons.append(f"{source} is not what it was")
    raise StartError(f"{os.uname().nodename} can't get the environment: {'; '.join(reasons)}")


def _from_peers(name: str, archive: Path, *, seed: str, key: bytes) -> None:
    shelf = _Shelf(name)
    draft = archive.with_name(f".{archive.name}.draft")
    fetch = Fetch(name, draft, means=Means(key=key), begun=shelf.hold)
    server = Server(shelf, key=key, host=wire.route_to(wire.split_address(seed)[0]))
    over = threading.Event()

    def keep_meeting() -> None:
        others: list[str] = []
        for pause_s in chain(_MEET_S, repeat(_MEET_S[-1])):
            with suppress(wire.PeerError):  # it is busy, or away: those that are known go on
                others = meet(name, server.address, seed=seed, key=key)
            fetch.offer([Source(address=seed, origin=True), *(Source(address=one) for one in others)])
            if over.wait(pause_s):
                return

    try:
        threading.Thread(target=keep_meeting, name="starter-meet", daemon=True).start()
        fetch.run(alone_s=_ALONE_S)
    finally:
        over.set()
        server.close()
    os.replace(draft, archive)


class _Shelf:
    """What a starting pilot serves: the one object that it fetches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._copy: Copy | None = None

    def hold(self, copy: Copy) -> None:
        """There is a copy now."""
        self._copy = copy

    @contextmanager
    def lend(self, name: str) -> Iterator[Copy | None]:
        """See `stoker.pilot.transfer.server.Shelf`."""
        yield self._copy if name == self._name else None

    def expects(self, name: str) -> bool:
        """Whether it is the one."""
        return name == self._name


def _from_path(source: Path, archive: Path) -> None:
    draft = archive.with_name(f".{archive.name}.copied")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, draft)
    draft.replace(archive)


def _is(path: Path, name: str) -> bool:
    """Whether a file is the object of that name."""
    parts, size = [], 0
    with path.open("rb") as file:
        while chunk := file.read(PART_BYTES):
            parts.append(hashlib.sha256(chunk).digest())
            size += len(chunk)
    entry = Entry(b"", Kind.FILE, size_bytes=size, parts=b"".join(parts))
    return proves(name, encode(Manifest(Kind.FILE, (entry,))))

"""Getting the archive of the packages: from the session's seed and from others that start, or from a path that is seen.

Everybody who fetches serves what he has already (`stoker.pilot.transfer`), and goes on while he unpacks; they find each
other at the seed (`stoker.pilot.transfer.meeting`): a thousand nodes that start at once read the session's own host
about once. Each part is checked when it comes, against the archive's name.
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

from stoker.connections import split_address
from stoker.contexts.manifest import PART_BYTES, Entry, EntryKind, Manifest, encode, proves
from stoker.pilot.starter.place import StartError
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectSource
from stoker.pilot.transfer.client import SEED_FILE, read_key
from stoker.pilot.transfer.copy import ObjectCopy
from stoker.pilot.transfer.fetch import ObjectFetch
from stoker.pilot.transfer.meeting import TRIES, meet
from stoker.pilot.transfer.server import ObjectServer, bits_of
from stoker.pilot.transfer.sources import SourceAccess
from stoker.whole_files import draft_of

_MEET_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between looks for others: those who start at once find each other soon."""
_ALONE_S = 10.0
"""The seed and the others are tried for so long."""


def get(packages: dict[str, Any], archive: Path, *, session: Path) -> Serving | None:
    """Put the archive at that path, whole and proven. Others that start may be getting it from here then.

    Raises StartError, and OSError if the disk does not take it.
    """
    name, source = str(packages["name"]), str(packages["source"])
    if archive.exists() and _is(archive, name):
        return None
    reasons = []
    seed = session / SEED_FILE
    if seed.exists():
        try:
            key = read_key(session / "keys" / "transfer.json")
            serving = Serving(name, archive, seed=seed.read_text().strip(), key=key)
            serving.fetch()
            return serving
        except (wire.PeerError, ValueError) as error:
            reasons.append(str(error))
    try:
        _from_path(Path(source), archive)
    except FileNotFoundError:
        reasons.append(f"{source} is not seen here")
    else:
        if _is(archive, name):
            return None
        archive.unlink()
        reasons.append(f"{source} is not what it was")
    raise StartError(f"{os.uname().nodename} can't get the environment: {'; '.join(reasons)}")


class Serving:
    """The archive on its way here, and on from here: it is served until it is closed, or this process becomes the
    pilot. Raises OSError, ValueError."""

    def __init__(self, name: str, archive: Path, *, seed: str, key: bytes) -> None:
        self._name, self._archive, self._seed, self._key = name, archive, seed, key
        self._draft = archive.with_name(f".{archive.name}.draft")
        self._served = _ServedCopy(name)
        self._lost: set[str] = set()
        self._none_left = False
        self._fetch = ObjectFetch(
            name, self._draft, means=SourceAccess(key=key), lost=self._lose, begun=self._served.hold
        )
        self._server = ObjectServer(self._served, key=key, host=wire.route_to(split_address(seed)[0]))
        self._whole = threading.Event()
        self._closed = threading.Event()

    def fetch(self) -> None:
        """Bring it here. Raises PeerError, OSError."""
        threading.Thread(target=self._keep_meeting, name="starter-meet", daemon=True).start()
        try:
            self._fetch.run(alone_s=_ALONE_S)
            os.replace(self._draft, self._archive)
            self._whole.set()
        finally:
            if not self._whole.is_set():
                self.close()

    def close(self) -> None:
        """Serve nobody any more."""
        self._closed.set()
        self._server.close()

    def _lose(self, source: ObjectSource, _why: str) -> None:
        self._lost.add(source.address)

    def _keep_meeting(self) -> None:
        others: list[str] = []
        for pause_s in chain(_MEET_S, repeat(_MEET_S[-1])):
            with suppress(wire.PeerError):  # it is busy, or away: those that are known go on
                others = self._meet()
            self._fetch.offer(
                [ObjectSource(address=self._seed, origin=True), *(ObjectSource(address=one) for one in others)]
            )
            if self._closed.wait(pause_s):
                return

    def _meet(self) -> list[str]:
        """Say to the seed what is here, and hear from whom the rest may be had."""
        lost = sorted(self._lost - {self._seed})
        no_use = bool(lost) and not self._fetch.outcome().peer_bytes
        found = meet(
            self._name,
            self._server.address,
            have=self._served.pieces(),
            wants=not self._whole.is_set(),
            lost=lost,
            alone=no_use and (len(lost) >= TRIES or self._none_left),
            again_s=_MEET_S[-1],
            seed=self._seed,
            key=self._key,
        )
        self._none_left = not found
        return found


class _ServedCopy:
    """What a starting pilot serves: the one object that it fetches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._copy: ObjectCopy | None = None

    def hold(self, copy: ObjectCopy) -> None:
        """There is a copy now."""
        self._copy = copy

    def pieces(self) -> bytes:
        """Which pieces are here, a bit each."""
        copy = self._copy
        return bits_of(list(copy.arrivals), len(copy.pieces)) if copy is not None else b""

    @contextmanager
    def lend(self, name: str) -> Iterator[ObjectCopy | None]:
        """See `stoker.pilot.transfer.server.ServedObjects`."""
        yield self._copy if name == self._name else None

    def expects(self, name: str) -> bool:
        """Whether it is the one."""
        return name == self._name


def _from_path(source: Path, archive: Path) -> None:
    with draft_of(archive, draft=archive.with_name(f".{archive.name}.copied")) as draft:
        draft.unlink(missing_ok=True)
        try:
            os.link(source, draft)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, draft)


def _is(path: Path, name: str) -> bool:
    """Whether a file is the object of that name."""
    parts, size = [], 0
    with path.open("rb") as file:
        while chunk := file.read(PART_BYTES):
            parts.append(hashlib.sha256(chunk).digest())
            size += len(chunk)
    entry = Entry(b"", EntryKind.FILE, size_bytes=size, parts=b"".join(parts))
    return proves(name, encode(Manifest(EntryKind.FILE, (entry,))))

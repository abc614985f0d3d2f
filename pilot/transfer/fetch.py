"""Fetches one object from several sources concurrently, and sends results to the seed.

One thread reads each source: another pilot, the session's seed, or a path. A source that sends a wrong piece is not
used again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stoker.contexts.manifest import MOST_BYTES, PART_BYTES, piece_size_bytes
from stoker.errors import StokerError
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, ObjectCopy, ObjectSource, PiecePicker, WrongBytesError
from stoker.pilot.transfer.wire import PeerError

# ---- sources

DEPTH = 2  # outstanding requests to a fast peer: the next piece travels while the last piece is verified
SLOW_S = 0.1  # seconds per piece; a peer that needs longer gets one request at a time

_FILE_CHANGED = "the file has changed since the recipe was made, or is damaged; make the recipe again"
_BUSY_S = 15.0
_BUSY_RETRY_S = 0.3
_IDLE_S = 0.2


class SourceReader:
    """Reads pieces from one source of a fetch, in a thread."""

    def __init__(self, source: ObjectSource, fetch: ObjectFetch) -> None:
        self.source = source
        self._fetch = fetch
        self._channel: wire.Channel | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._why = ""
        self._useful = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="transfer-fetch", daemon=True).start()

    def stop(self, why: str = "") -> None:
        with self._lock:
            self._stopped = True
            self._why = why
            if self._channel is not None:
                self._channel.close()

    @property
    def _done(self) -> bool:
        return self._stopped or self._fetch.over

    def _run(self) -> None:
        why, wrong = "", False
        try:
            while not self._done:
                useful = self._useful
                try:
                    if self.source.path:
                        self._read_path()
                    else:
                        self._read_peer()
                except wire.PeerError:
                    if self._useful == useful:  # the connection delivered no piece: give up this source
                        raise
        except WrongBytesError as error:
            why, wrong = _FILE_CHANGED if self.source.path else str(error), True
        except (OSError, ValueError, StokerError) as error:
            why = str(error)
        except Exception as error:  # despite this bug, other threads must not wait for this source
            why = f"{type(error).__name__}: {error}"
        self._fetch.ended(self, self._why if self._stopped else why, wrong=wrong)

    def _read_peer(self) -> None:
        channel = wire.connect(self.source.address, key=self._fetch.key, limits=self._fetch.limits)
        with self._lock:
            self._channel = channel
            if self._stopped:
                channel.close()
        try:
            copy = self._open(channel)
            if copy is not None:
                self._converse(channel, copy)
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    def _open(self, channel: wire.Channel) -> ObjectCopy | None:
        fetch, busy_until = self._fetch, time.monotonic() + _BUSY_S
        while not self._done:
            channel.send({"op": "open", "object": fetch.name, "manifest": fetch.copy is None and not fetch.manifest})
            header = channel.receive()
            trouble = header.get("error")
            if not trouble:
                return self._opened(channel, header)
            if trouble == "busy" and time.monotonic() < busy_until:
                fetch.wait(_BUSY_RETRY_S)
            elif trouble == "busy":
                raise wire.PeerError("it is busy with other pilots")
            elif trouble != "soon":
                raise wire.PeerError("it does not have the object")
        return None

    def _opened(self, channel: wire.Channel, header: dict[str, Any]) -> ObjectCopy:
        manifest = _body(channel, header, "manifest", most=MOST_BYTES)
        bits = _body(channel, header, "have", most=MOST_BYTES)
        data = _body(channel, header, "data", most=PART_BYTES)
        copy = self._fetch.copy or self._fetch.create_object_copy(self._fetch.manifest or bytes(manifest))
        count = len(copy.pieces)
        has = range(count) if header.get("whole") else (i for i in range(count) if bits[i >> 3] >> (i & 7) & 1)
        if not header.get("whole") and len(bits) != -(-count // 8):
            raise wire.PeerError("it does not say which pieces it has")
        self._fetch.join(self.source, has)
        if data and count == 1:
            self._fetch.arrive(self.source, 0, data)
            self._useful += 1
        return copy

    def _converse(self, channel: wire.Channel, copy: ObjectCopy) -> None:
        fetch, asked, depth = self._fetch, deque[int](), DEPTH if self.source.origin else 1
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._done:
            while len(asked) < depth and (index := fetch.take(self.source)) is not None:
                channel.send({"op": "piece", "index": index})
                asked.append(index)
            if asked:
                began = time.monotonic()
                self._answer(channel, copy, asked.popleft(), buffer)
                depth = DEPTH if self.source.origin or time.monotonic() - began < SLOW_S else 1
            else:
                channel.send({"op": "wait"})
                header = channel.receive()
                _body(channel, header, "", most=0)
                fetch.hear(self.source, _indices(header, len(copy.pieces)))

    def _answer(self, channel: wire.Channel, copy: ObjectCopy, index: int, buffer: memoryview) -> None:
        header = channel.receive()
        size = piece_size_bytes(copy.pieces[index])
        has = _indices(header, len(copy.pieces))
        if header.get("error"):
            _body(channel, header, "", most=0)
            self._fetch.hear(self.source, has, lacks=index)
            return
        if header.get("index") != index or header["body"] != size:
            raise wire.PeerError("it sent a piece that was not requested")
        channel.receive_body(buffer[:size])
        self._fetch.hear(self.source, has)
        self._fetch.arrive(self.source, index, buffer[:size])
        self._useful += 1

    def _read_path(self) -> None:
        fetch = self._fetch
        copy = fetch.copy or fetch.create_object_copy(fetch.manifest or fetch.manifest_at(self.source.path))
        original = ObjectCopy(Path(self.source.path), fetch.name, copy.data, whole=True)
        fetch.join(self.source, range(len(copy.pieces)))
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._done:
            index = fetch.take(self.source)
            if index is None:
                fetch.wait(_IDLE_S)
                continue
            data = buffer[: piece_size_bytes(copy.pieces[index])]
            if not original.read(index, data):
                raise OSError(f"{self.source.path} is shorter than it was")
            fetch.arrive(self.source, index, data)
            self._useful += 1


def _body(channel: wire.Channel, header: dict[str, Any], field: str, *, most: int) -> memoryview:
    size = header.get(field, 0) if field else header["body"]
    if type(size) is not int or not 0 <= size <= most:
        raise wire.PeerError(f"it announced {size} bytes where at most {most} are valid")
    data = memoryview(bytearray(size))
    channel.receive_body(data)
    return data


def _indices(header: dict[str, Any], count: int) -> list[int]:
    have = header.get("have", [])
    if not isinstance(have, list) or not all(type(index) is int and 0 <= index < count for index in have):
        raise wire.PeerError("it announced pieces that do not exist")
    return have


# ---- fetches

log = logging.getLogger("stoker.transfer")

STALL_S = 60.0  # seconds without bytes after which all sources are dropped
_POLL_S = 0.5
_REASONS = 4  # maximum number of reasons that the error message lists


class ObjectFetch:
    """A fetch of one object from the sources of the last `offer`, thread-safe. `begun` receives the partial copy, which
    the pilot serves to peers. `lost` receives sources that failed, and the reason.
    """

    def __init__(
        self, name: str, *, key: bytes, limits: wire.WireLimits = wire.LIMITS,
        manifest_at: Callable[[str], bytes] = lambda _path: b"",
        lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        begun: Callable[[ObjectCopy], None] = lambda _copy: None,
    ) -> None:  # fmt: skip
        self.name, self.key, self.limits, self.manifest_at = name, key, limits, manifest_at
        self.sources: list[ObjectSource] = []
        self.manifest = b""  # empty until the manifest is known
        self.copy: ObjectCopy | None = None
        self.over = False
        self._lost, self._begun = lost, begun
        self._root: Path | None = None
        self._chance = random.Random()
        self._picker: PiecePicker[ObjectSource] = PiecePicker(0, chance=self._chance)
        self._from_origin = self._from_peers = 0
        self._started_at = self._moved_at = time.monotonic()
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._making = threading.Lock()
        self._lock = threading.Lock()  # held while the following fields change
        self._readers: dict[ObjectSource, SourceReader] = {}
        self._wrong: set[ObjectSource] = set()
        self._telling = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS)

    def offer(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        self.manifest = manifest or self.manifest
        self.sources = list(sources)
        if self._root is not None:
            self._update_readers()

    def _update_readers(self) -> None:
        with self._lock:
            offered = set(self.sources)
            old = [self._readers.pop(source) for source in list(self._readers) if source not in offered]
            fresh = [one for one in offered - self._wrong if one not in self._readers and not self.over]
            starting = {source: SourceReader(source, self) for source in fresh}
            self._readers |= starting
            refused = offered & self._wrong
        for reader in old:
            reader.stop()
        for reader in starting.values():
            reader.start()
        for source in refused:
            self._lost(source, "it served wrong bytes before")

    def run(self, root: Path, *, alone_s: float = float("inf")) -> FetchOutcome:
        """Fetch the object to `root`, which may contain parts of an earlier attempt. Raises OSError, PeerError."""
        self._root = root
        self._started_at = self._moved_at = alone_at = time.monotonic()
        if self.manifest and not self.over:  # check parts of an earlier attempt before the sources answer
            try:
                self.create_object_copy(self.manifest)
            except (OSError, WrongBytesError) as error:
                self.end(error)
        self._update_readers()
        try:
            while not self.over:
                self.wait(_POLL_S)
                now = time.monotonic()
                with self._lock:
                    alone_at = now if self._readers or self._telling else alone_at
                if now - alone_at > alone_s:
                    why = dict.fromkeys([f"no source of {self.name} is left", *self._reasons])
                    self.end(PeerError("; ".join(why)))
                if now - self._moved_at > STALL_S:
                    self._moved_at = now
                    with self._lock:
                        readers = list(self._readers.values())
                    for reader in readers:
                        reader.stop(f"no bytes arrived for {STALL_S:g} s")
        finally:
            self.stop()
        if isinstance(self._failure, WrongBytesError):
            raise PeerError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure
        return self.outcome()

    def stop(self) -> None:
        """Stop the fetch. The fetched parts remain for another attempt."""
        self.end(PeerError(f"the fetch of {self.name} was stopped"))
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.stop()

    # ---- methods for readers

    def ended(self, reader: SourceReader, why: str, *, wrong: bool) -> None:
        """Record the end of a reader. `why`: empty if the fetch is complete. `wrong`: True if bytes were wrong."""
        with self._changed:
            self._picker.gone(reader.source)
            self._changed.notify_all()
        with self._lock:
            known = self._readers.get(reader.source) is reader and not self.over
            if wrong:
                self._wrong.add(reader.source)
            if known:
                del self._readers[reader.source]
                self._telling += 1
                self._reasons.append(f"{reader.source}: {why}")
        if known:
            log.warning("%s from %s: %s", self.name, reader.source, why)
            self._lost(reader.source, why)
            with self._lock:
                self._telling -= 1

    def create_object_copy(self, manifest: bytes) -> ObjectCopy:
        """Raises WrongBytesError, OSError."""
        with self._making:
            if self.copy is not None:
                return self.copy
            assert self._root is not None
            try:
                copy = ObjectCopy(self._root, self.name, manifest, whole=False)
                copy.keep_correct_pieces()
            except ValueError as error:
                raise WrongBytesError(str(error)) from error
            except OSError as error:
                self.end(error)
                raise
            with self._changed:
                self._picker = PiecePicker(len(copy.pieces), chance=self._chance)
                for index in copy.arrivals:
                    self._picker.arrived(index, time.monotonic())
                self.copy, self.manifest = copy, manifest
        self._begun(copy)
        if copy.complete:
            self.end(None)
        return copy

    def join(self, source: ObjectSource, has: Iterable[int]) -> None:
        if self.copy is not None and source.origin:
            self.copy.first_hand = True
        with self._changed:
            self._picker.gone(source)
            self._picker.add(source, origin=source.origin)
            self._picker.has(source, has)

    def hear(self, source: ObjectSource, has: Iterable[int], *, lacks: int | None = None) -> None:
        """Record that a source has the pieces `has`, and does not have the piece `lacks`."""
        with self._changed:
            if lacks is not None:
                self._picker.mark_piece_unavailable(source, lacks)
            self._picker.has(source, has)

    def take(self, source: ObjectSource) -> int | None:
        with self._changed:
            return None if self.over else self._picker.take(source, time.monotonic())

    def arrive(self, source: ObjectSource, index: int, data: memoryview) -> None:
        """Store a piece that has arrived. Raises WrongBytesError."""
        copy = self.copy
        if copy is None:
            raise ValueError("a piece arrived before the manifest")
        with self._changed:
            self._from_origin += len(data) if source.origin else 0
            self._from_peers += 0 if source.origin else len(data)
        try:
            if not copy.has(index) and not copy.write(index, data):
                raise WrongBytesError(f"a part of {self.name} does not match its name (a checksum)")
        except OSError as error:
            self.end(error)
            return
        with self._changed:
            self._moved_at = time.monotonic()
            self._picker.arrived(index, self._moved_at)
            self._changed.notify_all()
        if copy.complete:
            self.end(None)

    def end(self, failure: Exception | None) -> None:
        """End the fetch. Later calls have no effect."""
        with self._changed:
            if not self.over:
                self.over, self._failure = True, failure
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        with self._changed:
            if not self.over:
                self._changed.wait(seconds)

    def outcome(self) -> FetchOutcome:
        return FetchOutcome(self._from_origin, self._from_peers, time.monotonic() - self._started_at)


# ---- single exchanges

_CHUNK = 1 << 20
SEED_FILE = "seed.address"  # file in the session's folder with the `host:port` of the listening seed


def read_key(file: str | os.PathLike[str]) -> bytes:
    """Return a session's transfer key from the file `keys/transfer.json`. Raises OSError, ValueError."""
    try:
        return bytes.fromhex(json.loads(Path(file).read_bytes())["secret"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} contains no transfer key: {error}") from error


def put(name: str, data: wire.Buffer, *, address: str, key: bytes) -> str:
    """Send a result to the seed, and return its path at the seed. Raises PeerError."""
    digest, view = hashlib.sha256(data).hexdigest(), memoryview(data)
    channel = wire.connect(address, key=key)
    try:
        channel.send({"op": "put", "name": name, "size": len(data), "sha256": digest})
        _answer(channel)
        for start in range(0, len(data), _CHUNK):
            channel.send_body(view[start : start + _CHUNK])
        return str(_answer(channel)["path"])
    finally:
        channel.close()


def _answer(channel: wire.Channel) -> dict[str, object]:
    header = channel.receive()
    if header.get("error") or header["body"]:
        raise wire.PeerError(f"the session's seed refused it: {header.get('text') or header.get('error')}")
    return header

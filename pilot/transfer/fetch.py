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

MAX_OPEN_REQUESTS = 2  # outstanding requests to a fast peer: the next piece travels while the last piece is verified
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
        self._stop_reason = ""
        self._delivered_pieces = 0

    def start(self) -> None:
        threading.Thread(target=self._read_source, name="transfer-fetch", daemon=True).start()

    def stop(self, why: str = "") -> None:
        with self._lock:
            self._stopped = True
            self._stop_reason = why
            if self._channel is not None:
                self._channel.close()

    @property
    def _must_stop(self) -> bool:
        return self._stopped or self._fetch.is_over

    def _read_source(self) -> None:
        why, wrong = "", False
        try:
            while not self._must_stop:
                useful = self._delivered_pieces
                try:
                    if self.source.path:
                        self._read_path()
                    else:
                        self._read_peer()
                except wire.PeerError:
                    if self._delivered_pieces == useful:  # the connection delivered no piece: drop this source
                        raise
        except WrongBytesError as error:
            why, wrong = _FILE_CHANGED if self.source.path else str(error), True
        except (OSError, ValueError, StokerError) as error:
            why = str(error)
        except Exception as error:  # a bug: report the end of this source, so that other threads do not wait for it
            why = f"{type(error).__name__}: {error}"
        self._fetch.record_reader_end(self, self._stop_reason if self._stopped else why, wrong=wrong)

    def _read_peer(self) -> None:
        channel = wire.connect_to_peer(self.source.address, key=self._fetch.key, limits=self._fetch.limits)
        with self._lock:
            self._channel = channel
            if self._stopped:
                channel.close()
        try:
            copy = self._open_object(channel)
            if copy is not None:
                self._request_pieces(channel, copy)
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    def _open_object(self, channel: wire.Channel) -> ObjectCopy | None:
        fetch, busy_until = self._fetch, time.monotonic() + _BUSY_S
        while not self._must_stop:
            channel.send({"op": "open", "object": fetch.name, "manifest": fetch.copy is None and not fetch.manifest})
            header = channel.receive()
            trouble = header.get("error")
            if not trouble:
                return self._read_open_answer(channel, header)
            if trouble == "busy" and time.monotonic() < busy_until:
                fetch.wait_for_change(_BUSY_RETRY_S)
            elif trouble == "busy":
                raise wire.PeerError("it is busy with other pilots")
            elif trouble != "soon":
                raise wire.PeerError("it does not have the object")
        return None

    def _read_open_answer(self, channel: wire.Channel, header: dict[str, Any]) -> ObjectCopy:
        manifest = _receive_body(channel, header, "manifest", most=MOST_BYTES)
        bits = _receive_body(channel, header, "have", most=MOST_BYTES)
        data = _receive_body(channel, header, "data", most=PART_BYTES)
        copy = self._fetch.copy or self._fetch.create_object_copy(self._fetch.manifest or bytes(manifest))
        count = len(copy.pieces)
        has = range(count) if header.get("whole") else (i for i in range(count) if bits[i >> 3] >> (i & 7) & 1)
        if not header.get("whole") and len(bits) != -(-count // 8):
            raise wire.PeerError("it does not say which pieces it has")
        self._fetch.add_source(self.source, has)
        if data and count == 1:
            self._fetch.store_piece(self.source, 0, data)
            self._delivered_pieces += 1
        return copy

    def _request_pieces(self, channel: wire.Channel, copy: ObjectCopy) -> None:
        fetch, asked, depth = self._fetch, deque[int](), MAX_OPEN_REQUESTS if self.source.origin else 1
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._must_stop:
            while len(asked) < depth and (index := fetch.choose_next_piece(self.source)) is not None:
                channel.send({"op": "piece", "index": index})
                asked.append(index)
            if asked:
                began = time.monotonic()
                self._receive_piece(channel, copy, asked.popleft(), buffer)
                depth = MAX_OPEN_REQUESTS if self.source.origin or time.monotonic() - began < SLOW_S else 1
            else:
                channel.send({"op": "wait"})
                header = channel.receive()
                _receive_body(channel, header, "", most=0)
                fetch.record_source_pieces(self.source, _announced_pieces(header, len(copy.pieces)))

    def _receive_piece(self, channel: wire.Channel, copy: ObjectCopy, index: int, buffer: memoryview) -> None:
        header = channel.receive()
        size = piece_size_bytes(copy.pieces[index])
        has = _announced_pieces(header, len(copy.pieces))
        if header.get("error"):
            _receive_body(channel, header, "", most=0)
            self._fetch.record_source_pieces(self.source, has, lacks=index)
            return
        if header.get("index") != index or header["body"] != size:
            raise wire.PeerError("it sent a piece that was not requested")
        channel.receive_body(buffer[:size])
        self._fetch.record_source_pieces(self.source, has)
        self._fetch.store_piece(self.source, index, buffer[:size])
        self._delivered_pieces += 1

    def _read_path(self) -> None:
        fetch = self._fetch
        copy = fetch.copy or fetch.create_object_copy(fetch.manifest or fetch.manifest_at(self.source.path))
        original = ObjectCopy(Path(self.source.path), fetch.name, copy.manifest_bytes, whole=True)
        fetch.add_source(self.source, range(len(copy.pieces)))
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._must_stop:
            index = fetch.choose_next_piece(self.source)
            if index is None:
                fetch.wait_for_change(_IDLE_S)
                continue
            data = buffer[: piece_size_bytes(copy.pieces[index])]
            if not original.read_piece(index, data):
                raise OSError(f"{self.source.path} is shorter than it was")
            fetch.store_piece(self.source, index, data)
            self._delivered_pieces += 1


def _receive_body(channel: wire.Channel, header: dict[str, Any], field: str, *, most: int) -> memoryview:
    size = header.get(field, 0) if field else header["body"]
    if type(size) is not int or not 0 <= size <= most:
        raise wire.PeerError(f"it announced {size} bytes where at most {most} are valid")
    data = memoryview(bytearray(size))
    channel.receive_body(data)
    return data


def _announced_pieces(header: dict[str, Any], count: int) -> list[int]:
    have = header.get("have", [])
    if not isinstance(have, list) or not all(type(index) is int and 0 <= index < count for index in have):
        raise wire.PeerError("it announced pieces that do not exist")
    return have


# ---- fetches

log = logging.getLogger("stoker.transfer")

NO_BYTES_LIMIT_S = 60.0  # seconds without bytes after which all sources are dropped
_POLL_S = 0.5
_REASONS = 4  # maximum number of reasons that the error message lists


class ObjectFetch:
    """Fetches one object from the sources that the last `set_sources` named. Thread-safe. `on_copy_created` receives
    the partial copy, which the pilot serves to peers. `on_source_lost` receives a failed source and the reason.
    """

    def __init__(
        self, name: str, *, key: bytes, limits: wire.WireLimits = wire.LIMITS,
        manifest_at: Callable[[str], bytes] = lambda _path: b"",
        on_source_lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        on_copy_created: Callable[[ObjectCopy], None] = lambda _copy: None,
    ) -> None:  # fmt: skip
        self.name, self.key, self.limits, self.manifest_at = name, key, limits, manifest_at
        self.sources: list[ObjectSource] = []
        self.manifest = b""  # empty until the manifest is known
        self.copy: ObjectCopy | None = None
        self.is_over = False
        self._on_source_lost, self._on_copy_created = on_source_lost, on_copy_created
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
        self._wrong_sources: set[ObjectSource] = set()
        self._running_callbacks = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS)

    def set_sources(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        self.manifest = manifest or self.manifest
        self.sources = list(sources)
        if self._root is not None:
            self._update_readers()

    def _update_readers(self) -> None:
        with self._lock:
            offered = set(self.sources)
            old = [self._readers.pop(source) for source in list(self._readers) if source not in offered]
            fresh = [one for one in offered - self._wrong_sources if one not in self._readers and not self.is_over]
            starting = {source: SourceReader(source, self) for source in fresh}
            self._readers |= starting
            refused = offered & self._wrong_sources
        for reader in old:
            reader.stop()
        for reader in starting.values():
            reader.start()
        for source in refused:
            self._on_source_lost(source, "it served wrong bytes before")

    def run(self, root: Path, *, no_source_limit_s: float = float("inf")) -> FetchOutcome:
        """Fetch the object to `root`, which may contain parts of an earlier attempt. Raises OSError, PeerError."""
        self._root = root
        self._started_at = self._moved_at = alone_at = time.monotonic()
        if self.manifest and not self.is_over:  # check parts of an earlier attempt before the sources answer
            try:
                self.create_object_copy(self.manifest)
            except (OSError, WrongBytesError) as error:
                self.end_fetch(error)
        self._update_readers()
        try:
            while not self.is_over:
                self.wait_for_change(_POLL_S)
                now = time.monotonic()
                with self._lock:
                    alone_at = now if self._readers or self._running_callbacks else alone_at
                if now - alone_at > no_source_limit_s:
                    why = dict.fromkeys([f"no source of {self.name} is left", *self._reasons])
                    self.end_fetch(PeerError("; ".join(why)))
                if now - self._moved_at > NO_BYTES_LIMIT_S:
                    self._moved_at = now
                    with self._lock:
                        readers = list(self._readers.values())
                    for reader in readers:
                        reader.stop(f"no bytes arrived for {NO_BYTES_LIMIT_S:g} s")
        finally:
            self.stop()
        if isinstance(self._failure, WrongBytesError):
            raise PeerError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure
        return self.outcome()

    def stop(self) -> None:
        """Stop the fetch. The fetched parts remain for another attempt."""
        self.end_fetch(PeerError(f"the fetch of {self.name} was stopped"))
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.stop()

    # ---- methods for readers

    def record_reader_end(self, reader: SourceReader, why: str, *, wrong: bool) -> None:
        """Record the end of a reader. `why`: empty if the fetch is complete. `wrong`: True if bytes were wrong."""
        with self._changed:
            self._picker.remove_source(reader.source)
            self._changed.notify_all()
        with self._lock:
            known = self._readers.get(reader.source) is reader and not self.is_over
            if wrong:
                self._wrong_sources.add(reader.source)
            if known:
                del self._readers[reader.source]
                self._running_callbacks += 1
                self._reasons.append(f"{reader.source}: {why}")
        if known:
            log.warning("%s from %s: %s", self.name, reader.source, why)
            self._on_source_lost(reader.source, why)
            with self._lock:
                self._running_callbacks -= 1

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
                self.end_fetch(error)
                raise
            with self._changed:
                self._picker = PiecePicker(len(copy.pieces), chance=self._chance)
                for index in copy.arrivals:
                    self._picker.record_arrival(index, time.monotonic())
                self.copy, self.manifest = copy, manifest
        self._on_copy_created(copy)
        if copy.is_complete:
            self.end_fetch(None)
        return copy

    def add_source(self, source: ObjectSource, has: Iterable[int]) -> None:
        if self.copy is not None and source.origin:
            self.copy.reads_origin = True
        with self._changed:
            self._picker.remove_source(source)
            self._picker.add_source(source, origin=source.origin)
            self._picker.add_pieces_of_source(source, has)

    def record_source_pieces(self, source: ObjectSource, has: Iterable[int], *, lacks: int | None = None) -> None:
        """Record that a source has the pieces `has`, and does not have the piece `lacks`."""
        with self._changed:
            if lacks is not None:
                self._picker.mark_piece_unavailable(source, lacks)
            self._picker.add_pieces_of_source(source, has)

    def choose_next_piece(self, source: ObjectSource) -> int | None:
        with self._changed:
            return None if self.is_over else self._picker.choose_next_piece(source, time.monotonic())

    def store_piece(self, source: ObjectSource, index: int, data: memoryview) -> None:
        """Store a piece that has arrived. Raises WrongBytesError."""
        copy = self.copy
        if copy is None:
            raise ValueError("a piece arrived before the manifest")
        with self._changed:
            self._from_origin += len(data) if source.origin else 0
            self._from_peers += 0 if source.origin else len(data)
        try:
            if not copy.has_piece(index) and not copy.write_piece(index, data):
                raise WrongBytesError(f"a part of {self.name} does not match its name (a checksum)")
        except OSError as error:
            self.end_fetch(error)
            return
        with self._changed:
            self._moved_at = time.monotonic()
            self._picker.record_arrival(index, self._moved_at)
            self._changed.notify_all()
        if copy.is_complete:
            self.end_fetch(None)

    def end_fetch(self, failure: Exception | None) -> None:
        """End the fetch. Later calls have no effect."""
        with self._changed:
            if not self.is_over:
                self.is_over, self._failure = True, failure
            self._changed.notify_all()

    def wait_for_change(self, seconds: float) -> None:
        with self._changed:
            if not self.is_over:
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


def send_result(name: str, data: wire.Buffer, *, address: str, key: bytes) -> str:
    """Send a result to the seed, and return its path at the seed. Raises PeerError."""
    digest, view = hashlib.sha256(data).hexdigest(), memoryview(data)
    channel = wire.connect_to_peer(address, key=key)
    try:
        channel.send({"op": "put", "name": name, "size": len(data), "sha256": digest})
        _receive_seed_answer(channel)
        for start in range(0, len(data), _CHUNK):
            channel.send_body(view[start : start + _CHUNK])
        return str(_receive_seed_answer(channel)["path"])
    finally:
        channel.close()


def _receive_seed_answer(channel: wire.Channel) -> dict[str, object]:
    header = channel.receive()
    if header.get("error") or header["body"]:
        raise wire.PeerError(f"the session's seed refused it: {header.get('text') or header.get('error')}")
    return header

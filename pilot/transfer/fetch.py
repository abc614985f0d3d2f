"""Fetches one object from several sources concurrently, and sends results to the seed.

One thread reads each source: another pilot, the session's seed, or a path. A source of a wrong piece is not used again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stoker.contexts.manifest import MOST_BYTES, PART_BYTES, piece_size_bytes
from stoker.errors import StokerError
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, FetchState, ObjectCopy, ObjectSource, WrongBytesError
from stoker.pilot.transfer.wire import PeerError

# ---- sources

DEPTH = 2  # outstanding requests to a fast peer: the next piece travels while the last piece is verified
SLOW_S = 0.1  # seconds per piece; a peer that needs longer gets one request at a time

_FILE_CHANGED = "the file has changed since the recipe was made, or is damaged; make the recipe again"
_BUSY_S = 15.0
_BUSY_RETRY_S = 0.3
_IDLE_S = 0.2


class SourceReader:
    """Reads pieces from one source. `ended` receives the reason (empty if complete), and True if bytes were wrong."""

    def __init__(
        self, source: ObjectSource, board: FetchState, *, ended: Callable[[SourceReader, str, bool], None]
    ) -> None:
        self.source = source
        self._board = board
        self._ended = ended
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
        return self._stopped or self._board.over

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
                    if self._useful == useful:  # after a useful connection, connect again
                        raise
        except WrongBytesError as error:
            why, wrong = _FILE_CHANGED if self.source.path else str(error), True
        except (OSError, ValueError, StokerError) as error:
            why = str(error)
        except Exception as error:  # despite this bug, other threads must not wait for this source
            why = f"{type(error).__name__}: {error}"
        self._board.leave(self.source)
        self._ended(self, self._why if self._stopped else why, wrong)

    def _read_peer(self) -> None:
        channel = wire.connect(self.source.address, key=self._board.key, limits=self._board.limits)
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
        board, busy_until = self._board, time.monotonic() + _BUSY_S
        while not self._done:
            channel.send({"op": "open", "object": board.name, "manifest": board.copy is None and not board.told})
            header = channel.receive()
            trouble = header.get("error")
            if not trouble:
                return self._opened(channel, header)
            if trouble == "busy" and time.monotonic() < busy_until:
                board.wait(_BUSY_RETRY_S)
            elif trouble == "busy":
                raise wire.PeerError("it is busy with other pilots")
            elif trouble != "soon":
                raise wire.PeerError("it does not have the object")
        return None

    def _opened(self, channel: wire.Channel, header: dict[str, Any]) -> ObjectCopy:
        manifest = _body(channel, header, "manifest", most=MOST_BYTES)
        bits = _body(channel, header, "have", most=MOST_BYTES)
        data = _body(channel, header, "data", most=PART_BYTES)
        copy = self._board.copy
        if copy is None:
            copy = self._board.create_object_copy(self._board.told or bytes(manifest))
        count = len(copy.pieces)
        has = range(count) if header.get("whole") else (i for i in range(count) if bits[i >> 3] >> (i & 7) & 1)
        if not header.get("whole") and len(bits) != -(-count // 8):
            raise wire.PeerError("it does not say which pieces it has")
        self._board.join(self.source, has)
        if data and count == 1:
            self._board.arrive(self.source, 0, data)
            self._useful += 1
        return copy

    def _converse(self, channel: wire.Channel, copy: ObjectCopy) -> None:
        board, asked, depth = self._board, deque[int](), DEPTH if self.source.origin else 1
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._done:
            while len(asked) < depth and (index := board.take(self.source)) is not None:
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
                board.hear(self.source, _indices(header, len(copy.pieces)))

    def _answer(self, channel: wire.Channel, copy: ObjectCopy, index: int, buffer: memoryview) -> None:
        header = channel.receive()
        size = piece_size_bytes(copy.pieces[index])
        has = _indices(header, len(copy.pieces))
        if header.get("error"):
            _body(channel, header, "", most=0)
            self._board.hear(self.source, has, lacks=index)
            return
        if header.get("index") != index or header["body"] != size:
            raise wire.PeerError("it sent a piece that was not requested")
        channel.receive_body(buffer[:size])
        self._board.hear(self.source, has)
        self._board.arrive(self.source, index, buffer[:size])
        self._useful += 1

    def _read_path(self) -> None:
        board = self._board
        copy = board.copy
        if copy is None:
            if not board.told and board.manifest_at is None:
                raise wire.PeerError("its manifest is unknown")
            manifest = board.told or (board.manifest_at(self.source.path) if board.manifest_at else b"")
            copy = board.create_object_copy(manifest)
        original = ObjectCopy(Path(self.source.path), board.name, copy.data, whole=True)
        board.join(self.source, range(len(copy.pieces)))
        buffer = memoryview(bytearray(PART_BYTES))
        while not self._done:
            index = board.take(self.source)
            if index is None:
                board.wait(_IDLE_S)
                continue
            data = buffer[: piece_size_bytes(copy.pieces[index])]
            if not original.read(index, data):
                raise OSError(f"{self.source.path} is shorter than it was")
            board.arrive(self.source, index, data)
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
    """Fetches one object from the sources of the last `offer`."""

    def __init__(
        self, name: str, *, key: bytes, limits: wire.WireLimits = wire.LIMITS,
        manifest_at: Callable[[str], bytes] | None = None,
        lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        begun: Callable[[ObjectCopy], None] = lambda _copy: None,
    ) -> None:  # fmt: skip
        self.sources: list[ObjectSource] = []
        self._lost = lost
        self._board = FetchState(name, key=key, limits=limits, manifest_at=manifest_at, begun=begun)
        self._lock = threading.Lock()
        self._workers: dict[ObjectSource, SourceReader] = {}
        self._wrong: set[ObjectSource] = set()
        self._telling = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS)

    @property
    def copy(self) -> ObjectCopy | None:
        return self._board.copy

    @property
    def manifest(self) -> bytes:
        return self._board.told

    def release(self) -> None:
        """Close the files of the copy."""
        self._board.copy = None

    def offer(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        self._board.told = manifest or self._board.told
        self.sources = list(sources)
        if self._board.root is not None:
            self._update_workers()

    def _update_workers(self) -> None:
        with self._lock:
            offered = set(self.sources)
            old = [self._workers.pop(source) for source in list(self._workers) if source not in offered]
            fresh = [one for one in offered - self._wrong if one not in self._workers and not self._board.over]
            starting = {source: SourceReader(source, self._board, ended=self._ended) for source in fresh}
            self._workers |= starting
            refused = offered & self._wrong
        for worker in old:
            worker.stop()
        for worker in starting.values():
            worker.start()
        for source in refused:
            self._lost(source, "it served wrong bytes before")

    def run(self, root: Path, *, alone_s: float = float("inf")) -> FetchOutcome:
        """Fetch the object to `root`, which may contain parts of an earlier attempt. Raises OSError, PeerError."""
        board, alone_at = self._board, time.monotonic()
        board.begin(root)
        if board.told and not board.over:  # check parts of an earlier attempt before the sources answer
            try:
                board.create_object_copy(board.told)
            except (OSError, WrongBytesError) as error:
                board.end(error)
        self._update_workers()
        try:
            while not board.over:
                board.wait(_POLL_S)
                now = time.monotonic()
                with self._lock:
                    alone_at = now if self._workers or self._telling else alone_at
                if now - alone_at > alone_s:
                    why = dict.fromkeys([f"no source of {board.name} is left", *self._reasons])
                    board.end(PeerError("; ".join(why)))
                if now - board.moved_at > STALL_S:
                    board.moved_at = now
                    with self._lock:
                        workers = list(self._workers.values())
                    for worker in workers:
                        worker.stop(f"no bytes arrived for {STALL_S:g} s")
        finally:
            self.stop()
        if isinstance(board.failure, WrongBytesError):
            raise PeerError(str(board.failure)) from board.failure
        if board.failure is not None:
            raise board.failure
        return board.outcome()

    def outcome(self) -> FetchOutcome:
        return self._board.outcome()

    def stop(self) -> None:
        """Stop the fetch. Its parts remain for another attempt."""
        self._board.end(PeerError(f"the fetch of {self._board.name} was stopped"))
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()

    def _ended(self, worker: SourceReader, why: str, wrong: bool) -> None:
        with self._lock:
            known = self._workers.get(worker.source) is worker and not self._board.over
            if wrong:
                self._wrong.add(worker.source)
            if known:
                del self._workers[worker.source]
                self._telling += 1
                self._reasons.append(f"{worker.source}: {why}")
        if known:
            log.warning("%s from %s: %s", self._board.name, worker.source, why)
            self._lost(worker.source, why)
            with self._lock:
                self._telling -= 1


# ---- single exchanges

_CHUNK = 1 << 20


SEED_FILE = "seed.address"  # file in the session's folder with the `host:port` of the listening seed


def read_key(file: str | os.PathLike[str]) -> bytes:
    """Return a session's transfer key from the file `keys/transfer.json`. Raises OSError, ValueError."""
    try:
        return bytes.fromhex(json.loads(Path(file).read_bytes())["secret"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} contains no transfer key: {error}") from error


def get(name: str, target: Path, *, addresses: Iterable[str], key: bytes) -> FetchOutcome:
    """Fetch an object to `target`, completely or not at all."""
    draft = target.with_name(f".{target.name}.draft")
    fetch = ObjectFetch(name, key=key)
    fetch.offer(ObjectSource(address=address, origin=True) for address in addresses)
    outcome = fetch.run(draft, alone_s=0.0)
    os.replace(draft, target)
    return outcome


def put(name: str, parts: Sequence[wire.Buffer], *, address: str, key: bytes) -> str:
    """Send a result to the seed, and return its path at the seed. Raises PeerError."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    channel = wire.connect(address, key=key)
    try:
        size = sum(len(part) for part in parts)
        channel.send({"op": "put", "name": name, "size": size, "sha256": whole.hexdigest()})
        _answer(channel)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _CHUNK):
                channel.send_body(view[start : start + _CHUNK])
        return str(_answer(channel)["path"])
    finally:
        channel.close()


def _answer(channel: wire.Channel) -> dict[str, object]:
    header = channel.receive()
    if header.get("error") or header["body"]:
        raise wire.PeerError(f"the session's seed refused it: {header.get('text') or header.get('error')}")
    return header

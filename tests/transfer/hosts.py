"""Hosts with only the transfer part of a pilot, with real sockets and disks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from live import peers

from stoker.connections import join_address, split_address
from stoker.contexts.manifest import PART_BYTES
from stoker.contexts.objects import has_content_of, make_object_ref, read_object_manifest
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, ObjectCopy, ObjectSource
from stoker.pilot.transfer.fetch import ObjectFetch
from stoker.pilot.transfer.server import ObjectServer

KEY = bytes(range(32))
SHORT = wire.WireLimits(connect_s=2.0, handshake_s=2.0, silence_s=2.0, body_s=4.0)
WAIT_S = 60.0

until = partial(peers.until, seconds=WAIT_S)


class Original:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ref = make_object_ref(path)
        self.name = self.ref.name
        self.manifest = read_object_manifest(self.ref)

    @property
    def source(self) -> ObjectSource:
        return ObjectSource(path=str(self.path), origin=True)


class FetchTo(ObjectFetch):
    """A fetch to the path `target`."""

    target: Path

    def run(self, *, alone_s: float = float("inf")) -> FetchOutcome:  # type: ignore[override]
        return super().run(self.target, no_source_limit_s=alone_s)


class Host:
    """A disk with a transfer server and fetches to this disk."""

    def __init__(self, folder: Path, *, key: bytes, limits: wire.WireLimits = wire.LIMITS, most: int = 4) -> None:
        folder.mkdir()
        self.folder = folder
        self.key, self.limits = key, limits
        self.copies: dict[str, ObjectCopy] = {}
        self.expected: set[str] = set()
        self.lost: list[tuple[ObjectSource, str]] = []
        self.fetches: list[FetchTo] = []
        self.server = ObjectServer(self, key=key, host="127.0.0.1", limits=limits, most=most)
        self.source = ObjectSource(address=self.server.address, label=folder.name)

    @contextmanager
    def lend_copy(self, name: str) -> Iterator[ObjectCopy | None]:
        yield self.copies.get(name)

    def is_fetching(self, name: str) -> bool:
        return name in self.expected

    def hold(self, original: Original) -> None:
        self.copies[original.name] = ObjectCopy(original.path, original.name, original.manifest, whole=True)

    def fetch(self, original: Original, *sources: ObjectSource, manifest: bool = False) -> FetchTo:
        fetch = FetchTo(
            original.name,
            key=self.key,
            limits=self.limits,
            on_source_lost=lambda source, why: self.lost.append((source, why)),
            on_copy_created=lambda copy: self.copies.setdefault(copy.name, copy),
        )
        fetch.target = self.folder / "object"
        self.fetches.append(fetch)
        fetch.set_sources(sources, manifest=original.manifest if manifest else b"")
        return fetch

    def get(self, original: Original, *sources: ObjectSource, manifest: bool = False) -> FetchOutcome:
        outcome = self.fetch(original, *sources, manifest=manifest).run(alone_s=0.0)
        assert has_content_of(self.folder / "object", original.ref)
        return outcome

    def close(self) -> None:
        for fetch in self.fetches:
            fetch.stop()
        self.server.close()


class Running:
    def __init__(self, fetch: FetchTo, *, alone_s: float = float("inf")) -> None:
        self.outcome: FetchOutcome | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(fetch, alone_s), daemon=True)
        self._thread.start()

    def _run(self, fetch: FetchTo, alone_s: float) -> None:
        try:
            self.outcome = fetch.run(alone_s=alone_s)
        except Exception as error:
            self.error = error

    def wait(self, seconds: float = WAIT_S) -> FetchOutcome:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the fetch did not end"
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


class FaultyRelay:
    """A relay in front of a server that acts like a faulty network or peer.

    `spoil` gets each chunk from the server and the number of bytes sent before. It returns the bytes to send, or None
    to cut the connection. A `frozen` relay sends nothing.
    """

    def __init__(self, address: str, *, spoil: Callable[[bytes, int], bytes | None] | None = None) -> None:
        self._to = split_address(address)
        self._spoil = spoil or (lambda chunk, _before: chunk)
        self.frozen = threading.Event()
        self.connections = 0
        self.passed = 0
        self._open: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.source = ObjectSource(address=join_address("127.0.0.1", self._socket.getsockname()[1]), label="between")
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for one in self._open:
            _shut(one)

    def close(self) -> None:
        _shut(self._socket)
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._socket.accept()
                there = socket.create_connection(self._to)
            except OSError:
                return
            self.connections += 1
            self._open += [here, there]
            threading.Thread(target=self._pass, args=(here, there, lambda chunk, _before: chunk), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, self._spoil), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, spoil: Callable[[bytes, int], bytes | None]) -> None:
        before = 0
        try:
            while chunk := source.recv(65536):
                while self.frozen.is_set():
                    time.sleep(0.01)
                changed = spoil(chunk, before)
                if changed is None:
                    break
                before += len(chunk)
                if source in self._open[1::2]:
                    self.passed += len(chunk)
                target.sendall(changed)
        except OSError:
            pass
        _shut(source)
        _shut(target)


class Link:
    """A link of given speed shared by all connections: `carry` relays each chunk (see `FaultyRelay`)."""

    def __init__(self, *, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, chunk: bytes, _before: int) -> bytes:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + len(chunk) / self._bytes_per_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))
        return chunk


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()


PART = PART_BYTES

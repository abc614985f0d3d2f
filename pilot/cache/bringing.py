"""Brings objects into the cache by a link, a clone or a fetch, and serves cached objects to other pilots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.contexts.manifest import proves
from stoker.contexts.objects import manifest_of
from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.cache import disk
from stoker.pilot.cache.store import CacheError, ChangedError, DiskError, ObjectCache, Pin
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, ObjectCopy, ObjectSource
from stoker.pilot.transfer.fetch import FetchSettings, ObjectFetch
from stoker.units import show_bytes

# ---- bringing

_NOTHING = FetchOutcome(origin_bytes=0, peer_bytes=0, kept_bytes=0, seconds=0.0)


class Bringing:
    """Brings one object into the cache. `run` blocks its thread; `offer` and `stop` are thread-safe."""

    def __init__(
        self,
        cache: ObjectCache,
        ref: ObjectRef,
        *,
        key: bytes = b"",
        lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        begun: Callable[[ObjectCopy], None] = lambda _copy: None,
    ) -> None:
        self._cache = cache
        self._ref = ref
        self._key = key
        self._lost = lost
        self._on_begin = begun
        self._lock = threading.Lock()
        self._fetch: ObjectFetch | None = None
        self._offer: tuple[tuple[ObjectSource, ...], bytes] = ((), b"")
        self._stopped = False

    def offer(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        with self._lock:
            known = self._offer[1]
            self._offer = tuple(sources), manifest if proves(self._ref.name, manifest) else known
            fetch, offer = self._fetch, self._offer
        if fetch is not None:
            fetch.offer(offer[0], manifest=offer[1])

    def stop(self) -> None:
        """Stop the fetch. `run` then raises CacheError."""
        with self._lock:
            self._stopped = True
            fetch = self._fetch
        if fetch is not None:
            fetch.stop()

    def run(self, *, alone_s: float = float("inf")) -> tuple[Pin, FetchOutcome]:
        """Fetch the object. Raises DiskError if disk space is missing, CacheError without a source or after `stop`."""
        try:
            with self._cache.claim(self._ref) as draft:
                here = self._cache.find(self._ref.name)
                if here is not None:
                    return here, _NOTHING
                self._cache.make_room(self._ref)
                look = self._link_or_clone_source(draft)
                if look:
                    with suppress(ChangedError):
                        return self._cache.enter(self._ref, draft, manifest=self._offer[1], look=look), _NOTHING
                self._cache.make_disk_room(self._ref, draft)
                return self._fetch_into_cache(draft, alone_s)
        except OSError as error:
            kind = DiskError if is_unwritable_disk_error(error) else CacheError
            raise kind(
                f"the object {self._ref.name} ({show_bytes(self._ref.size_bytes)}) could not be copied to"
                f" {self._cache.folder}: {error}; free disk space there, or set [pilot] scratch to another disk",
                object=self._ref.name,
                cache=str(self._cache.folder),
            ) from error
        except wire.PeerError as error:
            raise CacheError(str(error), object=self._ref.name, cache=str(self._cache.folder)) from error

    def _link_or_clone_source(self, draft: Path) -> str:
        with self._lock:
            paths = [source.path for source in self._offer[0] if source.path]
        for path in map(Path, paths):
            if look := disk.link(path, draft, self._ref):
                return look
            disk.share(path, draft)
        return ""

    def _fetch_into_cache(self, draft: Path, alone_s: float) -> tuple[Pin, FetchOutcome]:
        def manifest_at(path: str) -> bytes:
            return manifest_of(ObjectRef(self._ref.name, self._ref.size_bytes, path))

        copies: list[ObjectCopy] = []

        def begun(copy: ObjectCopy) -> None:
            copies.append(copy)
            self._on_begin(copy)

        with self._lock:
            if self._stopped:
                raise wire.PeerError(f"the fetch of {self._ref.name} was stopped")
            fetch = self._fetch = ObjectFetch(
                self._ref.name,
                draft,
                means=FetchSettings(key=self._key, manifest_at=manifest_at),
                lost=self._lost,
                begun=begun,
            )
            offer = self._offer
        fetch.offer(offer[0], manifest=offer[1])
        try:
            outcome = fetch.run(alone_s=alone_s)
        except (OSError, wire.PeerError) as error:
            if isinstance(error, OSError) or not any(copy.arrivals for copy in copies):
                for copy in copies:
                    copy.give_up()
                disk.delete_tree(draft)  # after a failed write, this frees disk space
            raise
        finally:
            with self._lock:
                self._fetch = None  # the fetch keeps files open, which would occupy disk space after an eviction
        return self._cache.enter(self._ref, draft, manifest=copies[0].data), outcome


# ---- serving

log = logging.getLogger("stoker.pilot")


class ServedCache:
    """Serves the objects of a cache to a transfer server (`ServedObjects`). Thread-safe."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._coming: dict[str, ObjectCopy | None] = {}

    def expect(self, name: str) -> None:
        self._coming.setdefault(name, None)

    def grows(self, copy: ObjectCopy) -> None:
        """Serve the pieces of an object that is being fetched."""
        self._coming[copy.name] = copy

    def settled(self, name: str) -> None:
        """Record that the fetch of an object has ended."""
        self._coming.pop(name, None)

    def expects(self, name: str) -> bool:
        return name in self._coming

    @contextmanager
    def lend(self, name: str) -> Iterator[ObjectCopy | None]:
        """Yield a cached object, pinned, or a partial object with the pieces that have arrived."""
        growing = self._coming.get(name)
        if growing is not None:
            yield growing
            return
        pin = self._cache.find(name)
        try:
            yield self._whole(name, pin) if pin is not None else None
        finally:
            if pin is not None:
                pin.release()

    def _whole(self, name: str, pin: Pin) -> ObjectCopy | None:
        try:
            known = self._cache.manifest(name)
            data = known or manifest_of(ObjectRef(name=name, size_bytes=0, source=pin.path))
            if not known:
                self._cache.keep_manifest(name, data)
            return ObjectCopy(Path(pin.path), name, data, whole=True)
        except (OSError, ValueError, StokerError) as error:
            log.warning("%s cannot be served to other pilots: %s", name, error)
            return None

"""Brings objects into the cache by a link or a fetch, and serves cached objects to other pilots."""

from __future__ import annotations

import logging
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
from stoker.pilot.transfer.fetch import ObjectFetch
from stoker.units import show_bytes

# ---- bringing

_NOTHING = FetchOutcome(origin_bytes=0, peer_bytes=0, seconds=0.0)


class CacheFetch:
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

        def manifest_at(path: str) -> bytes:
            return manifest_of(ObjectRef(ref.name, ref.size_bytes, path))

        self._fetch = ObjectFetch(ref.name, key=key, manifest_at=manifest_at, lost=lost, begun=begun)

    def offer(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        self._fetch.offer(sources, manifest=manifest if proves(self._ref.name, manifest) else b"")

    def stop(self) -> None:
        """Stop the fetch. `run` then raises CacheError."""
        self._fetch.stop()

    def run(self, *, alone_s: float = float("inf")) -> tuple[Pin, FetchOutcome]:
        """Fetch the object. Raises DiskError if disk space is missing, CacheError without a source or after `stop`."""
        try:
            with self._cache.claim(self._ref) as draft:
                here = self._cache.find(self._ref.name)
                if here is not None:
                    return here, _NOTHING
                self._cache.make_room(self._ref)
                paths = [Path(source.path) for source in self._fetch.sources if source.path]
                look = next(filter(None, (disk.link(path, draft, self._ref) for path in paths)), "")
                if look:
                    with suppress(ChangedError):
                        return self._cache.enter(self._ref, draft, manifest=self._fetch.manifest, look=look), _NOTHING
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

    def _fetch_into_cache(self, draft: Path, alone_s: float) -> tuple[Pin, FetchOutcome]:
        fetch = self._fetch
        try:
            outcome = fetch.run(draft, alone_s=alone_s)
        except (OSError, wire.PeerError) as error:
            copy = fetch.copy
            if isinstance(error, OSError) or copy is None or not copy.arrivals:
                if copy is not None:
                    copy.give_up()
                disk.delete_tree(draft)  # after a failed write, this frees disk space
            raise
        finally:
            fetch.copy = None  # the open files of the copy would occupy disk space after an eviction
        return self._cache.enter(self._ref, draft, manifest=fetch.manifest), outcome


# ---- serving

log = logging.getLogger("stoker.pilot")


class ServedCache:
    """Serves the objects of a cache to a transfer server. Thread-safe."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._coming: dict[str, ObjectCopy | None] = {}

    def expect(self, name: str) -> None:
        self._coming.setdefault(name, None)

    def grows(self, copy: ObjectCopy) -> None:
        """Serve the pieces of an object that is being fetched."""
        self._coming[copy.name] = copy

    def settled(self, name: str) -> None:
        self._coming.pop(name, None)

    def expects(self, name: str) -> bool:
        return name in self._coming

    @contextmanager
    def lend(self, name: str) -> Iterator[ObjectCopy | None]:
        """Yield a partial copy of the object, a cached copy that stays pinned meanwhile, or None."""
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

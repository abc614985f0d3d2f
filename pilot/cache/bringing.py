"""Puts objects into the cache by a hard link or a fetch, and serves cached objects to other pilots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.contexts.manifest import is_manifest_of
from stoker.contexts.objects import read_object_manifest
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
    """Puts one object into the cache. `run` blocks its thread; `set_sources` and `stop` are thread-safe."""

    def __init__(
        self,
        cache: ObjectCache,
        ref: ObjectRef,
        *,
        key: bytes = b"",
        on_source_lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        on_copy_created: Callable[[ObjectCopy], None] = lambda _copy: None,
    ) -> None:
        self._cache = cache
        self._object_ref = ref

        def manifest_at(path: str) -> bytes:
            return read_object_manifest(ObjectRef(ref.name, ref.size_bytes, path))

        self._fetch = ObjectFetch(
            ref.name, key=key, manifest_at=manifest_at, on_source_lost=on_source_lost, on_copy_created=on_copy_created
        )

    def set_sources(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        self._fetch.set_sources(sources, manifest=manifest if is_manifest_of(self._object_ref.name, manifest) else b"")

    def stop(self) -> None:
        """Stop the fetch. `run` then raises CacheError."""
        self._fetch.stop()

    def run(self, *, no_source_limit_s: float = float("inf")) -> tuple[Pin, FetchOutcome]:
        """Fetch the object. Raises DiskError if disk space is missing, CacheError without a source or after `stop`."""
        try:
            with self._cache.claim_draft(self._object_ref) as draft:
                here = self._cache.find_and_pin(self._object_ref.name)
                if here is not None:
                    return here, _NOTHING
                self._cache.free_cache_space(self._object_ref)
                paths = [Path(source.path) for source in self._fetch.sources if source.path]
                look = next(filter(None, (disk.link_if_unchanged(path, draft, self._object_ref) for path in paths)), "")
                if look:
                    with suppress(ChangedError):
                        return self._cache.publish_draft(
                            self._object_ref, draft, manifest=self._fetch.manifest, signature=look
                        ), _NOTHING
                self._cache.free_disk_space(self._object_ref, draft)
                return self._fetch_into_cache(draft, no_source_limit_s)
        except OSError as error:
            kind = DiskError if is_unwritable_disk_error(error) else CacheError
            raise kind(
                f"the object {self._object_ref.name} ({show_bytes(self._object_ref.size_bytes)}) could not be copied to"
                f" {self._cache.folder}: {error}; free disk space there, or set [pilot] scratch to another disk",
                object=self._object_ref.name,
                cache=str(self._cache.folder),
            ) from error
        except wire.PeerError as error:
            raise CacheError(str(error), object=self._object_ref.name, cache=str(self._cache.folder)) from error

    def _fetch_into_cache(self, draft: Path, no_source_limit_s: float) -> tuple[Pin, FetchOutcome]:
        fetch = self._fetch
        try:
            outcome = fetch.run(draft, no_source_limit_s=no_source_limit_s)
        except (OSError, wire.PeerError) as error:
            copy = fetch.copy
            if isinstance(error, OSError) or copy is None or not copy.arrivals:
                if copy is not None:
                    copy.free_disk_space()
                disk.delete_tree(draft)  # after a failed write, this frees disk space
            raise
        finally:
            fetch.copy = None  # close the copy's files: open files occupy disk space even after an eviction
        return self._cache.publish_draft(self._object_ref, draft, manifest=fetch.manifest), outcome


# ---- serving

log = logging.getLogger("stoker.pilot")


class ServedCache:
    """Serves the objects of a cache to a transfer server. Thread-safe."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._fetches: dict[str, ObjectCopy | None] = {}

    def announce_fetch(self, name: str) -> None:
        self._fetches.setdefault(name, None)

    def serve_partial_copy(self, copy: ObjectCopy) -> None:
        """Serve the pieces of an object that is being fetched."""
        self._fetches[copy.name] = copy

    def forget_fetch(self, name: str) -> None:
        self._fetches.pop(name, None)

    def is_fetching(self, name: str) -> bool:
        return name in self._fetches

    @contextmanager
    def lend_copy(self, name: str) -> Iterator[ObjectCopy | None]:
        """Yield the partial copy of an object that is being fetched, else the pinned cached copy, else None."""
        growing = self._fetches.get(name)
        if growing is not None:
            yield growing
            return
        pin = self._cache.find_and_pin(name)
        try:
            yield self._open_cached_copy(name, pin) if pin is not None else None
        finally:
            if pin is not None:
                pin.release()

    def _open_cached_copy(self, name: str, pin: Pin) -> ObjectCopy | None:
        try:
            known = self._cache.read_stored_manifest(name)
            data = known or read_object_manifest(ObjectRef(name=name, size_bytes=0, source=pin.path))
            if not known:
                self._cache.store_manifest(name, data)
            return ObjectCopy(Path(pin.path), name, data, whole=True)
        except (OSError, ValueError, StokerError) as error:
            log.warning("%s cannot be served to other pilots: %s", name, error)
            return None

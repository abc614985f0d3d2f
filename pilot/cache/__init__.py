"""The object cache on this host's disk. All pilots of one user share the cache."""

from __future__ import annotations

from stoker.pilot.cache.bringing import CacheFetch, ServedCache
from stoker.pilot.cache.store import CacheError, DiskError, InUseError, ObjectCache, Pin

__all__ = ["CacheError", "CacheFetch", "DiskError", "InUseError", "ObjectCache", "Pin", "ServedCache"]

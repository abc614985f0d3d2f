"""The object cache on this host's disk, shared by one user's pilots."""

from __future__ import annotations

from stoker.pilot.cache.bringing import Bringing, ServedCache
from stoker.pilot.cache.store import CacheError, DiskError, InUseError, ObjectCache, Pin

__all__ = ["Bringing", "CacheError", "DiskError", "InUseError", "ObjectCache", "Pin", "ServedCache"]

"""Objects on this host's disk: content-named, shared by the sessions of one user, bounded."""

from __future__ import annotations

from stoker.pilot.cache.store import CacheError, ObjectCache, Pin

__all__ = ["CacheError", "ObjectCache", "Pin"]

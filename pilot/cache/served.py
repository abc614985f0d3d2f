"""What a pilot serves to others: the objects of its cache, and those that are just coming into it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.contexts.objects import manifest_of
from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.cache.store import ObjectCache, Pin
from stoker.pilot.transfer.copy import ObjectCopy

log = logging.getLogger("stoker.pilot")


class ServedCache:
    """For a transfer server: see `stoker.pilot.transfer.server.ServedObjects`. Any thread may use it."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._coming: dict[str, ObjectCopy | None] = {}

    def expect(self, name: str) -> None:
        """An object is wanted here: peers that ask for it are told that it comes."""
        self._coming.setdefault(name, None)

    def grows(self, copy: ObjectCopy) -> None:
        """An object that is expected has begun to come: its pieces can be served."""
        self._coming[copy.name] = copy

    def settled(self, name: str) -> None:
        """An object has come, or will not."""
        self._coming.pop(name, None)

    def expects(self, name: str) -> bool:
        """Whether an object is on its way here."""
        return name in self._coming

    @contextmanager
    def lend(self, name: str) -> Iterator[ObjectCopy | None]:
        """The object, whole and pinned, or as far as it has come."""
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

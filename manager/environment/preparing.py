"""What a new session does for those of its sites whose environment travels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from stoker.manager.environment.carrying import carry
from stoker.manager.environment.packing import pack_environment
from stoker.protocol.session import SessionFolder
from stoker.site import EnvironmentKind, Site
from stoker.units import show_bytes

log = logging.getLogger("stoker")

_EVERY_S = 5.0


def prepare(folder: SessionFolder, sites: Iterable[Site], *, say: Callable[[str], None] = log.warning) -> None:
    """Pack the environment, if it was not packed before, and lay out what nodes of these sites are given.

    `say` hears how far it is, when that takes long. Raises ConfigError for an environment that cannot travel, and
    SessionError where there is no room.
    """
    for site in sites:
        if site.environment.kind is EnvironmentKind.PACKED:
            progress = _Progress(site.name, say)
            carry(folder, site, pack_environment(python=site.environment.python, on_progress=progress.tell))


class _Progress:
    """Says now and then how far the packing is."""

    def __init__(self, site: str, say: Callable[[str], None]) -> None:
        self._site = site
        self._say = say
        self._next = time.monotonic() + _EVERY_S / 5

    def tell(self, done: int, total: int) -> None:
        """`done` of `total` bytes are packed."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            self._say(
                f"packing this environment for site {self._site}, once: {show_bytes(done)} of {show_bytes(total)}"
            )

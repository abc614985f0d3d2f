"""The ways of objects between pilots: what this pilot serves, the session's key for transfers, its seed."""

from __future__ import annotations

import hmac
import logging
from contextlib import suppress

from stoker.connections import split_address
from stoker.errors import SessionError
from stoker.pilot.cache import ObjectCache, ServedCache
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.client import SEED_FILE, read_key
from stoker.pilot.transfer.server import ObjectServer
from stoker.protocol.session import SessionFolder

log = logging.getLogger("stoker.pilot")


class Peers:
    """One pilot's end of transfers."""

    def __init__(self, session: SessionFolder, cache: ObjectCache) -> None:
        self.served = ServedCache(cache)
        self.key = b""
        with suppress(OSError, ValueError, KeyError):
            self.key = read_key(session.key_file("transfer"))
        self.gang_key = hmac.digest(self.key, b"gangs", "sha256") if self.key else b""
        """What libraries make the keys of gangs from; transfers cannot be had with it."""
        self.carried = session.is_carried
        """Whether this pilot has a copy of the session's folder, and sees no other file of it."""
        self._session = session
        self.host = _own_address(session)
        """What other pilots reach this machine at."""
        self._server = _serve(self.served, self.host, self.key)

    @property
    def address(self) -> str:
        """Where other pilots reach this one; empty where they do not."""
        return self._server.address if self._server is not None else ""

    @property
    def is_serving(self) -> bool:
        """Whether others get objects from this pilot just now."""
        return self._server is not None and bool(self._server.serving)

    def seed(self) -> str:
        """Where the session's seed listens; empty if it has none that this pilot could use."""
        try:
            return (self._session.path / SEED_FILE).read_text().strip() if self.key else ""
        except OSError:
            return ""

    def close(self) -> None:
        """Serve nothing any more."""
        if self._server is not None:
            self._server.close()


def _own_address(session: SessionFolder) -> str:
    """This machine's address on the network that leads to the manager."""
    try:
        host, _ = split_address(session.read().address.removeprefix("tcp://"))
        return wire.route_to(host)
    except (OSError, ValueError, SessionError):
        return "127.0.0.1"


def _serve(served: ServedCache, host: str, key: bytes) -> ObjectServer | None:
    """Serve other pilots."""
    if not key:
        log.info("the session has no transfer key: this pilot serves no objects to others")
        return None
    try:
        return ObjectServer(served, key=key, host=host)
    except (OSError, ValueError) as error:
        log.warning("this pilot serves no objects to others: %s", error)
        return None

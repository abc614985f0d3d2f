"""Fetches objects into the pilot's cache, and serves cached objects to other pilots."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from stoker.connections import split_address
from stoker.contexts.recipe import ObjectRef
from stoker.errors import SessionError, StokerError
from stoker.pilot.cache import Bringing, DiskError, InUseError, ObjectCache, Pin, ServedCache
from stoker.pilot.core.events import Event, FetchFailure, ObjectArrived, ObjectLost, SourceFailed
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.core.state import CoreState
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, ObjectSource
from stoker.pilot.transfer.fetch import SEED_FILE, read_key
from stoker.pilot.transfer.server import ObjectServer
from stoker.protocol.ids import PilotId
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_pilot import FetchObject

# ---- whose fault an error is


def is_pilots_fault(error: BaseException) -> bool:
    """Return True if the disk of this pilot caused the error. Another pilot may then succeed."""
    return isinstance(error, DiskError) or is_unwritable_disk_error(error)


# ---- serving objects to other pilots

log = logging.getLogger("stoker.pilot")


class Peers:
    """The transfer server of one pilot, with its keys."""

    def __init__(self, session: SessionFolder, cache: ObjectCache) -> None:
        self.served = ServedCache(cache)
        self.carried = session.is_carried
        self.host = "127.0.0.1"  # address of this machine for other pilots
        with suppress(OSError, ValueError, SessionError):
            self.host = wire.local_address_for_host(split_address(session.read().address.removeprefix("tcp://"))[0])
        self.key = b""
        with suppress(OSError, ValueError, KeyError):
            self.key = read_key(session.key_file("transfer"))
        # Libraries derive the keys of gangs from this secret, which does not permit transfers.
        self.gang_key = hmac.digest(self.key, b"gangs", "sha256") if self.key else b""
        self._session = session
        self._server: ObjectServer | None = None
        if not self.key:
            log.info("the session has no transfer key: this pilot does not serve objects to other pilots")
            return
        try:
            self._server = ObjectServer(self.served, key=self.key, host=self.host)
        except (OSError, ValueError) as error:
            log.warning("this pilot does not serve objects to other pilots: %s", error)

    @property
    def address(self) -> str:
        return self._server.address if self._server is not None else ""

    @property
    def is_serving(self) -> bool:
        return self._server is not None and bool(self._server.serving)

    def seed(self) -> str:
        """Return the address of the session's seed; empty if no seed runs."""
        try:
            return (self._session.path / SEED_FILE).read_text().strip() if self.key else ""
        except OSError:
            return ""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


# ---- fetches


class _Fetching:
    def __init__(self, order: FetchObject) -> None:
        self.order = order
        self.bringing: Bringing | None = None


class _Agent(Protocol):
    cache: ObjectCache
    peers: Peers
    check_standing: Callable[[], bool]

    @property
    def state(self) -> CoreState: ...

    def handle(self, event: Event) -> None: ...

    def later(self, action: Callable[[], None]) -> None: ...


class Fetches:
    def __init__(self, agent: _Agent) -> None:
        self._agent = agent
        self._fetches: dict[str, _Fetching] = {}
        self.arrived: dict[str, Pin] = {}  # new objects, pinned until libraries have pinned them

    def order(self, order: FetchObject) -> None:
        """Fetch an object from the sources in `order`, which replace earlier sources."""
        fetching = self._fetches.setdefault(order.object.name, _Fetching(order))
        fetching.order = order
        if order.origin:  # look for the origin in a thread, because the file system may not answer
            find = threading.Thread(
                target=self._find_origin, args=(fetching, order), name="objects-origin", daemon=True
            )
            find.start()
        else:
            self._offer(fetching, order, [])

    def stop(self, name: str) -> None:
        self._agent.peers.served.settled(name)
        fetching = self._fetches.pop(name, None)
        if fetching is not None and fetching.bringing is not None:
            fetching.bringing.stop()

    def close(self) -> None:
        for fetching in self._fetches.values():
            if fetching.bringing is not None:
                fetching.bringing.stop()

    def _find_origin(self, fetching: _Fetching, order: FetchObject) -> None:
        peers = self._agent.peers
        path, seed, why = order.object.source, peers.seed(), "there is none"
        origin = [ObjectSource(address=seed, label="the session's seed", origin=True)] if seed else []
        if path and not (seed and peers.carried):
            try:
                os.stat(path)
                origin = [ObjectSource(path=path, origin=True)]
            except OSError as error:
                why = (error.strerror or str(error)).lower()
        self._agent.later(lambda: self._offer(fetching, order, origin, why=why))

    def _offer(self, fetching: _Fetching, order: FetchObject, origin: list[ObjectSource], *, why: str = "") -> None:
        ref = order.object
        if self._fetches.get(ref.name) is not fetching or fetching.order is not order:
            return
        if fetching.bringing is None:
            fetching.bringing = self._start(fetching, ref)
        peers = [ObjectSource(address=peer.address, label=peer.pilot) for peer in order.peers]
        fetching.bringing.offer([*peers, *origin], manifest=order.manifest)
        if order.origin and not origin:
            where = f"at {ref.source} ({why})" if ref.source else "anywhere that this pilot knows"
            what = f"the object {ref.name} is not {where}; put it on a file system that compute nodes can access"
            self._agent.handle(SourceFailed(ref.name, what))

    def _start(self, fetching: _Fetching, ref: ObjectRef) -> Bringing:
        agent = self._agent

        def lost(source: ObjectSource, why: str) -> None:
            agent.later(lambda: self._lost(fetching, ref.name, source, why))

        bringing = Bringing(agent.cache, ref, key=agent.peers.key, lost=lost, begun=agent.peers.served.grows)

        def run() -> None:
            try:
                here, outcome = bringing.run()
            except StokerError as error:
                text, ours, is_in_use = str(error), is_pilots_fault(error), isinstance(error, InUseError)
            except Exception as error:  # a bug: report a failed fetch, because libraries wait for the object
                log.exception("the fetch of %s failed", ref.name)
                text = f"the object {ref.name} could not be fetched: {type(error).__name__}: {error}"
                ours = is_in_use = False
            else:
                agent.later(lambda: self._arrived(fetching, ref, here, outcome))
                return
            agent.later(lambda: self._failed(fetching, ref.name, text, ours=ours, is_in_use=is_in_use))

        threading.Thread(target=run, name="objects-bring", daemon=True).start()
        return bringing

    def _arrived(self, fetching: _Fetching, ref: ObjectRef, here: Pin, outcome: FetchOutcome) -> None:
        if self._fetches.get(ref.name) is fetching:  # False if the fetch was stopped just now
            del self._fetches[ref.name]
            self._agent.peers.served.settled(ref.name)
        self.arrived[ref.name] = here
        event = ObjectArrived(ref.name, ref.size_bytes, outcome.origin_bytes, outcome.peer_bytes, outcome.seconds)
        self._agent.handle(event)
        self.arrived.pop(ref.name).release()

    def _lost(self, fetching: _Fetching, name: str, source: ObjectSource, why: str) -> None:
        if self._fetches.get(name) is not fetching:
            return
        if source.origin:
            why = f"the object {name} could not be fetched from {source}: {why}"
            self._agent.handle(SourceFailed(name, why))
        else:
            self._agent.handle(SourceFailed(name, why, PilotId(source.label)))

    def _failed(self, fetching: _Fetching, name: str, why: str, *, ours: bool, is_in_use: bool) -> None:
        if self._fetches.get(name) is not fetching:
            return
        self._agent.check_standing()
        state, in_use = self._agent.state, {}
        if is_in_use and name in state.wants:
            waiting = [state.libraries[number] for number in state.wants[name].libraries if number in state.libraries]
            in_use = {library.number: self._agent.cache.lacks_bytes(library.recipe.objects) for library in waiting}
        self._agent.handle(ObjectLost(name, FetchFailure(why, is_pilots_fault=ours, in_use_bytes=in_use)))

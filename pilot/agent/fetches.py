"""Fetches objects into the pilot's cache."""

from __future__ import annotations

import logging
import os
import threading

from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.agent.agent import Agent, Fetching
from stoker.pilot.cache import Bringing, DiskError, InUseError, Pin
from stoker.pilot.core.events import FetchFailure, ObjectArrived, ObjectLost, SourceFailed
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.transfer.board import FetchOutcome, ObjectSource
from stoker.protocol.ids import PilotId
from stoker.protocol.to_pilot import FetchObject

log = logging.getLogger("stoker.pilot")


def is_pilots_fault(error: BaseException) -> bool:
    """True if the disk of this pilot caused the error, so that another pilot may succeed."""
    return isinstance(error, DiskError) or is_unwritable_disk_error(error)


def fetch(agent: Agent, order: FetchObject) -> None:
    """Fetch an object from the sources in `order`, which replace earlier sources."""
    fetching = agent.fetches.setdefault(order.object.name, Fetching(order))
    fetching.order = order
    if order.origin:  # look for the origin in a thread, because the file system may not answer
        find = threading.Thread(target=_find_origin, args=(agent, fetching, order), name="objects-origin", daemon=True)
        find.start()
    else:
        _offer(agent, fetching, order, [])


def stop(agent: Agent, name: str) -> None:
    agent.peers.served.settled(name)
    fetching = agent.fetches.pop(name, None)
    if fetching is not None and fetching.bringing is not None:
        fetching.bringing.stop()


def _find_origin(agent: Agent, fetching: Fetching, order: FetchObject) -> None:
    path, seed, why = order.object.source, agent.peers.seed(), "there is none"
    origin = [ObjectSource(address=seed, label="the session's seed", origin=True)] if seed else []
    if path and not (seed and agent.peers.carried):
        try:
            os.stat(path)
            origin = [ObjectSource(path=path, origin=True)]
        except OSError as error:
            why = (error.strerror or str(error)).lower()
    agent.later(lambda: _offer(agent, fetching, order, origin, why=why))


def _offer(agent: Agent, fetching: Fetching, order: FetchObject, origin: list[ObjectSource], *, why: str = "") -> None:
    ref = order.object
    if agent.fetches.get(ref.name) is not fetching or fetching.order is not order:
        return
    if fetching.bringing is None:
        fetching.bringing = _start(agent, fetching, ref)
    peers = [ObjectSource(address=peer.address, label=peer.pilot) for peer in order.peers]
    fetching.bringing.offer([*peers, *origin], manifest=order.manifest)
    if order.origin and not origin:
        where = f"at {ref.source} ({why})" if ref.source else "anywhere that this pilot knows"
        what = f"the object {ref.name} is not {where}; put it on a file system that compute nodes can access"
        agent.handle(SourceFailed(ref.name, what))


def _start(agent: Agent, fetching: Fetching, ref: ObjectRef) -> Bringing:
    def lost(source: ObjectSource, why: str) -> None:
        agent.later(lambda: _lost(agent, fetching, source, why))

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
            agent.later(lambda: _arrived(agent, fetching, ref, here, outcome))
            return
        agent.later(lambda: _failed(agent, fetching, text, ours=ours, is_in_use=is_in_use))

    threading.Thread(target=run, name="objects-bring", daemon=True).start()
    return bringing


def _arrived(agent: Agent, fetching: Fetching, ref: ObjectRef, here: Pin, outcome: FetchOutcome) -> None:
    if agent.fetches.get(ref.name) is fetching:  # False if the fetch was stopped just now
        del agent.fetches[ref.name]
        agent.peers.served.settled(ref.name)
    agent.arrived[ref.name] = here
    agent.handle(ObjectArrived(ref.name, ref.size_bytes, outcome.origin_bytes, outcome.peer_bytes, outcome.seconds))
    agent.arrived.pop(ref.name).release()


def _lost(agent: Agent, fetching: Fetching, source: ObjectSource, why: str) -> None:
    name = fetching.order.object.name
    if agent.fetches.get(name) is not fetching:
        return
    if source.origin:
        agent.handle(SourceFailed(name, f"the object {name} could not be fetched from {source}: {why}"))
    else:
        agent.handle(SourceFailed(name, why, PilotId(source.label)))


def _failed(agent: Agent, fetching: Fetching, why: str, *, ours: bool, is_in_use: bool) -> None:
    name = fetching.order.object.name
    if agent.fetches.get(name) is not fetching:
        return
    agent.check_standing()
    state, in_use = agent.state, {}
    if is_in_use and name in state.wants:
        waiting = [state.libraries[number] for number in state.wants[name].libraries if number in state.libraries]
        in_use = {library.number: agent.cache.lacks_bytes(library.recipe.objects) for library in waiting}
    agent.handle(ObjectLost(name, FetchFailure(why, is_pilots_fault=ours, in_use_bytes=in_use)))

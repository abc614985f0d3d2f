"""Update transfers when pilots join, leave, or request, receive or fail to receive objects."""

from __future__ import annotations

from stoker.contexts.recipe import Awareness, ObjectRef, Recipe
from stoker.manager.core import object_plan
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot, PilotState
from stoker.manager.core.transfers import Fetch, FetchMode, Peer, Transfers
from stoker.protocol.to_manager import FetchFailed, ObjectsCached, ObjectsGone, PilotHello, WantObjects

_MAX_FAILED_PILOTS = 3  # A peer is not used any more if it failed to serve this many pilots, and more than it served


def connect_peer(manager: Manager, pilot: Pilot, hello: PilotHello) -> None:
    """Record which objects a joining pilot has, and plan again the fetches that it had before it disconnected."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None:
        peer = transfers.peers[pilot.id] = Peer(pilot.id)
    elif peer.here:
        disconnect_peer(manager, pilot)
    peer.here, peer.draining, peer.address = True, pilot.state is PilotState.DRAINING, hello.peer
    peer.hands_on.clear()
    peer.blamed = peer.served = 0
    peer.cache = hello.cache or pilot.id
    transfers.caches.setdefault(peer.cache, {})[peer.id] = peer
    for name in hello.objects:
        if name not in peer.has:
            transfers.add_holder(peer, transfers.get_or_create_object(name))
    wants, peer.wants = peer.wants, {}
    for ref in wants.values():
        if ref.name not in peer.has:
            _plan_fetch(transfers, peer, ref)


def disconnect_peer(manager: Manager, pilot: Pilot) -> None:
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        return
    peer.here = False
    peer.wants = {name: fetch.object.ref for name, fetch in peer.fetches.items()}
    for fetch in list(peer.fetches.values()):
        transfers.end_fetch(fetch)
    for object in list(peer.has.values()):
        transfers.remove_holder(peer, object)
    transfers.leaving.pop(peer.id, None)
    near = transfers.caches[peer.cache]
    del near[peer.id]
    if not near:
        del transfers.caches[peer.cache]


def exclude_draining_pilot(manager: Manager, pilot: Pilot) -> float:
    """Stop using a draining pilot as a peer. Return the maximum seconds that it stays so that other pilots can copy its
    objects.
    """
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None:
        return 0.0
    peer.draining = True
    peer.parked.clear()
    for fetch in peer.fetches.values():
        fetch.object.able.pop(peer.id, None)
    for object in peer.has.values():
        object.open.pop(peer.id, None)
    object_plan.replan_waiting_fetches(transfers, peer)
    return object_plan.begin_object_handover(manager, peer)


def define_manifest(manager: Manager, name: str, manifest: bytes) -> None:
    object = manager.state.transfers.get_or_create_object(name)
    object.manifest = object.manifest or manifest


def plan_requested_fetches(manager: Manager, pilot: Pilot, message: WantObjects) -> None:
    """Plan fetches of the objects that a pilot requests. If they are already planned, send the plans again."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        manager.state.count_refusal("objects requested by a disconnected pilot")
        return
    for ref in message.objects:
        fetch = peer.fetches.get(ref.name)
        if fetch is None:
            _plan_fetch(transfers, peer, ref)
        else:
            fetch.said = None
            transfers.changed[fetch] = None


def plan_recipe_fetches(manager: Manager, pilot: Pilot, recipe: Recipe) -> tuple[str, ...]:
    """Plan the fetches of those objects of a recipe that a pilot lacks. Return the names of these objects."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here or not peer.address or recipe.awareness is Awareness.NONE:
        return ()
    planned = []
    for ref in recipe.objects:  # several files may have equal content
        if ref.name not in peer.has and ref.name not in peer.fetches:
            _plan_fetch(transfers, peer, ref)
            planned.append(ref.name)
    return tuple(planned)


def _plan_fetch(transfers: Transfers, peer: Peer, ref: ObjectRef) -> None:
    if ref.name in peer.has:  # the copy was damaged, or it was lost and the report of the loss has not arrived
        transfers.remove_holder(peer, peer.has[ref.name])
    object = transfers.get_or_create_object(ref.name)
    if ref.source or not object.ref.size_bytes:
        object.ref = ref
    transfers.start_fetch(peer, object)


def record_arrived_objects(manager: Manager, pilot: Pilot, message: ObjectsCached) -> None:
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        manager.state.count_refusal("object received by a disconnected pilot")
        return
    for arrival in message.arrivals:
        object = transfers.get_or_create_object(arrival.name)
        if not object.ref.size_bytes:
            object.ref = ObjectRef(arrival.name, arrival.size_bytes)
        object.origin_bytes += arrival.origin_bytes
        object.peer_bytes += arrival.peer_bytes
        transfers.peer_bytes += arrival.peer_bytes
        fetch = peer.fetches.get(arrival.name)
        if fetch is not None:
            if arrival.peer_bytes:
                _update_source_scores(transfers, fetch)
            transfers.end_fetch(fetch, complete=True)
        if arrival.name not in peer.has:
            transfers.add_holder(peer, object)


def _update_source_scores(transfers: Transfers, fetch: Fetch) -> None:
    for source in fetch.sources.values():
        source.served += 1
    for id in fetch.failed:
        if (peer := transfers.peers.get(id)) is not None:
            peer.blamed += 1
            if peer.blamed >= max(_MAX_FAILED_PILOTS, peer.served + 1):
                _stop_using_peer(transfers, peer)


def _stop_using_peer(transfers: Transfers, peer: Peer) -> None:
    peer.address = ""
    peer.parked.clear()
    for object in peer.has.values():
        transfers.stop_serving(peer, object)
    for fetch in list(peer.fetches.values()):
        fetch.object.able.pop(peer.id, None)
        if fetch.mode is FetchMode.READER:
            transfers.set_mode(fetch, FetchMode.STRANDED)
            transfers.unsettled[fetch] = None
        transfers.stop_serving(peer, fetch.object)


def remove_lost_objects(manager: Manager, pilot: Pilot, message: ObjectsGone) -> None:
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None:
        return
    for name in message.names:
        fetch = peer.fetches.get(name)
        if fetch is not None:
            transfers.end_fetch(fetch)
        elif name in peer.has:
            transfers.remove_holder(peer, peer.has[name])
        peer.wants.pop(name, None)


def handle_failed_fetch(manager: Manager, pilot: Pilot, message: FetchFailed) -> None:
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    fetch = peer.fetches.get(message.name) if peer is not None else None
    if fetch is None:
        return  # the fetch is no longer planned
    object = fetch.object
    object.reason = message.reason or object.reason
    if fetch.mode is FetchMode.FOLLOWING:
        transfers.become_leader(fetch)  # the shared cache lost the object: fetch it again
    for id in message.peers:
        fetch.failed[id] = None
        source = fetch.sources.get(id)
        if source is not None:
            transfers.remove_source(fetch, source)
    if message.origin:
        fetch.unreadable = True
        object.unreadable[pilot.id] = None
        was_reader = fetch.mode is FetchMode.READER
        transfers.set_mode(fetch, FetchMode.STRANDED if fetch.mode is FetchMode.ALONE else FetchMode.WAITING)
        if was_reader:
            transfers.stop_serving(fetch.peer, object)
    transfers.unsettled[fetch] = None

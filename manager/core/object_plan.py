"""Plan transfers of objects. One pilot reads each object from its origin, and pilots copy the object from each other.

Pervasive Context Management boots workers "in a peer-to-peer fashion" (§4.1). Here a pilot fetches an object in parts
from several other pilots (*peers*), as in BitTorrent.

- *Bounded*: a fetch uses at most three peers, and a pilot serves at most four fetches (`TransferLimits`).
- *One reader*: if no pilot that can serve others has the object, one pilot reads the object from its origin.
- *No cycles*: each fetch has a *sure* peer: a pilot that has the object, reads it from its origin, or began to fetch it
  earlier. So pilots cannot wait for each other in a circle.
- *Once per host*: if several pilots share a cache, only one of them fetches the object.
- *No starvation*: a pilot uses its last transfer slot only for objects that it has or reads from their origin. Fetches
  that wait for a sure peer are served first, then fetches of rare objects.
- *Unreachable peers*: if several peers could not serve a pilot, it reads the object from its origin. If no transfer
  between peers has succeeded yet and three pilots found no peer, one failed peer is enough.
- *Handover*: if a leaving pilot has the only copy of a needed object, it exits after another pilot has copied the
  object, or after `MAX_HANDOVER_S` seconds.
- *Bad peers*: if a peer fails several pilots that other peers can serve, it is not used until it reconnects.

`plan_pending_transfers` runs at the end of an event, in O(log n) for n pilots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, islice

from stoker.manager.core import deadlines
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library, LibraryState, Pilot
from stoker.manager.core.state import State
from stoker.manager.core.transfers import Fetch, FetchMode, Peer, TransferredObject, Transfers
from stoker.protocol import to_pilot
from stoker.protocol.status import ObjectStatus
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes

MAX_HANDOVER_S = 120.0  # Maximum seconds that a leaving pilot stays so that other pilots can copy its objects
_EXIT_RESERVE_S = 4.0  # Seconds of walltime that remain for the exit of a leaving pilot after these copies
_MAX_RECEIVERS = 3  # Maximum number of pilots that are tried as the new holder of an object


def begin_object_handover(manager: Manager, peer: Peer) -> float:
    """Plan copies of the objects that only this draining pilot has. Return the maximum seconds that the pilot stays."""
    pilot = manager.state.pilots[peer.id]
    left_s = deadlines.walltime_left_s(pilot, manager.state.now) - _EXIT_RESERVE_S
    if not peer.can_serve or left_s <= 0:
        return 0.0
    refs, contexts = manager.state.transfers.objects_of_recipe, manager.state.contexts.values()
    waiting = (context.recipe for context in contexts if context.queue.head() is not None)
    needed = {ref.name for recipe in waiting for ref in refs(recipe)}
    for name, object in peer.has.items():
        if (name in needed or _is_being_fetched(object)) and not _has_staying_holder(object):
            peer.hands_on[name] = {}
    _choose_receivers(manager, peer)
    if not peer.hands_on:
        return 0.0
    manager.state.transfers.leaving[peer.id] = peer
    text = f"copies {len(peer.hands_on)} of its objects, which no other pilot has, to other pilots"
    pilot.note(manager.state.now, text)
    return min(MAX_HANDOVER_S, left_s)


def _release_leaving_pilots(manager: Manager) -> None:
    leaving = manager.state.transfers.leaving
    for peer in list(leaving.values()):
        _choose_receivers(manager, peer)
        if not peer.hands_on:
            del leaving[peer.id]
            pilot = manager.state.pilots.get(peer.id)
            if pilot is not None and peer.here:
                manager.send_to_pilot(pilot, to_pilot.Exit("other pilots have its objects", drain=True))


def _choose_receivers(manager: Manager, peer: Peer) -> None:
    for name, tried in list(peer.hands_on.items()):
        object = peer.has.get(name)
        if object is None or _has_staying_holder(object):
            del peer.hands_on[name]
        elif not _is_being_fetched(object):
            other = _find_receiver(manager, object) if len(tried) < _MAX_RECEIVERS else None
            if other is None:
                del peer.hands_on[name]
            else:
                tried[other.id] = None
                manager.state.transfers.start_fetch(other, object).kept = True


def _has_staying_holder(object: TransferredObject) -> bool:
    return any(not peer.draining for peer in object.holders.values())


def _is_being_fetched(object: TransferredObject) -> bool:
    return any(not fetch.peer.draining for fetch in object.fetches.values())


def _find_receiver(manager: Manager, object: TransferredObject) -> Peer | None:
    tried = {id for peer in object.holders.values() for id in peer.hands_on.get(object.ref.name, ())}
    peers = manager.state.transfers.peers.values()
    able = [peer for peer in peers if peer.can_serve and not peer.draining and peer.id not in tried]
    left_s = {peer: deadlines.walltime_left_s(manager.state.pilots[peer.id], manager.state.now) for peer in able}
    return min(able, key=lambda peer: (-left_s[peer], len(peer.fetches), len(peer.has)), default=None)


_MAX_SHOWN_NAMES = 4


def list_object_statuses(state: State) -> tuple[ObjectStatus, ...]:
    found = {
        ref.name: ref
        for context in state.contexts.values()
        for ref in state.transfers.objects_of_recipe(context.recipe)
    }
    known = ((ref, state.transfers.objects.get(ref.name) or TransferredObject(ref.name)) for ref in found.values())
    return tuple(
        ObjectStatus(
            ref.name, ref.size_bytes, len(object.holders), len(object.fetches), object.origin_bytes, object.peer_bytes,
            _describe_object_trouble(object),
        )
        for ref, object in known
    )  # fmt: skip


def _describe_object_trouble(object: TransferredObject) -> str:
    said = []
    if object.lonely:
        said.append(f"no peer could serve {_abbreviate_names(object.lonely)}, which read it from its origin")
    if object.unreadable:
        said.append(f"it cannot be read on {_abbreviate_names(object.unreadable)}")
    return "; ".join(said) + (f" ({object.reason})" if said and object.reason else "")


def warn_of_unreachable_peers(state: State) -> str:
    """Return a warning if pilots cannot reach each other; otherwise an empty text."""
    lonely = state.transfers.lonely
    if not lonely:
        return ""
    reasons = [object.reason for object in state.transfers.objects.values() if object.lonely and object.reason]
    why = f" ({reasons[-1]})" if reasons else ""
    whom = "Pilots cannot reach each other" if not state.transfers.peer_bytes else "Some pilots cannot reach others"
    return (
        f"{whom}{why}: {_abbreviate_names(lonely)} read the files from their origin, which is slower. Open the pilots'"
        " ports between the compute nodes, or name another network in the site file: [session] interface"
    )


def describe_loading_phase(state: State, library: Library) -> str:
    """Return the phase of a loading library, such as `fetching from peers n014, n021` or `loading`."""
    source = _describe_sources(state, library)
    return f"{LibraryPhase.FETCHING.value} {source}" if source else library.phase.value


def _describe_sources(state: State, library: Library) -> str:
    peer = state.transfers.peers.get(library.pilot.id)
    own = peer.fetches if peer is not None else {}
    refs = state.transfers.objects_of_recipe(library.context.recipe, kind=library.kind)
    fetches = [own[ref.name] for ref in refs if ref.name in own]
    said = []
    if any(fetch.mode in (FetchMode.READER, FetchMode.ALONE) for fetch in fetches):
        said.append("from its origin")
    peers = dict.fromkeys(id for fetch in fetches for id in fetch.sources)
    if peers:
        said.append(f"from peer{'s' * (len(peers) > 1)} {_abbreviate_names(peers)}")
    if any(fetch.mode is FetchMode.FOLLOWING for fetch in fetches):
        said.append("with another pilot of its host")
    if not said and fetches:
        said.append("when a pilot is free to serve it")
    return " and ".join(said)


def _note_fetch_in_libraries(state: State, pilot: Pilot, fetch: Fetch) -> None:
    ref = fetch.object.ref
    name = ref.source.rpartition("/")[2] or ref.name[:16]
    for library in pilot.libraries.values():
        refs = state.transfers.objects_of_recipe(library.context.recipe, kind=library.kind)
        if library.state is LibraryState.LOADING and any(ref.name == one.name for one in refs):
            text = f"{name} ({show_bytes(ref.size_bytes)}) is fetched {_describe_sources(state, library)}"
            library.note(state.now, text)


def _abbreviate_names(names: Collection[str]) -> str:
    shown = list(names)[:_MAX_SHOWN_NAMES]
    more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(shown) + more


def _send_fetch_plans(manager: Manager) -> None:
    transfers = manager.state.transfers
    changed, transfers.changed = transfers.changed, {}
    for fetch in changed:
        object, pilot = fetch.object, manager.state.pilots.get(fetch.peer.id)
        if pilot is None or not fetch.peer.here or object.fetches.get(pilot.id) is not fetch:
            continue
        sources, origin = _peers_and_origin_of_fetch(transfers, fetch)
        before, fetch.said = fetch.said, (tuple(source.id for source in sources), origin)
        if not (sources or origin):
            fetch.said = None
        if fetch.said is None or fetch.said == before:
            continue
        manifest = object.manifest if before is None else b""
        if before is None:
            _note_fetch_in_libraries(manager.state, pilot, fetch)
        peers = tuple(to_pilot.ServingPeer(source.id, source.address) for source in sources)
        manager.send_to_pilot(pilot, to_pilot.FetchObject(object.ref, peers, origin, manifest, fetch.kept))


def _peers_and_origin_of_fetch(transfers: Transfers, fetch: Fetch) -> tuple[list[Peer], bool]:
    if fetch.mode is not FetchMode.FOLLOWING:
        return list(fetch.sources.values()), fetch.mode in (FetchMode.READER, FetchMode.ALONE)
    near = transfers.find_peer_sharing_cache(fetch)
    return ([near], False) if near is not None and near.can_serve else ([], near is not None)


_MAX_EXAMINED = 16  # Maximum number of waiting fetches that are examined to find one that a free peer can serve


def plan_pending_transfers(manager: Manager) -> None:
    transfers = manager.state.transfers
    if transfers.leaving:
        _release_leaving_pilots(manager)
    while transfers.unsettled or transfers.freed:
        if transfers.unsettled:
            batch, transfers.unsettled = transfers.unsettled, {}
            for fetch in sorted(batch, key=lambda fetch: (len(fetch.object.whole), fetch.number)):
                if fetch.object.fetches.get(fetch.peer.id) is fetch:
                    _choose_sources(manager, fetch)
        else:
            freed, transfers.freed = transfers.freed, {}
            for peer in freed:
                _assign_free_transfer_slots(transfers, peer)
    if transfers.changed:
        _send_fetch_plans(manager)


def _choose_sources(manager: Manager, fetch: Fetch) -> None:
    transfers, object = manager.state.transfers, fetch.object
    if fetch.mode in (FetchMode.READER, FetchMode.ALONE, FetchMode.FOLLOWING):
        return
    if fetch.mode is FetchMode.STRANDED:
        _read_origin_alone(manager, fetch)
        return
    rooted = _ensure_reliable_source(transfers, fetch)
    if not rooted and _choose_origin_reader(transfers, object, fetch):
        return
    rooted = rooted or _ensure_reliable_source(transfers, fetch)
    if not rooted and _needs_origin_read(transfers, fetch):
        _read_origin_alone(manager, fetch)
        return
    while (
        rooted
        and len(fetch.sources) < transfers.max_sources_of(object)
        and len(fetch.failed) < transfers.max_failed_peers
    ):
        source = transfers.find_source(fetch, must_be_sure=False)
        if source is None:
            break
        transfers.add_source(fetch, source)
    transfers.set_mode(fetch, FetchMode.PEERS if rooted else FetchMode.WAITING)


def _ensure_reliable_source(transfers: Transfers, fetch: Fetch) -> bool:
    """Give a fetch a *sure* peer (see the module docstring), which may replace another peer. Return False if no sure
    peer is free.
    """
    if any(fetch.can_rely_on_source(source) for source in fetch.sources.values()):
        return True
    source = transfers.find_source(fetch, must_be_sure=True) if len(fetch.failed) < transfers.max_failed_peers else None
    if source is not None:
        transfers.add_source(fetch, source, replaces_last=len(fetch.sources) >= transfers.max_sources_of(fetch.object))
    return source is not None


def _choose_origin_reader(transfers: Transfers, object: TransferredObject, fetch: Fetch) -> bool:
    """If no pilot has the object, let one pilot read its origin. Return True if this is the pilot of `fetch`."""
    if object.whole or object.reader is not None or len(object.unreadable) >= transfers.limits.origin_tries:
        return False
    one = fetch if fetch.can_read_for_others else next(iter(object.able.values()), None)
    if one is not None:
        transfers.set_mode(one, FetchMode.READER)
        transfers.changed[one] = None
    return one is fetch


def _needs_origin_read(transfers: Transfers, fetch: Fetch) -> bool:
    """Return True if too many peers failed to serve a fetch, or no *sure* peer (module docstring) is left."""
    object = fetch.object
    if len(fetch.failed) >= transfers.max_failed_peers:
        return True
    if sum(id in object.whole for id in fetch.failed) < len(object.whole):
        return False
    if object.reader is not None and object.reader.peer.id not in fetch.failed:
        return False
    earlier = (
        x for x in islice(object.fetches.values(), _MAX_EXAMINED) if x.number < fetch.number and x.peer.can_serve
    )
    return all(x.peer.id in fetch.failed for x in earlier)


def _read_origin_alone(manager: Manager, fetch: Fetch) -> None:
    transfers, object = manager.state.transfers, fetch.object
    if fetch.unreadable or len(object.unreadable) >= transfers.limits.origin_tries:
        manager.send_to_pilot(manager.state.pilots[fetch.peer.id], to_pilot.FetchObject(object.ref))
        transfers.end_fetch(fetch)
        return
    if fetch.failed:
        object.lonely[fetch.peer.id] = transfers.lonely[fetch.peer.id] = None
    transfers.set_mode(fetch, FetchMode.STRANDED)
    transfers.start_origin_reads(object)


def _assign_free_transfer_slots(transfers: Transfers, peer: Peer) -> None:
    """Assign a peer's free transfer slots to fetches that wait or have too few peers. Rare objects come first."""
    if not peer.can_serve or not transfers.needy:
        return
    if peer.draining:
        replan_waiting_fetches(transfers, peer)
        return
    mine = [
        object
        for name, object in transfers.needy.items()
        if peer.id in object.whole
        or ((own := object.fetches.get(peer.id)) and own.mode in (FetchMode.PEERS, FetchMode.READER))
    ]
    mine.sort(key=lambda object: len(object.whole))
    for urgent in (True, False):
        for object in mine:
            while transfers.has_free_slot(peer, object):
                fetch = _find_fetch_to_serve(transfers, peer, object, urgent=urgent)
                if fetch is None:
                    break
                transfers.add_source(fetch, peer, replaces_last=len(fetch.sources) >= transfers.max_sources_of(object))
                transfers.set_mode(fetch, FetchMode.PEERS)


def replan_waiting_fetches(transfers: Transfers, peer: Peer) -> None:
    """Plan again the fetches that wait for objects of a peer that is about to exit."""
    reads = (fetch.object for fetch in peer.fetches.values() if fetch.mode is FetchMode.READER)
    for object in chain(peer.has.values(), reads):
        transfers.unsettled.update(dict.fromkeys(islice(object.waiting.values(), _MAX_EXAMINED)))


def _find_fetch_to_serve(transfers: Transfers, peer: Peer, object: TransferredObject, *, urgent: bool) -> Fetch | None:
    if not urgent:
        most = transfers.max_sources_of(object)  # the limit may have decreased since these fetches were listed
        underserved = (x for x in islice(object.underserved.values(), _MAX_EXAMINED) if len(x.sources) < most)
        return next((x for x in underserved if x.can_fetch_from(peer)), None)
    waiting: Iterable[Fetch] = object.waiting.values()
    # if no peer transfer has succeeded yet, peers may be unreachable, so read the origin instead
    if transfers.peer_bytes:
        waiting = chain(waiting, object.stranded.values())
    for fetch in islice(waiting, _MAX_EXAMINED):
        if fetch.can_fetch_from(peer) and fetch.can_rely_on_source(peer):
            return fetch
    return None

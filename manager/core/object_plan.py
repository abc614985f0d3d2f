"""Plan transfers of objects. One pilot reads each object from its origin, and pilots copy the object from each other.

Pervasive Context Management boots workers "in a peer-to-peer fashion" (§4.1). Here objects are sent in parts from
several peers (other pilots), as in BitTorrent.

- *Bounded*: a fetch uses at most three peers, and a pilot serves at most four fetches (`Limits`).
- *One reader*: while no serving pilot has the object, one pilot reads the object from its origin.
- *Rooted*: each fetch has a *sure* peer. This peer has the object, reads it from its origin, or requested it earlier.
  So pilots cannot wait for each other in a circle.
- *Once a host*: if pilots share a cache, only one of these pilots fetches the object.
- *Live*: a pilot reserves its last transfer slot for objects that it has or reads from their origin. Fetches that wait
  for a sure peer are served first, then fetches of rare objects.
- *Unreachable peers*: if several peers could not serve a pilot, the pilot reads the object from its origin. If no peer
  transfer has succeeded and three pilots found no peer, one failed peer is enough.
- *Handed on*: a pilot with the only copy of a needed object exits after another pilot has a copy, or after `MOST_S`
  seconds.
- *Bad peers*: if a peer fails several pilots while other peers serve them, the peer is not used until its next hello.

`plan_pending_transfers` plans at the end of the event, in O(log n) for n pilots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, islice

from stoker.manager.core import deadlines
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library, LibraryState, Pilot
from stoker.manager.core.state import State
from stoker.manager.core.transfers import Fetch, Object, Peer, Transfers, Way
from stoker.protocol import to_pilot
from stoker.protocol.status import ObjectStatus
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes

MOST_S = 120.0  # Maximum seconds that a leaving pilot stays to copy its objects
_EXIT_RESERVE_S = 4.0  # Seconds of walltime that a pilot reserves for its exit after these copies
_MOST_RECEIVERS = 3  # Maximum number of pilots that are tried as receivers of an object


def begin_object_handover(manager: Manager, peer: Peer) -> float:
    """Plan copies of the objects that only this draining pilot has. Return the maximum seconds that the pilot stays."""
    pilot = manager.state.pilots[peer.id]
    left_s = deadlines.walltime_left_s(pilot, manager.state.now) - _EXIT_RESERVE_S
    if not peer.serving or left_s <= 0:
        return 0.0
    refs, contexts = manager.state.transfers.refs, manager.state.contexts.values()
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
    return min(MOST_S, left_s)


def _release_leaving_pilots(manager: Manager) -> None:
    leaving = manager.state.transfers.leaving
    for peer in list(leaving.values()):
        _choose_receivers(manager, peer)
        if not peer.hands_on:
            del leaving[peer.id]
            pilot = manager.state.pilots.get(peer.id)
            if pilot is not None and peer.here:
                manager.say(pilot, to_pilot.Exit("other pilots have its objects", drain=True))


def _choose_receivers(manager: Manager, peer: Peer) -> None:
    for name, tried in list(peer.hands_on.items()):
        object = peer.has.get(name)
        if object is None or _has_staying_holder(object):
            del peer.hands_on[name]
        elif not _is_being_fetched(object):
            other = _find_receiver(manager, object) if len(tried) < _MOST_RECEIVERS else None
            if other is None:
                del peer.hands_on[name]
            else:
                tried[other.id] = None
                manager.state.transfers.fetch(other, object).kept = True


def _has_staying_holder(object: Object) -> bool:
    return any(not peer.draining for peer in object.holders.values())


def _is_being_fetched(object: Object) -> bool:
    return any(not fetch.peer.draining for fetch in object.fetches.values())


def _find_receiver(manager: Manager, object: Object) -> Peer | None:
    tried = {id for peer in object.holders.values() for id in peer.hands_on.get(object.ref.name, ())}
    peers = manager.state.transfers.peers.values()
    able = [peer for peer in peers if peer.serving and not peer.draining and peer.id not in tried]
    left_s = {peer: deadlines.walltime_left_s(manager.state.pilots[peer.id], manager.state.now) for peer in able}
    return min(able, key=lambda peer: (-left_s[peer], len(peer.fetches), len(peer.has)), default=None)


_SHOWN = 4


def object_statuses(state: State) -> tuple[ObjectStatus, ...]:
    found = {ref.name: ref for context in state.contexts.values() for ref in state.transfers.refs(context.recipe)}
    known = ((ref, state.transfers.objects.get(ref.name) or Object(ref.name)) for ref in found.values())
    return tuple(
        ObjectStatus(
            ref.name, ref.size_bytes, len(object.holders), len(object.fetches), object.origin_bytes, object.peer_bytes,
            _trouble(object),
        )
        for ref, object in known
    )  # fmt: skip


def _trouble(object: Object) -> str:
    said = []
    if object.lonely:
        said.append(f"no peer could serve {_abbreviate_names(object.lonely)}, which read it from its origin")
    if object.unreadable:
        said.append(f"it cannot be read on {_abbreviate_names(object.unreadable)}")
    return "; ".join(said) + (f" ({object.reason})" if said and object.reason else "")


def unreachable_peers_warning(state: State) -> str:
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
    refs = state.transfers.refs(library.context.recipe, kind=library.kind)
    fetches = [own[ref.name] for ref in refs if ref.name in own]
    said = []
    if any(fetch.way in (Way.READER, Way.ALONE) for fetch in fetches):
        said.append("from its origin")
    peers = dict.fromkeys(id for fetch in fetches for id in fetch.sources)
    if peers:
        said.append(f"from peer{'s' * (len(peers) > 1)} {_abbreviate_names(peers)}")
    if any(fetch.way is Way.FOLLOWING for fetch in fetches):
        said.append("with another pilot of its host")
    if not said and fetches:
        said.append("when a pilot is free to serve it")
    return " and ".join(said)


def _note_fetch_in_libraries(state: State, pilot: Pilot, fetch: Fetch) -> None:
    ref = fetch.object.ref
    name = ref.source.rpartition("/")[2] or ref.name[:16]
    for library in pilot.libraries.values():
        refs = state.transfers.refs(library.context.recipe, kind=library.kind)
        if library.state is LibraryState.LOADING and any(ref.name == one.name for one in refs):
            text = f"{name} ({show_bytes(ref.size_bytes)}) is fetched {_describe_sources(state, library)}"
            library.note(state.now, text)


def _abbreviate_names(names: Collection[str]) -> str:
    shown = list(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more


def _send_fetch_plans(manager: Manager) -> None:
    transfers = manager.state.transfers
    changed, transfers.changed = transfers.changed, {}
    for fetch in changed:
        object, pilot = fetch.object, manager.state.pilots.get(fetch.peer.id)
        if pilot is None or not fetch.peer.here or object.fetches.get(pilot.id) is not fetch:
            continue
        sources, origin = _sources(transfers, fetch)
        before, fetch.said = fetch.said, (tuple(source.id for source in sources), origin)
        if not (sources or origin):
            fetch.said = None
        if fetch.said is None or fetch.said == before:
            continue
        manifest = object.manifest if before is None else b""
        if before is None:
            _note_fetch_in_libraries(manager.state, pilot, fetch)
        peers = tuple(to_pilot.ServingPeer(source.id, source.address) for source in sources)
        manager.say(pilot, to_pilot.FetchObject(object.ref, peers, origin, manifest, fetch.kept))


def _sources(transfers: Transfers, fetch: Fetch) -> tuple[list[Peer], bool]:
    if fetch.way is not Way.FOLLOWING:
        return list(fetch.sources.values()), fetch.way in (Way.READER, Way.ALONE)
    near = transfers.near(fetch)
    return ([near], False) if near is not None and near.serving else ([], near is not None)


_MOST_EXAMINED = 16  # Maximum number of waiting fetches that are examined to find one that a peer can serve


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
    if fetch.way in (Way.READER, Way.ALONE, Way.FOLLOWING):
        return
    if fetch.way is Way.STRANDED:
        _read_origin_alone(manager, fetch)
        return
    rooted = _ensure_reliable_source(transfers, fetch)
    if not rooted and _choose_origin_reader(transfers, object, fetch):
        return
    rooted = rooted or _ensure_reliable_source(transfers, fetch)
    if not rooted and _needs_origin_read(transfers, fetch):
        _read_origin_alone(manager, fetch)
        return
    while rooted and len(fetch.sources) < transfers.wants(object) and len(fetch.failed) < transfers.patience:
        source = transfers.find(fetch, root=False)
        if source is None:
            break
        transfers.link(fetch, source)
    transfers.send(fetch, Way.PEERS if rooted else Way.WAITING)


def _ensure_reliable_source(transfers: Transfers, fetch: Fetch) -> bool:
    """Ensure that a fetch has a peer that is sure to get the object; replace another peer if necessary. Return False if
    none is free.
    """
    if any(fetch.can_rely_on_source(source) for source in fetch.sources.values()):
        return True
    source = transfers.find(fetch, root=True) if len(fetch.failed) < transfers.patience else None
    if source is not None:
        transfers.link(fetch, source, instead=len(fetch.sources) >= transfers.wants(fetch.object))
    return source is not None


def _choose_origin_reader(transfers: Transfers, object: Object, fetch: Fetch) -> bool:
    """Let one pilot read the origin if no pilot has the object. Return True if this fetch's pilot is the reader."""
    if object.whole or object.reader is not None or len(object.unreadable) >= transfers.limits.origin_tries:
        return False
    one = fetch if fetch.able else next(iter(object.able.values()), None)
    if one is not None:
        transfers.send(one, Way.READER)
        transfers.changed[one] = None
    return one is fetch


def _needs_origin_read(transfers: Transfers, fetch: Fetch) -> bool:
    """Return True if too many peers failed to serve this fetch, or if no peer is certain to have the object."""
    object = fetch.object
    if len(fetch.failed) >= transfers.patience:
        return True
    if sum(id in object.whole for id in fetch.failed) < len(object.whole):
        return False
    if object.reader is not None and object.reader.peer.id not in fetch.failed:
        return False
    earlier = (x for x in islice(object.fetches.values(), _MOST_EXAMINED) if x.number < fetch.number and x.peer.serving)
    return all(x.peer.id in fetch.failed for x in earlier)


def _read_origin_alone(manager: Manager, fetch: Fetch) -> None:
    transfers, object = manager.state.transfers, fetch.object
    if fetch.unreadable or len(object.unreadable) >= transfers.limits.origin_tries:
        manager.say(manager.state.pilots[fetch.peer.id], to_pilot.FetchObject(object.ref))
        transfers.end(fetch)
        return
    if fetch.failed:
        object.lonely[fetch.peer.id] = transfers.lonely[fetch.peer.id] = None
    transfers.send(fetch, Way.STRANDED)
    transfers.start_origin_reads(object)


def _assign_free_transfer_slots(transfers: Transfers, peer: Peer) -> None:
    """Assign a peer's free slots to fetches that wait or have too few peers. Rare objects come first."""
    if not peer.serving or not transfers.needy:
        return
    if peer.draining:
        replan_waiting_fetches(transfers, peer)
        return
    mine = [
        object
        for name, object in transfers.needy.items()
        if peer.id in object.whole or ((own := object.fetches.get(peer.id)) and own.way in (Way.PEERS, Way.READER))
    ]
    mine.sort(key=lambda object: len(object.whole))
    for urgent in (True, False):
        for object in mine:
            while transfers.has_room(peer, object):
                fetch = _find_fetch_to_serve(transfers, peer, object, urgent=urgent)
                if fetch is None:
                    break
                transfers.link(fetch, peer, instead=len(fetch.sources) >= transfers.wants(object))
                transfers.send(fetch, Way.PEERS)


def replan_waiting_fetches(transfers: Transfers, peer: Peer) -> None:
    """Plan the fetches that wait for objects of a draining peer again."""
    reads = (fetch.object for fetch in peer.fetches.values() if fetch.way is Way.READER)
    for object in chain(peer.has.values(), reads):
        transfers.unsettled.update(dict.fromkeys(islice(object.waiting.values(), _MOST_EXAMINED)))


def _find_fetch_to_serve(transfers: Transfers, peer: Peer, object: Object, *, urgent: bool) -> Fetch | None:
    if not urgent:
        most = transfers.wants(object)  # the limit may have dropped since these fetches were listed
        underserved = (x for x in islice(object.underserved.values(), _MOST_EXAMINED) if len(x.sources) < most)
        return next((x for x in underserved if x.can_fetch_from(peer)), None)
    waiting: Iterable[Fetch] = object.waiting.values()
    if transfers.peer_bytes:  # without peer transfers, peers may be unreachable, so stranded fetches use the origin
        waiting = chain(waiting, object.stranded.values())
    for fetch in islice(waiting, _MOST_EXAMINED):
        if fetch.can_fetch_from(peer) and fetch.can_rely_on_source(peer):
            return fetch
    return None

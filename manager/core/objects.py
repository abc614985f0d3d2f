"""The plan of transfers: who gets which object from whom, so that the file system it comes from is read once.

Pervasive Context Management boots new workers "in a peer-to-peer fashion" (§4.1; §3 has each worker keep a context's
parts in a local cache): a context's files are what every pilot needs first, and a shared file system that serves them
to each pilot is the slowest way there is. TaskVine, which the paper builds on, sends a worker to *one* other that has
the whole file, and bounds what each serves. Here an object travels in parts, so a pilot serves parts while it still
gets others, and gets them from several peers at once, as BitTorrent does; and the manager, not chance, chooses the
peers.

The plan is a graph of edges (from whom a pilot gets an object), kept by these rules:

- *Bounded*: up to three peers for a fetch, up to four fetches served by a pilot (`Limits`). An object of a few parts
  comes from one peer.
- *One reader*: while nobody who serves has the object, one pilot reads its origin; another takes over if it is lost,
  and keeps what it got from peers. A second one reads it only when peers have failed it (below).
- *Rooted*: a fetch counts as served only if one of its peers is *sure*: has the object, reads the origin, or asked for
  it earlier. "Earlier" is an order, so following sure peers ends at a holder or a reader, and no circle of pilots
  waits for itself. The other peers may be anybody: pilots that asked later give back what they got elsewhere. That is
  what keeps every link busy, because the first four pilots, with the reader as their only sure peer, would else share
  its link.
- *Once a host*: of the pilots that use one cache one gets an object, and the others find it there. If it leaves the
  cache before they have, one of them gets it anew: whoever says that a source failed it (it is the one at work in the
  cache), else the first.
- *Live*: the last place of a pilot serves only what it has whole or reads. So it is always held by somebody who is
  certain to finish, and comes free; whoever waits for a sure peer is first to get a place, then those that could use
  another peer. Where places are few, the object with the fewest holders goes first.
- *Unreachable peers*: a pilot tells which peers failed it and gets others. When several have, or none is left, it is
  let to the origin, a few such pilots at a time. Where no peer has ever reached another, one failure is enough.
- *Handed on*: what only a leaving pilot has, and calls need, goes to another first (`handing_on`). It serves
  others only where nobody who stays can.
- *Bad peers*: a peer that fails pilots which others serve well is given to nobody until it says hello again.

An event changes facts (`Transfers`) and lists whom it concerns; `settle` plans once, at the end of the event, and says
what changed. Peers are found in a queue and in a heap, so an event costs O(log n) for n pilots that want one object,
and each of these is told once or twice what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from stoker.contexts.recipe import Awareness, ObjectRef, Recipe
from stoker.manager.core import handing_on, object_orders
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.peers import Fetch, Object, Peer, Way
from stoker.manager.core.phases import PilotState
from stoker.manager.core.transfers import Transfers
from stoker.manager.protocol import to_pilot
from stoker.manager.protocol.to_manager import FetchFailed, ObjectArrival, PilotHello

_BLAMED = 3
"""A peer that failed so many pilots, and more than it served, is given to nobody."""
_LOOKED_AT = 16
"""Of those that wait, so many are looked at for one that a peer can serve."""


# ---- pilots come and go


def pilot_came(manager: Manager, pilot: Pilot, hello: PilotHello) -> None:
    """A pilot is here, or here again, with these objects. What it was getting when it was cut off is planned anew."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None:
        peer = transfers.peers[pilot.id] = Peer(pilot.id)
    elif peer.here:
        pilot_cut(manager, pilot)
    peer.here, peer.draining, peer.address = True, pilot.state is PilotState.DRAINING, hello.peer
    peer.hands_on.clear()
    peer.blamed = peer.served = 0
    peer.cache = hello.cache or pilot.id
    transfers.caches.setdefault(peer.cache, {})[peer.id] = peer
    for name in hello.objects:
        if name not in peer.has:
            transfers.hold(peer, transfers.object(name))
    wants, peer.wants = peer.wants, {}
    for ref in wants.values():
        if ref.name not in peer.has:
            _want(transfers, peer, ref)


def pilot_cut(manager: Manager, pilot: Pilot) -> None:
    """A pilot's connection broke: nobody gets anything from it, and nothing is planned for it, until it is back."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        return
    peer.here = False
    peer.wants = {name: fetch.object.ref for name, fetch in peer.fetches.items()}
    for fetch in list(peer.fetches.values()):
        transfers.end(fetch)
    for object in list(peer.has.values()):
        transfers.release(peer, object)
    transfers.leaving.pop(peer.id, None)
    _leave_cache(transfers, peer)


def _leave_cache(transfers: Transfers, peer: Peer) -> None:
    near = transfers.caches[peer.cache]
    del near[peer.id]
    if not near:
        del transfers.caches[peer.cache]


def pilot_left(manager: Manager, pilot: Pilot) -> None:
    """A pilot is gone."""
    pilot_cut(manager, pilot)
    manager.state.transfers.peers.pop(pilot.id, None)


def pilot_drains(manager: Manager, pilot: Pilot) -> float:
    """A pilot is about to leave: it goes on with what it serves, and gets nothing more to serve while others can. For
    how many seconds it should stay so that others get what only it has."""
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
    _last_resort(transfers, peer)
    return handing_on.begin(manager, peer)


# ---- what pilots and clients say


def define_manifest(manager: Manager, name: str, manifest: bytes) -> None:
    """The digests of an object's parts, for pilots that are told to get it from now on."""
    object = manager.state.transfers.object(name)
    object.manifest = object.manifest or manifest


def wanted(manager: Manager, pilot: Pilot, refs: Iterable[ObjectRef]) -> None:
    """A pilot needs objects. Asking again is answered again."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        manager.state.refuse("objects wanted by a pilot that is not here")
        return
    for ref in refs:
        fetch = peer.fetches.get(ref.name)
        if fetch is None:
            _want(transfers, peer, ref)
        else:
            fetch.said = None
            transfers.changed[fetch] = None


def plan_for(manager: Manager, pilot: Pilot, recipe: Recipe) -> tuple[str, ...]:
    """Plan the transfers of the objects that a pilot lacks for a library, before it asks: their names. None for a
    context that reads its files from their source, and for a pilot that takes no part in transfers."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here or not peer.address or recipe.awareness is Awareness.NONE:
        return ()
    lacking = [ref for ref in recipe.objects if ref.name not in peer.has and ref.name not in peer.fetches]
    for ref in lacking:
        _want(transfers, peer, ref)
    return tuple(ref.name for ref in lacking)


def _want(transfers: Transfers, peer: Peer, ref: ObjectRef) -> None:
    if ref.name in peer.has:  # it was damaged, or went while the word of it was on its way
        transfers.release(peer, peer.has[ref.name])
    object = transfers.object(ref.name)
    if ref.source or not object.ref.size_bytes:
        object.ref = ref
    transfers.fetch(peer, object)


def arrived(manager: Manager, pilot: Pilot, arrival: ObjectArrival) -> None:
    """An object is in a pilot's cache. Peers that failed it, where others did not, are blamed."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None or not peer.here:
        manager.state.refuse("object that came to a pilot that is not here")
        return
    object = transfers.object(arrival.name)
    if not object.ref.size_bytes:
        object.ref = ObjectRef(arrival.name, arrival.size_bytes)
    object.origin_bytes += arrival.origin_bytes
    object.peer_bytes += arrival.peer_bytes
    transfers.peer_bytes += arrival.peer_bytes
    fetch = peer.fetches.get(arrival.name)
    if fetch is not None:
        if arrival.peer_bytes:
            _judge(transfers, fetch)
        transfers.end(fetch, complete=True)
    if arrival.name not in peer.has:
        transfers.hold(peer, object)


def _judge(transfers: Transfers, fetch: Fetch) -> None:
    for source in fetch.sources.values():
        source.served += 1
    for id in fetch.failed:
        source_then = transfers.peers.get(id)
        if source_then is not None:
            source_then.blamed += 1
            if source_then.blamed >= max(_BLAMED, source_then.served + 1):
                _silence(transfers, source_then)


def _silence(transfers: Transfers, peer: Peer) -> None:
    """Give a peer to nobody until it says hello again."""
    peer.address = ""
    peer.parked.clear()
    for object in peer.has.values():
        transfers.withdraw(peer, object)
    for fetch in list(peer.fetches.values()):
        fetch.object.able.pop(peer.id, None)
        if fetch.way is Way.READER:
            transfers.send(fetch, Way.STRANDED)
            transfers.unsettled[fetch] = None
        transfers.withdraw(peer, fetch.object)


def gone(manager: Manager, pilot: Pilot, names: Iterable[str]) -> None:
    """Objects have left a pilot's cache, or are not wanted there any more."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    if peer is None:
        return
    for name in names:
        fetch = peer.fetches.get(name)
        if fetch is not None:
            transfers.end(fetch)
        elif name in peer.has:
            transfers.release(peer, peer.has[name])
        peer.wants.pop(name, None)


def failed(manager: Manager, pilot: Pilot, message: FetchFailed) -> None:
    """Peers, or the origin, did not serve an object to a pilot."""
    transfers = manager.state.transfers
    peer = transfers.peers.get(pilot.id)
    fetch = peer.fetches.get(message.name) if peer is not None else None
    if fetch is None:
        return  # it was taken off the plan meanwhile
    object = fetch.object
    object.reason = message.reason or object.reason
    if fetch.way is Way.FOLLOWING:
        transfers.take_over(fetch)  # what was in its cache is gone again
    for id in message.peers:
        fetch.failed[id] = None
        source = fetch.sources.get(id)
        if source is not None:
            transfers.unlink(fetch, source)
    if message.origin:
        fetch.unreadable = True
        object.unreadable[pilot.id] = None
        was_reader = fetch.way is Way.READER
        transfers.send(fetch, Way.STRANDED if fetch.way is Way.ALONE else Way.WAITING)
        if was_reader:
            transfers.withdraw(fetch.peer, object)
    transfers.unsettled[fetch] = None


# ---- the plan


def settle(manager: Manager) -> None:
    """Plan what the event has changed, and tell the pilots that it concerns."""
    transfers = manager.state.transfers
    if transfers.leaving:
        handing_on.look(manager)
    while transfers.unsettled or transfers.freed:
        if transfers.unsettled:
            batch, transfers.unsettled = transfers.unsettled, {}
            for fetch in sorted(batch, key=lambda fetch: (fetch.object.scarcity, fetch.number)):
                if fetch.object.fetches.get(fetch.peer.id) is fetch:
                    _feed(manager, fetch)
        else:
            freed, transfers.freed = transfers.freed, {}
            for peer in freed:
                _offer(transfers, peer)
    if transfers.changed:
        object_orders.say(manager)


def _feed(manager: Manager, fetch: Fetch) -> None:
    """Give a fetch a sure source, and as many others as it may have and are free."""
    transfers, object = manager.state.transfers, fetch.object
    if fetch.way in (Way.READER, Way.ALONE, Way.FOLLOWING):
        return
    if fetch.way is Way.STRANDED:
        _alone(manager, fetch)
        return
    rooted = _root(transfers, fetch)
    if not rooted and _have_read(transfers, object, fetch):
        return
    rooted = rooted or _root(transfers, fetch)
    if not rooted and _hopeless(transfers, fetch):
        _alone(manager, fetch)
        return
    while rooted and len(fetch.sources) < transfers.wants(object) and len(fetch.failed) < transfers.patience:
        source = transfers.find(fetch, root=False)
        if source is None:
            break
        transfers.link(fetch, source)
    transfers.send(fetch, Way.PEERS if rooted else Way.WAITING)


def _root(transfers: Transfers, fetch: Fetch) -> bool:
    """Whether a fetch has a sure source, or gets one now: in place of another if it has as many as it may."""
    if any(transfers.roots(source, fetch) for source in fetch.sources.values()):
        return True
    source = transfers.find(fetch, root=True) if len(fetch.failed) < transfers.patience else None
    if source is not None:
        transfers.link(fetch, source, instead=len(fetch.sources) >= transfers.wants(fetch.object))
    return source is not None


def _have_read(transfers: Transfers, object: Object, fetch: Fetch) -> bool:
    """See to it that somebody reads the origin, if nobody has the object. True if it is this pilot."""
    if object.whole or object.reader is not None or len(object.unreadable) >= transfers.limits.origin_tries:
        return False
    one = fetch if fetch.able else next(iter(object.able.values()), None)
    if one is not None:
        transfers.send(one, Way.READER)
        transfers.changed[one] = None
    return one is fetch


def _hopeless(transfers: Transfers, fetch: Fetch) -> bool:
    """Whether a fetch without a sure source has seen enough of peers, or none is left that could ever be one."""
    object = fetch.object
    if len(fetch.failed) >= transfers.patience:
        return True
    if sum(id in object.whole for id in fetch.failed) < len(object.whole):
        return False
    if object.reader is not None and object.reader.peer.id not in fetch.failed:
        return False
    earlier = (x for x in islice(object.fetches.values(), _LOOKED_AT) if x.number < fetch.number and x.peer.serving)
    return all(x.peer.id in fetch.failed for x in earlier)


def _alone(manager: Manager, fetch: Fetch) -> None:
    """Peers are of no use to a pilot: it may read the origin for itself. Nobody can give it what it can't read."""
    transfers, object = manager.state.transfers, fetch.object
    if fetch.unreadable or len(object.unreadable) >= transfers.limits.origin_tries:
        manager.say(manager.state.pilots[fetch.peer.id], to_pilot.FetchObject(object.ref))
        transfers.end(fetch)
        return
    if fetch.failed:
        object.lonely[fetch.peer.id] = transfers.lonely[fetch.peer.id] = None
    transfers.send(fetch, Way.STRANDED)
    transfers.next_alone(object)


def _offer(transfers: Transfers, peer: Peer) -> None:
    """A peer has a place free: who waits for a sure source first, then who could use another; rarest object first."""
    if not peer.serving or not transfers.needy:
        return
    if peer.draining:
        _last_resort(transfers, peer)
        return
    mine = [
        object
        for name, object in transfers.needy.items()
        if peer.id in object.whole or ((own := object.fetches.get(peer.id)) and own.way in (Way.PEERS, Way.READER))
    ]
    mine.sort(key=lambda object: object.scarcity)
    for urgent in (True, False):
        for object in mine:
            while transfers.has_room(peer, object):
                fetch = _customer(transfers, peer, object, urgent=urgent)
                if fetch is None:
                    break
                transfers.link(fetch, peer, instead=len(fetch.sources) >= transfers.wants(object))
                transfers.send(fetch, Way.PEERS)


def _last_resort(transfers: Transfers, peer: Peer) -> None:
    """A peer that is about to leave serves only where nobody else does: those that wait see whether that is so."""
    reads = (fetch.object for fetch in peer.fetches.values() if fetch.way is Way.READER)
    for object in chain(peer.has.values(), reads):
        transfers.unsettled.update(dict.fromkeys(islice(object.waiting.values(), _LOOKED_AT)))


def _customer(transfers: Transfers, peer: Peer, object: Object, *, urgent: bool) -> Fetch | None:
    """Whom a peer with a place free should serve next: of those that wait for a sure source, or of the others."""
    if not urgent:
        most = transfers.wants(object)  # it may have sunk since they were listed
        hungry = (x for x in islice(object.hungry.values(), _LOOKED_AT) if len(x.sources) < most)
        return next((x for x in hungry if transfers.may_serve(peer, x)), None)
    waiting: Iterable[Fetch] = object.waiting.values()
    if transfers.peer_bytes:  # else peers may never reach each other, and whoever is stranded waits for the origin
        waiting = chain(waiting, object.stranded.values())
    for fetch in islice(waiting, _LOOKED_AT):
        if transfers.may_serve(peer, fetch) and transfers.roots(peer, fetch):
            return fetch
    return None

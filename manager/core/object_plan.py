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

from stoker.manager.core import handing_on, object_orders
from stoker.manager.core.manager import Manager
from stoker.manager.core.peers import Fetch, Object, Peer, Way
from stoker.manager.core.transfers import Transfers
from stoker.protocol import to_pilot

# Of those that wait, so many are looked at for one that a peer can serve.
_MOST_EXAMINED = 16


def settle(manager: Manager) -> None:
    """Plan what the event has changed, and tell the pilots that it concerns."""
    transfers = manager.state.transfers
    if transfers.leaving:
        handing_on.release_leaving_pilots(manager)
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
    if any(fetch.is_rooted_in(source) for source in fetch.sources.values()):
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
    earlier = (x for x in islice(object.fetches.values(), _MOST_EXAMINED) if x.number < fetch.number and x.peer.serving)
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
        last_resort(transfers, peer)
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


def last_resort(transfers: Transfers, peer: Peer) -> None:
    """A peer that is about to leave serves only where nobody else does: those that wait see whether that is so."""
    reads = (fetch.object for fetch in peer.fetches.values() if fetch.way is Way.READER)
    for object in chain(peer.has.values(), reads):
        transfers.unsettled.update(dict.fromkeys(islice(object.waiting.values(), _MOST_EXAMINED)))


def _customer(transfers: Transfers, peer: Peer, object: Object, *, urgent: bool) -> Fetch | None:
    """Whom a peer with a place free should serve next: of those that wait for a sure source, or of the others."""
    if not urgent:
        most = transfers.wants(object)  # it may have sunk since they were listed
        hungry = (x for x in islice(object.hungry.values(), _MOST_EXAMINED) if len(x.sources) < most)
        return next((x for x in hungry if x.may_come_from(peer)), None)
    waiting: Iterable[Fetch] = object.waiting.values()
    if transfers.peer_bytes:  # else peers may never reach each other, and whoever is stranded waits for the origin
        waiting = chain(waiting, object.stranded.values())
    for fetch in islice(waiting, _MOST_EXAMINED):
        if fetch.may_come_from(peer) and fetch.is_rooted_in(peer):
            return fetch
    return None

"""The plan of transfers: which pilot gets which object from which other.

What only a leaving pilot has goes to another before it leaves, if calls wait that need it.

A pilot is drained before its walltime ends, or when it is no longer needed. Its objects mostly lie elsewhere too; one
that does not would be read again from where it comes from, and a snapshot be made again. So another pilot is told to
get it although it has not asked (the one that has least to do, and time left), and the leaving one to stay until that
is done: at most until shortly before its own end. What others are getting from it just then counts the same.

How objects travel, in words and numbers: for `stoker status`, for the stories of libraries, for the user once.

What pilots are told of the plan of transfers (`objects`): from whom they get an object from now on.

The plan of transfers: who gets which object from whom, so that the file system it comes from is read once.

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
- *Handed on*: what only a leaving pilot has, and calls need, goes to another first (`object_plan`). It serves
  others only where nobody who stays can.
- *Bad peers*: a peer that fails pilots which others serve well is given to nobody until it says hello again.

An event changes facts (`Transfers`) and lists whom it concerns; `settle` plans once, at the end of the event, and says
what changed. Peers are found in a queue and in a heap, so an event costs O(log n) for n pilots that want one object,
and each of these is told once or twice what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import deadlines
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library, LibraryState, Pilot
from stoker.manager.core.state import State
from stoker.manager.core.transfers import Fetch, Object, Peer, Transfers, Way
from stoker.protocol import to_pilot
from stoker.protocol.status import ObjectStatus
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes

MOST_S = 120.0  # A leaving pilot stays no longer than this for its objects
_TRIES = 3  # Pilots that are told to get an object, one after the other, should they fail


def begin_hand_on(manager: Manager, peer: Peer) -> float:
    """A pilot drains: see to it that nothing that is needed leaves with it. For how many seconds it should stay."""
    pilot = manager.state.pilots[peer.id]
    left_s = deadlines.time_to_hand_on_s(pilot, manager.state.now)
    if not peer.serving or left_s <= 0:
        return 0.0
    needed = frozenset(_needed(manager))
    for name, object in peer.has.items():
        if (name in needed or _comes(object)) and not _stays(object):
            peer.hands_on[name] = {}
    _go_on(manager, peer)
    if not peer.hands_on:
        return 0.0
    manager.state.transfers.leaving[peer.id] = peer
    pilot.note(manager.state.now, f"hands on {len(peer.hands_on)} of its objects, which nobody else has")
    return min(MOST_S, left_s)


def release_leaving_pilots(manager: Manager) -> None:
    """Hand on further objects of the pilots that leave; let those go that have none left to hand on."""
    leaving = manager.state.transfers.leaving
    for peer in list(leaving.values()):
        _go_on(manager, peer)
        if not peer.hands_on:
            del leaving[peer.id]
            pilot = manager.state.pilots.get(peer.id)
            if pilot is not None and peer.here:
                manager.say(pilot, to_pilot.Exit("others have its objects", drain=True))


def _go_on(manager: Manager, peer: Peer) -> None:
    for name, tried in list(peer.hands_on.items()):
        object = peer.has.get(name)
        if object is None or _stays(object):
            del peer.hands_on[name]
        elif not _comes(object):
            other = _heir(manager, object) if len(tried) < _TRIES else None
            if other is None:
                del peer.hands_on[name]
            else:
                tried[other.id] = None
                fetch = manager.state.transfers.fetch(other, object)
                fetch.kept = True


def _stays(object: Object) -> bool:
    """Whether a pilot has it that stays."""
    return any(not peer.draining for peer in object.holders.values())


def _comes(object: Object) -> bool:
    """Whether it is on its way to a pilot that stays."""
    return any(not fetch.peer.draining for fetch in object.fetches.values())


def _heir(manager: Manager, object: Object) -> Peer | None:
    """Who is to have an object next."""
    tried = {id for peer in object.holders.values() for id in peer.hands_on.get(object.ref.name, ())}
    able = [
        peer
        for peer in manager.state.transfers.peers.values()
        if peer.serving and not peer.draining and peer.id not in tried
    ]
    return min(able, key=lambda peer: (_ends_soon(manager, peer), len(peer.fetches), len(peer.has)), default=None)


def _ends_soon(manager: Manager, peer: Peer) -> float:
    """Whoever has no end is best; then who has most time left."""
    return -deadlines.walltime_left_s(manager.state.pilots[peer.id], manager.state.now)


def _needed(manager: Manager) -> Iterator[str]:
    """What contexts need for which calls wait: files, and snapshots of what is loaded."""
    waiting = {key for key, context in manager.state.contexts.items() if context.queue.head() is not None}
    for key in waiting:
        yield from (ref.name for ref in manager.state.contexts[key].recipe.objects)
    for (key, _), forms in manager.state.transfers.snapshots.items():
        if key in waiting:
            yield from (snapshot.object.name for snapshot in forms.values())


# ---- transfers in words
_SHOWN = 4


def object_statuses(state: State) -> tuple[ObjectStatus, ...]:
    """The objects of the session's contexts, their snapshots among them, and how each has travelled."""
    found = {ref.name: ref for context in state.contexts.values() for ref in context.recipe.objects}
    for forms in state.transfers.snapshots.values():
        found.update({snapshot.object.name: snapshot.object for snapshot in forms.values()})
    return tuple(_status(state, ref) for ref in found.values())


def _status(state: State, ref: ObjectRef) -> ObjectStatus:
    object = state.transfers.objects.get(ref.name)
    if object is None:
        return ObjectStatus(ref.name, ref.size_bytes, 0, 0, 0, 0)
    return ObjectStatus(
        name=ref.name,
        size_bytes=ref.size_bytes,
        holders=len(object.holders),
        fetching=len(object.fetches),
        origin_bytes=object.origin_bytes,
        peer_bytes=object.peer_bytes,
        trouble=_trouble(object),
    )


def _trouble(object: Object) -> str:
    said = []
    if object.lonely:
        said.append(f"no peer could serve {_some(object.lonely)}, which read it from where it lies")
    if object.unreadable:
        said.append(f"it can't be read on {_some(object.unreadable)}")
    return "; ".join(said) + (f" ({object.reason})" if said and object.reason else "")


def object_trouble(state: State) -> str:
    """One sentence when pilots cannot reach each other, for the user to be told once; else empty."""
    lonely = state.transfers.lonely
    if not lonely:
        return ""
    reasons = [object.reason for object in state.transfers.objects.values() if object.lonely and object.reason]
    why = f" ({reasons[-1]})" if reasons else ""
    whom = "Pilots cannot reach each other" if not state.transfers.peer_bytes else "Some pilots cannot reach others"
    return (
        f"{whom}{why}: {_some(lonely)} read from where the files lie, which is slower. Open the pilots' ports between"
        " the compute nodes, or name another network in the site file: [session] interface"
    )


def fetch_phase(state: State, library: Library) -> str:
    """What a library that is loading is doing: `fetching from peers n014, n021`, `loading`."""
    source = comes_from(state, library)
    return f"{LibraryPhase.FETCHING.value} {source}" if source else library.phase.value


def comes_from(state: State, library: Library) -> str:
    """Where the objects come from that a library still lacks: `from peers n014, n021`; empty when it lacks none."""
    fetches = list(_fetches(state, library))
    said = []
    if any(fetch.way in (Way.READER, Way.ALONE) for fetch in fetches):
        said.append("from where it lies")
    peers = dict.fromkeys(id for fetch in fetches for id in fetch.sources)
    if peers:
        said.append(f"from peer{'s' * (len(peers) > 1)} {_some(peers)}")
    if any(fetch.way is Way.FOLLOWING for fetch in fetches):
        said.append("with another pilot of its host")
    if not said and fetches:
        said.append("when a pilot has a place free to serve it")
    return " and ".join(said)


def _fetches(state: State, library: Library) -> Iterator[Fetch]:
    peer = state.transfers.peers.get(library.pilot.id)
    if peer is not None:
        for ref in _objects(state, library):
            fetch = peer.fetches.get(ref.name)
            if fetch is not None:
                yield fetch


def _objects(state: State, library: Library) -> Iterator[ObjectRef]:
    """What a library may wait for: the objects of its recipe, and snapshots of its context."""
    recipe = library.context.recipe
    yield from recipe.objects
    forms = state.transfers.snapshots.get((recipe.key, library.devices[0].facts.kind), {})
    yield from (snapshot.object for snapshot in forms.values())


def note_objects(state: State, pilot: Pilot, fetch: Fetch) -> None:
    """Tell, in the stories of the libraries that wait for an object, where it comes from."""
    ref = fetch.object.ref
    name = ref.source.rpartition("/")[2] or ref.name[:16]
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING and any(ref.name == one.name for one in _objects(state, library)):
            text = f"{name} ({show_bytes(ref.size_bytes)}) comes {comes_from(state, library)}"
            library.note(state.now, text)


def _some(names: Collection[str]) -> str:
    """The first few of many, and how many more."""
    shown = list(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more


# ---- orders to pilots
def send_plan(manager: Manager) -> None:
    """Tell pilots from whom they get objects now. The manifest goes along once."""
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
            note_objects(manager.state, pilot, fetch)
        peers = tuple(to_pilot.ServingPeer(source.id, source.address) for source in sources)
        manager.say(pilot, to_pilot.FetchObject(object.ref, peers, origin, manifest, fetch.kept))


def _sources(transfers: Transfers, fetch: Fetch) -> tuple[list[Peer], bool]:
    """What a pilot is told: its peers, and whether it may read the origin. One that follows finds the object in its
    cache, wherever it is sent."""
    if fetch.way is not Way.FOLLOWING:
        return list(fetch.sources.values()), fetch.way in (Way.READER, Way.ALONE)
    near = transfers.near(fetch)
    return ([near], False) if near is not None and near.serving else ([], near is not None)


# ---- object plan
# Of those that wait, so many are looked at for one that a peer can serve.
_MOST_EXAMINED = 16


def settle_transfers(manager: Manager) -> None:
    """Plan what the event has changed, and tell the pilots that it concerns."""
    transfers = manager.state.transfers
    if transfers.leaving:
        release_leaving_pilots(manager)
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
        send_plan(manager)


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

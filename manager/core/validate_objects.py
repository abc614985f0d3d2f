"""What must hold of the plan of transfers after every event; `validate` calls it."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core.peers import Fetch, Object, Peer, Way
from stoker.manager.core.transfers import Transfers


def broken(transfers: Transfers) -> Iterator[str]:
    """What does not hold, in words."""
    if transfers.unsettled or transfers.freed or transfers.changed:
        yield "an event ended with transfers that were not planned"
    for peer in transfers.peers.values():
        yield from _peer(transfers, peer)
    for object in transfers.objects.values():
        yield from _object(transfers, object)
        for fetch in object.fetches.values():
            yield from _fetch(transfers, fetch)


def _peer(transfers: Transfers, peer: Peer) -> Iterator[str]:
    if len(peer.serves) > transfers.limits.serves:
        yield f"{peer.id} serves {len(peer.serves)}"
    if (peer.serves or peer.has or peer.fetches) and not peer.here:
        yield f"{peer.id} is not here and takes part"
    if peer.serves and not peer.address:
        yield f"{peer.id} serves and has no address"
    relayed = [name for (name, _), _ in peer.serves.items() if not _sure(peer, transfers.objects[name])]
    if len(relayed) > transfers.limits.serves - 1:
        yield f"{peer.id} gives its last place to what it does not have"
    for (name, id), fetch in peer.serves.items():
        if fetch.sources.get(peer.id) is not peer or (fetch.object.ref.name, fetch.peer.id) != (name, id):
            yield f"{peer.id} serves {name} to {id}, which does not know it"
        if name not in peer.has and name not in peer.fetches:
            yield f"{peer.id} serves {name}, which it neither has nor gets"


def _sure(peer: Peer, object: Object) -> bool:
    return peer.id in object.holders or object.fetches[peer.id].way is Way.READER


def _object(transfers: Transfers, object: Object) -> Iterator[str]:
    name = object.ref.name
    if set(object.holders) & set(object.fetches):
        yield f"{name} is fetched by pilots that have it"
    if {id for id, peer in object.holders.items() if peer.serving} != set(object.whole):
        yield f"{name}: who serves it is wrong"
    if not set(object.open) <= set(object.whole):
        yield f"{name}: who has a place free is wrong"
    if len(object.alone) > transfers.limits.readers:
        yield f"{name} is read by {len(object.alone)} pilots for themselves"
    if object.stranded and len(object.alone) < transfers.limits.readers:
        yield f"{name}: pilots wait for its origin and nobody reads it"
    by_way = {way: {x.peer.id for x in object.fetches.values() if x.way is way} for way in Way}
    queues = {Way.WAITING: object.waiting, Way.STRANDED: object.stranded, Way.ALONE: object.alone}
    for way, queue in queues.items():
        if set(queue) != by_way[way]:
            yield f"{name}: those that are {way.value} are listed wrongly"
    if not set(object.hungry) <= by_way[Way.PEERS]:
        yield f"{name}: who could use another peer is wrong"
    if by_way[Way.READER] != ({object.reader.peer.id} if object.reader is not None else set()):
        yield f"{name}: its reader is wrong"
    brings = [x.peer.cache for x in object.fetches.values() if x.way is not Way.FOLLOWING]
    if len(set(brings)) < len(brings):  # there is no exception: one that is told to find it there follows, too
        yield f"{name}: several pilots of one cache bring it there"
    numbers = [fetch.number for fetch in object.fetches.values()]
    if numbers != sorted(numbers):
        yield f"{name}: its fetches are not in the order of their numbers"
    finds = any(fetch.way is Way.FOLLOWING and fetch.leader is None for fetch in object.fetches.values())
    sure = object.whole or object.reader or object.alone or finds
    if not sure and any(fetch.way is not Way.FOLLOWING for fetch in object.fetches.values()):
        yield f"{name}: pilots wait for it, and nobody has it, reads it, or is told to find it in its cache"
    if (name in transfers.needy) != bool(object.waiting or object.hungry or object.stranded):
        yield f"{name}: needy is wrong"


def _fetch(transfers: Transfers, fetch: Fetch) -> Iterator[str]:
    object, id = fetch.object, fetch.peer.id
    what = f"{object.ref.name} to {id}"
    if fetch.peer.fetches.get(object.ref.name) is not fetch:
        yield f"{what}: the pilot does not know of it"
    if len(fetch.sources) > transfers.limits.sources:
        yield f"{what}: from {len(fetch.sources)} peers"
    if id in fetch.sources or set(fetch.sources) & set(fetch.failed):
        yield f"{what}: from itself, or from who failed it"
    if any(x.serves.get((object.ref.name, id)) is not fetch for x in fetch.sources.values()):
        yield f"{what}: a source does not know of it"
    rooted = any(fetch.is_rooted_in(source) for source in fetch.sources.values())
    if (fetch.way is Way.PEERS and not rooted) or (fetch.way is Way.WAITING and rooted):
        yield f"{what}: {fetch.way.value}, rooted {rooted}"
    leader = fetch.leader
    if leader is not None and (fetch.way is not Way.FOLLOWING or leader.way is Way.FOLLOWING):
        yield f"{what}: {fetch.way.value} behind one that is {leader.way.value}"
    if leader is not None and (object.fetches.get(leader.peer.id), leader.peer.cache) != (leader, fetch.peer.cache):
        yield f"{what}: follows one that is not under way into its cache"
    if leader is not None and leader.number > fetch.number:
        yield f"{what}: follows one that asked later"
    if fetch.way is Way.FOLLOWING and leader is None and (transfers.near(fetch) is None or fetch.said is None):
        yield f"{what}: is to find it in its cache, and it is not there, or it was not told"
    if fetch.way in (Way.STRANDED, Way.ALONE, Way.FOLLOWING) and fetch.sources:
        yield f"{what}: {fetch.way.value} and from peers"
    if fetch.way is Way.WAITING:
        yield from _waiting(transfers, fetch, what)


def _waiting(transfers: Transfers, fetch: Fetch, what: str) -> Iterator[str]:
    """Somebody will be a sure source and has not failed it, and nobody is who has a place free."""
    object = fetch.object
    earlier = {x.peer.id for x in object.fetches.values() if x.number < fetch.number and x.peer.serving}
    reader = {object.reader.peer.id: object.reader.peer} if object.reader is not None else {}
    if not (object.whole.keys() | reader.keys() | earlier) - fetch.failed.keys():
        yield f"{what}: waits, and nobody is left who could serve it"
    sources = [peer for peer in (*object.whole.values(), *reader.values()) if fetch.may_come_from(peer)]
    staying = [peer for peer in sources if not peer.draining]
    free = [peer.id for peer in staying or sources if transfers.has_room(peer, object)]
    if free and len(object.waiting) <= 8:
        yield f"{what}: waits, although {free} could serve it"
